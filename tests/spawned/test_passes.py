"""Passes, recompute and overlap on the programs of real steps: the same bits, the same collectives, less of all else."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_cases import G, L, case
from test_equivalence import batches_of, check_equal, num_ranks_of, setup_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtengine.mesh import build_mesh
from dtengine.nodes import is_collective
from dtengine.optim import sgd
from dtengine.passes import PASSES
from dtengine.program import Program
from dtengine.step import Step, init_state, make_step
from dtengine.verify import VerifyOptions

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

FP32 = {"precision": "fp32", "global_batch": 8, "microbatches": 2, "clip": 0.1}


def step_of(options: VerifyOptions, **program: Any) -> Step:
    """A step with SGD."""
    options = replace(options, program=replace(options.program, **program))
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    return make_step(setup.model, setup.model_config, setup.plan, mesh, sgd(0.9), setup.step, lambda _: 0.1)


def two_steps(step: Step, options: VerifyOptions) -> list[Tensor]:
    """Losses, norms and parameters of two steps on the same batch."""
    state, found = init_state(step), []
    for _ in range(2):
        state, metrics = step(state, batches_of(setup_of(options), step.mesh, options.check), 100.0)
        found += [metrics.loss, metrics.norm]
    return [*found, *(p.to_local().clone() for p in state.params.values())]


def sequence_of(step: Step) -> list[tuple]:
    """Operations of a step's collectives, in order."""
    programs = [p for p in step.programs.values() if isinstance(p, Program)]
    return [(c.operation, c.axes, c.bytes) for p in programs for c in p.collectives]


# --- passes ---------------------------------------------------------------------------------------------------------


def run_without(rank: int, options: VerifyOptions) -> dict[str, tuple[bool, float, bool]]:
    """For each pass, against a step with all of them: (same bits, largest difference, same collectives)."""
    whole = step_of(options)
    expected, found = two_steps(whole, options), {}
    for name in PASSES:
        step = step_of(options, disable_pass=(name,))
        got = two_steps(step, options)
        for program in step.programs.values():
            assert isinstance(program, Program)
            program.graph.graph.lint()
        same = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        off = max(relative(a, b) for a, b in zip(expected, got, strict=True) if b.numel())
        found[name] = same, off, sorted(sequence_of(whole)) == sorted(sequence_of(step))
    return found


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the tensor; some true gradients are zero, so biases may hold rounding alone."""
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-3)


@pytest.mark.parametrize(
    ("of", "mesh", "plan", "passes"), [(L, "dp=2", "ddp", 2), (L, "dp=2,tp=2", "fsdp", 1), (G, "tp=2", "zero1", 1)]
)
def test_a_pass_changes_no_bit(pool: Pool, of: dict[str, Any], mesh: str, plan: str, passes: int) -> None:
    """In fp32, with a width at which products are large, a step without one pass gives the same bits as with all; where
    the pass says that it takes sums in another order, the same within fp32's rounding. Collectives stay."""
    options = case(of, mesh, plan, **{**FP32, "microbatches": passes}, layers=1, embed=96, mlp=160, seq=64)
    for answer in pool.run(num_ranks_of(options), run_without, options):
        for name, (same, off, collectives) in answer.items():
            assert collectives, name
            assert same if PASSES[name].exact else off < 1e-4, (name, off)


def run_effects(rank: int, options: VerifyOptions) -> dict[str, int]:
    """{pass: nodes that it removed or changed}, of a step's graphs."""
    step = step_of(options)
    step.prepare()
    whole, found = operators(step), dict.fromkeys(PASSES, 0)
    for effect in step.effects:
        found[effect.name] += abs(effect.before - effect.after)
    for name in PASSES:
        if not found[name]:  # it puts as many nodes as it takes, or moves them
            other = step_of(options, disable_pass=(name,))
            other.prepare()
            found[name] = int(operators(other) != whole)
    return found


def operators(step: Step) -> list[tuple[str, str]]:
    """What a step's program runs, in order."""
    program = step.programs["step"]
    assert isinstance(program, Program)
    return [(n.op, str(n.target)) for n in program.graph.graph.nodes]


def test_every_pass_does_something(pool: Pool) -> None:
    """Each pass changes some graph of a small set of plans."""
    total = dict.fromkeys(PASSES, 0)
    for mesh, plan, precision in (("dp=2", "ddp", "fp64"), ("tp=2", "ddp", "fp32")):
        options = case(L, mesh, plan, **{**FP32, "precision": precision}, layers=1, embed=96, mlp=160, seq=64)
        for passes in (1, 2):
            answer = pool.run(2, run_effects, replace(options, batch=replace(options.batch, microbatches=passes)))[0]
            total = {name: total[name] + answer[name] for name in PASSES}
    assert [name for name, changed in total.items() if not changed] == []


