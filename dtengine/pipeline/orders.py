"""Orders of actions as lists of numbers, so that a search can time thousands of them.

Backward is always split here: an I that is followed by its W is a B whose gradient leaves early, so a split order takes no
longer than a fused one. Microbatches are alike, so that the lists of this module take them in turn in each stage.
"""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from dtengine.pipeline.actions import Action, Schedule, inputs
from dtengine.pipeline.simulate import Costs

KINDS = ("F", "I", "W")
Orders = list[list[int]]  # for each rank its actions, as numbers


class Rule(NamedTuple):
    """How a list is dealt out: what a rank takes first of the actions that are ready.

    Attributes:
        kinds: order of preference, such as "IFW".
        deepest_first: whether, of forwards, that of the last stage comes first, else that of the first.
        patience: share of a W that a rank will wait for something better than that W.
        limits: most live stage-microbatches of each rank.
        in_flight: most microbatches that have entered the first stage and have not ended there.
    """

    kinds: str
    deepest_first: bool
    patience: float
    limits: tuple[int, ...]
    in_flight: int


class Timing(NamedTuple):
    """When the actions of an order end, in an order in which they can run."""

    ends: list[float]
    sequence: list[int]
    makespan: float


class Problem:
    """The actions of a pipeline with given placement and costs.

    Attributes:
        actions: by number.
        times: of each.
        preds: for each (what it waits for, time of the transfer).
    """

    def __init__(self, rank_of: Sequence[int], num_microbatches: int, costs: Costs) -> None:
        self.rank_of = tuple(rank_of)
        self.num_stages, self.num_ranks, self.num_microbatches = len(rank_of), max(rank_of) + 1, num_microbatches
        self.costs = costs
        table = costs.per_stage(self.num_stages)
        self.actions = [Action(s, k, m) for k in KINDS for s in range(self.num_stages) for m in range(num_microbatches)]
        self.number = {action: x for x, action in enumerate(self.actions)}
        self.times = [table[a.kind][a.stage] for a in self.actions]
        self.rank = [self.rank_of[a.stage] for a in self.actions]
        self.preds = [
            tuple(
                (self.number[n], 0.0 if self.rank_of[n.stage] == self.rank_of[a.stage] else table["send"][n.stage])
                for n in inputs(a, self.num_stages)
            )
            for a in self.actions
        ]
        self.change = [{"F": 1, "I": 0, "W": -1}[a.kind] for a in self.actions]  # of live stage-microbatches
        self.bound = self._bound(table)

    def _bound(self, table: dict[str, tuple[float, ...]]) -> float:
        """Return a time below which no order ends: of each rank the work between its first input and its last output."""
        head, m, best = 0.0, self.num_microbatches, 0.0
        lags = [0.0 if a == b else max(0.0, table["send"][s]) for s, (a, b) in enumerate(pairwise(self.rank_of))]
        for rank in range(self.num_ranks):
            own = [s for s, r in enumerate(self.rank_of) if r == rank]
            if not own:
                continue
            head = sum(table["F"][: own[0]]) + sum(lags[: own[0]])
            back = [0.0 if self.rank_of[s] == self.rank_of[s - 1] else table["send"][s] for s in range(1, own[0] + 1)]
            tail = sum(table["I"][: own[0]]) + sum(back) + (table["W"][0] if own[0] else 0.0)
            chain = m * sum(table["F"][s] + table["I"][s] for s in own)
            work = chain + m * sum(table["W"][s] for s in own)
            best = max(best, head + work, head + chain + tail)
        through = sum(table["F"]) + sum(table["I"]) + table["W"][0] + sum(lags)
        through += sum(table["send"][s] for s in range(1, self.num_stages) if self.rank_of[s] != self.rank_of[s - 1])
        return max(best, through)

    def orders_of(self, schedule: Schedule) -> Orders:
        """Return the orders of a schedule, its backwards split."""
        return [
            [
                self.number[action._replace(kind=kind)]
                for action in schedule.actions(rank)
                for kind in ("IW" if action.kind == "B" else action.kind)
            ]
            for rank in range(self.num_ranks)
        ]

    def time(self, orders: Orders) -> Timing | None:
        """Run orders; None where they wait for each other."""
        preds, times = self.preds, self.times
        ends, waiting = [-1.0] * len(times), [-1] * len(times)
        place, free, sequence = [0] * len(orders), [0.0] * len(orders), []
        todo = list(range(len(orders)))
        while todo:
            rank = todo.pop()
            row, k, now = orders[rank], place[rank], free[rank]
            while k < len(row):
                x = row[k]
                start = now
                for y, lag in preds[x]:
                    end = ends[y]
                    if end < 0:
                        waiting[y] = rank
                        break
                    if end + lag > start:
                        start = end + lag
                else:
                    ends[x] = now = start + times[x]
                    sequence.append(x)
                    k += 1
                    if waiting[x] >= 0:
                        todo.append(waiting[x])
                        waiting[x] = -1
                    continue
                break
            place[rank], free[rank] = k, now
        return Timing(ends, sequence, max(free)) if len(sequence) == len(times) else None

    def peak(self, row: Sequence[int]) -> int:
        """Return the most live stage-microbatches of a rank's order."""
        live = most = 0
        for x in row:
            live += self.change[x]
            if live > most:
                most = live
        return most

    def repair(self, row: list[int], limit: int) -> bool:
        """Move W forward in a rank's order, in place, until its peak is within a limit; False where that cannot be."""
        live = k = 0
        while k < len(row):
            if live + self.change[row[k]] > limit:
                begun, later = set(row[:k]), range(k + 1, len(row))
                w = next((j for j in later if self.change[row[j]] < 0 and self.preds[row[j]][0][0] in begun), -1)
                if w < 0:
                    return False
                row.insert(k, row.pop(w))
            live += self.change[row[k]]
            k += 1
        return True

    def critical_path(self, orders: Orders, timing: Timing, numbers: Random) -> list[int]:
        """Return actions that follow each other without a gap up to the end, first to last; one of several by chance."""
        ends, times = timing.ends, self.times
        before = {y: x for row in orders for x, y in pairwise(row)}
        slack = 1e-9 * timing.makespan
        x = numbers.choice([row[-1] for row in orders if row and ends[row[-1]] >= timing.makespan - slack])
        path = [x]
        while True:
            reach = ends[x] - times[x] - slack
            tight = [y for y, lag in self.preds[x] if ends[y] + lag >= reach]
            if x in before and ends[before[x]] >= reach:
                tight.append(before[x])
            if not tight:
                return path[::-1]
            x = numbers.choice(tight)
            path.append(x)

    def deal(self, rule: Rule) -> Orders | None:
        """Make orders by list scheduling: whichever rank can start first takes what it prefers; None where it is stuck."""
        return _Deal(self, rule).run()


