"""Optimizers: held to torch's and to their formula, and to what all of them promise.

What needs several ranks is in tests/spawned/test_optimizers.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtengine
from dtengine import optim
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.muon import hidden, orthogonal
from dtengine.optim import OPTIMIZERS, adafactor, adamw, lion, muon, sgd
from dtengine.optimizer import Leaf, Matrix, Optimizer, Slot, Update, matrix
from dtengine.update import global_norm_terms

ALONE = Mesh(None, {}, (), {})  # type: ignore[arg-type]  # one device: no axis, no group
SPECS = [
    Param("vocab embed", (7, 5), 0.5),
    Param("embed mlp", (3, 5), 0.5),
    Param("mlp embed", (2, 8), 0.5, decay=False),
    Param("embed kv_heads q_per_kv head_dim", (5, 2, 3, 17), 0.5),
    Param("embed", (7,), mean=1.0),
    Param("kv_heads head_dim", (2, 3)),
    Param("", (), mean=0.7),
]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
TABLE = {
    **{name: make() for name, make in OPTIMIZERS.items()},
    "adamw with other betas": adamw(0.8, 0.99, 1e-6),
    "momentum": sgd(0.9),
    "momentum and decay": sgd(0.5, 0.1),
    "lion with other betas": lion(0.95, 0.98, 1.0),
    "adafactor without decay": adafactor(weight_decay=0.0),
    "muon with other momentum": muon(0.8, 3, 0.0),
}
OPTIMIZER = pytest.mark.parametrize("optimizer", TABLE.values(), ids=TABLE)


def now(step: int, lr: float = 1e-2, skip: bool = False) -> Update:
    """Make the scalars of update number `step`, from 1."""
    return Update(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(step)), torch.tensor(float(skip)))


def draw(dtype: torch.dtype, seed: int, specs: list[Param] = SPECS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) for p in specs]


def empty_slots(optimizer: Optimizer, dtype: torch.dtype, specs: list[Param] = SPECS) -> list[dict[str, torch.Tensor]]:
    return [{k: torch.zeros(s.shape, dtype=dtype) for k, s in optimizer.slots(p).items()} for p in specs]


def apply(optimizer, params, grads, slots, at: Update, specs: list[Param] = SPECS) -> None:
    parts = [Leaf(p, (), x, g, s) for p, x, g, s in zip(specs, params, grads, slots, strict=True)]
    optimizer.update(parts, ALONE, at)


def train(optimizer: Optimizer, dtype: torch.dtype, specs: list[Param], steps: int = 8):
    """Parameters and slots after some updates, with rates that change."""
    params, slots = draw(dtype, 0, specs), empty_slots(optimizer, dtype, specs)
    for step in range(1, steps + 1):
        apply(optimizer, params, draw(dtype, step, specs), slots, now(step, 0.1 / step), specs)
    return params, slots


def train_torch(make, dtype: torch.dtype, specs: list[Param], decay: float, steps: int = 8, **options):
    """Parameters and state after the same updates by an optimizer of torch's, which sees matrices as they are stored."""
    params = [p.requires_grad_() for p in draw(dtype, 0, specs)]
    groups = [{"params": [p], "weight_decay": decay * s.decayed} for p, s in zip(params, specs, strict=True)]
    reference = make(groups, **options)
    for step in range(1, steps + 1):
        for param, grad in zip(params, draw(dtype, step, specs), strict=True):
            param.grad = grad.clone()
        for group in reference.param_groups:
            group["lr"] = 0.1 / step
        reference.step()
    return [p.detach() for p in params], [reference.state[p] for p in params]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype])


# One by one


@DTYPES
@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0])
def test_adamw_is_torch_adamw(dtype, decay):
    """Over eight steps, with rates that change, parameters and both moments are those of torch.optim.AdamW."""
    params, slots = train(adamw(weight_decay=decay), dtype, SPECS)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "foreach": False, "fused": False}
    theirs, state = train_torch(torch.optim.AdamW, dtype, SPECS, decay, **options)
    close(params, theirs)
    close([s["mean"] for s in slots], [s["exp_avg"] for s in state])
    close([s["square"] for s in slots], [s["exp_avg_sq"] for s in state])