def test_compiled_parts_are_exact(pool: Pool) -> None:
    """Forward and backward of each kind of part, compiled by Inductor with the collectives in them, equal one device."""
    check_equal(pool, case(L, "tp=2", "ddp", sp=False, layers=1, microbatches=2, compile=True))


# --- recompute ------------------------------------------------------------------------------------------------------

MODES: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "every-2"},
    {"activation_budget": 0.6},
    {"activation_budget": 0.1},
    {"save": "min-cut"},
    {"recompute": "every-2", "save": "min-cut"},
)


def run_recompute(rank: int, options: VerifyOptions) -> list[tuple[bool, int]]:
    """For each mode: (the bits of "none", bytes of activations at the peak)."""
    found, expected = [], None
    for mode in MODES:
        step = step_of(options, **mode)
        got = two_steps(step, options)
        expected = expected or got
        memory = step.memory()
        assert memory is not None
        found.append((all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), memory.activations))
    return found


@pytest.mark.parametrize(("of", "mesh"), [(G, "tp=2"), (L, "dp=2")])
def test_c08_recompute_is_bit_neutral(pool: Pool, of: dict[str, Any], mesh: str) -> None:
    """C08: with dropout 0.1, recomputing all, some or every second block gives the same bits, and holds less."""
    options = case(of, mesh, **{**FP32, "microbatches": 1}, dropout=0.1, layers=4, bucket_mb=0.0)
    for answer in pool.run(num_ranks_of(options), run_recompute, options):
        assert all(same for same, _ in answer)
        none, selective, full, every, some, little, cut, both = (activations for _, activations in answer)
        assert full < selective < none
        assert full < every < none
        assert little <= some < none
        assert full < both < cut < none


# --- overlap --------------------------------------------------------------------------------------------------------


class Timeline(TorchDispatchMode):
    """Notes what runs when: (operator, seconds at its begin and end)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.events.append((str(func), began, time.perf_counter()))
        return result


COMPUTES = ("mm", "linear", "attention")


def run_timeline(rank: int, options: VerifyOptions, operation: str) -> list[int]:
    """For each collective of an operation in a real step: products that ran between its start and its first wait."""
    step = step_of(options)
    state, batches = init_state(step), batches_of(setup_of(options), step.mesh, options.check)
    state, _ = step(state, batches, 100.0)
    with Timeline() as timeline:
        step(state, batches, 100.0)
    starts = [name for name, _, _ in timeline.events if "c10d" in name and "wait" not in name]
    program = step.programs["step"]
    assert isinstance(program, Program)
    nodes = [n for n in program.graph.graph.nodes if n.op.startswith("call") and "getitem" not in str(n.target)]
    sent = [n for n in nodes if is_collective(n)]
    assert len(starts) == len(sent)
    found = []
    for node in (n for n, c in zip(sent, program.collectives, strict=True) if c.operation == operation):
        users = {u for out in node.users for u in (out, *out.users) if "wait" in str(u.target)}
        first = min(nodes.index(u) for u in users)
        between = nodes[nodes.index(node) : first]
        found.append(sum(any(word in str(n.target) for word in COMPUTES) for n in between))
    assert all(
        a[2] <= b[1] for a, b in zip(timeline.events, timeline.events[1:], strict=False)
    )  # the graph's own order
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_c30_gathers_run_while_blocks_compute(pool: Pool, prefetch: int) -> None:
    """C30: L with 8 layers, ZeRO-3 on dp2: the next block's gather starts before this block's products and is waited for
    behind them, forward and backward; with depth 0 nothing runs in between."""
    options = case(L, "dp=2", layers=8, bucket_mb=0.0, prefetch=prefetch)
    for between in pool.run(2, run_timeline, options, "all_gather"):
        if prefetch == 0:
            assert between == [0] * len(between)
        else:
            assert sum(n > 0 for n in between) >= len(between) - 2  # not the first, and not behind the embedding
    for between in pool.run(2, run_timeline, options, "reduce_scatter"):
        assert sum(n > 0 for n in between) >= (len(between) - 2 if prefetch else 0)


def test_tensor_parallel_collectives_overlap_with_products(pool: Pool) -> None:
    """Under tp the gradient of a block's input travels while gradients of weights are computed."""
    options = case(L, "tp=2", "ddp", layers=2, sp=False)
    for between in pool.run(2, run_timeline, options, "all_reduce"):
        assert sum(n > 0 for n in between) >= 4  # attention and MLP of two blocks, in the backward


# --- traces ---------------------------------------------------------------------------------------------------------


def run_traces(rank: int, options: VerifyOptions) -> int:
    step = step_of(options)
    step.prepare()
    return len(step.executor.traces)


def test_alike_blocks_are_traced_once(pool: Pool) -> None:
    """A step of eight layers takes as many traces as one of four, whatever is recomputed."""
    for mode in MODES[:3]:
        four, eight = (pool.run(2, run_traces, case(L, "dp=2", layers=n, bucket_mb=0.0, **mode)) for n in (4, 8))
        assert four == eight
