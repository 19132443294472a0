"""Pipelines: the same stages, on the same ranks, run by dtengine and by ``torch.distributed.pipelining``.

Of both schedules' two ranks each has one stage, or two; microbatches, initial weights and the optimizer are the same.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.peers import ADAMW, CLIP, DECAY, LR, Llama, Side, copy_weights, decay_groups, tensors_of
from benchmarks.rows import draw_batches, draw_weights, fastest, require_compiler, side_of, sizes_of
from dtengine.config import Setup, resolve
from dtengine.data import Batch
from dtengine.mesh import build_mesh, parse_mesh
from dtengine.model import ModelConfig
from dtengine.optim import adamw
from dtengine.options import (
    BatchOptions,
    MeshOptions,
    ModelOptions,
    OptimizerOptions,
    PipelineOptions,
    ProgramOptions,
    StepOptions,
)
from dtengine.pipeline.simulate import simulate
from dtengine.pipeline.step import PipelineStep
from dtengine.pipeline.timeline import costs_of
from dtengine.step import Step, init_state

RANKS = 2
MESH = f"pp={RANKS}"


class Row(NamedTuple):
    """A schedule of dtengine's and torch's class that does the same.

    Attributes:
        schedule: a name of dtengine's.
        peer: the class.
        compiled: whether Inductor compiles both: each stage's module, and each kind of part.
        candidates: further arguments of the class to choose from by their speed; the first is the default.
    """

    schedule: str
    peer: Any
    compiled: bool = False
    candidates: tuple[Mapping[str, Any], ...] = ({},)

    @property
    def single(self) -> bool:
        """Whether the class takes one stage, not a list."""
        return self.schedule in ("gpipe", "1f1b")

    def words(self) -> str:
        """Return what the peer is."""
        return self.peer.__name__ + (", torch.compile of each stage" if self.compiled else "")


# Not for the two zero-bubble classes: with defer_pp_recv torch 2.13 posts their receives in another order than the sends
# of the other rank, and its messages have no tags: activations and gradients swap, losses are wrong without any error.
_RECEIVE = (MappingProxyType({"defer_pp_recv": False}), MappingProxyType({"defer_pp_recv": True}))
PIPELINES = {
    "gpipe": Row("gpipe", ScheduleGPipe),
    "1f1b": Row("1f1b", Schedule1F1B),
    "interleaved": Row("interleaved", ScheduleInterleaved1F1B, candidates=_RECEIVE),
    "loopedbfs": Row("loopedbfs", ScheduleLoopedBFS, candidates=_RECEIVE),
    "interleaved-zb": Row("interleaved-zb", ScheduleInterleavedZeroBubble),
    "zbv": Row("zbv", ScheduleZBVZeroBubble),
    "dualpipev": Row("dualpipev", ScheduleDualPipeV, candidates=_RECEIVE),
    "1f1b+compile": Row("1f1b", Schedule1F1B, compiled=True),
}


def pipelines_text() -> str:
    """Return the table of rows for ``--help``."""
    width = max(map(len, PIPELINES))
    return "\n".join(f"  {name:{width}}  {row.words()}" for name, row in PIPELINES.items())


class PipelineWork(NamedTuple):
    """One row at one size; what runs on the ranks is as ``rows.Compared`` says.

    Attributes:
        name: a key of PIPELINES.
        config: sizes of the model.
        sequences: global batch.
        microbatches: of equal size.
    """

    name: str
    config: ModelConfig
    sequences: int
    microbatches: int

    @property
    def row(self) -> Row:
        """The row of the table."""
        return PIPELINES[self.name]

    @property
    def ranks(self) -> int:
        """Of both sides."""
        return RANKS

    @property
    def dtype(self) -> torch.dtype:
        """What both sides compute in."""
        return torch.float32

    def check(self) -> None:
        """Raise ValueError for what a person can fix: unequal microbatches, stages without layers, no compiler."""
        if self.sequences % self.microbatches:
            raise ValueError(
                f"--sequences {self.sequences}: --microbatches {self.microbatches} must be equal parts of it. Use a "
                f"multiple of {self.microbatches}."
            )
        setup = self.setup()
        if 0 in setup.layers:
            raise ValueError(
                f"--layers {self.config.layers}: schedule {self.name} has {len(setup.layers)} stages, dealt {setup.layers}. "
                f"Each must have a layer. Use --layers {len(setup.layers)}, or more."
            )
        require_compiler("--schedules", [self.name] if self.row.compiled else [])

    def setup(self) -> Setup:
        """Resolve dtengine's options as its command does; the peer takes layers and placement of stages from there."""
        config = self.config
        sizes = ModelOptions(
            layers=config.layers, embed=config.embed, heads=config.heads, mlp=config.mlp, vocab=config.vocab, seq=config.seq
        )  # fmt: skip
        batch = BatchOptions(global_batch=self.sequences, microbatches=self.microbatches)
        optimizer = OptimizerOptions(clip=CLIP, weight_decay=DECAY)
        program, pipeline = ProgramOptions(compile=self.row.compiled), PipelineOptions(self.row.schedule)
        return resolve(StepOptions(MeshOptions(MESH, "ddp"), sizes, batch, optimizer, program, pipeline))

    def coordinate(self, rank: int) -> int:
        """Return a rank's data-parallel coordinate: all ranks share one."""
        return 0

    def batches(self, coordinate: int) -> list[Batch]:
        """Draw the microbatches; equal on all ranks."""
        return draw_batches(self.config, self.sequences, self.setup().batch_shape, coordinate)

    def weights(self) -> dict[str, Tensor]:
        """Draw dtengine's initial parameters, whole."""
        return draw_weights(self.config, {"dp": RANKS})

    def ours(self, batches: list[Batch]) -> Side:
        """Build dtengine's side."""
        return side_of(self.step(), batches, float(self.sequences * self.config.seq))

    def step(self) -> Step:
        """Build dtengine's step."""
        return self.setup().bind(build_mesh(parse_mesh(MESH)), adamw(weight_decay=DECAY), lambda number: LR)

    def theirs(self, batches: list[Batch], weights: dict[str, Tensor], chosen: Mapping[str, Any] | None = None) -> Side:
        """Build the peer's side; ``chosen`` is one of the row's candidates."""
        row, setup = self.row, self.setup()
        assert setup.schedule is not None
        whole = Llama(self.config)
        copy_weights(whole, weights)
        stages = [
            make_stage(whole, setup.layers, number, batches[0].tokens, compiled=row.compiled)
            for number in setup.schedule.stages(dist.get_rank())
        ]
        options = dict(row.candidates[0] if chosen is None else chosen)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / self.microbatches

        # The loss is a term of the mean over the whole batch already, so that no gradient is scaled afterwards.
        schedule = row.peer(stages[0] if row.single else stages, self.microbatches, loss, scale_grads=False, **options)
        return pipeline_side(schedule, stages, batches)

    def tune(self, batches: list[Batch], weights: dict[str, Tensor], steps: int) -> Mapping[str, Any]:
        """Return the fastest of the peer's candidates, the same on all ranks; see ``rows.fastest``."""
        return fastest(lambda one: self.theirs(batches, weights, one), self.row.candidates, steps)


