"""The loss scale of fp16: what keeps small gradients from vanishing, and what happens where large ones overflow.

The backward's seed is multiplied by the scale; reduced gradients are divided by it once, in fp32, before norm and
clipping. The scale is a power of two, so neither rounds. It is one tensor of the state, changed inside the step's program
from facts that all ranks have agreed on: no rank waits for the host, and all ranks have the same scale.

Source: Micikevicius et al., "Mixed Precision Training", 2018, sections 3.2 and 4.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LARGEST = 1.0, 2.0**24  # 2^24 times the smallest fp16 number is 1


class LossScale(NamedTuple):
    """What the scale's tensor says, as numbers; they go into a checkpoint's facts.

    Attributes:
        scale: factor of the next step's loss.
        good: steps since it last changed.
        skipped: steps of the run that updated nothing.
    """

    scale: float
    good: float = 0.0
    skipped: float = 0.0


def check(scale: float, window: int) -> None:
    """Raise ValueError for a first scale that is no power of two within bounds, or a window below 1."""
    if not (SMALLEST <= scale <= LARGEST and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"--loss-scale {scale:g}: must be a power of two from {SMALLEST:.0f} to {LARGEST:.0f}, so that scaling rounds "
            "nothing. Use 65536."
        )
    if window < 1:
        raise ValueError(f"--loss-scale-window {window}: a number of steps, at least 1.")


def advance(now: Tensor, finite: Tensor, window: int) -> Tensor:
    """Return the scale's tensor behind a step: halved where it overflowed, doubled after ``window`` good steps in a row.

    Args:
        now: float32 [3], as LossScale.
        finite: bool scalar, the same on all ranks.
        window: good steps before the scale is doubled.
    """
    scale, good, skipped = now.unbind()
    good = torch.where(finite, good + 1, 0.0)
    full = good >= window
    larger = torch.where(full, scale * 2, scale).clamp(max=LARGEST)
    scale = torch.where(finite, larger, (scale / 2).clamp(min=SMALLEST))
    return torch.stack([scale, torch.where(full, 0.0, good), torch.where(finite, skipped, skipped + 1)])
