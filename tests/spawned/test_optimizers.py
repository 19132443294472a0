"""Every optimizer on every plan: what one device computes, what a checkpoint holds, what a step communicates; and the
terms of the training loss on a vocabulary that is split."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from graphs import traced
from test_equivalence import batches_of, check_equal, num_ranks_of, parsed, setup_of
from torch import Tensor

from dtengine import checkpoint
from dtengine.layout import PLANS, axes_of, make_plan
from dtengine.mesh import Mesh, build_mesh, parse_mesh
from dtengine.model import Param, forward, parameters
from dtengine.ops import Ops
from dtengine.optim import OPTIMIZERS
from dtengine.optimizer import Leaf, Update
from dtengine.parameters import init_param
from dtengine.program import count_collectives
from dtengine.shard import Move, bounds_of, gather, redistribute, take, wrap
from dtengine.step import Step, init_state, make_step
from dtengine.verify import VerifyOptions, difference, random_batch

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

TOLERANCE = 1e-9
STEPS = 3
RATES = {"adamw": 1e-2, "sgd": 1.0, "lion": 1e-3, "adafactor": 1e-1, "muon": 1e-2}
MESHES = ("1", "2", "2x2", "1x3", "rep=2,dp=2")
ALONE = Mesh(None, {}, (), {})  # type: ignore[arg-type]  # one device: no axis, no group
OPTIONS = "--layers 1 --global-batch 12 --weight-decay 0.1"


def step_of(options: VerifyOptions, name: str, mesh: Mesh) -> Step:
    """A step with a given optimizer, on this process group's ranks."""
    setup, beside = setup_of(options), {"momentum": 0.9} if name == "sgd" else {}
    optimizer = OPTIMIZERS[name](weight_decay=options.optimizer.weight_decay, **beside)
    return make_step(setup.model, setup.model_config, setup.plan, mesh, optimizer, setup.step, lambda _: RATES[name])


def run_plan(rank: int, options: VerifyOptions, names: list[str]) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """{optimizer: (whole parameters after some steps, whether replicas are bit-equal)}."""
    setup, found = setup_of(options), {}
    mesh = build_mesh(setup.plan.sizes)
    batches = batches_of(setup, mesh, options.check)
    for name in names:
        step = step_of(options, name, mesh)
        state = init_state(step)
        for _ in range(STEPS):
            state, _ = step(state, batches)
        whole = dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))
        found[name] = whole, checkpoint.replicas_equal(state, mesh)
    return found


