"""What a schedule takes: time, bubble and memory of each rank, from the costs of its actions.

A rank runs its actions in order, each as soon as the one before has ended and its inputs are there:

    2F0    the output of 1F0
    2I0    2F0, and the input gradient of stage 3: of 3I0, or of 3B0 at its end
    2W0    2I0
    2B0    as 2I0; it is 2I0 and 2W0 without a gap, and its gradient leaves at its end

Between ranks a result arrives ``send`` after it is computed, within a rank at once. A transfer takes its own time and
nothing else: ranks compute meanwhile, and transfers do not wait for each other. A cell of overlapped actions starts when
the inputs of all are there, takes the sum of their times, and has its results at its end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dtengine.pipeline.actions import Action, Cell, Schedule, inputs, result

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Times of the actions in any one unit: a number for all stages, or one for each.

    Attributes:
        f: forward.
        i: gradient of the stage's input.
        w: gradients of its parameters; a whole backward takes i + w.
        send: what the stage computed on its way to another rank, forward or back.
    """

    f: Cost = 1.0
    i: Cost = 1.0
    w: Cost = 1.0
    send: Cost = 0.0

    def per_stage(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """Return the times of each stage by kind: F, I, W, B and send.

        Raises:
            ValueError: not one number a stage, or one that is negative or no number.
        """
        table: dict[str, tuple[float, ...]] = {}
        for kind, cost in zip(("F", "I", "W", "send"), (self.f, self.i, self.w, self.send), strict=True):
            values = tuple(cost) if isinstance(cost, Sequence) else (cost,) * num_stages
            option = f"--cost-{kind.lower()}"
            if len(values) != num_stages:
                raise ValueError(
                    f"{option}: {len(values)} numbers for {num_stages} stages. Give one number, or one for each stage."
                )
            bad = [str(v) for v in values if not (math.isfinite(v) and v >= 0)]
            if bad:
                raise ValueError(f"{option}: {', '.join(bad[:4])}. A cost is a number of at least 0.")
            table[kind] = values
        table["B"] = tuple(i + w for i, w in zip(table["I"], table["W"], strict=True))
        return table

    def split(self, num_parts: int, num_stages: int) -> "Costs":
        """Return the costs of the same model cut into another number of stages of equal depth.

        Args:
            num_parts: stages that these costs are for, where they are one number each.
            num_stages: stages to cut into. Compute is divided by depth; a transfer takes as long as before.
        """

        def cut(cost: Cost, divide: bool) -> Cost:
            values = tuple(cost) if isinstance(cost, Sequence) else (cost,) * num_parts
            parts, cuts = len(values), []
            for stage in range(num_stages):  # in units of 1 / (parts * num_stages) of the depth
                first, last = stage * parts, (stage + 1) * parts
                shares = [
                    max(0, min(last, (p + 1) * num_stages) - max(first, p * num_stages)) / num_stages
                    for p in range(parts)
                ]
                inside = values[(last - 1) // num_stages]
                cuts.append(sum(s * v for s, v in zip(shares, values, strict=True)) if divide else inside)
            return cuts[0] if not isinstance(cost, Sequence) else tuple(cuts)

        return Costs(cut(self.f, True), cut(self.i, True), cut(self.w, True), cut(self.send, False))


class Event(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """What an action computed, on its way to another rank."""

    action: Action
    source: int
    destination: int
    start: float
    end: float


class Wait(NamedTuple):
    """A rank that never goes on: its next action, and the input that never arrives."""

    rank: int
    action: Action
    needs: Action
    source: int | None  # the rank that would run it, None where no rank has it

    def __str__(self) -> str:
        where = "which no rank runs" if self.source is None else f"of rank {self.source}"
        return f"rank {self.rank} waits in {self.action} for {self.needs}, {where}"


class RankFigures(NamedTuple):
    """Time and memory of a rank.

    Attributes:
        start, end: of its first and last action.
        busy: time in which it computes.
        bubble: the rest, between start and end.
        peak_live: most stage-microbatches of activations held at once, from the start of F to the end of W or B.
        peak_size: the same, each counted with the size of its stage's activations.
        peak_waiting: most stage-microbatches whose I has run and whose W has not.
    """

    start: float
    end: float
    busy: float
    bubble: float
    peak_live: int
    peak_size: float
    peak_waiting: int

    @property
    def share(self) -> float:
        """Bubble as a share of the time from start to end."""
        return self.bubble / (self.end - self.start) if self.end > self.start else 0.0


@dataclass(frozen=True)
class Simulation:
    """A schedule in time.

    Attributes:
        events: for each rank its actions, in order; up to the first that waits for ever.
        transfers: between ranks.
        ranks: figures of each rank.
        makespan: from the first start to the last end over all ranks.
        deadlock: which ranks wait for what; None where all ends.
    """

    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[Transfer, ...]
    ranks: tuple[RankFigures, ...]
    makespan: float
    deadlock: tuple[Wait, ...] | None

    @property
    def bubble(self) -> float:
        """Bubble time of the rank that has most."""
        return max((rank.bubble for rank in self.ranks), default=0.0)

    @property
    def bubble_share(self) -> float:
        """Largest bubble share of a rank."""
        return max((rank.share for rank in self.ranks), default=0.0)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Peak of live stage-microbatches of each rank."""
        return tuple(rank.peak_live for rank in self.ranks)


def simulate(schedule: Schedule, costs: Costs, sizes: Sequence[float] | None = None) -> Simulation:
    """Run a schedule with given costs.

    Args:
        schedule: need not be right; what waits for ever is told in ``deadlock``.
        costs: of its stages.
        sizes: bytes of one microbatch's activations in each stage, or any other unit; 1 by default.

    Raises:
        ValueError: costs or sizes do not fit the stages.
    """
    num_stages, rank_of = schedule.num_stages, schedule.rank_of
    table = costs.per_stage(num_stages)
    if sizes is not None and len(sizes) != num_stages:
        raise ValueError(f"sizes: {len(sizes)} numbers for {num_stages} stages. Give one for each stage.")
    cells = [[cell for cell in row if cell] for row in schedule.ranks]
    events: list[list[Event]] = [[] for _ in cells]
    transfers: list[Transfer] = []
    done: dict[Action, tuple[int, float]] = {}  # result -> the rank that has it, since when
    blocked: dict[Action, list[int]] = {}  # result -> ranks that wait for it
    ran = [0] * len(cells)
    todo = list(range(len(cells)))
    while todo:
        rank = todo.pop()
        while ran[rank] < len(cells[rank]):
            cell = cells[rank][ran[rank]]
            needs = [need for action in cell for need in inputs(action, num_stages)]
            missing = next((n for n in needs if n not in done), None)
            if missing:
                blocked.setdefault(missing, []).append(rank)
                break
            arrivals = [
                at if source == rank else at + table["send"][n.stage] for n in needs for source, at in [done[n]]
            ]
            end = max([events[rank][-1].end if events[rank] else 0.0, *arrivals])
            for action in cell:
                start, end = end, end + table[action.kind][action.stage]
                events[rank].append(Event(action, start, end))
            ran[rank] += 1
            for action in cell:
                if result(action) in done:
                    continue
                done[result(action)] = rank, end
                todo += blocked.pop(result(action), [])
                to = action.stage + {"F": 1, "W": 0}.get(action.kind, -1)
                if 0 <= to < num_stages and rank_of[to] != rank:
                    transfers.append(Transfer(action, rank, rank_of[to], end, end + table["send"][action.stage]))
    return _simulation(schedule, events, transfers, sizes, _waits(cells, blocked, ran, num_stages))


def observed(schedule: Schedule, events: Sequence[Sequence[Event]]) -> Simulation:
    """Return the figures of a step that ran.

    Args:
        schedule: what ran.
        events: for each rank when its actions did, in order. A transfer lasts from the end of the action that made it to
            the start of the one that reads it.
    """
    makers = {result(e.action): (rank, e) for rank, row in enumerate(events) for e in row}
    transfers = []
    for rank, row in enumerate(events):
        for event in row:
            for need in inputs(event.action, schedule.num_stages):
                source, made = makers[need]
                if source != rank:
                    transfers.append(Transfer(made.action, source, rank, made.end, event.start))
    return _simulation(schedule, [list(row) for row in events], transfers, None, None)


def _simulation(
    schedule: Schedule,
    events: list[list[Event]],
    transfers: list[Transfer],
    sizes: Sequence[float] | None,
    deadlock: tuple[Wait, ...] | None,
) -> Simulation:
    """Add all ranks up."""
    figures = tuple(_figures(schedule, rank, row, sizes) for rank, row in enumerate(events))
    first = min((rank[0].start for rank in events if rank), default=0.0)
    last = max((rank[-1].end for rank in events if rank), default=0.0)
    return Simulation(tuple(map(tuple, events)), tuple(transfers), figures, last - first, deadlock)


def _figures(schedule: Schedule, rank: int, events: list[Event], sizes: Sequence[float] | None) -> RankFigures:
    """Add up one rank. What is held is counted by order, since zero times make it ambiguous by time."""
    live = waiting = peak_live = peak_waiting = 0
    size = peak_size = 0.0
    ran = 0
    for cell in schedule.ranks[rank]:
        ran += len(cell)
        if ran > len(events):
            break
        begun = [a.stage for a in cell if a.kind == "F"]  # overlapped actions are held together, in whatever order
        live += len(begun)
        size += sum(sizes[stage] if sizes else 1.0 for stage in begun)
        peak_live, peak_size = max(peak_live, live), max(peak_size, size)
        for action in cell:
            if action.kind in "WB":
                live -= 1
                size -= sizes[action.stage] if sizes else 1.0
            waiting += {"I": 1, "W": -1}.get(action.kind, 0)
            peak_waiting = max(peak_waiting, waiting)
    busy = math.fsum(e.end - e.start for e in events)
    first, last = (events[0].start, events[-1].end) if events else (0.0, 0.0)
    gaps = math.fsum(b.start - a.end for a, b in pairwise(events))
    return RankFigures(first, last, busy, gaps, peak_live, peak_size, peak_waiting)


def _waits(
    cells: list[list[Cell]], blocked: dict[Action, list[int]], ran: list[int], num_stages: int
) -> tuple[Wait, ...] | None:
    """Return which ranks wait for what, by rank."""
    owners = {result(action): rank for rank, row in enumerate(cells) for cell in row for action in cell}
    waits = []
    for need, ranks in blocked.items():
        for rank in ranks:
            action = next(a for a in cells[rank][ran[rank]] if need in inputs(a, num_stages))
            waits.append(Wait(rank, action, need, owners.get(need)))
    return tuple(sorted(waits, key=lambda wait: wait.rank)) or None
