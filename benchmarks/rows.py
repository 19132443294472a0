"""What is compared with what: the table of peers, and both sides of a row built from the same weights and data."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from os import environ
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from benchmarks.harness import time_in_turn
from benchmarks.peers import (
    CLIP,
    DECAY,
    LR,
    Llama,
    Side,
    copy_weights,
    local,
    peer_side,
    wrap_ddp,
    wrap_fsdp2,
    wrap_nothing,
    wrap_tp,
)
from dtengine.data import Batch, BatchShape, rows_of
from dtengine.layout import make_plan
from dtengine.mesh import build_mesh
from dtengine.model import ModelConfig, configure, load_model
from dtengine.optim import adamw
from dtengine.shard import gather
from dtengine.state import StepConfig
from dtengine.step import Step, init_state, make_step

NOTHING: Mapping[str, Any] = MappingProxyType({})
BUCKETS = ({"bucket_mb": 25}, {"bucket_mb": 5}, {"bucket_mb": 100})  # DDP's default first

# Both sides do the same sums in another order, and three AdamW steps carry that on. In float32 the largest difference
# that was seen is 2e-7; 1024 eps is a wide bound. bfloat16 rounds each of some thousand terms by up to eps = 2^-7; these
# roundings are independent, so that the mean over 1024 tokens is off by eps / 32, and four times that is allowed. A
# missing scale, mask or microbatch changes a loss by whole per cents.
TOLERANCE = {torch.float32: 1024 * torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 8}


class Row(NamedTuple):
    """One peer and the plan that it is compared with.

    Attributes:
        text: what the peer is.
        wrap: makes the peer of a module.
        plan: dtengine's plan.
        axis: mesh axis of all ranks: "dp" or "tp"; "" for one rank alone.
        wrapped: further arguments of ``wrap``.
        stepped: further arguments of ``peer_side``.
        candidates: arguments of ``wrap`` to choose from by their speed; the first is the default.
        options: further fields of dtengine's StepConfig.
        microbatches: of both sides.
        sequence_parallel: whether dtengine's plan has it.
        dtype: what both sides compute in.
    """

    text: str
    wrap: Callable[..., nn.Module]
    plan: str
    axis: str = "dp"
    wrapped: Mapping[str, Any] = NOTHING
    stepped: Mapping[str, Any] = NOTHING
    candidates: tuple[Mapping[str, Any], ...] = (NOTHING,)
    options: Mapping[str, Any] = NOTHING
    microbatches: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32

    def mesh(self, ranks: int) -> dict[str, int]:
        """Return dtengine's mesh on so many ranks."""
        return {"dp": 1, "tp": ranks} if self.axis == "tp" else {"dp": ranks}

    def mesh_text(self, ranks: int) -> str:
        """Return that mesh as a person types it."""
        return "x".join(map(str, self.mesh(ranks).values()))

    def words(self) -> str:
        """Return what dtengine runs, in the words of its options."""
        more = [f"{name} {value}" for name, value in self.options.items()]
        more += [f"microbatches {self.microbatches}"] if self.microbatches > 1 else []
        more += ["no sp"] if self.axis == "tp" and not self.sequence_parallel else []
        return ", ".join([self.plan, *more])