def one_device(options: VerifyOptions, name: str) -> dict[str, Tensor]:
    """Parameters after some steps of the same optimizer on whole tensors, untraced, in one pass over the batch."""
    setup, beside = setup_of(options), {"momentum": 0.9} if name == "sgd" else {}
    optimizer = OPTIMIZERS[name](weight_decay=options.optimizer.weight_decay, **beside)
    batch = random_batch(replace(setup, global_batch=math.prod(setup.batch_shape)), options.check)
    specs = setup.model.specs(setup.model_config)
    described = parameters(specs)
    params = {
        n: init_param(p, n, setup.step.seed, [(0, s) for s in p.shape], "cpu").requires_grad_()
        for n, p in described.items()
    }
    slots = {
        n: {k: torch.zeros(s.shape, dtype=torch.float64) for k, s in optimizer.slots(p).items()}
        for n, p in described.items()
    }
    for number in range(1, STEPS + 1):
        total, count = setup.model.loss(forward(setup.model, specs, params, batch, Ops()), batch, Ops())
        grads = torch.autograd.grad(total / count, list(params.values()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        factor = (setup.step.clip / norm).clamp(max=1.0)
        with torch.no_grad():
            parts = [
                Leaf(described[n], (), p, g * factor, slots[n]) for (n, p), g in zip(params.items(), grads, strict=True)
            ]
            optimizer.update(parts, ALONE, update(number, RATES[name]))
    return {n: p.detach() for n, p in params.items()}


def update(number: int, lr: float) -> Update:
    """The scalars of an update."""
    return Update(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(number)), torch.zeros(()))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    """{optimizer: parameters of one device}; the same for every plan and mesh, for all fill the same global batch."""
    return {name: one_device(parsed(OPTIONS), name) for name in OPTIMIZERS}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_optimizer_on_every_plan_is_one_device(
    pool: Pool, plan: str, mesh: str, expected: dict[str, dict[str, Tensor]]
) -> None:
    """In float64 with sizes that nothing divides, parameters after three steps are those of the same optimizer on whole
    tensors within 1e-9, and replicas are bit-equal."""
    options = parsed(f"--mesh {mesh} --plan {plan} {OPTIONS} --eager")
    for answer in pool.run(num_ranks_of(options), run_plan, options, list(OPTIMIZERS)):
        for name, (whole, equal) in answer.items():
            assert equal, name
            assert difference(whole, expected[name])[0] <= TOLERANCE, name


def run_both(rank: int, options: VerifyOptions, name: str) -> bool:
    """Whether traced and untraced steps give the same bits, also of slots."""
    setup, found = setup_of(options), []
    mesh = build_mesh(setup.plan.sizes)
    for eager in (False, True):
        step = step_of(replace(options, program=replace(options.program, eager=eager)), name, mesh)
        state = init_state(step)
        for _ in range(2):
            state, _ = step(state, batches_of(setup, mesh, options.check))
        found.append([*state.params.values(), *(x for slots in state.slots.values() for x in slots.values())])
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_traced_is_untraced(pool: Pool, name: str) -> None:
    """A traced step gives the untraced one's bits, of parameters and slots: no number of a step is frozen in it."""
    assert all(pool.run(4, run_both, parsed(f"--mesh 2x2 {OPTIONS}"), name))


def run_counts(rank: int, options: VerifyOptions, names: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """{optimizer: collectives of an update}."""
    mesh, found = build_mesh(setup_of(options).plan.sizes), {}
    for name in names:
        step = step_of(options, name, mesh)
        params = [step.parameters.empty(n, step.parameters.placements(step.plan.params, n)) for n in step.params]
        grads = [step.parameters.empty(n, step.parameters.placements(step.plan.optimizer, n)) for n in step.params]
        slots = [{k: x.to_local() for k, x in step.updater.init_slots(n).items()} for n in step.params]
        scalars = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), torch.ones(())]

        def one(*tensors: Tensor, step: Step = step, slots: list[dict[str, Tensor]] = slots) -> list[Tensor]:
            n = len(step.params)
            rest = iter(tensors[2 * n : -3])
            mine = [{k: next(rest) for k in one} for one in slots]
            return step.updater(list(tensors[:n]), mine, list(tensors[n : 2 * n]), *tensors[-3:], master=[], scale=None)

        flat = [x for one in slots for x in one.values()]
        found[name] = count_collectives([(traced(one, [*params, *grads, *flat, *scalars], mesh), 1)])
    return found


@pytest.mark.parametrize("layers", [1, 3])
def test_an_update_communicates_for_all_parameters_together(pool: Pool, layers: int) -> None:
    """Beside the one sum of loss and norm: adafactor two all-reduces, muon two all-to-alls over each mesh axis
    (counted under the name of what gloo makes of them), the others nothing, whatever the number of layers."""
    options = parsed(f"--mesh 2x2 {OPTIONS} --layers {layers}")
    one = {"dp+tp": {"all_reduce": 1}}
    expected = dict.fromkeys(OPTIMIZERS, one)
    expected["adafactor"] = {"dp+tp": {"all_reduce": 3}}
    expected["muon"] = {**one, "dp": {"all_to_all": 2}, "tp": {"all_to_all": 2}}
    assert pool.run(4, run_counts, options, list(OPTIMIZERS)) == [expected] * 4


# --- shards and checkpoints -----------------------------------------------------------------------------------------

SPECS = [
    Param("embed kv_heads q_per_kv head_dim", (5, 3, 2, 2), 0.5),
    Param("embed kv_heads q_per_kv head_dim", (5, 3, 2, 2), 0.5),
    Param("mlp embed", (2, 7), 0.5),
    Param("experts embed mlp", (2, 4, 3), 0.5),
    Param("vocab embed", (1, 9), 0.5),
    Param("embed", (3,), mean=1.0),
    Param("kv_heads head_dim", (3, 2)),
    Param("", (), mean=0.7),
]


