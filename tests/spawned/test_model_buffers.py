"""Buffers on a mesh: batch-norm statistics of the global microbatch, skips, checkpoints, recompute."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_cases import _bits, case, counts_of, run_poisoned
from test_equivalence import assert_same_bits, batches_of, check_equal, num_ranks_of, run_plan, setup_of, step_of
from torch import Tensor

from dtengine import Buffer, Model, Ops, checkpoint, sgd
from dtengine.layout import PLANS
from dtengine.mesh import build_mesh
from dtengine.model import forward
from dtengine.models import mlp
from dtengine.shard import gather
from dtengine.state import State
from dtengine.step import init_state, make_step
from dtengine.verify import random_batch, train_one_device

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

MESHES = ("1", "2", "2x2", "1x3", "rep=2,dp=2", "dp=2,tp=2", "rep=2,dp=2,tp=2", "dp=3,tp=2")
SIZES = {"embed": 10, "heads": 1, "kv_heads": 1, "head_dim": 10, "mlp": 13, "vocab": 67, "seq": 15, "layers": 2}
RUN: dict[str, Any] = {
    **SIZES,
    "model": "mlp",
    "tied": False,
    "global_batch": 7,
    "microbatches": 2,
    "steps": 3,
    "lr": 0.3,
    "clip": 1.0,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
RES = "batch res_seq embed"
HERE = os.path.relpath(__file__)


# --- a model that uses buffers otherwise ------------------------------------------------------------------------------


def _specs(config: Any) -> dict[str, Any]:
    """Buffers that a forward reads, that nothing changes, that tp splits, without dims; some beside no parameter."""
    specs = mlp.specs(config)
    more = {
        "gain": Buffer("embed", (config.embed,), 1.0),
        "passes": Buffer("", ()),
        "fixed": Buffer("mlp embed", (config.mlp, config.embed), 0.25),
    }
    return {**specs, "blocks": [{**block, "own": more} for block in specs["blocks"]]}


def _block(params: Any, x: Tensor, ops: Ops) -> tuple[Tensor, dict]:
    """What the forward reads is what the pass began with, also where it is computed again."""
    own = params["own"]
    x, new = mlp.block(params, x, ops)
    x = ops.local(torch.mul, f"{RES}, embed -> {RES}", x, own["gain"])
    up = ops.einsum("batch seq embed, mlp embed -> batch seq mlp", ops.constrain(x, "batch seq embed"), own["fixed"])
    down = ops.einsum("batch seq mlp, mlp embed -> batch seq embed", up, own["fixed"])
    x = ops.add(x, ops.constrain(down, RES))
    gain = ops.local(lambda gain: gain * 0.9 + 0.05, "embed -> embed", own["gain"])
    passes = ops.local(lambda n: n + 1, "->", own["passes"])
    return x, {**new, "own": {"gain": gain, "passes": passes}}


MODEL: Model = replace(mlp.MODEL, specs=_specs, block=_block)


def _unknown(params: Any, x: Tensor, ops: Ops) -> tuple[Tensor, dict]:
    return x, {"norm": {"median": params["norm"]["mean"]}}


def _misplaced(params: Any, x: Tensor, ops: Ops) -> tuple[Tensor, dict]:
    return x, {"norm.mean": ops.einsum(f"{RES} -> embed", x)}


UNKNOWN, MISPLACED = (replace(mlp.MODEL, block=block) for block in (_unknown, _misplaced))


# --- equal to one device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [(plan, mesh) for i, plan in enumerate(PLANS) for j, mesh in enumerate(MESHES) if (i + j) % 4 == 0],
)
def test_statistics_are_of_the_global_microbatch(pool: Pool, plan: str, mesh: str) -> None:
    """Loss, raw gradients, parameters and buffers are one device's, which takes the same microbatches whole: with 1 to 3
    of them, padded rows and padded coordinates, with and without sequence parallelism; replicas are bit-equal."""
    number = list(PLANS).index(plan) + MESHES.index(
        mesh
    )  # so that each plan and mesh meets each number of microbatches
    given = {**RUN, "layers": 1, "microbatches": 1 + number % 3, "global_batch": 5 + number % 3, "sp": number % 4 != 3}
    report = check_equal(pool, case({}, mesh, plan, **given))
    assert report.replicas_equal and report.buffers <= 1e-9


@pytest.mark.parametrize(("mesh", "recompute"), [("1", "full"), ("2x2", "none"), ("2x2", "full"), ("1x3", "none")])
def test_buffers_of_a_models_own(pool: Pool, recompute: str, mesh: str) -> None:
    """Buffers that a forward reads, that are split, that have no dims, that nothing changes."""
    given = {**RUN, "model": f"{HERE}:MODEL", "recompute": recompute}
    options = case({}, mesh, **given)
    check_equal(pool, options)
    for trained, _ in pool.run(num_ranks_of(options), run_plan, options):
        for layer in range(2):
            assert trained.buffers[f"blocks.{layer}.own.passes"].item() == RUN["steps"] * RUN["microbatches"]
            assert (trained.buffers[f"blocks.{layer}.own.fixed"] == 0.25).all()


@pytest.mark.parametrize("mesh", ["1", "dp=2,tp=2"])
def test_recompute_and_eager_give_the_same_bits(pool: Pool, mesh: str) -> None:
    """The forward that is computed again updates no buffer again; untraced functions give the same bits."""
    plain = case({}, mesh, **RUN, dropout=0.1)
    first = pool.run(num_ranks_of(plain), run_plan, plain)
    for given in ({"recompute": "full"}, {"save": "min-cut"}, {"eager": True}):
        other = replace(plain, program=replace(plain.program, **given))
        for one, again in zip(first, pool.run(num_ranks_of(plain), run_plan, other), strict=True):
            assert_same_bits(one[0], again[0])


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_all_reduce_each_way(pool: Pool, microbatches: int) -> None:
    """A batch normalisation costs one all-reduce forward and one backward in each microbatch."""
    counts = counts_of(pool, case({}, "2", "ddp", **{**RUN, "microbatches": microbatches}))
    norms = RUN["layers"] + 2
    assert counts == {"dp": {"all_reduce": 2 * norms * microbatches + 2}}  # and gradients, and loss with norm


# --- what a step must not change --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["data", "gradient"])
@pytest.mark.parametrize(("mesh", "plan", "eager"), [("dp=2,tp=2", "fsdp", False), ("rep=2,dp=2", "zero1", True)])
def test_a_skipped_step_keeps_the_buffers(pool: Pool, mesh: str, plan: str, where: str, eager: bool) -> None:
    """A loss or a gradient that is not finite: no bit of parameters, slots or buffers changes, in any microbatch."""
    options = case({}, mesh, plan, **{**RUN, "global_batch": 8}, eager=eager)
    for finite, _, changed in pool.run(4, run_poisoned, options, "adamw", math.nan, where):
        assert finite == [1.0, 0.0, 1.0]
        assert changed == [True, False, True]


def run_evaluation(rank: int, options: Any) -> tuple[float, float, bool]:
    """Train two steps, evaluate: (held-out loss, one device's with the same buffers, whether the state changed)."""
    setup, mesh, step = step_of(options)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    for _ in range(2):
        state, _ = step(state, batches)
    before = _bits(state)
    mean, _ = step.evaluate(state, batches)
    same = all(torch.equal(a, b) for a, b in zip(before, _bits(state), strict=True))
    held = {**state.params, **state.buffers}
    whole = dict(zip(held, gather(list(held.values()), mesh), strict=True))
    batch = random_batch(replace(setup, global_batch=math.prod(setup.batch_shape)), options.check)
    logits = forward(setup.model, setup.model.specs(setup.model_config), whole, batch, Ops())
    total, count = setup.model.loss(logits, batch, Ops())
    return mean, (total / count).item(), same


@pytest.mark.parametrize("mesh", ["1", "dp=2,tp=2", "rep=2,dp=2"])
@pytest.mark.parametrize("model", ["mlp", f"{HERE}:MODEL"])
def test_evaluation_uses_the_buffers_and_keeps_them(pool: Pool, model: str, mesh: str) -> None:
    """A held-out loss is one device's with the running statistics, and changes no bit of the state."""
    options = case({}, mesh, **{**RUN, "model": model})
    for mean, expected, same in pool.run(num_ranks_of(options), run_evaluation, options):
        assert mean == pytest.approx(expected, rel=1e-9)
        assert same


def run_checkpoint(rank: int, options: Any, folder: str, write: bool) -> tuple[dict[str, Tensor], float]:
    """Train a step and save, or load; (whole buffers, loss of the step behind)."""
    setup, mesh, step = step_of(options)
    state: State = init_state(step)
    batches = batches_of(setup, mesh, options.check)
    if write:
        state, _ = step(state, batches)
        checkpoint.save(Path(folder), state, mesh, {})
    else:
        state = checkpoint.load(Path(folder) / "step-1", state, mesh)
    assert state.step == 1
    whole = gather(list(state.buffers.values()), mesh)  # may be the state's own tensors, which the next step changes
    held = {name: one.clone() for name, one in zip(state.buffers, whole, strict=True)}
    return held, step(state, batches)[1].loss.item()


def test_any_mesh_reads_the_buffers_of_any_mesh(pool: Pool, tmp_path: Path) -> None:
    """Buffers are in a checkpoint by name, once; another mesh and plan loads the same bits and steps on alike."""
    given = {**RUN, "global_batch": 8, "microbatches": 1, "model": f"{HERE}:MODEL"}
    written = pool.run(4, run_checkpoint, case({}, "2x2", **given), str(tmp_path), True)
    whole = checkpoint.read_whole(tmp_path / "step-1")
    names = {name.removeprefix("buffers."): one for name, one in whole.items() if name.startswith("buffers.")}
    assert names.keys() == written[0][0].keys() and len(names) == 2 * 4 + 3 * 2
    for mesh, plan in (("1", "ddp"), ("1x3", "zero2"), ("rep=2,dp=2,tp=2", "fsdp")):
        options = case({}, mesh, plan, **given)
        for held, loss in pool.run(num_ranks_of(options), run_checkpoint, options, str(tmp_path), False):
            assert all(torch.equal(held[n], one) and torch.equal(names[n], one) for n, one in written[0][0].items())
            assert loss == pytest.approx(written[0][1], rel=1e-9)


def run_bf16(rank: int, options: Any) -> list[tuple[torch.dtype, bool]]:
    setup, mesh, step = step_of(options)
    state, _ = step(init_state(step), batches_of(setup, mesh, options.check))
    return [(b.dtype, bool(torch.isfinite(b.to_local()).all())) for b in state.buffers.values()]


def test_buffers_stay_fp32_under_bf16(pool: Pool) -> None:
    """Statistics are computed and kept in fp32 where the rest is computed in bf16."""
    options = case({}, "2x2", **RUN, precision="bf16")
    for found in pool.run(4, run_bf16, options):
        assert set(found) == {(torch.float32, True)}


# --- what is refused --------------------------------------------------------------------------------------------------


def run_refused(rank: int, options: Any) -> str:
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = make_step(setup.model, setup.model_config, setup.plan, mesh, sgd(), setup.step, lambda _: 0.1)
    try:
        step.prepare()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "UNKNOWN",
            "model block at blocks.0: of the new buffers that it returned, blocks.0.norm.median is no buffer of it",
        ),
        (
            "MISPLACED",
            "blocks.0.norm.mean is ((Partial(sum), Partial(sum)), (10,)), the buffer ((Replicate(), Replicate())",
        ),
    ],
)
def test_new_buffers_that_are_none_are_refused(pool: Pool, name: str, said: str) -> None:
    """A name that is no buffer, or a value that is not laid out as the buffer, is refused by name on all ranks."""
    for text in pool.run(4, run_refused, case({}, "2x2", **{**RUN, "model": f"{HERE}:{name}"})):
        assert said in text


def test_one_device_takes_microbatches_one_after_another() -> None:
    """The oracle's statistics are a microbatch's: 2 microbatches give other losses than 1, and momentum acts twice."""
    results = []
    for microbatches in (1, 2):
        options = case({}, "1", **{**RUN, "global_batch": 8, "microbatches": microbatches, "steps": 1})
        setup = setup_of(options)
        results.append(train_one_device(setup, options.optimizer, random_batch(setup, options.check)))
    assert results[0].losses != results[1].losses
    one, two = (r.buffers["embed.norm.mean"] for r in results)
    assert (two.norm() / one.norm()).item() == pytest.approx(1.9, abs=0.1)
