"""What ranks hold: the estimate from the graph beside the allocator's events, and that fsdp holds no more than it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_pool import Pool

from dtengine import checkpoint
from dtengine.config import resolve
from dtengine.data import Batch
from dtengine.memory import MemoryEstimate, moments
from dtengine.mesh import build_mesh
from dtengine.options import (
    BatchOptions,
    MeshOptions,
    ModelOptions,
    OptimizerOptions,
    PipelineOptions,
    ProgramOptions,
    StepOptions,
)
from dtengine.program import Program
from dtengine.step import Step, init_state

SIZES = ModelOptions(layers=4, embed=256, heads=4, seq=128, vocab=256)


def step_of(
    mesh: MeshOptions, program: ProgramOptions, model: ModelOptions = SIZES, passes: int = 1, schedule: str = "1f1b"
) -> Step:
    """Return a step of 8 sequences."""
    batch, pipeline = BatchOptions(global_batch=8, microbatches=passes), PipelineOptions(schedule=schedule)
    setup = resolve(StepOptions(mesh, model, batch, OptimizerOptions(optimizer="adamw"), program, pipeline))
    bound = build_mesh(setup.plan.sizes, torch.device("cpu"))
    optimizer = setup.optimizer(OptimizerOptions())
    return setup.bind(bound, optimizer, lambda _: 1e-3)


def batches_of(step: Step) -> list[Batch]:
    """Return the microbatches of a step, the same on all ranks."""
    config = step.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (config.microbatches, config.microbatch, config.seq), generator=generator)
    return [Batch(t, t.clone(), torch.ones(t.shape), torch.arange(len(t))) for t in tokens]


def run_measured(
    rank: int, mesh: MeshOptions, program: ProgramOptions, passes: int = 1, schedule: str = "1f1b"
) -> tuple[int, MemoryEstimate, int]:
    """Return (measured bytes, estimate, resident bytes counted from storages) of a step.

    The smallest of three: what a busy machine lets gloo's threads free late adds to a measurement, and nothing subtracts.
    """
    step = step_of(mesh, program, passes=passes, schedule=schedule)
    state, batches = init_state(step), batches_of(step)
    state, _ = step(state, batches)
    measured = []
    for _ in range(3):
        state, _, most = step.measured(state, batches)
        measured.append(most)
    estimate = step.memory()
    assert estimate is not None
    groups = [state.params, state.master, *state.slots.values()]
    held = [tensor.to_local() for group in groups for tensor in group.values()]
    return min(measured), estimate, sum(t.nbytes for t in held)


@pytest.mark.parametrize(
    ("mesh", "plan", "program", "passes"),
    [
        ("2", "ddp", ProgramOptions(), 1),
        ("2", "zero1", ProgramOptions(), 1),
        ("2", "zero2", ProgramOptions(), 2),
        ("2", "fsdp", ProgramOptions(), 1),
        ("2", "fsdp", ProgramOptions(precision="bf16"), 1),
        ("2", "fsdp", ProgramOptions(recompute="full"), 1),
        ("2", "fsdp", ProgramOptions(recompute="selective"), 2),
        ("2", "fsdp", ProgramOptions(bucket_mb=0), 1),
        ("tp=2", "ddp", ProgramOptions(), 1),
        ("tp=2", "fsdp", ProgramOptions(recompute="full"), 1),
    ],
    ids=lambda x: x.recompute + x.precision + str(x.bucket_mb) if isinstance(x, ProgramOptions) else str(x),
)
def test_estimate_is_what_is_measured(pool: Pool, mesh: str, plan: str, program: ProgramOptions, passes: int) -> None:
    """On every rank the estimate of the peak is within 5 % of the allocator's, and what is resident is exact."""
    options = MeshOptions(mesh=mesh, plan=plan)  # type: ignore[arg-type]
    for measured, estimate, held in pool.run(2, run_measured, options, program, passes):
        print(f"{mesh} {plan}: measured {measured}, estimated {estimate.total}, {measured / estimate.total:.4f}")
        assert 0.95 < measured / estimate.total < 1.05, (estimate, measured)
        assert estimate.parameters + estimate.optimizer == held


