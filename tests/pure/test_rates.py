"""Learning rates: functions of the step alone; the peak and the batch."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtengine.rates import DECAYS, LearningRate, scale_peak

# Rates


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(DECAYS), st.floats(0, 1))
@settings(deadline=None)
def test_a_rate_rises_to_its_peak_and_falls_to_its_floor(warmup, steps, decay, floor):
    """It rises by equal parts of the peak through warm-up, is the peak after it, then never rises nor is below the floor,
    and stays there after the last step; with rsqrt it only nears it."""
    rate = LearningRate(3e-3, steps, warmup, decay, floor)
    assert [rate(s) for s in range(warmup)] == [3e-3 * (s + 1) / warmup for s in range(warmup)]
    if decay == "rsqrt":  # counts from step 1, so that the last step of warm-up has the peak
        assert rate(warmup) == pytest.approx(3e-3 * max(floor, math.sqrt(max(1, warmup) / (warmup + 1))), rel=1e-12)
    elif decay != "wsd" or steps > warmup:
        assert rate(warmup) == pytest.approx(3e-3, rel=1e-12)
    falling = [rate(s) for s in range(warmup, max(warmup, steps) + 5)]
    assert all(a >= b for a, b in zip(falling, falling[1:], strict=False))
    assert min(falling) >= 3e-3 * floor * (1 - 1e-12)
    if decay != "rsqrt":
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


def test_wsd_is_stable_and_then_falls():
    """The peak until the last decay steps, then equal parts down to the floor; a tenth of all steps by default."""
    rate = LearningRate(1.0, 20, 4, "wsd", 0.2, 5)
    assert [rate(s) for s in range(4, 16)] == [1.0] * 12
    assert [rate(s) for s in range(16, 22)] == pytest.approx([0.84, 0.68, 0.52, 0.36, 0.2, 0.2])
    assert LearningRate(1.0, 300, 20, "wsd").falling == 30
    assert LearningRate(1.0, 3, 0, "wsd").falling == 1
    longer = LearningRate(1.0, 40, 4, "wsd", 0.2, 5)  # its stable part is the same: a run can be prolonged
    assert [longer(s) for s in range(16)] == [rate(s) for s in range(16)]


def test_rsqrt_is_its_formula():
    """Vaswani et al.: min(step^-1/2, step warmup^-3/2), with steps from 1, as a share of its largest; down to a floor."""
    rate = LearningRate(2.0, 7, 10, "rsqrt", 0.0)
    assert [rate(s - 1) for s in range(1, 200)] == pytest.approx(
        [2.0 * min(s**-0.5, s * 10**-1.5) * 10**0.5 for s in range(1, 200)]
    )
    assert LearningRate(2.0, 7, 10, "rsqrt", 0.25)(10_000) == 0.5
    assert LearningRate(2.0, 7, 0, "rsqrt")(3) == 1.0


@pytest.mark.parametrize("decay", DECAYS)
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