_PREFETCH = ({"prefetch": False}, {"prefetch": True})
_BF16 = {"options": {"precision": "bf16"}, "dtype": torch.bfloat16}
ROWS = {
    "torch": Row("a plain module on one rank", wrap_nothing, "ddp", ""),
    "ddp": Row("DistributedDataParallel", wrap_ddp, "ddp", candidates=BUCKETS),
    "ddp-accumulate": Row(
        "the same, 4 microbatches, no_sync on the first three", wrap_ddp, "ddp",
        wrapped={"static_graph": False},  # with it, DDP stops at an internal assertion when no_sync comes first
        candidates=BUCKETS, microbatches=4,
    ),
    "zero-redundancy": Row(
        "DDP and ZeroRedundancyOptimizer(parameters_as_bucket_view)", wrap_ddp, "zero1", stepped={"zero": True},
        candidates=BUCKETS,
    ),
    "fsdp2": Row("fully_shard on each block and the root", wrap_fsdp2, "fsdp", candidates=_PREFETCH),
    "fsdp2-keep": Row(
        "the same with reshard_after_forward=False: blocks stay gathered, for more memory", wrap_fsdp2, "fsdp",
        wrapped={"reshard": False}, candidates=_PREFETCH, options={"reshard": False},
    ),
    "fsdp2-recompute": Row(
        "fully_shard on each block in a non-reentrant checkpoint_wrapper", wrap_fsdp2, "fsdp",
        wrapped={"recompute": True}, candidates=_PREFETCH, options={"recompute": "full"},
    ),
    "tp": Row("parallelize_module, vocabulary and loss split too", wrap_tp, "ddp", "tp", stepped={"split_loss": True}),
    "tp+sp": Row(
        "the same with SequenceParallel norms", wrap_tp, "ddp", "tp", wrapped={"sequence": True},
        stepped={"split_loss": True}, sequence_parallel=True,
    ),
    "ddp-bf16": Row(
        "DDP under torch.autocast(bfloat16), float32 parameters", wrap_ddp, "ddp", stepped={"autocast": True},
        candidates=BUCKETS, **_BF16,
    ),
    "fsdp2-bf16": Row(
        "fully_shard with MixedPrecisionPolicy(param bfloat16, reduce float32)", wrap_fsdp2, "fsdp",
        wrapped={"bf16": True}, candidates=_PREFETCH, **_BF16,
    ),
    "ddp+compile": Row(
        "torch.compile(DDP(module)); it starts some half a minute later", wrap_ddp, "ddp", wrapped={"compiled": True},
        options={"compile": True},
    ),
}  # fmt: skip


def rows_text(peers: Sequence[str] = tuple(ROWS)) -> str:
    """Return the table of rows for ``--help``."""
    name, text = max(map(len, peers)), max(len(ROWS[peer].text) for peer in peers)
    return "\n".join(f"  {p:{name}}  {ROWS[p].text:{text}}  plan {ROWS[p].words()}" for p in peers)


def check_compiler(peers: list[str]) -> None:
    """Raise ValueError where a row needs a C++ compiler and there is none."""
    require_compiler("--peers", [peer for peer in peers if ROWS[peer].wrapped.get("compiled")])


def require_compiler(option: str, needing: Sequence[str]) -> None:
    """Raise ValueError where some rows need a C++ compiler and there is none; ``option`` is what chooses them."""
    compiler = environ.get("CXX", "g++")
    if needing and shutil.which(compiler) is None:
        raise ValueError(
            f"{option} {' '.join(needing)}: Inductor needs a C++ compiler, and {compiler} is not there. Install one, set "
            "CXX, or leave the row out."
        )


def sizes_of(width: int, layers: int) -> ModelConfig:
    """Return the model's sizes: heads of 32, but four at least; an MLP of 8/3 of the width, rounded up to 16."""
    heads = max(4, width // 32)
    return configure(
        load_model("llama"), "llama", layers=layers, embed=width, heads=heads, mlp=-(-width // 6) * 16, vocab=256,
        seq=128,
    )  # fmt: skip


def draw_batches(config: ModelConfig, sequences: int, shape: BatchShape, coordinate: int) -> list[Batch]:
    """Draw the microbatches of a data-parallel coordinate; equal on all ranks that share it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (sequences, config.seq + 1), generator=generator)
    found = []
    for rows in map(torch.from_numpy, rows_of(shape, coordinate)):
        mine, weights = tokens[rows], torch.ones(len(rows), config.seq)
        found.append(Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), weights, rows))
    return found


def draw_weights(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Draw dtengine's initial parameters on a mesh without pipeline, whole and in float32 whatever a row computes in."""
    mesh = build_mesh(sizes)
    plan = make_plan("ddp", mesh.sizes, config.axis_sizes)
    step = make_step(load_model("llama"), config, plan, mesh, adamw(), StepConfig(1, config.seq), lambda number: LR)
    state = init_state(step)
    return dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))


def fastest(
    build: Callable[[Mapping[str, Any]], Side], candidates: Sequence[Mapping[str, Any]], steps: int
) -> Mapping[str, Any]:
    """Return the candidate whose step is the fastest, the same on all ranks.

    Args:
        build: makes the peer's side of a candidate.
        candidates: the first is the default.
        steps: timed steps of each, after two that are not timed; 0 takes the default.
    """
    if len(candidates) == 1 or steps == 0:
        return candidates[0]
    runs = [build(one).run for one in candidates]
    for run in runs * 2:
        run()
    seconds = time_in_turn(runs, steps)
    return candidates[int(seconds.median(0).values.argmin())]