@pytest.mark.parametrize(
    ("mesh", "plan", "program", "schedule"),
    [
        ("pp=2", "ddp", ProgramOptions(), "1f1b"),
        ("pp=2", "ddp", ProgramOptions(save="min-cut"), "zb-h1"),
        ("pp=2", "zero1", ProgramOptions(precision="bf16", recompute="full"), "zbv"),
        ("pp=2", "ddp", ProgramOptions(), "gpipe"),
        ("pp=2,dp=2", "fsdp", ProgramOptions(), "interleaved"),
        ("pp=2,tp=2", "ddp", ProgramOptions(), "dualpipev"),
    ],
    ids=lambda x: x.recompute + x.precision + x.save if isinstance(x, ProgramOptions) else str(x),
)
def test_estimate_of_a_pipeline(pool: Pool, mesh: str, plan: str, program: ProgramOptions, schedule: str) -> None:
    """The same for the ranks of stages, whose peak is read off the schedule's actions."""
    options = MeshOptions(mesh=mesh, plan=plan)  # type: ignore[arg-type]
    ranks = 4 if "," in mesh else 2
    for measured, estimate, held in pool.run(ranks, run_measured, options, program, 4, schedule):
        print(
            f"{mesh} {plan} {schedule}: measured {measured}, estimated {estimate.total}, {measured / estimate.total:.4f}"
        )
        assert 0.95 < measured / estimate.total < 1.05, (estimate, measured)
        assert estimate.parameters + estimate.optimizer == held


def run_gathered(rank: int, plan: str, program: ProgramOptions, passes: int) -> tuple[int, int, int]:
    """Return (most bytes of gathered parameters at any moment, bytes of a block, of embedding and head)."""
    step = step_of(MeshOptions(mesh="2", plan=plan), program, passes=passes)  # type: ignore[arg-type]
    step.prepare()
    programs = [p for p in step.programs.values() if isinstance(p, Program)]
    most = max(m.bytes["gathered"] for p in programs for m in moments(p.graph.graph))
    sizes = {
        name: torch.Size(p.shape).numel() * step.parameters.compute_dtype.itemsize for name, p in step.params.items()
    }
    ends = sum(size for name, size in sizes.items() if not name.startswith("blocks."))
    return most, (sum(sizes.values()) - ends) // 4, ends


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fsdp_gathers_no_more_than_it_says(pool: Pool, prefetch: int, recompute: str) -> None:
    """At no moment of a step more than (prefetch + 1) blocks are gathered, embedding and head beside them."""
    program = ProgramOptions(bucket_mb=0, prefetch=prefetch, recompute=recompute)
    for most, block, ends in pool.run(2, run_gathered, "fsdp", program, 2):
        print(f"prefetch {prefetch}, recompute {recompute}: {(most - ends) / block:.3f} blocks beside the ends")
        assert block * prefetch < most <= block * (prefetch + 1) + ends


# --- offload --------------------------------------------------------------------------------------------------------

SMALL = ModelOptions(layers=2, embed=18, heads=2, head_dim=6, mlp=26, seq=15, vocab=256)


def run_offloaded(rank: int, mesh: MeshOptions, folder: str | None) -> list[tuple[str, bool, int, int]]:
    """Train with and without offload; returns (offload, whether all bits are equal, bytes on device, on host)."""
    found = []
    plain: list[torch.Tensor] = []
    for offload in ("none", "optimizer", *(["parameters"] if mesh.plan == "fsdp" else [])):
        program = ProgramOptions(offload=offload, bucket_mb=0.005)  # type: ignore[arg-type]
        step = step_of(mesh, program, SMALL, passes=2)
        state, batches = init_state(step), batches_of(step)
        state, metrics = step(state, batches)
        for number in range(2):
            if folder is not None and number == 1:  # continue from what was written
                path = checkpoint.save(Path(folder) / offload, state, step.mesh, {})
                state = checkpoint.load(path, init_state(step), step.mesh)
            state, metrics = step(state, batches)
        loss, _ = step.evaluate(state, batches)
        got = [p.to_local() for p in state.params.values()]
        got += [s.to_local() for slots in state.slots.values() for s in slots.values()]
        got += [metrics.loss, metrics.norm, torch.tensor(loss)]
        plain = plain or got
        estimate = step.memory()
        assert estimate is not None
        equal = len(got) == len(plain) and all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
        found.append((offload, equal, estimate.parameters + estimate.optimizer, estimate.host))
    return found


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("2", "ddp"), ("2", "zero1"), ("2", "zero2"), ("2", "fsdp"), ("tp=2", "fsdp"), ("4", "zero1"), ("2x2", "fsdp")],
)
def test_offload_changes_no_bit(pool: Pool, tmp_path: Path, mesh: str, plan: str) -> None:
    """With state on the host every tensor has the same bits, also through a checkpoint; the device holds less by it."""
    options = MeshOptions(mesh=mesh, plan=plan)  # type: ignore[arg-type]
    folder = str(tmp_path) if plan in ("zero1", "fsdp") else None
    for rank in pool.run(4 if mesh in ("4", "2x2") else 2, run_offloaded, options, folder):
        print(rank)
        assert all(equal for _, equal, _, _ in rank)
        assert len({device + host for _, _, device, host in rank}) == 1
        assert [host > 0 for _, _, _, host in rank] == [False] + [True] * (len(rank) - 1)
        assert plan != "fsdp" or rank[-1][2] == 0