def run_shards(rank: int, mesh_text: str) -> dict[str, list[list[Tensor]]]:
    """{optimizer: [whole parameters and slots after some updates of shards] for each plan}."""
    sizes, found = parse_mesh(mesh_text), {}
    mesh = build_mesh(sizes)
    for name, make in OPTIMIZERS.items():
        for plan in ("ddp", "fsdp"):
            layout = make_plan(plan, sizes, {}).optimizer
            placed = [layout.placements(p.names, sizes) for p in SPECS]
            optimizer = make()
            params = [take(x, at, mesh) for x, at in zip(drawn(0), placed, strict=True)]
            slots, homes = [], []
            for param, at in zip(SPECS, placed, strict=True):
                described = optimizer.slots(param)
                homes.append({k: (s.placements(at), s.shape) for k, s in described.items()})
                slots.append(
                    {
                        k: torch.zeros([b - a for a, b in bounds_of(shape, place, mesh)], dtype=torch.float64)
                        for k, (place, shape) in homes[-1].items()
                    }
                )
            for number in range(1, STEPS + 1):
                grads = [take(x, at, mesh) for x, at in zip(drawn(number), placed, strict=True)]
                parts = [Leaf(*one) for one in zip(SPECS, placed, params, grads, slots, strict=True)]
                optimizer.update(parts, mesh, update(number, 0.1))
            local = [*params, *(x for one in slots for x in one.values())]
            at = [(p, s.shape) for p, s in zip(placed, SPECS, strict=True)]
            at += [home for one in homes for home in one.values()]
            moves = [Move(place, tuple(layout.placements((), sizes)), shape) for place, shape in at]
            found.setdefault(name, []).append(redistribute(local, moves, mesh))
    return found


def drawn(seed: int) -> list[Tensor]:
    """Whole random tensors of SPECS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in SPECS]


@pytest.mark.parametrize("mesh", ["2", "2x2", "rep=2,dp=3", "1x5", "4x2"])
def test_shards_are_updated_as_the_whole(pool: Pool, mesh: str) -> None:
    """Parameters and slots, gathered, are those of an update of whole tensors within 1e-12: uneven and empty shards,
    matrices of many dims, experts, vectors and a scalar."""
    whole = {}
    for name, make in OPTIMIZERS.items():
        optimizer, params = make(), drawn(0)
        slots = [{k: torch.zeros(s.shape, dtype=torch.float64) for k, s in optimizer.slots(p).items()} for p in SPECS]
        for number in range(1, STEPS + 1):
            parts = [Leaf(p, (), x, g, s) for p, x, g, s in zip(SPECS, params, drawn(number), slots, strict=True)]
            optimizer.update(parts, ALONE, update(number, 0.1))
        whole[name] = [*params, *(x for one in slots for x in one.values())]
    for answer in pool.run(math.prod(parse_mesh(mesh).values()), run_shards, mesh):
        for name, plans in answer.items():
            for gathered in plans:
                for ours, theirs in zip(gathered, whole[name], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def run_save(rank: int, options: VerifyOptions, name: str, folder: Path) -> None:
    """Two steps, then a checkpoint."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = step_of(options, name, mesh)
    state = init_state(step)
    for _ in range(2):
        state, _ = step(state, batches_of(setup, mesh, options.check))
    checkpoint.save(folder, state, mesh, {})


