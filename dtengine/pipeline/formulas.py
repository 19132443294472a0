"""Bubble and activation memory of the named schedules as published, to stand beside what the simulator counts.

p ranks, m microbatches (2p or more), v stages a rank; f, i, w are the times of one stage, alike for all, sends are free.
Bubble is the time that the slowest rank waits between its first start and its last end; memory counts live
stage-microbatches of the fullest rank. Publications give times and microbatches of a whole rank; here they are those of its
stages, so that a rank's time is v times as long, and its microbatch is v stage-microbatches.
"""

from collections.abc import Callable
from typing import NamedTuple

GPIPE = (
    "Huang et al. 2018, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, arXiv:1811.06965"
)
FLUSH = "Narayanan et al. 2020, Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503"
MEGATRON = (
    "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, "
    "arXiv:2104.04473"
)
RECOMPUTE = (
    "memory: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198"
)
BREADTH = "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism, arXiv:2211.05953"
ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
CONTROLLABLE = "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362"
DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437, for DualPipe on 2p ranks"


class Setting(NamedTuple):
    """What the formulas are given."""

    p: int
    m: int
    v: int
    f: float
    i: float
    w: float

    @property
    def whole(self) -> float:
        """All work on one microbatch in one stage."""
        return self.f + self.i + self.w

    @property
    def equal(self) -> bool:
        """Whether F, I and W take the same time."""
        return self.f == self.i == self.w

    @property
    def short_weights(self) -> bool:
        """Whether W takes no longer than F or I."""
        return self.w <= min(self.f, self.i)


class Formula(NamedTuple):
    """Published figures of a schedule.

    Attributes:
        bubble_text, bubble: its bubble; None where the formula does not hold.
        memory_text, memory: its activation memory.
        source: authors, year, title, address.
    """

    bubble_text: str
    bubble: Callable[[Setting], float | None]
    memory_text: str
    memory: Callable[[Setting], float | None]
    source: str


def _where(holds: bool, value: float) -> float | None:
    return value if holds else None


FORMULAS: dict[str, Formula] = {
    "gpipe": Formula("(p-1)(f+i+w)", lambda s: (s.p - 1) * s.whole, "m", lambda s: s.m, GPIPE),
    "1f1b": Formula("(p-1)(f+i+w)", lambda s: (s.p - 1) * s.whole, "p", lambda s: min(s.p, s.m), FLUSH),
    "interleaved": Formula(
        "(p-1)(f+i+w)",
        lambda s: (s.p - 1) * s.whole,
        "pv + p-1 where p divides m",
        lambda s: _where(s.m % s.p == 0, min(s.p * s.v + s.p - 1, s.m * s.v)),
        f"{MEGATRON}; {RECOMPUTE}",
    ),
    "loopedbfs": Formula("(p-1)(f+i+w)", lambda s: (s.p - 1) * s.whole, "mv", lambda s: s.m * s.v, BREADTH),
    "zb-h1": Formula(
        "(p-1)(f+i-w)",
        lambda s: _where(s.short_weights, (s.p - 1) * (s.f + s.i - s.w)),
        "p",
        lambda s: min(s.p, s.m),
        ZERO_BUBBLE,
    ),
    "zb-h2": Formula(
        "(p-1)(f+i-2w)",
        lambda s: _where(s.short_weights, (s.p - 1) * (s.f + s.i - 2 * s.w)),
        "2p-1",
        lambda s: min(2 * s.p - 1, s.m),
        ZERO_BUBBLE,
    ),
    "zbv": Formula(
        "0 where f = i = w",
        lambda s: _where(s.equal, 0.0),
        "2p",
        lambda s: 2 * min(s.p, s.m),
        ZERO_BUBBLE,
    ),
    "v-half": Formula(
        "(p-1)(f+i+w) where f = i = w",
        lambda s: _where(s.equal, (s.p - 1) * s.whole),
        "2 floor((p+2)/2), at most",
        lambda s: 2 * min((s.p + 2) // 2, s.m),
        CONTROLLABLE,
    ),
    "v-min": Formula(
        "4/3 (p-1)(f+i+w) where f = i = w, about",
        lambda s: _where(s.equal, 4 / 3 * (s.p - 1) * s.whole),
        "2 floor((p+4)/3)",
        lambda s: 2 * min((s.p + 4) // 3, s.m),
        CONTROLLABLE,
    ),
    "dualpipev": Formula(
        "(p-1)(f+2i-w), at most, with F and B one after the other in a pair",
        lambda s: (s.p - 1) * (s.f + 2 * s.i - s.w),
        "2p+1",
        lambda s: min(2 * s.p + 1, 2 * s.m),
        DEEPSEEK,
    ),
}
"""By name; nothing is published for interleaved-zb, and nothing can be for auto."""