@DTYPES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_its_formula(dtype, momentum, decay):
    """v = momentum v + g; p = p - lr (v + decay p); without decay that is torch.optim.SGD."""
    params, slots = train(sgd(momentum, decay), dtype, SPECS)
    expected = [p.double() for p in draw(dtype, 0)]
    velocity = [torch.zeros_like(p) for p in expected]
    for step in range(1, 9):
        for i, grad in enumerate(draw(dtype, step)):
            velocity[i] = momentum * velocity[i] + grad.double()
            expected[i] = expected[i] - 0.1 / step * (velocity[i] + decay * SPECS[i].decayed * expected[i])
    close(params, [p.to(dtype) for p in expected])
    if momentum:
        close([s["momentum"] for s in slots], [v.to(dtype) for v in velocity])
    if decay == 0:
        close(params, train_torch(torch.optim.SGD, dtype, SPECS, 0.0, momentum=momentum, lr=1.0, foreach=False)[0])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_its_formula(decay):
    """p = p - lr (sign(0.9 m + 0.1 g) + decay p); then m = 0.99 m + 0.01 g."""
    params, slots = train(lion(weight_decay=decay), torch.float64, SPECS)
    expected = draw(torch.float64, 0)
    means = [torch.zeros_like(p) for p in expected]
    for step in range(1, 9):
        for i, grad in enumerate(draw(torch.float64, step)):
            sign = torch.sign(0.9 * means[i] + 0.1 * grad)
            expected[i] = expected[i] - 0.1 / step * (sign + decay * SPECS[i].decayed * expected[i])
            means[i] = 0.99 * means[i] + 0.01 * grad
    close(params, expected)
    close([s["mean"] for s in slots], means)


FLAT = [Param("embed mlp", (3, 5), 0.5), Param("embed mlp", (6, 2), 0.5), Param("embed", (7,), mean=1.0)]


@DTYPES
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_torch_adafactor(dtype, decay):
    """On matrices and vectors, parameters and moments are those of torch.optim.Adafactor (its lr is below 1/sqrt(t))."""
    params, slots = train(adafactor(weight_decay=decay), dtype, FLAT)
    theirs, state = train_torch(torch.optim.Adafactor, dtype, FLAT, decay, foreach=False)
    close(params, theirs)
    close([s["rows"] for s in slots[:2]], [s["row_var"].squeeze(-1) for s in state[:2]])
    close([s["columns"] for s in slots[:2]], [s["col_var"].squeeze(-2) for s in state[:2]])
    close([slots[2]["square"]], [state[2]["variance"]])


def test_adafactor_survives_gradients_of_zero_in_fp32():
    """Rows, columns and whole tensors without a gradient get no update, and no number that is none."""
    params, optimizer = draw(torch.float32, 0), adafactor(weight_decay=0.0)
    before, slots = [p.clone() for p in params], empty_slots(optimizer, torch.float32)
    grads = [torch.zeros_like(p) for p in params]
    grads[0][2] = 1e-3
    apply(optimizer, params, grads, slots, now(1))
    assert all(torch.isfinite(x).all() for x in [*params, *(v for s in slots for v in s.values())])
    assert torch.equal(params[0][:2], before[0][:2]) and not torch.equal(params[0][2], before[0][2])
    assert all(torch.equal(a, b) for a, b in zip(params[1:], before[1:], strict=True))


