"""The named schedules: pure functions of ranks, microbatches and stages a rank.

| name | source | stages a rank | bubble of the slowest rank | live activations, in microbatches of a rank |
| --- | --- | --- | --- | --- |
| gpipe | Huang et al. 2019 | 1 | (p-1)(F+I+W) | m |
| 1f1b | Narayanan et al. 2019 | 1 | (p-1)(F+I+W) | p - rank |
| interleaved | Narayanan et al. 2021 | v | (p-1)(F+I+W)/v | p + (p-1)/v - 2 rank/v |
| loopedbfs | Lamy-Poirier 2022 | v | (p-1)(F+I+W)/v | m |
| zb-h1 | Qi et al. 2023 | 1 | (p-1)(F+I-W) | p |
| zb-h2 | Qi et al. 2023 | 1 | (p-1)(F+I-2W) | 2p-1 |
| interleaved-zb | Qi et al. 2023, as in torch | v | (p-1)(F+I-W)/v | p |
| zbv | Qi et al. 2023 | 2, a V | 0 where F = I = W | p |
| v-half | Qi et al. 2024 | 2, a V | (p-1)(F+I+W)/2 where F = I = W | (p+2)//2 |
| v-min | Qi et al. 2024 | 2, a V | 2(p-1)(F+I+W)/3 + F/2 where F = I = W | (p+4)//3 |
| dualpipev | DeepSeek 2024; Qi et al. 2025 | 2, a V | (p-1)F/2 where F = I = W | p + 1/2 |

p ranks, m microbatches (at least 2p), v stages a rank; F, I, W are the times of a whole rank, W no more than F or I.
Bubble: last end minus first start, less the work; actions that overlap count one after the other. An activation lives
from the start of F to the end of W or B; with several stages a rank each holds a part of a microbatch. All take any
number of ranks and microbatches.
"""

from collections.abc import Callable

from dtengine.pipeline.actions import Action, Schedule, loop_placement
from dtengine.pipeline.steps import aligned
from dtengine.pipeline.v_schedules import dualpipev, v_half, v_min, zbv

Builder = Callable[[int, int, int], Schedule]


