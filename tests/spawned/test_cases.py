"""Cases from public reports, by their ids, and the collectives that a step may use.

G and L are the two small models of those reports: GPT and Llama, 4 layers, width 32, vocab 64, context 16, 8 sequences a
step, SGD with lr 1e-3, clipped at 0.1. Held to one device in float64 within 1e-9, unless a test says otherwise.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from graphs import traced
from test_equivalence import (
    batches_of,
    check_equal,
    num_ranks_of,
    run_plan,
    setup_of,
    step_of,
)
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from dtengine.data import IGNORE, Batch
from dtengine.layout import PLANS, Placements
from dtengine.mesh import build_mesh, parse_mesh
from dtengine.model import Model, ModelConfig, Param, forward, parameters
from dtengine.models import gpt
from dtengine.ops import Ops
from dtengine.optim import adamw, sgd
from dtengine.parameters import init_param
from dtengine.program import check_collectives
from dtengine.shard import Move, gather, redistribute, take, wrap
from dtengine.state import State
from dtengine.step import init_state, make_step
from dtengine.torch_private import all_reduce
from dtengine.verify import (
    Trained,
    VerifyOptions,
    difference,
    random_batch,
    train_one_device,
    train_plan,
)

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

TOLERANCE = 1e-9
G = {"model": "gpt", "heads": 4, "kv_heads": 4, "head_dim": 8, "mlp": 128, "tied": True}
L = {"model": "llama", "heads": 8, "kv_heads": 4, "head_dim": 4, "mlp": 96, "tied": False}
SHARED = {"layers": 4, "embed": 32, "vocab": 64, "seq": 16, "dropout": 0.0, "global_batch": 8, "steps": 5, "lr": 1e-3}


def case(of: dict[str, Any], mesh: str, plan: str = "fsdp", **given: Any) -> VerifyOptions:
    """Return the options of a case: a model, a mesh, a plan, and what the case says beside."""
    values = SHARED | of | {"mesh": mesh, "plan": plan} | given
    options = VerifyOptions()
    for group in fields(VerifyOptions):
        chosen = getattr(options, group.name)
        mine = {f.name: values.pop(f.name) for f in fields(chosen) if f.name in values}
        options = replace(options, **{group.name: replace(chosen, **mine)})
    assert not values
    return options


def _gpt_with_unused(config: ModelConfig) -> dict[str, Any]:
    specs = gpt.specs(config)
    blocks = [{**block, "unused": Param("mlp", (config.mlp,), 0.5)} for block in specs["blocks"]]
    return {**specs, "blocks": blocks}


UNUSED_MODEL: Model = replace(gpt.MODEL, specs=_gpt_with_unused)
UNUSED = f"{os.path.relpath(__file__)}:UNUSED_MODEL"


# --- C01, C02: one norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["1", "2", "inf"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_c01_one_norm_for_every_order(pool: Pool, mesh: str, order: str) -> None:
    """C01: the norm before clipping is one process's for any order, the same on all ranks; so are clipped gradients."""
    report = check_equal(pool, case(G, mesh, clip_order=order, clip=0.1, steps=1, lr=1.0))
    assert report.norm <= TOLERANCE


