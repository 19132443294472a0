"""Random values: functions of (seed, name, index) alone, distributed as they should be, and frozen."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtengine.random import MASK, bits, fold, global_index, keep_mask, key, mix, normal, scramble

INDEX = torch.arange(1 << 16)
MANY = torch.arange(1 << 19)
NAMES = st.text("ab.0é", max_size=6)
SIGMAS = 4.5  # all draws below are fixed; a fair source fails one of 300,000 comparisons


def step_key(seed: int, step: int, site: str = "embed.embed") -> torch.Tensor:
    """Key a dropout mask as the step does."""
    return fold(key(site), fold(key(seed, "dropout"), torch.tensor(step)))


@st.composite
def parts(draw):
    """Draw (shape, bounds of a part of it)."""
    shape = draw(st.lists(st.integers(1, 12), max_size=3))
    bounds = [tuple(sorted((draw(st.integers(0, s)), draw(st.integers(0, s))))) for s in shape]
    return shape, bounds


# Any cut draws the same values


@given(parts())
@settings(deadline=None)
def test_global_index_numbers_a_part_as_the_whole_does(drawn):
    """The indices of a part are those of the whole tensor in row-major order, whatever the bounds."""
    shape, bounds = drawn
    whole = torch.arange(math.prod(shape)).view(shape)
    index = global_index(shape, bounds, "cpu")
    assert index.dtype == torch.int64
    assert torch.equal(index, whole[tuple(slice(*b) for b in bounds)])


@given(parts(), st.integers(-(2**63), 2**63 - 1), st.floats(0, 0.99))
@settings(deadline=None)
def test_values_do_not_depend_on_how_the_index_set_is_cut(drawn, seed_key, rate):
    """bits, normal and keep_mask of a part are, bit for bit, the part of what the whole tensor draws."""
    shape, bounds = drawn
    part = tuple(slice(*b) for b in bounds)
    whole, index = (global_index(shape, b, "cpu") for b in ([(0, s) for s in shape], bounds))
    keys = torch.tensor(seed_key)
    for draw in (lambda i: bits(seed_key, i), lambda i: normal(seed_key, i), lambda i: keep_mask(keys, i, rate)):
        assert torch.equal(draw(index), draw(whole)[part])


@given(st.permutations(range(40)), st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None)
def test_values_do_not_depend_on_order_or_company(order, seed_key):
    """An element draws the same value alone, in any order, and among any others."""
    index = torch.tensor(order)
    drawn = normal(seed_key, index)
    assert torch.equal(drawn, normal(seed_key, torch.arange(40))[index])
    assert torch.equal(drawn[:1], normal(seed_key, index[:1]))


def test_indices_beyond_32_bits_draw_values_of_their_own():
    """Tensors of more than 2^32 elements do not repeat themselves."""
    index = torch.cat([torch.arange(100), torch.arange(100) + (1 << 32), torch.arange(100) + (1 << 40)])
    assert bits(0, index).unique().numel() == 300


@given(st.integers(-(2**64), 2**64), st.integers(-(2**64), 2**64), NAMES, NAMES)
@settings(deadline=None)
def test_keys_are_int64_and_differ_with_each_part(seed, other, name, another):
    """A key is an int64 of its parts; other seeds, names and ways of cutting the same text give other keys."""
    made = key(seed, name)
    assert -(2**63) <= made < 2**63
    assert made == key(seed, name)
    assert (made == key(other, name)) == (seed == other)
    assert (made == key(seed, another)) == (name == another)
    assert key(seed, name, another) != key(seed, name + another)
    assert key(str(seed)) != key(seed)


# Distribution


@pytest.mark.parametrize("name", ["embed.table", "blocks.0.mlp.up", "blocks.11.attention.out.weight"])
def test_normal_has_the_moments_of_the_sum_of_twelve_uniforms(name):
    """Mean 0, variance 1, skewness 0, excess kurtosis -0.1, within 6; each within the error of the draws."""
    x = normal(key(0, name), MANY)
    count = x.numel()
    assert x.dtype == torch.float64
    assert x.mean().abs() < SIGMAS / math.sqrt(count)
    assert (x.var() - 1).abs() < SIGMAS * math.sqrt(1.9 / count)  # variance of a variance: kurtosis - 1
    assert x.pow(3).mean().abs() < SIGMAS * math.sqrt(15 / count)
    assert (x.pow(4).mean() - 2.9).abs() < SIGMAS * math.sqrt(96 / count)
    assert x.abs().max() < 6


def irwin_hall(x: np.ndarray, terms: int = 12) -> np.ndarray:
    """Return the distribution function of the sum of uniforms, less its mean."""
    total = np.zeros_like(x)
    for k in range(terms + 1):
        total += (-1) ** k * math.comb(terms, k) * np.maximum(x + terms / 2 - k, 0) ** terms
    return total / math.factorial(terms)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_normal_has_the_quantiles_of_the_sum_of_twelve_uniforms(seed):
    """Kolmogorov-Smirnov against the exact distribution function; and it is within 0.003 of the normal one."""
    x = normal(key(seed, "embed.table"), INDEX).sort().values.numpy()
    rank = (np.arange(len(x)) + 0.5) / len(x)
    exact = irwin_hall(np.minimum(x, 0))  # the lower half; the upper by symmetry, without cancellation
    exact = np.where(x > 0, 1 - irwin_hall(-np.maximum(x, 0)), exact)
    assert np.abs(exact - rank).max() < 1.95 / math.sqrt(len(x))  # 1 in 1,000
    normally = torch.special.ndtr(torch.from_numpy(x)).numpy()
    assert np.abs(exact - normally).max() < 0.003


@pytest.mark.parametrize("seed_key", [0, 1, -1, key(0, "embed.table")])
def test_every_byte_is_uniform(seed_key):
    """Chi-square of each of the eight bytes over its 256 values."""
    drawn = bits(seed_key, INDEX).numpy().view(np.uint8).reshape(-1, 8)
    expected = len(drawn) / 256
    for byte in range(8):
        chi = ((np.bincount(drawn[:, byte], minlength=256) - expected) ** 2 / expected).sum()
        assert abs(chi - 255) < SIGMAS * math.sqrt(2 * 255)


def ones(words: torch.Tensor) -> np.ndarray:
    """Count how often each of 64 bits is set, as a deviation in standard errors."""
    unpacked = np.unpackbits(words.numpy().view(np.uint8).reshape(-1, 8), axis=1)
    return (unpacked.mean(0) - 0.5) * 2 * math.sqrt(len(unpacked))


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 64, 128, 768, 4096, 1 << 20, 1 << 32])
def test_neighbours_flip_half_of_the_bits(stride):
    """Values at indices that are one apart, one row or one power of two apart agree in each bit half of the time."""
    assert np.abs(ones(bits(7, INDEX) ^ bits(7, INDEX + stride))).max() < SIGMAS
    assert np.abs(ones(bits(7, INDEX))).max() < SIGMAS


KEYS = {
    "seeds": [key(seed, "embed.table") for seed in range(4)],
    "names": [key(0, f"blocks.{i}.mlp.up") for i in range(4)],
    "steps": [int(step_key(0, step)) for step in range(4)],
    "seeds of dropout": [int(step_key(seed, 5)) for seed in range(4)],
    "sites": [int(step_key(0, 5, f"blocks.{i}.mlp")) for i in range(4)],
}


@pytest.mark.parametrize("what", KEYS)
def test_keys_that_differ_in_one_thing_draw_independent_values(what):
    """Between any two seeds, names, steps or sites, each bit agrees half of the time and normals do not correlate."""
    for one, other in itertools.combinations(KEYS[what], 2):
        assert one != other
        assert np.abs(ones(bits(one, INDEX) ^ bits(other, INDEX))).max() < SIGMAS
    one, other = (normal(k, INDEX) for k in KEYS[what][:2])
    assert (one * other).mean().abs() < SIGMAS / math.sqrt(INDEX.numel())


def test_the_words_of_a_normal_value_are_independent():
    """A normal value is made of the words of three keys in a row; bits under such keys agree half of the time."""
    for one, other in itertools.combinations([100, 101, 102], 2):
        assert np.abs(ones(bits(one, INDEX) ^ bits(other, INDEX))).max() < SIGMAS


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 128, 768])
def test_neighbouring_normals_do_not_correlate(lag):
    """Weights one column or one row apart are independent, and so are their squares."""
    x = normal(key(0, "blocks.0.attention.q"), INDEX)
    for y in (x, x.square() - 1):
        assert (y[lag:] * y[:-lag]).mean().abs() < SIGMAS * 2 / math.sqrt(len(x))


# Dropout


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_keep_mask_keeps_as_many_as_the_rate_says(rate):
    """The share that is kept is 1 - rate, within the error of the draws."""
    for step in range(3):
        mask = keep_mask(step_key(0, step), INDEX, rate)
        assert mask.dtype == torch.bool
        error = SIGMAS * math.sqrt(rate * (1 - rate) / len(INDEX))
        assert abs(mask.double().mean().item() - (1 - rate)) < error


def test_keep_mask_of_rate_zero_keeps_all():
    """Rate 0 drops nothing; and what a rate keeps a lower rate keeps too."""
    masks = [keep_mask(step_key(3, 4), INDEX, rate) for rate in (0.0, 0.2, 0.5, 0.8)]
    assert masks[0].all()
    assert all((high <= low).all() for low, high in itertools.pairwise(masks))


def test_masks_of_two_steps_agree_by_chance_only():
    """A mask is not that of the step before: two masks of rate 0.5 agree in half of the elements."""
    same = keep_mask(step_key(0, 1), INDEX, 0.5) == keep_mask(step_key(0, 2), INDEX, 0.5)
    assert abs(same.double().mean().item() - 0.5) < SIGMAS * 0.5 / math.sqrt(len(INDEX))


# Hashes


def test_scramble_is_splitmix64():
    """The numpy hash is SplitMix64 as published: the first five values of the generator with seed 1234567."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + np.arange(5, dtype=np.uint64) * golden
    assert scramble(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
@settings(deadline=None)
def test_torch_and_numpy_hash_alike(values):
    """mix, in torch, is scramble less its first addition."""
    numbers = np.array(values, np.uint64)
    with np.errstate(over="ignore"):
        before = numbers - np.uint64(0x9E3779B97F4A7C15)
    assert mix(torch.from_numpy(numbers.view(np.int64))).numpy().view(np.uint64).tolist() == scramble(before).tolist()
    assert MASK == 2**64 - 1


# Frozen: a change here changes every run that is resumed


def test_values_are_frozen():
    """Keys, bits, weights, masks and hashes are what they were when the first checkpoint was written."""
    index = torch.arange(4)
    assert key(0, "a") == 9026062096370171638
    assert key(1, "a") == 8415240736594023236
    assert key(0, "b") == -6140905232337774552
    assert bits(0, index).tolist() == [
        5197578548964807871,
        -3642288131749336026,
        8883187925210353900,
        4132491476520377205,
    ]
    assert bits(key(0, "a"), index).tolist() == [
        970996578570538698,
        7571274608762760430,
        377146459979048642,
        2624018111403028615,
    ]
    assert normal(key(0, "init", "embed.table"), index).tolist() == [
        -0.2210693359375,
        1.55517578125,
        0.5255126953125,
        -0.0164794921875,
    ]
    dropout = fold(key(3, "dropout"), torch.tensor(7))
    assert dropout.item() == -2138027255789600372
    kept = "".join(map(str, keep_mask(dropout, torch.arange(24), 0.3).int().tolist()))
    assert kept == "011010011011010111111111"
    assert mix(index).tolist() == [0, 6238072747940578789, -2606959012126976886, 2185194620014831856]