def simulated(work: PipelineWork, steps: int) -> dict[str, float]:
    """Time the actions of dtengine's steps on two ranks, and simulate the schedule with the costs that they had.

    Args:
        work: the row at its size.
        steps: that are timed, after three that are not.

    Returns:
        actions_ms: from the first action's start to the last one's end, median of the steps; simulated_ms; and bubble,
        simulated_bubble: share of the rank that waits most.
    """
    step, batches = work.step(), work.batches(0)
    assert isinstance(step, PipelineStep)
    state, count = init_state(step), float(work.sequences * work.config.seq)
    runs = []
    for number in range(steps + 3):
        dist.barrier()
        state, _, seen = step.timed(state, batches, count)
        runs += [seen] if number >= 3 else []
    expected = simulate(step.schedule, costs_of(step.schedule, runs))
    return {
        "actions_ms": 1e3 * statistics.median(one.makespan for one in runs),
        "simulated_ms": 1e3 * expected.makespan,
        "bubble": statistics.median(one.bubble_share for one in runs),
        "simulated_bubble": expected.bubble_share,
    }


def work_of(name: str, width: int, layers: int, sequences: int, microbatches: int) -> PipelineWork:
    """Return a row at a width."""
    return PipelineWork(name, sizes_of(width, layers), sequences, microbatches)


# --- the peer -------------------------------------------------------------------------------------------------------


class StageModule(nn.Module):
    """Consecutive blocks of a Llama; the first stage has the embedding too, the last norm and output."""

    cos: Tensor
    sin: Tensor

    def __init__(self, whole: Llama, blocks: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.table = whole.table if first else None
        self.blocks = nn.ModuleList(whole.blocks[i] for i in blocks)
        self.head = nn.Sequential(whole.norm, whole.unembed) if last else None
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = self.table(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(x)


def make_stage(
    whole: Llama, layers: Sequence[int], number: int, tokens: Tensor, *, compiled: bool = False
) -> PipelineStage:
    """Build a stage by hand, with the form of what it takes and gives, so that torch need not infer it.

    Args:
        whole: the model.
        layers: blocks of each stage.
        number: of this stage.
        tokens: [batch, seq] int64 of a microbatch.
        compiled: torch.compile its module.
    """
    ends = [0, *accumulate(layers)]
    first, last = number == 0, number + 1 == len(layers)
    module: nn.Module = StageModule(whole, range(ends[number], ends[number + 1]), first=first, last=last)
    x = torch.empty(*tokens.shape, whole.norm.normalized_shape[0], device="meta", requires_grad=True)
    logits = torch.empty(*tokens.shape, whole.unembed.out_features, device="meta", requires_grad=True)
    if compiled:
        module = torch.compile(module)  # type: ignore[assignment]
    return PipelineStage(
        module,
        number,
        len(layers),
        torch.device("cpu"),
        input_args=tokens.to("meta") if first else x,
        output_args=logits if last else x,
    )


def pipeline_side(schedule: Any, stages: Sequence[PipelineStage], batches: Sequence[Batch]) -> Side:
    """Return the peer's training step.

    The norm of the gradients of all stages and the loss, which only the last stage has, are summed over the ranks by one
    all-reduce within the step; so does dtengine.

    Args:
        schedule: of torch's classes, of these stages.
        stages: of this rank.
        batches: the microbatches; torch cuts the whole batch into them.
    """
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(decay_groups(parameters), **ADAMW)
    first, last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))
    tokens = (torch.cat([batch.tokens for batch in batches]),) if first else ()
    targets = torch.cat([batch.targets for batch in batches]) if last else None

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(*tokens, target=targets, losses=losses, return_outputs=False)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        sums = torch.stack([norm.square(), torch.stack(losses).detach().sum() if losses else torch.zeros(())])
        dist.all_reduce(sums)
        clip_grads_with_norm_(parameters, CLIP, sums[0].sqrt(), foreach=True)
        optimizer.step()
        return sums[1].item()

    return Side(run, lambda: tensors_of(parameters, optimizer))