def newton_schulz(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Jordan's iteration as published, without bf16; by the singular values that it maps one by one."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_is_its_formula(decay):
    """m = 0.95 m + 0.05 g, and of Nesterov's 0.95 m + 0.05 g the orthogonal factor, scaled by 0.2 sqrt(longer side), for
    hidden matrices, embed by all else; AdamW for all other parameters."""
    params, slots = train(muon(weight_decay=decay), torch.float64, SPECS)
    adam, adam_slots = train(adamw(weight_decay=decay), torch.float64, SPECS)
    expected = draw(torch.float64, 0)
    means = [torch.zeros_like(p) for p in expected]
    for step in range(1, 9):
        for i, grad in enumerate(draw(torch.float64, step)):
            means[i] = 0.95 * means[i] + 0.05 * grad
            if i in (1, 2, 3):
                flat = (0.95 * means[i] + 0.05 * grad).reshape(grad.shape[0], -1)
                change = (newton_schulz(flat) * 0.2 * math.sqrt(max(flat.shape))).view(grad.shape)
                expected[i] = expected[i] - 0.1 / step * (change + decay * SPECS[i].decayed * expected[i])
    for i in range(len(SPECS)):
        if i in (1, 2, 3):
            torch.testing.assert_close(params[i], expected[i], rtol=1e-11, atol=1e-11)
            assert slots[i].keys() == {"momentum"}
            close([slots[i]["momentum"]], [means[i]])
        else:
            assert torch.equal(params[i], adam[i])
            assert all(torch.equal(slots[i][k], adam_slots[i][k]) for k in ("mean", "square"))


def test_muon_is_torch_muon_to_bf16():
    """torch.optim.Muon iterates in bf16, which leaves two digits of an update of 0.04 to 0.2."""
    params, _ = train(muon(), torch.float32, FLAT[:2])
    options = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
    theirs, _ = train_torch(torch.optim.Muon, torch.float32, FLAT[:2], 0.1, **options)
    for a, b in zip(params, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(0, 100))
@settings(deadline=None, max_examples=40)
def test_singular_values_come_near_one(count, rows, columns, seed):
    """Of matrices whose singular values are within a factor of 20, each alone; a zero matrix stays zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    s = 0.05 + 0.95 * torch.rand(count, min(rows, columns), generator=generator, dtype=torch.float64)
    done = torch.linalg.svdvals(orthogonal(u @ torch.diag_embed(s) @ v, 5))
    assert ((done > 0.6) & (done < 1.25)).all()
    assert not orthogonal(torch.zeros(1, rows, columns), 5).any()


def test_which_parameters_are_matrices():
    """embed by all else, whatever its place; experts count matrices; norms, biases, vectors are none, and tables no hidden
    ones."""
    forms = [matrix(p) for p in SPECS]
    assert forms == [
        Matrix((), 1, (0,)), Matrix((), 0, (1,)), Matrix((), 1, (0,)), Matrix((), 0, (1, 2, 3)), None, None, None,
    ]  # fmt: skip
    assert [hidden(p) is not None for p in SPECS] == [False, True, True, True, False, False, False]
    assert matrix(Param("experts embed mlp", (2, 3, 4), 0.1)) == Matrix((0,), 1, (2,))
    assert matrix(Param("experts embed", (2, 3), 0.1)) is None
    assert matrix(Param("mlp taps", (2, 3), 0.1)) == Matrix((), 0, (1,))
    assert hidden(Param("positions embed", (2, 3), 0.1)) is None


def test_experts_are_matrices_of_their_own():
    """Muon updates each expert as it would alone; Adafactor keeps each one's rows and columns."""
    together = [Param("experts mlp embed", (3, 4, 5), 0.5)]
    params, slots = train(muon(), torch.float64, together)
    _, factored = train(adafactor(), torch.float64, together)
    alone = [Param("mlp embed", (4, 5), 0.5)]
    for i in range(3):
        param, momentum = [draw(torch.float64, 0, together)[0][i]], empty_slots(muon(), torch.float64, alone)
        other, moments = [param[0].clone()], empty_slots(adafactor(), torch.float64, alone)
        for step in range(1, 9):
            grad = [draw(torch.float64, step, together)[0][i]]
            apply(muon(), param, grad, momentum, now(step, 0.1 / step), alone)
            apply(adafactor(), other, grad, moments, now(step, 0.1 / step), alone)
        torch.testing.assert_close(params[0][i], param[0], rtol=1e-11, atol=1e-11)
        for name in ("rows", "columns"):
            close([factored[0][name][i]], [moments[0][name]])


# All of them


@DTYPES
@OPTIMIZER
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_skipped_update_leaves_parameters_and_slots_as_they_are(optimizer, dtype, poison):
    """With skip set, nothing changes by a bit, whatever the gradients hold; the next update goes on from there."""
    params, slots = draw(dtype, 0), empty_slots(optimizer, dtype)
    apply(optimizer, params, draw(dtype, 1), slots, now(1))
    before = [p.clone() for p in params], [{k: v.clone() for k, v in s.items()} for s in slots]
    bad = [torch.full_like(p, poison) for p in params]
    apply(optimizer, params, bad, slots, now(2, skip=True))
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for slot, old in zip(slots, before[1], strict=True):
        assert all(torch.equal(slot[k], old[k]) for k in old)
    apply(optimizer, params, draw(dtype, 2), slots, now(2))
    assert all(torch.isfinite(p).all() for p in params)
    assert not any(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))


@DTYPES
@OPTIMIZER
def test_an_update_changes_tensors_in_place_and_leaves_gradients_alone(optimizer, dtype):
    """Parameters and slots keep their storage, every slot is used, gradients are read only."""
    params, grads, slots = draw(dtype, 0), draw(dtype, 1), empty_slots(optimizer, dtype)
    places = [t.data_ptr() for t in [*params, *(v for s in slots for v in s.values())]]
    apply(optimizer, params, grads, slots, now(1))
    assert places == [t.data_ptr() for t in [*params, *(v for s in slots for v in s.values())]]
    assert all(t.dtype == dtype for t in [*params, *(v for s in slots for v in s.values())])
    assert all(v.any() for s in slots for v in s.values())
    assert all(torch.equal(a, b) for a, b in zip(grads, draw(dtype, 1), strict=True))


