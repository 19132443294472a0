"""Counter-based random values: no generator, no state.

Every value is a function of a key and of the element's global index, so any mesh draws the same bits. Only integer
arithmetic and single correctly rounded float operations are used: a vectorised log or cos may differ in its last bit
between the body and the tail of a loop, and then the bits would depend on how a tensor is cut.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit ``value``."""
    value &= MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically (torch's shift of int64 is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Hash int64 values to int64 values: the SplitMix64 finaliser.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (constants: variant 13
    of D. Stafford, as in java.util.SplittableRandom).
    """
    x = (x ^ _shift(x, 30)) * _signed(_MUL_1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL_2)
    return x ^ _shift(x, 31)


def scramble(x: np.ndarray) -> np.ndarray:
    """Hash uint64 values by one SplitMix64 step, in numpy: for the data side, which runs before ranks are forked, when
    torch must not have started its threads.
    """
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL_2)
    return x ^ (x >> np.uint64(31))


def key(*parts: int | str) -> int:
    """Return an int64 key from a seed and names."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def fold(base: int | Tensor, value: Tensor) -> Tensor:
    """Return the key of ``base`` combined with an integer tensor (a step, say)."""
    return mix(value * _signed(_GOLDEN) ^ base)


def bits(keys: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits (int64) for each global element index."""
    return mix(mix((index + 1) * _signed(_GOLDEN) ^ keys))


def keep_mask(keys: Tensor, index: Tensor, rate: float) -> Tensor:
    """Return a bool mask, True with probability 1 - rate (to 2^-40), for each global element index."""
    threshold = round(rate * (1 << 40))
    return _shift(bits(keys, index), 24) >= threshold


def normal(seed_key: int, index: Tensor) -> Tensor:
    """Return float64 values close to N(0, 1), one for each global element index.

    The sum of twelve uniforms less six (Irwin-Hall; Box & Muller 1958 discuss it as the central-limit method): mean
    0, variance 1 - 2^-32, excess kurtosis -0.1, bounded by 6. It is exact in integers, so the bits are the same on
    every device and for every cut, and weights want no heavier tails.
    """
    total = torch.zeros_like(index)
    for draw in range(3):
        word = bits(_signed(seed_key + draw), index)
        for lane in range(4):
            total = total + ((word >> (16 * lane)) & 0xFFFF)
    # each lane is uniform on {0..65535}: add half a unit to centre it
    return (total.to(torch.float64) + (6.0 - 6 * 65536)) / 65536.0


def global_index(shape: Sequence[int], bounds: Sequence[tuple[int, int]], device: torch.device | str) -> Tensor:
    """Return the flat global indices (int64) of the part of a tensor within ``bounds``, in the part's shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, (start, stop) in zip(shape, bounds, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
    return index