class Compared(Protocol):
    """Both sides of a comparison; its methods run on the ranks.

    Attributes:
        ranks: of both sides.
        dtype: what both compute in.
    """

    @property
    def ranks(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def coordinate(self, rank: int) -> int:
        """Return a rank's data-parallel coordinate."""
        ...

    def batches(self, coordinate: int) -> list[Batch]:
        """Draw the microbatches of a coordinate."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Draw the initial parameters, whole."""
        ...

    def ours(self, batches: list[Batch]) -> Side:
        """Build dtengine's side."""
        ...

    def theirs(self, batches: list[Batch], weights: dict[str, Tensor], chosen: Mapping[str, Any] | None = None) -> Side:
        """Build the peer's side; ``chosen`` is one of its candidates."""
        ...

    def tune(self, batches: list[Batch], weights: dict[str, Tensor], steps: int) -> Mapping[str, Any]:
        """Return the fastest of the peer's candidates; see ``fastest``."""
        ...


def side_of(step: Step, batches: list[Batch], count: float) -> Side:
    """Return dtengine's side of a comparison: a step from its initial state, on so many counted tokens."""
    state = init_state(step)
    step.prepare()

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batches, count)
        return metrics.loss.item()

    def tensors() -> list[Tensor]:
        slots = [slot for slots in state.slots.values() for slot in slots.values()]
        return [local(t) for t in (*state.params.values(), *slots)]

    return Side(run, tensors)


class Work(NamedTuple):
    """One row at one size; runs on the ranks.

    Attributes:
        peer: a key of ROWS.
        config: sizes of the model.
        ranks: of both sides.
        sequences: global batch.
    """

    peer: str
    config: ModelConfig
    ranks: int
    sequences: int

    @property
    def row(self) -> Row:
        """The row of the table."""
        return ROWS[self.peer]

    def share(self) -> int:
        """Return the sequences that one rank takes in one pass.

        Raises:
            ValueError: the global batch does not divide.
        """
        parts = self.row.microbatches * (self.ranks if self.row.axis == "dp" else 1)
        if self.sequences % parts:
            raise ValueError(
                f"--sequences {self.sequences}: row {self.peer} on {self.ranks} ranks cuts a batch into {parts} parts, "
                f"which must be equal. Use a multiple of {parts}."
            )
        return self.sequences // parts

    @property
    def dtype(self) -> torch.dtype:
        """What both sides compute in."""
        return self.row.dtype

    def batches(self, coordinate: int) -> list[Batch]:
        """Draw the microbatches of a data-parallel coordinate; equal on all ranks that share it."""
        parts = self.ranks if self.row.axis == "dp" else 1
        shape = BatchShape(parts, self.row.microbatches, self.share())
        return draw_batches(self.config, self.sequences, shape, coordinate)

    def weights(self) -> dict[str, Tensor]:
        """Draw dtengine's initial parameters, whole and in float32 whatever the row computes in."""
        return draw_weights(self.config, self.row.mesh(self.ranks))

    def ours(self, batches: list[Batch]) -> Side:
        """Build dtengine's side."""
        row, mesh = self.row, build_mesh(self.row.mesh(self.ranks))
        plan = make_plan(row.plan, mesh.sizes, self.config.axis_sizes, sequence_parallel=row.sequence_parallel)
        config = StepConfig(self.share(), self.config.seq, microbatches=row.microbatches, clip=CLIP, **row.options)
        optimizer = adamw(weight_decay=DECAY)
        step = make_step(load_model("llama"), self.config, plan, mesh, optimizer, config, lambda number: LR)
        return side_of(step, batches, float(self.sequences * self.config.seq))

    def theirs(self, batches: list[Batch], weights: dict[str, Tensor], chosen: Mapping[str, Any] | None = None) -> Side:
        """Build the peer's side; ``chosen`` is one of the row's candidates."""
        row = self.row
        module = Llama(self.config)
        copy_weights(module, weights)
        model = row.wrap(module, **row.wrapped, **(row.candidates[0] if chosen is None else chosen))
        return peer_side(model, batches, **row.stepped)

    def tune(self, batches: list[Batch], weights: dict[str, Tensor], steps: int) -> Mapping[str, Any]:
        """Return the fastest of the peer's candidates, the same on all ranks; see ``fastest``."""
        return fastest(lambda one: self.theirs(batches, weights, one), self.row.candidates, steps)

    def coordinate(self, rank: int) -> int:
        """Return a rank's data-parallel coordinate."""
        return rank if self.row.axis == "dp" else 0