def run_load(rank: int, options: VerifyOptions, name: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load a checkpoint and go on for a step: whole tensors of the state as loaded, and parameters after the step."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = step_of(options, name, mesh)
    state = checkpoint.load(path, init_state(step), mesh)
    named = {f"params.{n}": x for n, x in state.params.items()}
    named |= {f"slots.{k}.{n}": x for n, slots in state.slots.items() for k, x in slots.items()}
    loaded = {n: x.clone() for n, x in zip(named, gather(list(named.values()), mesh), strict=True)}
    state, _ = step(state, batches_of(setup, mesh, options.check))
    return loaded, dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_slots_of_any_shape_move_between_meshes(pool: Pool, name: str, tmp_path: Path) -> None:
    """A checkpoint with factored or mixed slots, saved on one mesh and plan, is loaded bit-equal on others, which go on as
    one device does."""
    given = f"{OPTIONS} --eager"
    options = parsed(f"--mesh 2x2 --plan fsdp {given}")
    pool.run(4, run_save, options, name, tmp_path)
    path = tmp_path / "step-2"
    stored = checkpoint.read_whole(path)
    setup = setup_of(options)
    shapes = checkpoint.tensor_shapes(parameters(setup.model.specs(setup.model_config)), OPTIMIZERS[name]())
    assert {n: tuple(x.shape) for n, x in stored.items()} == shapes
    third = one_device(options, name)
    for mesh, plan in (("1", "ddp"), ("1x3", "fsdp"), ("rep=2,dp=2", "zero1")):
        other = parsed(f"--mesh {mesh} --plan {plan} {given}")
        for loaded, after in pool.run(num_ranks_of(other), run_load, other, name, path):
            assert loaded.keys() == stored.keys()
            assert [n for n in loaded if not torch.equal(loaded[n], stored[n])] == []
            assert difference(after, third)[0] <= TOLERANCE


# --- the training loss ----------------------------------------------------------------------------------------------


def loss_inputs(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets (some ignored) and weights."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, 5, vocab, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(-1, vocab, (2, 5), generator=generator)
    return logits, targets, torch.rand(2, 5, generator=generator, dtype=torch.float64)


def run_loss(rank: int, tp: int, vocab: int, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """(loss, whole gradient of the logits) where the vocabulary is split."""
    sizes = {"dp": 1, "tp": tp}
    mesh = build_mesh(sizes)
    layout = make_plan("fsdp", sizes, {}).compute
    three, two = (layout.placements(axes_of(a), sizes) for a in ("batch seq vocab", "batch seq"))
    logits, targets, weights = loss_inputs(vocab)
    split = wrap(take(logits, three, mesh), mesh, three, logits.shape).requires_grad_()
    ops = Ops(mesh, layout, label_smoothing=smoothing, z_loss=z_loss)
    batch = [wrap(x, mesh, two, x.shape) for x in (targets, weights)]
    loss, _ = ops.cross_entropy(split, *batch)
    (grad,) = torch.autograd.grad(loss.to_local(), split)  # type: ignore[attr-defined]
    return loss.to_local().detach(), gather([grad], mesh)[0]  # type: ignore[attr-defined,list-item]


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-1), (1.0, 0.0)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_smoothed_loss_and_z_loss_are_their_formula(pool: Pool, tp: int, smoothing: float, z_loss: float) -> None:
    """Loss and gradients are those of the formula in plain torch, whole or split over ranks, of which one may have no
    column (5 over 4)."""
    for vocab in (67, 5):
        logits, targets, weights = loss_inputs(vocab)
        logits.requires_grad_()
        log_z = logits.logsumexp(-1)
        labels = F.one_hot(targets.clamp(min=0), vocab).double() * (1 - smoothing) + smoothing / vocab
        losses = (labels * (log_z.unsqueeze(-1) - logits)).sum(-1) + z_loss * log_z**2
        loss = (losses * weights * (targets >= 0)).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        for ours, our_grad in pool.run(tp, run_loss, tp, vocab, smoothing, z_loss):
            torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(our_grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", ["2", "2x2", "1x4"])
def test_training_adds_the_terms_and_evaluation_does_not(pool: Pool, mesh: str) -> None:
    """Losses, gradients and parameters of training with both terms are one device's; held-out loss stays plain."""
    options = parsed(f"--mesh {mesh} --layers 1 --global-batch 8 --label-smoothing 0.2 --z-loss 0.01")
    check_equal(pool, options)
    setup = setup_of(options)
    specs = setup.model.specs(setup.model_config)
    whole = {
        n: init_param(p, n, setup.step.seed, [(0, s) for s in p.shape], "cpu") for n, p in parameters(specs).items()
    }
    batch = random_batch(setup, options.check)
    loss, count = setup.model.loss(forward(setup.model, specs, whole, batch, Ops()), batch, Ops())
    for plain in pool.run(num_ranks_of(options), run_evaluation, options):
        assert plain == pytest.approx((loss / count).item(), rel=TOLERANCE)


def run_evaluation(rank: int, options: VerifyOptions) -> float:
    """Loss of the initial parameters, by evaluation."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = step_of(options, "sgd", mesh)
    return step.evaluate(init_state(step), batches_of(setup, mesh, options.check))[0]
