"""bf16 and fp16: what is in which dtype, how the loss scale moves, and that any plan and precision reads any checkpoint.

G and L are the two models of ``test_cases``.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from commands import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cases import G, L, case
from test_equivalence import batches_of, check_equal, num_ranks_of, setup_of, step_of
from torch import Tensor

from dtengine import checkpoint, loss_scale
from dtengine.data import Batch
from dtengine.layout import PLANS
from dtengine.loss_scale import LossScale
from dtengine.mesh import Mesh, build_mesh
from dtengine.ops import Ops
from dtengine.optim import adamw
from dtengine.program import Program
from dtengine.shard import gather
from dtengine.state import State
from dtengine.step import Step, init_state, make_step
from dtengine.train import NonFinite, stop_if_not_finite
from dtengine.verify import VerifyOptions, random_batch, tolerance_of, train_one_device

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw_step(options: VerifyOptions, mesh: Mesh) -> Step:
    """A step with AdamW."""
    setup = setup_of(options)
    lr = options.optimizer.lr
    return make_step(setup.model, setup.model_config, setup.plan, mesh, adamw(), setup.step, lambda _: lr)


def whole(state: State, mesh: Mesh) -> dict[str, Tensor]:
    """Whole parameters in full precision."""
    return dict(zip(state.weights, gather(list(state.weights.values()), mesh), strict=True))


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "mesh", "precision"),
    [
        *((plan, "dp=2", precision) for plan in PLANS for precision in ("bf16", "fp16")),
        ("zero1", "dp=2,tp=2", "bf16"),
        ("fsdp", "dp=2,tp=2", "fp16"),
        ("zero2", "rep=2,dp=2", "bf16"),
        ("ddp", "rep=2,dp=2", "fp16"),
    ],
)
def test_plans_equal_one_device(pool: Pool, plan: str, mesh: str, precision: str) -> None:
    """Every plan in 16 bits equals one device in fp32 within what rounding explains, replicas bit-equal."""
    of = G if (plan in ("ddp", "zero2")) == (precision == "bf16") else L
    check_equal(pool, case(of, mesh, plan, layers=2, microbatches=2, precision=precision, steps=2, lr=0.1))


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_reduced_in_the_compute_dtype(pool: Pool, plan: str) -> None:
    """With --reduce-dtype compute gradients travel in half the bytes, and stay within the tolerance."""
    options = case(L, "dp=2", plan, layers=1, precision="bf16", reduce_dtype="compute", steps=2, microbatches=2)
    check_equal(pool, options)
    wide = replace(options, program=replace(options.program, reduce_dtype="fp32"))
    for narrow, full in zip(pool.run(2, run_bytes, options), pool.run(2, run_bytes, wide), strict=True):
        assert 2 * narrow["gradients"] == full["gradients"] > 0


def run_bytes(rank: int, options: VerifyOptions) -> dict[str, int]:
    """Bytes that a rank hands in to gather parameters, and to sum gradients (all but a few numbers)."""
    _, _, step = step_of(options)
    step.prepare()
    found = {"parameters": 0, "gradients": 0}
    for program in step.programs.values():
        assert isinstance(program, Program)
        for collective in program.collectives:
            if collective.bytes > 100:
                found["parameters" if collective.operation == "all_gather" else "gradients"] += collective.bytes
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["zero1", "zero2", "fsdp"])
def test_parameters_travel_in_half_the_bytes(pool: Pool, plan: str, precision: str) -> None:
    """Parameters are gathered in the compute dtype: half the bytes of fp32; gradients are still summed in fp32."""
    narrow, full = (
        pool.run(2, run_bytes, case(L, "dp=2", plan, layers=1, precision=p, microbatches=2))
        for p in (precision, "fp32")
    )
    for mine, theirs in zip(narrow, full, strict=True):
        assert 2 * mine["parameters"] == theirs["parameters"] > 0
        assert mine["gradients"] == theirs["gradients"] > 0


def run_dtypes(rank: int, options: VerifyOptions) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype], bool]:
    """dtypes of params, master and slots behind a step; whether params are the cast of their master, bit for bit."""
    mesh = build_mesh(setup_of(options).plan.sizes)
    step = adamw_step(options, mesh)
    state = init_state(step)
    state, _ = step(state, batches_of(setup_of(options), mesh, options.check))
    narrow = dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))
    same = all(torch.equal(narrow[n], w.to(narrow[n].dtype)) for n, w in whole(state, mesh).items())
    slots = {x.dtype for slots in state.slots.values() for x in slots.values()}
    return {p.dtype for p in state.params.values()}, {p.dtype for p in state.master.values()}, slots, same


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_in_which_dtype(pool: Pool, plan: str, precision: str) -> None:
    """In 16 bits ddp, zero1 and zero2 store the compute dtype beside an fp32 master; fsdp's shards are fp32."""
    wide = torch.float64 if precision == "fp64" else torch.float32
    stored, master = {wide}, set()
    if precision in DTYPES and plan != "fsdp":
        stored, master = {DTYPES[precision]}, {torch.float32}
    for found in pool.run(2, run_dtypes, case(L, "dp=2", plan, layers=1, precision=precision)):
        assert found == (stored, master, {wide}, True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sums_over_many_rows_are_in_fp32(dtype: torch.dtype) -> None:
    """Gradients of norm weights and of a table's row that is used 4,096 times are off by no more than rounding."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.rand(8, 512, 12, generator=generator).to(dtype) for _ in range(2))
    ones, ids = torch.ones(12, dtype=dtype), torch.zeros(8, 512, dtype=torch.int64)
    functions: dict[str, Any] = {
        "layer_norm": (lambda w: Ops().layer_norm(x.to(w.dtype), w, w), ones),
        "rms_norm": (lambda w: Ops().rms_norm(x.to(w.dtype), w), ones),
        "embedding": (lambda w: Ops().embedding(w, ids), ones.expand(3, 12)),
    }
    for name, (function, weight) in functions.items():
        found = []
        for given in (weight, weight.double()):
            leaf = given.clone().requires_grad_()
            found.append(torch.autograd.grad(function(leaf), leaf, grad.to(given.dtype))[0])
        assert found[0].dtype == dtype
        off = (found[0].double() - found[1]).abs().max() / found[1].abs().max()
        assert off <= torch.finfo(dtype).eps, name


# --- C36: the loss scale --------------------------------------------------------------------------------------------


def run_overflows(
    rank: int, options: VerifyOptions, bad_steps: int, good_steps: int
) -> tuple[list[list[float]], list[float], bool, str, dict[str, Tensor]]:
    """Steps with inf in one element of a gradient on rank 3 alone, then good ones.

    Returns:
        ([scale's tensor behind each step], [finite], whether a bad step changed any bit, the error that stopped the
        run, whole parameters at the end).
    """
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = adamw_step(options, mesh)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    count = float(sum((b.targets >= 0).sum() for b in batches) * setup.plan.coordinates)
    step.prepare()
    accumulate = step.programs["accumulate"]

    def with_inf(*tensors: Tensor) -> list[Tensor]:
        (loss,) = accumulate(*tensors)
        if rank == 3:
            with torch.inference_mode():
                next(flat for flat in step.sums.values() if flat.numel())[0] = math.inf
        return [loss]

    scales, finite, changed = [], [], False
    for number in range(bad_steps + good_steps):
        step.programs["accumulate"] = with_inf if number < bad_steps else accumulate
        before = bits(state)
        state, metrics = step(state, batches, count)
        assert state.scale is not None
        if number < bad_steps:
            changed |= any(not torch.equal(a, b) for a, b in zip(before, bits(state), strict=True))
        scales.append(state.scale.tolist())
        finite.append(metrics.finite.item())
        try:
            stop_if_not_finite(metrics, number, mesh, setup.plan)
        except NonFinite as error:
            return scales, finite, changed, str(error), whole(state, mesh)
    assert checkpoint.replicas_equal(state, mesh)
    return scales, finite, changed, "", whole(state, mesh)


def bits(state: State) -> list[Tensor]:
    """Copies of all local shards of parameters, master and slots, as integers."""
    tensors = [*state.params.values(), *state.master.values()]
    tensors += [x for slots in state.slots.values() for x in slots.values()]
    views = {2: torch.int16, 4: torch.int32}
    return [x.to_local().detach().clone().view(views[x.element_size()]) for x in tensors]


def fp16(mesh: str = "dp=4", plan: str = "zero2", **given: Any) -> VerifyOptions:
    """G in fp16."""
    return case(G, mesh, plan, **{"layers": 1, "microbatches": 2, "precision": "fp16", "lr": 1e-2} | given)


@pytest.mark.parametrize(("mesh", "plan"), [("dp=4", "zero2"), ("dp=2,tp=2", "fsdp"), ("dp=4", "ddp")])
def test_c36_an_overflow_on_one_rank_is_skipped_by_all(pool: Pool, mesh: str, plan: str) -> None:
    """C36: inf in one element on rank 3: all ranks skip and halve the scale, no bit of parameters, master or slots
    changes, and the run goes on with equal parameters, as if the skipped step had not been."""
    answers = pool.run(4, run_overflows, fp16(mesh, plan), 1, 3)
    for scales, finite, changed, error, _ in answers:
        assert scales == [[512, 0, 1], [512, 1, 1], [512, 2, 1], [512, 3, 1]]
        assert (finite, changed, error) == ([0, 1, 1, 1], False, "")
    unbroken = pool.run(4, run_overflows, fp16(mesh, plan, loss_scale=512.0), 0, 3)
    for *_, params in answers:
        for name, one in unbroken[0][-1].items():
            assert torch.equal(params[name], one), name


def test_c36_overflows_in_a_row_stop_the_run(pool: Pool) -> None:
    """C36: 20 overflows in a row from scale 2^16: 16 halvings, then all ranks stop, naming step and scale."""
    for scales, finite, changed, error, _ in pool.run(4, run_overflows, fp16(loss_scale=2.0**16), 20, 0):
        assert [s[0] for s in scales] == [2.0 ** (15 - i) for i in range(16)] + [1.0]
        assert not any(finite)
        assert not changed
        assert error == (
            f"step 17: loss {error.split('loss ')[1].split(',')[0]}, gradient norm inf at loss scale 1, the smallest, "
            "though every rank's own loss was finite; nothing was updated. Resume from the last checkpoint with a lower "
            "--lr, more --warmup or a smaller --clip, with --precision bf16, or look at that data."
        )


def test_the_scale_doubles_after_a_window_of_good_steps(pool: Pool) -> None:
    """With a window of 2: doubled after 2 good steps in a row, counted anew from each change."""
    for scales, *_ in pool.run(4, run_overflows, fp16(loss_scale=64.0, loss_scale_window=2), 1, 5):
        assert scales == [[32, 0, 1], [32, 1, 1], [64, 0, 1], [64, 1, 1], [128, 0, 1], [128, 1, 1]]


def test_the_scale_stays_within_bounds() -> None:
    """It is never below 1 nor above 2^24, and it stays a power of two."""
    now = torch.tensor(LossScale(4.0))
    for _ in range(4):
        now = loss_scale.advance(now, torch.tensor(False), 1)
    assert now.tolist() == [1, 0, 4]
    for _ in range(30):
        now = loss_scale.advance(now, torch.tensor(True), 1)
    assert now.tolist() == [2.0**24, 0, 4]


def run_raw(rank: int, options: VerifyOptions) -> dict[str, Tensor]:
    """Whole raw gradients of step 1."""
    setup, mesh, step = step_of(options)
    raw = step.gradients(init_state(step), batches_of(setup, mesh, options.check), 100.0)
    return dict(zip(raw, gather(list(raw.values()), mesh), strict=True))


def test_scaling_rounds_nothing(pool: Pool) -> None:
    """Scales 2^6 and 2^10 give the same bits of raw gradients wherever fp16 neither under- nor overflows."""
    low, high = (pool.run(2, run_raw, fp16("dp=2", "zero2", loss_scale=2.0**e))[0] for e in (6, 10))
    equal = total = 0
    for name, one in low.items():
        torch.testing.assert_close(one, high[name], rtol=1e-2, atol=1e-5)
        equal, total = equal + (one == high[name]).sum().item(), total + one.numel()
    assert equal > 0.5 * total


# --- C37 and checkpoints --------------------------------------------------------------------------------------------


def run_training(rank: int, options: VerifyOptions) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW on one batch: losses, whole parameters."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = adamw_step(options, mesh)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    losses = []
    for _ in range(options.optimizer.steps):
        state, metrics = step(state, batches)
        losses.append(metrics.loss.item())
    return losses, whole(state, mesh)


@pytest.mark.parametrize("plan", ["zero2", "fsdp"])
def test_c37_small_updates_are_not_lost_in_bf16(pool: Pool, plan: str) -> None:
    """C37: L in bf16, lr 1e-4, 200 steps: norm weights move from 1.0, and the final loss is fp32's within 2%."""
    options = case(L, "dp=2", plan, layers=2, steps=200, lr=1e-4, precision="bf16")
    (losses, params), _ = pool.run(2, run_training, options)
    wide = replace(options, program=replace(options.program, precision="fp32"))
    (theirs, _), _ = pool.run(2, run_training, wide)
    assert losses[-1] == pytest.approx(theirs[-1], rel=0.02)
    assert losses[-1] < 0.99 * losses[0]
    norms = {name: x for name, x in params.items() if "norm" in name}
    assert norms
    assert all((x != 1.0).any() for x in norms.values())


def run_save(rank: int, options: VerifyOptions, folder: Path) -> tuple[dict[str, Tensor], list[float] | None]:
    """Three steps, the first of which overflows in fp16, and a checkpoint: whole parameters, and the loss scale."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = adamw_step(options, mesh)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    for number in range(3):
        factor = math.inf if number == 0 and state.scale is not None else 1.0
        state, _ = step(state, [b._replace(weights=b.weights * factor) for b in batches], 100.0)
    checkpoint.save(folder, state, mesh, {})
    return whole(state, mesh), None if state.scale is None else state.scale.tolist()


def run_load(rank: int, options: VerifyOptions, path: Path) -> tuple[dict[str, Tensor], bool, list[float] | None, bool]:
    """Load a checkpoint into a fresh state.

    Returns:
        (whole parameters, whether what is stored is their cast bit for bit, the loss scale, whether a step with learning
        rate 0 leaves them).
    """
    mesh = build_mesh(setup_of(options).plan.sizes)
    setup = setup_of(options)
    step = make_step(setup.model, setup.model_config, setup.plan, mesh, adamw(), setup.step, lambda _: 0.0)
    state = checkpoint.load(path, init_state(step), mesh)
    assert state.step == 3
    weights = {n: w.clone() for n, w in whole(state, mesh).items()}
    stored = dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))
    cast = all(torch.equal(stored[n], w.to(stored[n].dtype)) for n, w in weights.items())
    scale = None if state.scale is None else state.scale.tolist()
    after, _ = step(state, batches_of(setup, mesh, options.check), 100.0)
    same = all(torch.equal(w, weights[n]) for n, w in whole(after, mesh).items())
    return weights, cast, scale, same


@pytest.mark.parametrize(
    ("writer", "mesh", "plan"),
    [("fp16", "dp=2", "zero2"), ("bf16", "dp=2,tp=2", "fsdp"), ("fp32", "1", "ddp")],
)
def test_c37_any_plan_and_precision_reads_any_checkpoint(
    pool: Pool, tmp_path: Path, writer: str, mesh: str, plan: str
) -> None:
    """C37: parameters in a checkpoint are the fp32 ones whatever wrote it; master and stored parameters both follow a
    load, and a step of rate 0 changes no bit; fp16's scale comes back, or starts where there is none."""
    options = case(L, mesh, plan, layers=1, precision=writer, lr=1e-2)
    written, scale = pool.run(num_ranks_of(options), run_save, options, tmp_path)[0]
    assert scale == ([512, 2, 1] if writer == "fp16" else None)
    path = tmp_path / "step-3"
    assert {t.dtype for t in checkpoint.read_manifest(path).tensors.values()} == {"F32"}
    for reader in ("fp32", "bf16", "fp16"):
        for its_mesh, its_plan in (("dp=2", "zero1"), ("dp=2,tp=2", "fsdp"), ("1", "ddp")):
            theirs = case(L, its_mesh, its_plan, layers=1, precision=reader)
            for weights, cast, found, same in pool.run(num_ranks_of(theirs), run_load, theirs, path):
                assert cast
                assert same
                assert found == (None if reader != "fp16" else scale or [1024, 0, 0])
                assert all(torch.equal(weights[n], w) for n, w in written.items())


def run_continued(rank: int, options: VerifyOptions, folder: Path | None) -> tuple[list[float], dict[str, Tensor]]:
    """Six steps of which the second overflows; with a folder saved and loaded behind the third: scale, parameters."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = adamw_step(options, mesh)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    for number in range(6):
        now: list[Batch] = batches
        if number == 1:
            now = [b._replace(weights=b.weights * math.inf) for b in batches]
        state, _ = step(state, now, 100.0)
        if folder is not None and number == 2:
            path = checkpoint.save(folder, state, mesh, {})
            state = checkpoint.load(path, init_state(step), mesh)
    assert state.scale is not None
    return state.scale.tolist(), whole(state, mesh)


def test_resume_restores_the_scale(pool: Pool, tmp_path: Path) -> None:
    """A run in fp16 that is saved and loaded has the same scale and the same bits of parameters as one that is not:
    scale, good steps and the steps that AdamW's bias correction leaves out come back."""
    options = fp16("dp=2", "zero1", loss_scale_window=3)
    for (scale, params), (again, loaded) in zip(
        pool.run(2, run_continued, options, None), pool.run(2, run_continued, options, tmp_path), strict=True
    ):
        assert scale == again == [1024, 1, 1]
        assert all(torch.equal(params[n], loaded[n]) for n in params)


def test_tolerances_are_tight() -> None:
    """The tolerance of 16 bits grows with depth, is smaller in fp16 by the ratio of the two dtypes, and is never above
    6e-2 in bf16; one device differs from itself by nothing."""
    found = {}
    for precision in DTYPES:
        for layers in (1, 2, 30):
            found[precision, layers] = tolerance_of(setup_of(case(L, "1", layers=layers, precision=precision)))
    assert found["bf16", 1] < found["bf16", 2] < found["bf16", 30] < 6e-2
    assert found["fp16", 2] == found["bf16", 2] / 8
    options = case(L, "1", layers=1, precision="bf16", steps=1)
    setup = setup_of(options)
    one = train_one_device(setup, options.optimizer, random_batch(setup, options.check))
    assert one.params["embed.table"].dtype == torch.float32


def test_a_run_in_fp16_shows_its_scale(tmp_path: Path) -> None:
    """The command: a scale that overflows is halved step by step, each said once and seen in TensorBoard, status.json and
    the checkpoint's facts; a run in bf16 goes on from it."""
    sizes = (
        "--layers 1 --embed 18 --heads 2 --head-dim 6 --mlp 26 --seq 15 --global-batch 4 --eval-sequences 7 --sample 0"
    )
    folder = tmp_path / "run"
    done = run(
        "dtengine.train",
        f"--mesh 2 --plan zero2 --precision fp16 --loss-scale 16777216 {sizes} --steps 10 --run-dir {folder}",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scales = [e.value for e in events.Scalars("loss_scale")]
    skipped = sum(a > b for a, b in zip(scales, scales[1:], strict=False))
    assert 0 < skipped < 10
    assert scales == [max(2.0 ** (24 - i), 2.0 ** (24 - skipped)) for i in range(10)]
    assert len(events.Scalars("train/gradient_norm")) == 10 - skipped
    for i in range(10):
        line = f"step {i + 1}: overflow at loss scale {2 ** (24 - i)}; skipped, the scale is halved"
        assert (line in done.out) is (i < skipped)
    assert json.loads((folder / "status.json").read_text())["loss_scale"] == scales[-1]
    facts = checkpoint.read_manifest(folder / "checkpoints" / "step-10").facts
    assert facts["loss_scale"] == {"scale": scales[-1], "good": 10 - skipped, "skipped": skipped}
    again = run("dtengine.train", f"--run-dir {folder} --resume --steps 12 --precision bf16", cwd=tmp_path)
    assert again.code == 0, again.err
    assert json.loads((folder / "status.json").read_text())["loss_scale"] is None
