"""Optimizers: held to torch's and to their formula; learning rates: functions of the step alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtengine.optim import OPTIMIZERS, LearningRate, Update, adamw, global_norm_terms, scale_peak, sgd

SHAPES = [(7,), (3, 5), (), (4, 0), (2, 3, 17)]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
OPTIMIZER = pytest.mark.parametrize(
    "optimizer",
    [adamw(), adamw(0.8, 0.99, 1e-6), sgd(), sgd(0.9), sgd(0.5, 0.1)],
    ids=["adamw", "adamw with other betas", "sgd", "momentum", "momentum and decay"],
)


def now(step: int, lr: float = 1e-2, skip: bool = False) -> Update:
    """Make the scalars of update number `step`, from 1."""
    return Update(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(step)), torch.tensor(float(skip)))


def draw(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype])


# Updates


@DTYPES
@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0])
def test_adamw_is_torch_adamw(dtype, decay):
    """Over eight steps, with rates that change, parameters and both moments are those of torch.optim.AdamW."""
    ours, theirs = draw(dtype, 0), [p.requires_grad_() for p in draw(dtype, 0)]
    optimizer = adamw()
    reference = torch.optim.AdamW(theirs, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, foreach=False, fused=False)
    slots = [optimizer.init(p) for p in ours]
    for step in range(1, 9):
        grads, lr = draw(dtype, step), 0.1 / step
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        optimizer.update(ours, grads, slots, decay, now(step, lr))
    close(ours, [p.detach() for p in theirs])
    close([s["mean"] for s in slots], [reference.state[p]["exp_avg"] for p in theirs])
    close([s["square"] for s in slots], [reference.state[p]["exp_avg_sq"] for p in theirs])


@DTYPES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_its_formula(dtype, momentum, decay):
    """v = momentum v + g; p = p - lr (v + decay p); without decay that is torch.optim.SGD."""
    params, expected = draw(dtype, 0), draw(torch.float64, 0)
    expected = [p.to(dtype).to(torch.float64) for p in expected]
    theirs = [p.requires_grad_() for p in draw(dtype, 0)]
    reference = torch.optim.SGD(theirs, lr=1.0, momentum=momentum, foreach=False)
    optimizer = sgd(momentum, decay)
    slots = [optimizer.init(p) for p in params]
    velocity = [torch.zeros_like(p) for p in expected]
    for step in range(1, 7):
        grads, lr = draw(dtype, step), 0.1 / step
        for i, grad in enumerate(grads):
            theirs[i].grad = grad.clone()
            velocity[i] = momentum * velocity[i] + grad.to(torch.float64)
            expected[i] = expected[i] - lr * (velocity[i] + decay * expected[i])
        reference.param_groups[0]["lr"] = lr
        reference.step()
        optimizer.update(params, grads, slots, decay, now(step, lr))
    close(params, [p.to(dtype) for p in expected])
    if momentum:
        close([s["momentum"] for s in slots], [v.to(dtype) for v in velocity])
    if decay == 0:
        close(params, [p.detach() for p in theirs])


@DTYPES
@OPTIMIZER
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_skipped_update_leaves_parameters_and_slots_as_they_are(optimizer, dtype, poison):
    """With skip set, nothing changes by a bit, whatever the gradients hold; the next update goes on from there."""
    params = draw(dtype, 0)
    slots = [optimizer.init(p) for p in params]
    optimizer.update(params, draw(dtype, 1), slots, 0.1, now(1))
    before = [p.clone() for p in params], [{k: v.clone() for k, v in s.items()} for s in slots]
    bad = [torch.full_like(p, poison) for p in params]
    optimizer.update(params, bad, slots, 0.1, now(2, skip=True))
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for slot, old in zip(slots, before[1], strict=True):
        assert all(torch.equal(slot[k], old[k]) for k in old)
    optimizer.update(params, draw(dtype, 2), slots, 0.1, now(2))
    assert all(torch.isfinite(p).all() for p in params)
    assert not torch.equal(params[0], before[0][0])


@DTYPES
@OPTIMIZER
def test_an_update_changes_tensors_in_place_and_leaves_gradients_alone(optimizer, dtype):
    """Parameters and slots keep their storage; slots have the parameter's shape and dtype; gradients are read only."""
    params, grads = draw(dtype, 0), draw(dtype, 1)
    slots = [optimizer.init(p) for p in params]
    assert all(v.shape == p.shape and v.dtype == dtype for p, s in zip(params, slots, strict=True) for v in s.values())
    assert all(not v.any() for s in slots for v in s.values())
    places = [t.data_ptr() for t in [*params, *(v for s in slots for v in s.values())]]
    optimizer.update(params, grads, slots, 0.1, now(1))
    assert places == [t.data_ptr() for t in [*params, *(v for s in slots for v in s.values())]]
    assert all(torch.equal(a, b) for a, b in zip(grads, draw(dtype, 1), strict=True))


