"""Learning rates: functions of the step alone, so that a resumed run goes on as the unbroken one."""

import math
from dataclasses import dataclass

DECAYS = ("cosine", "linear", "wsd", "rsqrt", "none")


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that depends on the step alone.

    Attributes:
        peak: rate after warm-up.
        steps: total number of steps; decay ends there.
        warmup: steps of linear warm-up; step 0 has peak / warmup.
        decay: one of DECAYS. "cosine" and "linear" fall from warm-up to the end; "wsd" (warm-up, stable, decay; Hu et
            al., "MiniCPM", 2024) stays at the peak and falls linearly over the last ``decay_steps``; "rsqrt" falls as
            1 / sqrt(step) and asks for no last step (Vaswani et al., "Attention is All You Need", 2017).
        floor: share of the peak that is left at the end, and that no rate after warm-up is below.
        decay_steps: steps of the decay of "wsd"; None: a tenth of all.
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: str = "cosine"
    floor: float = 0.1
    decay_steps: int | None = None

    def __call__(self, step: int) -> float:
        """Return the rate that the update of step ``step`` (from 0) uses."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.decay == "none":
            return self.peak
        if self.decay == "rsqrt":
            return self.peak * max(self.floor, math.sqrt(max(1, self.warmup) / (step + 1)))
        start = self.warmup if self.decay != "wsd" else max(self.warmup, self.steps - self.falling)
        done = min(1.0, max(0, step - start) / max(1, self.steps - start))
        share = 0.5 * (1 + math.cos(math.pi * done)) if self.decay == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * share)

    @property
    def falling(self) -> int:
        """Steps of the decay of "wsd"."""
        return max(1, round(self.steps / 10)) if self.decay_steps is None else self.decay_steps


def scale_peak(peak: float, global_batch: int, base_batch: int | None, rule: str, bound: float) -> tuple[float, str]:
    """Scale a rate that was found at one batch size to another.

    Args:
        peak: the rate at ``base_batch``.
        global_batch: sequences of one step.
        base_batch: batch size at which ``peak`` was found; None scales nothing.
        rule: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014; for Adam, Malladi et al. 2022) or "none".
        bound: largest factor allowed.

    Returns:
        (rate, what was done, in words; empty where nothing was asked for).
    """
    if base_batch is None or rule == "none":
        return peak, ""
    ratio = global_batch / base_batch
    wanted = ratio if rule == "linear" else math.sqrt(ratio)
    factor = min(wanted, bound)
    limited = f", bounded from {wanted:.3g}" if factor < wanted else ""
    return peak * factor, f"{rule} scaling from batch {base_batch} to {global_batch}: x{factor:.3g}{limited}"
