"""Schedules of two stages a rank whose order of ranks is a V: the first rank has the first stage and the last.

p ranks, m microbatches. In each function `there` is a rank's stage on the way down, `back` that on the way up.
"""

from collections import deque
from collections.abc import Callable

from dtengine.pipeline.actions import Action, Schedule, inputs, v_placement
from dtengine.pipeline.steps import aligned

Row = list[Action | tuple[Action, ...]]


class Stream:
    """The microbatches of a stage, taken in turn: forward, and back."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.taken = {"F": 0, "B": 0, "W": 0}

    def take(self, kind: str) -> Action:
        """Return the next action of a kind; input gradients and whole backwards are of one count."""
        counted = "B" if kind == "I" else kind
        self.taken[counted] += 1
        return Action(self.stage, kind, self.taken[counted] - 1)

    def weights(self) -> list[Action]:
        """Return the weight gradients that are left."""
        return [self.take("W") for _ in range(self.taken["B"] - self.taken["W"])]


def zbv(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """No wait where F, I and W take the same time, at 1F1B's memory (Qi et al. 2023, section 6)."""
    count = max(num_microbatches, 2 * num_ranks - 1)  # fewer do not fill the pattern: those too many are left out
    rows = []
    for rank in range(num_ranks):
        there, back = Stream(rank), Stream(2 * num_ranks - 1 - rank)
        after = num_ranks - rank
        row: Row = [there.take("F") for _ in range(2 * after - 1)]
        for _ in range(rank):
            row += [back.take("F"), there.take("F")]
        for _ in range(after):
            row += [back.take(kind) for kind in "FIW"]
        while back.taken["F"] < count:
            row += [there.take(kind) for kind in ("FIW" if there.taken["F"] < count else "IW")]
            row += [back.take(kind) for kind in "FIW"]
        for _ in range(rank):
            row += [there.take("I"), back.take("I")]
        for _ in range(after):
            row += [there.take("I"), there.take("W")]
        rows.append(row + back.weights() + there.weights())
    return aligned("zbv", first_of(rows, num_microbatches), v_placement(num_ranks), num_microbatches)


def dualpipev(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """A forward and a backward overlap: DualPipe cut in half, without its second copy of the parameters.

    DeepSeek-AI 2024, and "Cut-in-half" of Qi et al. 2025.
    """
    count = max(num_microbatches, 2 * num_ranks)  # fewer do not fill the pattern: those too many are left out
    rows = []
    for rank in range(num_ranks):
        there, back = Stream(rank), Stream(2 * num_ranks - 1 - rank)
        after = num_ranks - 1 - rank
        row: Row = [there.take("F") for _ in range(2 * after)]
        for _ in range(rank + 1):
            row += [there.take("F"), back.take("F")]
        for _ in range(after):
            row += [back.take(kind) for kind in "IWF"]
        for k in range(count - 2 * num_ranks + rank + 1):
            pair = (there.take("F"), back.take("B"))
            alone = k == 0 and rank == num_ranks - 1  # its next backward could start before the pair is through
            row += pair if alone else [pair]
            row.append((back.take("F"), there.take("B")))
        for _ in range(after):
            row += [back.take("B"), (back.take("F"), there.take("B"))]
        late: deque[Action] = deque()
        for k in range(2 * (rank + 1)):
            action = (there if k % 2 else back).take("I" if k > rank else "B")
            row.append(action)
            late.extend([action._replace(kind="W")] if k > rank else [])
        for _ in range(after):
            action = there.take("I")
            row += [late.popleft(), action]
            late.append(action._replace(kind="W"))
        rows.append(row + list(late))
    return aligned("dualpipev", first_of(rows, num_microbatches), v_placement(num_ranks), num_microbatches)


def first_of(rows: list[Row], num_microbatches: int) -> list[Row]:
    """Leave out the microbatches from a number on."""
    kept = []
    for row in rows:
        cells = [
            tuple(a for a in ((c,) if isinstance(c, Action) else c) if a.microbatch < num_microbatches) for c in row
        ]
        kept.append([cell for cell in cells if cell])
    return kept


def v_min(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Least memory: (p + 4) // 3 microbatches a rank, each of two halves (Qi et al. 2024).

    There is no slack between blocks: where F, I and W differ, each microbatch adds to the bubble.
    """
    gap = 0 if num_ranks % 3 else 2

    def first(rank: int) -> tuple[int, int, int, int]:
        down, up = rank, num_ranks - 1 - rank
        return down, num_ranks + up, 2 * num_ranks + gap + down, 3 * num_ranks + gap + up

    return building_blocks("v-min", num_ranks, num_microbatches, first, 2 * ((num_ranks + 4) // 3))


def v_half(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Half of 1F1B's memory and bubble: (p + 2) // 2 microbatches a rank, each of two halves (Qi et al. 2024)."""
    gap = 3 if num_ranks % 2 == 0 else 0

    def first(rank: int) -> tuple[int, int, int, int]:
        down, up = rank, num_ranks - 1 - rank
        return 2 * down, 2 * num_ranks - 1 + up, 3 * num_ranks - 1 + gap + 2 * down, 5 * num_ranks - 1 + gap + up

    return building_blocks("v-half", num_ranks, num_microbatches, first, 2 * ((num_ranks + 2) // 2))


def building_blocks(
    name: str, num_ranks: int, num_microbatches: int, first: Callable[[int], tuple[int, int, int, int]], limit: int
) -> Schedule:
    """Repeat a block every six units of time, take out the gaps, and put weight gradients where a rank would wait.

    Args:
        name: of the schedule.
        num_ranks, num_microbatches: its size.
        first: the times of microbatch 0 on a rank: F there, F back, I back, I there. Those of a rank differ modulo six.
        limit: most stage activations of one microbatch that a rank holds, from F to W; what the blocks need, or more.
    """
    todo = []
    for rank in range(num_ranks):
        there, back = rank, 2 * num_ranks - 1 - rank
        block = zip(first(rank), ((there, "F"), (back, "F"), (back, "I"), (there, "I")), strict=True)
        times = [(start + 6 * k, Action(*what, k)) for start, what in block for k in range(num_microbatches)]
        todo.append(deque(action for _, action in sorted(times)))
    rows: list[Row] = [[] for _ in todo]
    late: list[deque[Action]] = [deque() for _ in todo]
    live = [0] * num_ranks
    done: set[Action] = set()
    while any(todo) or any(late):
        step = [choose(todo[r], late[r], done, 2 * num_ranks, live[r] < limit) for r in range(num_ranks)]
        for rank, action in enumerate(step):
            if action:
                rows[rank].append(action)
                live[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
                late[rank].extend([action._replace(kind="W")] if action.kind == "I" else [])
                done.add(action)
        limit += not any(step)
    return aligned(name, rows, v_placement(num_ranks), num_microbatches)


def choose(todo: deque[Action], late: deque[Action], done: set[Action], num_stages: int, room: bool) -> Action | None:
    """Take the next action of a rank if it can run, else the oldest weight gradient that was put off."""
    if todo and done.issuperset(inputs(todo[0], num_stages)) and (room or todo[0].kind != "F"):
        return todo.popleft()
    return late.popleft() if late else None