@OPTIMIZER
@given(size=st.integers(1, 70), cuts=st.sets(st.integers(1, 69), max_size=3), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_pieces_of_a_tensor_are_updated_as_the_whole(optimizer, size, cuts, seed):
    """An update is elementwise: however a parameter is split, its elements come out the same; with sgd to the last bit,
    with adamw to the rounding of torch's fused kernel, which takes the tail of a tensor another way."""
    exact = "mean" not in optimizer.init(torch.zeros(1))
    generator = torch.Generator().manual_seed(seed)
    param, *grads = torch.randn(4, size, generator=generator)
    edges = [0, *sorted(c for c in cuts if c < size), size]
    pieces = [param[a:b].clone() for a, b in zip(edges, edges[1:], strict=False)]
    slots, whole_slots = [optimizer.init(p) for p in pieces], [optimizer.init(param)]
    for step, grad in enumerate(grads, 1):
        optimizer.update([param], [grad], whole_slots, 0.1, now(step))
        parts = [grad[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        optimizer.update(pieces, parts, slots, 0.1, now(step))
    torch.testing.assert_close(torch.cat(pieces), param, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


def test_the_table_of_optimizers():
    """Both optimizers are found by name, and say which decay they want."""
    assert set(OPTIMIZERS) == {"adamw", "sgd"}
    assert adamw().weight_decay == 0.1
    assert adamw(weight_decay=0.3).weight_decay == 0.3
    assert sgd().weight_decay == 0.0
    assert set(adamw().init(torch.ones(2))) == {"mean", "square"}
    assert sgd().init(torch.ones(2)) == {}
    assert set(sgd(0.9).init(torch.ones(2))) == {"momentum"}


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_terms_of_the_norm_add_up_to_the_norm_of_all(order):
    """Terms of ranks summed (for inf: their maximum) and rooted are the norm of all gradients in one vector; shards
    that are empty count nothing."""
    grads = draw(torch.float64, 5)
    terms = [global_norm_terms(some, order) for some in (grads[:2], grads[2:])]
    whole = torch.cat([g.flatten() for g in grads]).norm(order)
    found = max(terms) if math.isinf(order) else sum(terms) ** (1 / order)
    torch.testing.assert_close(torch.as_tensor(found), whole, rtol=1e-14, atol=0)


# Learning rates


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(["cosine", "linear", "none"]), st.floats(0, 1))
@settings(deadline=None)
def test_a_rate_rises_to_its_peak_and_falls_to_its_floor(warmup, steps, decay, floor):
    """It rises by equal parts of the peak through warm-up, is the peak after it, then never rises, and stays at the
    floor after the last step."""
    rate = LearningRate(3e-3, steps, warmup, decay, floor)
    assert [rate(s) for s in range(warmup)] == [3e-3 * (s + 1) / warmup for s in range(warmup)]
    assert rate(warmup) == pytest.approx(3e-3, rel=1e-12)
    falling = [rate(s) for s in range(warmup, max(warmup, steps) + 5)]
    assert all(a >= b for a, b in zip(falling, falling[1:], strict=False))
    assert falling[-1] == pytest.approx(3e-3 * (1 if decay == "none" else floor), rel=1e-12, abs=1e-18)


def test_rates_by_formula():
    """Half way through, cosine and linear are half way between peak and floor; a quarter of the way they differ."""
    rates = {d: LearningRate(1.0, 20, 4, d, 0.2) for d in ("cosine", "linear", "none")}
    assert [rates["cosine"](s) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert {d: r(12) for d, r in rates.items()} == pytest.approx({"cosine": 0.6, "linear": 0.6, "none": 1.0})
    assert {d: r(8) for d, r in rates.items()} == pytest.approx(
        {"cosine": 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, "linear": 0.8, "none": 1.0}
    )
    assert LearningRate(1.0, 20)(20) == pytest.approx(0.1)


@pytest.mark.parametrize("decay", ["cosine", "linear", "none"])
@pytest.mark.parametrize("resumed", [3, 4, 5, 19])
def test_a_resumed_run_uses_the_rates_of_the_unbroken_one(decay, resumed):
    """Warm-up 4, decay to step 20, resumed at 3, 4, 5 and 19: the list of rates is that of the unbroken run (C22)."""
    unbroken = [LearningRate(1e-3, 20, 4, decay)(step) for step in range(20)]
    first, second = LearningRate(1e-3, 20, 4, decay), LearningRate(1e-3, 20, 4, decay)
    assert [first(s) for s in range(resumed)] + [second(s) for s in range(resumed, 20)] == unbroken
    assert [second(s) for s in reversed(range(20))] == unbroken[::-1]  # whatever was asked before


# The peak and the batch


@pytest.mark.parametrize(
    ("base", "rule", "bound", "rate", "words"),
    [
        (None, "linear", 8.0, 1e-3, ""),
        (32, "none", 8.0, 1e-3, ""),
        (32, "linear", 8.0, 4e-3, "linear scaling from batch 32 to 128: x4"),
        (32, "sqrt", 8.0, 2e-3, "sqrt scaling from batch 32 to 128: x2"),
        (8, "linear", 8.0, 8e-3, "linear scaling from batch 8 to 128: x8, bounded from 16"),
        (1, "sqrt", 3.0, 3e-3, "sqrt scaling from batch 1 to 128: x3, bounded from 11.3"),
        (256, "linear", 8.0, 5e-4, "linear scaling from batch 256 to 128: x0.5"),
        (128, "sqrt", 8.0, 1e-3, "sqrt scaling from batch 128 to 128: x1"),
    ],
)
def test_the_peak_scales_with_the_batch_and_says_how(base, rule, bound, rate, words):
    """The factor is the ratio of batches, its root, or 1; a bound limits it, and the words say all of that."""
    assert scale_peak(1e-3, 128, base, rule, bound) == (pytest.approx(rate, rel=1e-12), words)