class _Deal:
    """The state of one list scheduling."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self.own = [[s for s, r in enumerate(problem.rank_of) if r == rank] for rank in range(problem.num_ranks)]
        self.ends = [-1.0] * len(problem.actions)
        self.following = {kind: [0] * problem.num_stages for kind in KINDS}  # next microbatch of each stage
        self.free, self.live = [0.0] * problem.num_ranks, [0] * problem.num_ranks
        self.orders: Orders = [[] for _ in self.own]

    def run(self) -> Orders | None:
        """Deal all actions."""
        problem = self.problem
        choice = [self.choose(rank) for rank in range(problem.num_ranks)]
        for _ in problem.actions:
            start, rank, x = min((c for c in choice if c), default=(0.0, 0, -1))
            if x < 0:
                return None
            action = problem.actions[x]
            self.ends[x] = self.free[rank] = start + problem.times[x]
            self.orders[rank].append(x)
            self.following[action.kind][action.stage] += 1
            self.live[rank] += problem.change[x]
            after = action.stage + {"F": 1, "I": -1, "W": 0}[action.kind]
            others = {problem.rank_of[after]} if 0 <= after < problem.num_stages else set()
            for changed in {rank} | others:
                choice[changed] = self.choose(changed)
        return self.orders

    def choose(self, rank: int) -> tuple[float, int, int] | None:
        """Return (start, rank, action) of what a rank would take next."""
        problem, rule, found = self.problem, self.rule, []
        for stage in self.own[rank]:
            for preference, kind in enumerate(rule.kinds):
                microbatch = self.following[kind][stage]
                if microbatch == problem.num_microbatches or (kind == "F" and not self.may_start(rank, stage)):
                    continue
                x = (KINDS.index(kind) * problem.num_stages + stage) * problem.num_microbatches + microbatch
                ready = self.free[rank]
                for y, lag in problem.preds[x]:
                    if self.ends[y] < 0:
                        break
                    ready = max(ready, self.ends[y] + lag)
                else:
                    depth = -stage if kind != "F" or rule.deepest_first else stage
                    found.append((ready, (preference, depth), x))
        if not found:
            return None
        start = min(found)[0]
        best = min((f for f in found if f[0] <= start), key=lambda f: f[1])
        if problem.actions[best[2]].kind == "W":
            until = start + rule.patience * problem.times[best[2]]
            best = min([f for f in found if start < f[0] < until and f[1] < best[1]], default=best)
        return best[0], rank, best[2]

    def may_start(self, rank: int, stage: int) -> bool:
        """Return whether a rank may take one more forward."""
        if self.live[rank] >= self.rule.limits[rank]:
            return False
        return stage > 0 or self.following["F"][0] - self.following["I"][0] < self.rule.in_flight