def make(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """Make a named schedule.

    Args:
        name: a key of ``SCHEDULES``.
        num_ranks: pipeline ranks.
        num_microbatches: of a step.
        chunks: stages a rank; where it is free, 2 if not given.

    Returns:
        The schedule, with empty cells where a rank would wait if all cells took the same time.

    Raises:
        ValueError: no such schedule, a number below 1, or stages a rank that the schedule does not have.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: unknown. Use one of {', '.join(SCHEDULES)}.")
    for value, what in ((num_ranks, "pipeline ranks"), (num_microbatches, "microbatches")):
        if value < 1:
            raise ValueError(f"schedule {name}: {value} {what}. It needs at least 1.")
    fixed = FIXED_CHUNKS.get(name)
    if chunks is None:
        chunks = fixed or 2
    if chunks < 1:
        raise ValueError(f"schedule {name}: {chunks} stages a rank. It needs at least 1.")
    if fixed and chunks != fixed:
        free = [other for other in SCHEDULES if other not in FIXED_CHUNKS]
        raise ValueError(
            f"schedule {name}: {chunks} stages a rank. It has {fixed}. Leave it out, or use one of {', '.join(free)}."
        )
    return SCHEDULES[name](num_ranks, num_microbatches, chunks)


def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards."""
    each = range(num_microbatches)
    rows = [[Action(r, kind, k) for kind in "FB" for k in each] for r in range(num_ranks)]
    return aligned("gpipe", rows, loop_placement(num_ranks, 1), num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """A backward as soon as there is one: a rank holds no more microbatches than there are ranks from it to the end."""
    rows = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank, num_microbatches)
        row = [Action(rank, "F", k) for k in range(ahead)]
        for k in range(num_microbatches):
            row.append(Action(rank, "B", k))
            if ahead + k < num_microbatches:
                row.append(Action(rank, "F", ahead + k))
        rows.append(row)
    return aligned("1f1b", rows, loop_placement(num_ranks, 1), num_microbatches)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """All microbatches through one stage before the next; backwards in the opposite order."""
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forward = [Action(s, "F", k) for s in stages for k in range(num_microbatches)]
        rows.append(forward + [Action(s, "B", k) for s, _, k in reversed(forward)])
    return aligned("loopedbfs", rows, loop_placement(num_ranks, chunks), num_microbatches)


def rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Deal microbatches to rounds of at least one a rank, as even as they go, larger rounds first.

    Torch deals the same where they divide, and refuses the rest.
    """
    number = max(1, num_microbatches // num_ranks)
    small, larger = divmod(num_microbatches, number)
    ends = [small * (i + 1) + min(larger, i + 1) for i in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def interleave(num_ranks: int, num_microbatches: int, chunks: int, backward: str) -> tuple[list[Action], ...]:
    """Return what a rank's chunks do in turn, round by round: (forwards, backwards), with the chunk for the stage."""
    each = rounds(num_ranks, num_microbatches)
    forwards = [Action(c, "F", k) for group in each for c in range(chunks) for k in group]
    backwards = [Action(c, backward, k) for group in each for c in reversed(range(chunks)) for k in group]
    return forwards, backwards


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B with several stages a rank: a round of microbatches goes through a chunk before the next chunk."""
    forwards, backwards = interleave(num_ranks, num_microbatches, chunks, "B")
    first = len(rounds(num_ranks, num_microbatches)[0])
    rows = []
    for rank in range(num_ranks):
        ahead = min((chunks - 1) * first + 2 * (num_ranks - 1 - rank), len(forwards))
        row = forwards[:ahead]
        for k, backward in enumerate(backwards):
            row.extend(forwards[ahead + k : ahead + k + 1])
            row.append(backward)
        rows.append([action._replace(stage=action.stage * num_ranks + rank) for action in row])
    return aligned("interleaved", rows, loop_placement(num_ranks, chunks), num_microbatches)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, chunks: int, name="interleaved-zb") -> Schedule:
    """Interleaved, with weight gradients put off, by one more on each rank, until they fill what would be a bubble."""
    forwards, backwards = interleave(num_ranks, num_microbatches, chunks, "I")
    first = len(rounds(num_ranks, num_microbatches)[0])
    rows = []
    for rank in range(num_ranks):
        ahead = min((chunks - 1) * first + num_ranks - 1 - rank, len(forwards))
        row = split_backward(forwards, backwards, ahead, rank)
        rows.append([action._replace(stage=action.stage * num_ranks + rank) for action in row])
    return aligned(name, rows, loop_placement(num_ranks, chunks), num_microbatches)


def split_backward(forwards: list[Action], backwards: list[Action], ahead: int, late: int) -> list[Action]:
    """Return `ahead` forwards, then by turns forward and input gradient; weight gradients follow, `late` behind."""
    weights = [action._replace(kind="W") for action in backwards]
    row = forwards[:ahead]
    for k, backward in enumerate(backwards):
        row.extend(forwards[ahead + k : ahead + k + 1])
        row.append(backward)
        row.extend(weights[k - late : k - late + 1] if k >= late else [])
    return row + weights[max(0, len(weights) - late) :]


def zero_bubble_h1(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B with weight gradients put off at no more memory than the first rank of 1F1B has."""
    return interleaved_zero_bubble(num_ranks, num_microbatches, 1, "zb-h1")


def zero_bubble_h2(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """As many forwards as fit before the first backward, weight gradients put off to the end: no wait at equal costs."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", k) for k in range(num_microbatches)]
        backwards = [Action(rank, "I", k) for k in range(num_microbatches)]
        ahead = min(2 * (num_ranks - rank - 1), num_microbatches)
        rows.append(split_backward(forwards, backwards, ahead, 2 * rank))
    return aligned("zb-h2", rows, loop_placement(num_ranks, 1), num_microbatches)


SCHEDULES: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "loopedbfs": looped_bfs,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "interleaved-zb": interleaved_zero_bubble,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipev": dualpipev,
}
FIXED_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "v-half": 2, "v-min": 2, "dualpipev": 2}