@pytest.mark.parametrize("mesh", ["dp=4", "tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_c02_norm_counts_each_gradient_once(pool: Pool, mesh: str, plan: str) -> None:
    """C02: in fp32 the reported norm is the same number on every rank, and one process's within 1e-5."""
    options = case(L, mesh, plan, precision="fp32", steps=1)
    setup = setup_of(options)
    theirs = train_one_device(setup, options.optimizer, random_batch(setup, options.check))
    norms = {trained.norm for trained, _ in pool.run(num_ranks_of(options), run_plan, options)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(theirs.norm, rel=1e-5)


# --- C04, C05: one scale --------------------------------------------------------------------------------------------


def run_batch(rank: int, options: VerifyOptions, batch: Batch) -> Trained:
    """Train the plan's side on a given batch."""
    setup = setup_of(options)
    return train_plan(setup, options.optimizer, batch, build_mesh(setup.plan.sizes))[0]


@pytest.mark.parametrize("mesh", ["1", "dp=2"])
def test_c04_a_short_sequence_weighs_its_tokens(pool: Pool, mesh: str) -> None:
    """C04: two samples with 11 and 101 counted tokens: accumulation 2 x 1 and batch 2 give equal gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, 64, (2, 128), generator=generator) for _ in range(2))
    for row, counted in enumerate((11, 101)):
        targets[row, counted:] = IGNORE
    batch = Batch(tokens, targets, torch.ones(2, 128), torch.arange(2))
    at_once = case(G, "1", layers=2, seq=128, global_batch=2, steps=2)
    theirs = train_one_device(setup_of(at_once), at_once.optimizer, batch)
    for microbatches in (1, 2):
        options = case(G, mesh, layers=2, seq=128, global_batch=2, microbatches=microbatches, steps=2)
        for ours in pool.run(num_ranks_of(options), run_batch, options, batch):
            assert difference(ours.grads, theirs.grads)[0] <= TOLERANCE
            assert difference(ours.params, theirs.params)[0] <= TOLERANCE
            assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)


def test_c05_microbatches_do_not_scale_gradients(pool: Pool) -> None:
    """C05: raw gradients and norm equal one process with 4 microbatches, and stay when 4 becomes 8 or 12."""
    for microbatches in (4, 8, 12):
        check_equal(pool, case(G, "dp=2", layers=2, global_batch=24, microbatches=microbatches, steps=2))


# --- C06, C07: meshes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("dp=4,tp=1", "fsdp"),
        ("dp=1,tp=4", "fsdp"),
        ("dp=2,tp=2", "zero1"),
        ("rep=4,dp=1,tp=1", "fsdp"),
        ("rep=4,dp=1", "zero2"),
        ("rep=1,dp=4", "ddp"),
        ("rep=4,dp=1,tp=1", "zero1"),
    ],
)
def test_c06_a_mesh_axis_of_size_1_is_ordinary(pool: Pool, mesh: str, plan: str) -> None:
    """C06: parameters after 5 steps equal one process, and replicas are bit-equal, also on axes of size 1."""
    report = check_equal(pool, case(L, mesh, plan, layers=2))
    assert report.replicas_equal


def run_weights(rank: int, every: list[VerifyOptions]) -> list[dict[str, Tensor]]:
    """Whole initial weights of several options that share a mesh."""
    found = []
    for options in every:
        _, mesh, step = step_of(options)
        params = init_state(step).params
        found.append(dict(zip(params, gather(list(params.values()), mesh), strict=True)))
    return found


@pytest.mark.parametrize("mesh", ["1", "dp=4", "tp=4", "dp=2,tp=2", "rep=2,dp=2,tp=2"])
def test_c07_initial_weights_depend_on_no_mesh(pool: Pool, mesh: str) -> None:
    """C07: with seed 0 the full weights of G and L are the same bits on every mesh and plan, also for vocab 67."""
    every = [
        case(of, mesh, plan, vocab=vocab, layers=2) for of in (G, L) for vocab in (64, 67) for plan in ("ddp", "fsdp")
    ]
    for answers in pool.run(num_ranks_of(every[0]), run_weights, every):
        for options, weights in zip(every, answers, strict=True):
            setup = setup_of(options)
            specs = parameters(setup.model.specs(setup.model_config))
            assert weights.keys() == specs.keys()
            for name, spec in specs.items():
                assert torch.equal(weights[name], init_param(spec, name, 0, [(0, s) for s in spec.shape], "cpu")), name


# --- C09, C10: sizes that do not divide -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "mesh", "tied"),
    [(G, "tp=2", True), (G, "tp=4", False), (L, "tp=2", False), (L, "tp=4", True)],
    ids=["G-tied", "G-untied", "L-untied", "L-tied"],
)
def test_c09_a_vocabulary_that_tp_does_not_divide(pool: Pool, of: dict[str, Any], mesh: str, tied: bool) -> None:
    """C09: with vocab 67, 50 steps with weight decay equal one process; the whole table has 67 rows."""
    options = case(of, mesh, vocab=67, tied=tied, steps=50, layers=2, lr=0.1, weight_decay=0.1)
    setup = setup_of(options)
    theirs = train_one_device(setup, options.optimizer, random_batch(setup, options.check))
    for ours, equal in pool.run(num_ranks_of(options), run_plan, options):
        assert equal
        assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
        assert difference(ours.params, theirs.params)[0] <= TOLERANCE
        assert ours.params["embed.table"].shape == (67, 32)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
@pytest.mark.parametrize("seq", [15, 7])
def test_c10_a_context_that_tp_does_not_divide(pool: Pool, seq: int, mesh: str) -> None:
    """C10: contexts of 15 and 7 with sequence parallelism equal one process."""
    check_equal(pool, case(L, mesh, seq=seq, layers=2, sp=True))


def run_evaluations(rank: int, options: VerifyOptions, lengths: list[int]) -> list[tuple[float, float]]:
    """Losses of evaluation batches of several lengths: (the plan's, one device's)."""
    setup, _, step = step_of(options)
    state, found = init_state(step), []
    specs = setup.model.specs(setup.model_config)
    whole = {n: init_param(p, n, 0, [(0, s) for s in p.shape], "cpu").to(torch.float64) for n, p in step.params.items()}
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        shape = (setup.batch_shape.microbatch, length)
        tokens, targets = (torch.randint(0, setup.model_config.vocab, shape, generator=generator) for _ in range(2))
        batch = Batch(tokens, targets, torch.ones(shape), torch.arange(shape[0]))
        mean, count = step.evaluate(state, [batch])
        assert count == math.prod(shape)
        loss, number = setup.model.loss(forward(setup.model, specs, whole, batch, Ops()), batch, Ops())
        found.append((mean, (loss / number).item()))
    return found


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
@pytest.mark.parametrize("of", [G, L], ids=["G", "L"])
def test_c10_evaluation_of_another_length(pool: Pool, of: dict[str, Any], mesh: str) -> None:
    """C10: evaluation batches shorter than a training sequence, of one length after another, equal one process."""
    options = case(of, mesh, seq=15, layers=1, sp=True)
    for answers in pool.run(num_ranks_of(options), run_evaluations, options, [15, 7, 11, 1]):
        for mine, theirs in answers:
            assert mine == pytest.approx(theirs, rel=TOLERANCE)


# --- C12, C13: shards and stages ------------------------------------------------------------------------------------


def counting(shape: tuple[int, ...]) -> Tensor:
    """A tensor filled with its flat indices."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def run_gather(rank: int, mesh_text: str, cases: list[tuple[tuple[int, ...], Placements]]) -> list[Tensor]:
    """Distribute index-valued tensors and gather them."""
    mesh = build_mesh(parse_mesh(mesh_text))
    return gather([wrap(take(counting(s), p, mesh), mesh, p, s) for s, p in cases], mesh)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4,tp=2"])
def test_c12_gathering_keeps_the_order_of_elements(pool: Pool, mesh: str) -> None:
    """C12: index-valued tensors of sizes 10 and 7 come back as 0..n-1, also where both axes split one dim."""
    split = [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1))]
    split += [(Replicate(), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())]
    cases = [(shape, p) for shape in ((10, 7), (7, 10), (1, 3), (3, 2, 5)) for p in split]
    cases += [((size,), (Shard(0), p)) for size in (10, 7, 1) for p in (Shard(0), Replicate())]
    for gathered in pool.run(math.prod(parse_mesh(mesh).values()), run_gather, mesh, cases):
        for (shape, placements), whole in zip(cases, gathered, strict=True):
            assert torch.equal(whole, counting(shape)), (shape, placements)


def run_moves(rank: int, options: VerifyOptions) -> list[str]:
    """Names of parameters whose moves between the plan's layouts do not keep every element where it belongs."""
    setup, mesh, step = step_of(options)
    plan, wrong = setup.plan, []
    names, shapes = list(step.params), [p.shape for p in step.params.values()]
    for source, target in (
        (plan.params, plan.compute),
        (plan.params, plan.optimizer),
        (plan.optimizer, plan.params),
        (plan.compute, plan.grads),
    ):
        placed = [[layout.placements(step.params[n].names, mesh.sizes) for n in names] for layout in (source, target)]
        local = [take(counting(s), p, mesh) for s, p in zip(shapes, placed[0], strict=True)]
        moves = [Move(a, b, s) for a, b, s in zip(*placed, shapes, strict=True)]
        for name, got, shape, there in zip(names, redistribute(local, moves, mesh), shapes, placed[1], strict=True):
            if not torch.equal(got, take(counting(shape), there, mesh)):
                wrong.append(f"{name}: {source.name} to {target.name}")
    return wrong


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4,tp=2", "rep=2,dp=2,tp=2"])
def test_c12_moves_between_layouts_keep_the_order_of_elements(pool: Pool, mesh: str) -> None:
    """C12: each weight of L filled with its flat index is cut, gathered and moved between a plan's layouts by one
    definition, for every plan and for widths 10 and 7."""
    for plan in PLANS:
        for sizes in ({}, {"embed": 10, "mlp": 7, "vocab": 67}, {"embed": 7, "mlp": 10, "kv_heads": 8}):
            options = case(L, mesh, plan, **{"layers": 1, **sizes})
            assert pool.run(num_ranks_of(options), run_moves, options) == [[]] * num_ranks_of(options)


@pytest.mark.parametrize(("plan", "microbatches"), [*((plan, 4) for plan in PLANS), ("zero1", 1), ("fsdp", 1)])
def test_c13_stages_are_layouts_of_the_same_arithmetic(pool: Pool, plan: str, microbatches: int) -> None:
    """C13: G, tied, with a parameter that nothing uses: 20 steps give one process's losses for every plan, with
    accumulation of 1 and 4."""
    given = {"model": UNUSED, "layers": 2, "global_batch": 16, "microbatches": microbatches}
    check_equal(pool, case(G, "dp=4", plan, **{**given, "steps": 20, "lr": 0.1, "momentum": 0.9}))


# --- C36: all ranks skip --------------------------------------------------------------------------------------------


def run_poisoned(
    rank: int, options: VerifyOptions, optimizer: str, value: float, where: str
) -> tuple[list[float], list[list[float]], list[bool]]:
    """Three steps, the second with a poisoned number: (finite, bad_data, whether any bit of the state changed)."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    chosen = sgd(0.9, 0.1) if optimizer == "sgd" else adamw(weight_decay=0.1)
    step = make_step(setup.model, setup.model_config, setup.plan, mesh, chosen, setup.step, lambda _: 0.1)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    count = float(sum((b.targets >= 0).sum() for b in batches) * setup.plan.coordinates)
    poisoned = batches
    if where == "data" and mesh.data_coordinate(setup.plan.data_axes) == 1:
        weights = batches[-1].weights.clone()
        weights[0] = value
        poisoned = [*batches[:-1], batches[-1]._replace(weights=weights)]
    step.prepare()
    accumulate = step.programs["accumulate"]

    def with_bad_gradient(*tensors: Tensor) -> list[Tensor]:
        loss, *rest = accumulate(*tensors)
        with torch.inference_mode():
            next(flat for flat in step.sums.values() if flat.numel())[0] = value
        return [loss, *rest]

    finite, bad, changed = [], [], []
    for number in range(3):
        if where == "gradient" and number == 1 and rank == 3:
            step.programs["accumulate"] = with_bad_gradient
        before = _bits(state)
        state, metrics = step(state, poisoned if number == 1 else batches, count)
        step.programs["accumulate"] = accumulate
        finite.append(metrics.finite.item())
        bad.append(metrics.bad_data.tolist())
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, _bits(state), strict=True)))
    return finite, bad, changed


def _bits(state: State) -> list[Tensor]:
    """Copies of all local shards of parameters, slots and buffers, as integers: a NaN equals itself."""
    tensors: list[DTensor] = [*state.params.values(), *(x for slots in state.slots.values() for x in slots.values())]
    tensors += state.buffers.values()
    return [x.to_local().detach().clone().view(torch.int64) for x in tensors]


@pytest.mark.parametrize(
    ("mesh", "plan", "value", "optimizer"),
    [
        ("dp=2,tp=2", "fsdp", math.nan, "adamw"),
        ("dp=2,tp=2", "fsdp", math.inf, "sgd"),
        ("rep=2,dp=2", "zero1", math.nan, "sgd"),
        ("rep=2,dp=2", "zero1", math.inf, "adamw"),
        ("dp=3", "ddp", math.nan, "adamw"),
    ],
)
def test_c36_a_non_finite_loss_is_skipped_by_all(
    pool: Pool, mesh: str, plan: str, value: float, optimizer: str
) -> None:
    """C36: a non-finite loss in the data of coordinate 1: all ranks skip, none changes a bit of parameters or slots,
    bad_data marks the coordinate, and the next step goes on."""
    options = case(L, mesh, plan, layers=1, global_batch=12, microbatches=2)
    coordinates = setup_of(options).plan.coordinates
    marked = [float(c == 1) for c in range(coordinates)]
    good = [0.0] * coordinates
    for finite, bad, changed in pool.run(num_ranks_of(options), run_poisoned, options, optimizer, value, "data"):
        assert finite == [1.0, 0.0, 1.0]
        assert bad == [good, marked, good]
        assert changed[1] is False
        assert changed[0] and changed[2]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(
    ("mesh", "plan", "order"),
    [("dp=4", "zero2", "1"), ("dp=4", "zero2", "inf"), ("dp=2,tp=2", "fsdp", "2"), ("dp=4", "ddp", "inf")],
)
def test_c36_a_non_finite_gradient_is_skipped_by_all(
    pool: Pool, mesh: str, plan: str, value: float, order: str
) -> None:
    """C36: with a finite loss, one non-finite element of a gradient on rank 3 alone makes all ranks skip, for any order
    of the norm, clipped or not."""
    for clip in (0.1, 0.0):
        options = case(L, mesh, plan, layers=1, clip_order=order, clip=clip, microbatches=2)
        good = [0.0] * setup_of(options).plan.coordinates
        for finite, bad, changed in pool.run(4, run_poisoned, options, "sgd", value, "gradient"):
            assert finite == [1.0, 0.0, 1.0]
            assert bad == [good] * 3
            assert changed[1] is False


# --- collectives ----------------------------------------------------------------------------------------------------


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that are really issued."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def run_counts(rank: int, options: VerifyOptions) -> tuple[dict[str, dict[str, int]], int]:
    """(what a step says that it issues, how many collectives its second call issued)."""
    setup, mesh, step = step_of(options)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    state, _ = step(state, batches, 100.0)
    with CountCollectives() as seen:
        step(state, batches, 100.0)
    return step.collectives(), seen.counts.total()


def counts_of(pool: Pool, options: VerifyOptions) -> dict[str, dict[str, int]]:
    """A step's collectives, the same on all ranks, and as many as are really issued."""
    answers = pool.run(num_ranks_of(options), run_counts, options)
    for said, issued in answers:
        assert said == answers[0][0]
        assert issued == sum(n for operations in said.values() for n in operations.values())
    return answers[0][0]


LAYERS, PASSES = 3, 2
PARTS = LAYERS + 2  # embed, each block, head
GATHERS = PARTS + LAYERS - 1  # each part, and blocks but the last once more for their backward
BLOCKS = 4 * LAYERS  # attention and MLP, forward and backward


@pytest.mark.parametrize("of", [G, L], ids=["G", "L"])
@pytest.mark.parametrize(
    ("mesh", "plan", "sp", "expected"),
    [
        # a gather and a reduce-scatter for each part and pass; one sum of loss and norm over the world
        (
            "dp=2",
            "fsdp",
            True,
            {"dp": {"all_gather": GATHERS * PASSES, "reduce_scatter": PARTS * PASSES, "all_reduce": 1}},
        ),
        # gradients once a step, whatever the passes
        ("dp=2", "ddp", True, {"dp": {"all_reduce": PARTS + 1}}),
        ("dp=2", "zero1", True, {"dp": {"reduce_scatter": PARTS, "all_gather": PARTS, "all_reduce": 1}}),
        ("dp=2", "zero2", True, {"dp": {"reduce_scatter": PARTS * PASSES, "all_gather": PARTS, "all_reduce": 1}}),
        # hsdp: replicas sum their gradients once a step
        (
            "rep=2,dp=2",
            "fsdp",
            True,
            {
                "dp": {"all_gather": GATHERS * PASSES, "reduce_scatter": PARTS * PASSES},
                "rep": {"all_reduce": PARTS},
                "rep+dp": {"all_reduce": 1},
            },
        ),
        # sequence parallel: 2 and 2 in each block, each way; embedding and head one of each; 2 for the loss; the norms'
        # gradients (of each block and the head) and the sum of loss and norm once a step
        (
            "tp=2",
            "ddp",
            True,
            {
                "tp": {
                    "all_gather": (BLOCKS + 2) * PASSES,
                    "reduce_scatter": (BLOCKS + 2) * PASSES,
                    "all_reduce": 2 * PASSES + LAYERS + 2,
                }
            },
        ),
        # no sequence parallel: 2 in each block, each way; embedding, head and loss; nothing for the norms' gradients
        ("tp=2", "ddp", False, {"tp": {"all_reduce": (BLOCKS + 4) * PASSES + 1}}),
        (
            "dp=2,tp=2",
            "fsdp",
            False,
            {
                "dp": {"all_gather": GATHERS * PASSES, "reduce_scatter": PARTS * PASSES},
                "tp": {"all_reduce": (BLOCKS + 4) * PASSES},
                "dp+tp": {"all_reduce": 1},
            },
        ),
    ],
    ids=["fsdp", "ddp", "zero1", "zero2", "hsdp", "tp-sp", "tp", "fsdp-tp"],
)
def test_collectives_are_what_the_layout_asks_for(
    pool: Pool, mesh: str, plan: str, sp: bool, expected: dict[str, dict[str, int]], of: dict[str, Any]
) -> None:
    """With a bucket for each part, a step issues the collectives that its layouts ask for and no other, for G with 16
    parameters in a block as for L with 9."""
    if of is G and mesh == "tp=2" and sp:  # its positions are summed over the split sequence
        expected = {"tp": {**expected["tp"], "all_reduce": expected["tp"]["all_reduce"] + 1}}
    if of is G and mesh == "dp=2,tp=2":  # tp takes the one dim of the MLP's bias, so dp holds it alike and sums it
        expected = {**expected, "dp": {**expected["dp"], "all_reduce": LAYERS}}
    options = case(of, mesh, plan, sp=sp, layers=LAYERS, microbatches=PASSES, clip=0.1, bucket_mb=0.0)
    assert counts_of(pool, options) == expected


@pytest.mark.parametrize("plan", PLANS)
def test_small_parts_share_a_collective(pool: Pool, plan: str) -> None:
    """A model smaller than a bucket is gathered once and reduced once in each pass, ddp and zero1 once a step."""
    passes = {"ddp": 1, "zero1": 1}.get(plan, PASSES)
    counts = counts_of(pool, case(L, "dp=2", plan, layers=LAYERS, microbatches=PASSES))
    reduction = "all_reduce" if plan == "ddp" else "reduce_scatter"
    expected = {reduction: passes, "all_gather": PASSES if plan == "fsdp" else int(plan != "ddp")}
    expected["all_reduce"] = expected.get("all_reduce", 0) + 1
    assert counts == {"dp": {name: n for name, n in expected.items() if n}}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_repeats_no_collective_that_is_not_read(pool: Pool, mode: str) -> None:
    """With everything recomputed, a block repeats its gathers and the reduce-scatter between attention and MLP, not the
    one behind them; selective recompute repeats none."""
    plain = counts_of(pool, case(L, "tp=2", "ddp", layers=LAYERS))["tp"]
    again = counts_of(pool, case(L, "tp=2", "ddp", layers=LAYERS, recompute=mode))["tp"]
    more = LAYERS if mode == "full" else 0
    assert again == {
        "all_gather": plain["all_gather"] + 2 * more,
        "reduce_scatter": plain["reduce_scatter"] + more,
        "all_reduce": plain["all_reduce"],
    }


def test_ddp_reduces_gradients_once(pool: Pool) -> None:
    """ddp and zero1 reduce gradients once a step whatever the number of microbatches."""
    for plan in ("ddp", "zero1"):
        counts = [counts_of(pool, case(L, "dp=2", plan, layers=1, microbatches=n)) for n in (1, 2, 4)]
        assert counts[0] == counts[1] == counts[2]


def run_disagreement(rank: int, kind: str) -> str:
    """What check_collectives says where rank 1 traced something else."""
    mesh = build_mesh({"dp": 2, "tp": 2})

    def function(x: Tensor) -> list[Tensor]:
        size = 3 if kind == "shape" and rank == 1 else 2
        axes = ("dp",) if kind == "axes" and rank == 1 else ("tp",)
        x = all_reduce(x[:size].clone(), "sum", mesh.groups[axes])
        return [all_reduce(x.clone(), "sum", mesh.groups[("tp",)]) if kind == "more" and rank == 1 else x]

    program = traced(function, [torch.zeros(4)], mesh)
    try:
        check_collectives([program], mesh)
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "equal"),
        ("shape", "operand shapes over tp differ within a group"),
        ("axes", "the order of operations differs between ranks"),
        ("more", "the order of operations differs between ranks"),
    ],
)
def test_ranks_that_traced_different_collectives_fail_alike(pool: Pool, kind: str, said: str) -> None:
    """Where one rank traced another collective, another shape or one more, all ranks raise, and none hangs."""
    answers = pool.run(4, run_disagreement, kind, timeout_s=60)
    assert all(said in answer for answer in answers), answers
    assert len(set(answers)) == 1


# --- the pool that these tests stand on -------------------------------------------------------------------------------


def run_trouble(rank: int, kind: str) -> int:
    """Rank 1 gets into trouble while rank 0 waits for it in a collective."""
    if rank == 1 and kind == "raise":
        raise KeyError("odd")
    if rank == 1 and kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and kind == "hang":
        time.sleep(100)
    torch.distributed.all_reduce(torch.ones(1))
    return rank


def test_pool_names_the_rank_and_recovers(pool: Pool) -> None:
    """A rank that raises, dies or hangs is named with what it did, and the next case runs all the same."""
    with type(pool)(2) as small:
        for kind, said, timeout_s in (
            ("raise", r"(?s)rank 1 raised KeyError: 'odd'.*in run_trouble", 60),
            ("die", "died: rank 1 with exit code -9", 60),
            ("hang", r"no answer .* from ranks \[1\]", 4),
        ):
            with pytest.raises(AssertionError, match=said):
                small.run(2, run_trouble, kind, timeout_s=timeout_s)
            assert small.run(2, run_trouble, "none") == [0, 1]
        assert small.starts == 3  # an exception costs no process