@OPTIMIZER
def test_a_rate_of_zero_changes_no_parameter(optimizer):
    """Slots go on; parameters stay, decay included: what decays is proportional to the rate."""
    params, slots = draw(torch.float64, 0), empty_slots(optimizer, torch.float64)
    apply(optimizer, params, draw(torch.float64, 1), slots, now(1, lr=0.0))
    assert all(torch.equal(a, b) for a, b in zip(params, draw(torch.float64, 0), strict=True))


@OPTIMIZER
def test_parameters_do_not_see_each_other(optimizer):
    """A parameter alone is updated as among others, to rounding."""
    together, _ = train(optimizer, torch.float64, SPECS, 3)
    for i, spec in enumerate(SPECS):
        params, slots = [draw(torch.float64, 0)[i]], empty_slots(optimizer, torch.float64, [spec])
        for step in range(1, 4):
            apply(optimizer, params, [draw(torch.float64, step)[i]], slots, now(step, 0.1 / step), [spec])
        torch.testing.assert_close(params[0], together[i], rtol=1e-12, atol=1e-12)


ELEMENTWISE = [name for name in TABLE if name.split()[0] not in ("adafactor", "muon")]


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(size=st.integers(1, 70), cuts=st.sets(st.integers(1, 69), max_size=3), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_pieces_of_a_tensor_are_updated_as_the_whole(name, size, cuts, seed):
    """However a parameter is split, its elements come out the same where the update is elementwise; to the last bit, but
    with adamw to the rounding of torch's fused kernel, which takes the tail of a tensor another way."""
    optimizer, exact = TABLE[name], not name.startswith("adamw")
    generator = torch.Generator().manual_seed(seed)
    param, *grads = torch.randn(4, size, generator=generator)
    edges = [0, *sorted(c for c in cuts if c < size), size]
    pieces = [param[a:b].clone() for a, b in zip(edges, edges[1:], strict=False)]
    specs = [Param("embed", (len(p),), 0.5, decay=True) for p in pieces]
    slots, whole_slots = (
        empty_slots(optimizer, torch.float32, some) for some in (specs, [Param("embed", (size,), 0.5, decay=True)])
    )
    for step, grad in enumerate(grads, 1):
        apply(optimizer, [param], [grad], whole_slots, now(step), [Param("embed", (size,), 0.5, decay=True)])
        parts = [grad[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        apply(optimizer, pieces, parts, slots, now(step), specs)
    torch.testing.assert_close(torch.cat(pieces), param, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


def test_the_table_of_optimizers():
    """All are found by name, take a weight decay, are public, and hold as much state as the table says."""
    assert set(OPTIMIZERS) == {"adamw", "sgd", "lion", "adafactor", "muon"}
    big, norm = Param("embed mlp", (40, 30), 0.1), Param("embed", (40,), mean=1.0)
    held = {}
    for name, make in OPTIMIZERS.items():
        assert make(weight_decay=0.3).weight_decay == 0.3
        assert getattr(dtengine, name) is make is getattr(optim, name)
        assert f"| {name} |" in (optim.__doc__ or "")
        held[name] = [sum(math.prod(s.shape) for s in make().slots(p).values()) for p in (big, norm)]
    assert held == {
        "adamw": [2400, 80], "sgd": [0, 0], "lion": [1200, 40], "adafactor": [70, 40], "muon": [1200, 80],
    }  # fmt: skip
    assert set(sgd(0.9).slots(norm)) == {"momentum"}
    assert adafactor().slots(big)["rows"] == Slot((40,), whole=True)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_terms_of_the_norm_add_up_to_the_norm_of_all(order):
    """Terms of ranks summed (for inf: their maximum) and rooted are the norm of all gradients in one vector; shards
    that are empty count nothing."""
    grads = draw(torch.float64, 5)
    terms = [global_norm_terms(some, order) for some in (grads[:2], grads[2:])]
    whole = torch.cat([g.flatten() for g in grads]).norm(order)
    found = max(terms) if math.isinf(order) else sum(terms) ** (1 / order)
    torch.testing.assert_close(torch.as_tensor(found), whole, rtol=1e-14, atol=0)
