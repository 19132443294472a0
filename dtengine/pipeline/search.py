"""Search for a schedule that suits given costs.

    auto(4, 8, Costs(f=(1, 1, 1, 1.6), i=(1, 1, 1, 1.9), w=(1, 1, 1, 1.3)), memory_limit=5)

It starts from every named schedule and from lists dealt by rules (depth of warm-up, memory, what goes first), and improves
the best by tabu search on the critical path, as for job shops: what shortens a schedule has to move an action of that path
to the front or to the end of its block, a run of neighbours on one rank (Nowicki and Smutnicki, 1996, "A Fast Taboo Search
Algorithm for the Job Shop Problem"). The result depends on the arguments alone: work is bounded by a count, not by a clock.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random
from typing import NamedTuple

from dtengine.pipeline.actions import Action, Schedule, loop_placement, v_placement
from dtengine.pipeline.orders import Orders, Problem, Rule
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make
from dtengine.pipeline.simulate import Costs
from dtengine.pipeline.steps import aligned

MOVES = 24  # neighbours that are timed before the search takes the best of them
PATIENCE = 60  # steps without a gain until it goes back
STARTS = 4  # best lists that are improved


class Found(NamedTuple):
    """Orders and how good they are: less is better, by makespan, then by memory."""

    makespan: float
    peak: int
    held: int
    problem: Problem
    orders: Orders

    @property
    def key(self) -> tuple[float, int, int]:
        """What is compared; sums in another order are no gain."""
        return float(f"{self.makespan:.12g}"), self.peak, self.held


def auto(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    memory_limit: int | None = None,
    chunks: int = 1,
    work: int = 4_000_000,
    named: Sequence[Schedule] | None = None,
) -> Schedule:
    """Return a schedule whose makespan is at most that of every named schedule with as many stages.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: of a step.
        costs: of the num_ranks * chunks stages.
        memory_limit: most live stage-microbatches of a rank.
        chunks: stages a rank.
        work: actions that are timed in all, about; the default takes 1 s, more may find better.
        named: schedules to start from; all of the table that have these stages by default.

    Raises:
        ValueError: a count below 1, a memory limit below the stages of a rank, or costs of other stages.
    """
    for option, value in (("--pp", num_ranks), ("--microbatches", num_microbatches), ("--chunks", chunks)):
        if value < 1:
            raise ValueError(f"{option} {value}: must be at least 1.")
    if memory_limit is not None and memory_limit < chunks:
        raise ValueError(
            f"--memory-limit {memory_limit}: a rank has {chunks} stages and holds each microbatch in all of them at once. "
            f"Allow at least {chunks}."
        )
    limit = num_microbatches * chunks if memory_limit is None else memory_limit
    if named is None:
        named = named_schedules(num_ranks, num_microbatches, chunks)
    placements = [loop_placement(num_ranks, chunks), *([v_placement(num_ranks)] if chunks == 2 else [])]
    placements += [s.rank_of for s in named]
    problems = {tuple(p): Problem(p, num_microbatches, costs) for p in placements}
    starts = []
    for schedule in named:
        problem = problems[schedule.rank_of]
        starts.append(_found(problem, problem.orders_of(schedule)))
    evaluations = work // max(1, 3 * num_ranks * chunks * num_microbatches)
    for problem in problems.values():
        share = evaluations // (2 * len(problems))
        for rule in _rules(problem, limit, share // 8):  # dealing a list takes as long as timing eight
            orders = problem.deal(rule)
            starts.append(_found(problem, orders) if orders else None)
    fitting = {f.key: f for f in reversed(starts) if f and f.peak <= limit}  # alike ones count once
    best = sorted(fitting.values(), key=lambda f: f.key)[:STARTS]
    if best[0].makespan > best[0].problem.bound * (1 + 1e-9):
        best = [_improve(found, limit, evaluations // 2 // len(best)) for found in best]
    return _to_schedule(min(best, key=lambda f: f.key))


def named_schedules(num_ranks: int, num_microbatches: int, chunks: int) -> list[Schedule]:
    """Return the named schedules that have that many stages a rank."""
    return [
        make(name, num_ranks, num_microbatches, chunks)
        for name in SCHEDULES
        if FIXED_CHUNKS.get(name, chunks) == chunks
    ]


def _found(problem: Problem, orders: Orders) -> Found | None:
    timing = problem.time(orders)
    if timing is None:
        return None
    peaks = [problem.peak(row) for row in orders]
    return Found(timing.makespan, max(peaks), sum(peaks), problem, orders)


def _rules(problem: Problem, limit: int, most: int) -> Iterator[Rule]:
    """Yield rules, no more than asked for: warm-ups as deep as those of the named schedules, each with every preference.

    The first is one microbatch after another, which any memory limit allows.
    """
    ranks, m = problem.num_ranks, problem.num_microbatches
    chunks = problem.num_stages // ranks
    yield Rule("IFW", True, 0.0, (chunks,) * ranks, 1)
    depths = {}
    for base, slope in product((1, ranks, 0, 2 * ranks, ranks // 2 + 1, ranks // 3 + 1), (1, 0, 2)):
        limits = tuple(
            max(chunks, min(limit, m * chunks, chunks * base + slope * (ranks - 1 - rank))) for rank in range(ranks)
        )
        depths[limits] = max(1, min(m, max(limits) // chunks))
    depths[(min(limit, m * chunks),) * ranks] = m
    preferences = list(product(("IFW", "FIW", "IWF"), (True, False) if chunks > 1 else (True,), (0.0, 0.5, 1.0)))
    rules = [Rule(*p, limits, flight) for p in preferences for limits, flight in depths.items()]
    if chunks > 1:
        rules += [rule._replace(in_flight=m) for rule in rules if rule.in_flight < m]
    step = max(1, -(-len(rules) // max(1, most)))
    yield from rules[::step]


def _improve(found: Found, limit: int, evaluations: int) -> Found:
    """Tabu search: take the best neighbour, better or not, never the same orders twice.

    Moves that leave the makespan are ordered by the sum of the ranks' ends. After many without a gain, go back to the best
    and shuffle a little.
    """
    problem, best, orders = found.problem, found, found.orders
    numbers = Random(0)
    seen, used, idle = {_key(orders)}, 0, 0
    timing = problem.time(orders)
    while timing and used < evaluations and best.makespan > problem.bound * (1 + 1e-9):
        moves = list(_moves(problem, orders, problem.critical_path(orders, timing, numbers), numbers))
        neighbours = []
        for move in moves if len(moves) <= MOVES else numbers.sample(moves, MOVES):
            used += 1
            new = _moved(problem, orders, move, limit)
            if new is None or (key := _key(new)) in seen:
                continue
            new_timing = problem.time(new)
            if new_timing:
                ends = sum(new_timing.ends[row[-1]] for row in new if row)
                neighbours.append((float(f"{new_timing.makespan:.12g}"), ends, len(neighbours), new, key, new_timing))
        used += 1
        idle += 1
        if neighbours and idle <= PATIENCE:
            _, _, _, orders, key, timing = min(neighbours)
            seen.add(key)
            new_best = _found(problem, orders)
            if new_best and new_best.key < best.key:
                best, idle = new_best, 0
        else:
            orders, idle = best.orders, 0
            for _ in range(numbers.randrange(1, 5)):
                rank = numbers.randrange(problem.num_ranks)
                size = len(orders[rank])
                move = rank, numbers.randrange(size), numbers.randrange(size)
                new = _moved(problem, orders, move, limit)
                orders = new if new and problem.time(new) else orders
            timing = problem.time(orders)
    return best


def _moved(problem: Problem, orders: Orders, move: tuple[int, int, int], limit: int) -> Orders | None:
    """Return orders with an action moved, and W where memory wants it; None where memory does not suffice."""
    rank, source, target = move
    row = orders[rank][:]
    row.insert(target, row.pop(source))
    if problem.peak(row) > limit and not problem.repair(row, limit):
        return None
    return [*orders[:rank], row, *orders[rank + 1 :]]


def _moves(problem: Problem, orders: Orders, path: list[int], numbers: Random) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, from, to): actions of a block of the critical path to its front or end, and a few W anywhere."""
    place = {x: k for row in orders for k, x in enumerate(row)}
    blocks = [[path[0]]]
    for x, y in pairwise(path):
        if problem.rank[x] == problem.rank[y] and place[y] == place[x] + 1:
            blocks[-1].append(y)
        else:
            blocks.append([y])
    for block in blocks:
        rank, first, last = problem.rank[block[0]], place[block[0]], place[block[-1]]
        for k in range(first, last + 1):
            if k > first:
                yield rank, k, first
            if k < last - 1 or (k == last - 1 and k > first):  # of two, one exchange
                yield rank, k, last
        weights = [place[x] for x in block if problem.actions[x].kind == "W"]
        if weights:
            yield rank, numbers.choice(weights), numbers.randrange(len(orders[rank]))


def _key(orders: Orders) -> int:
    return hash(tuple(map(tuple, orders)))


def _to_schedule(found: Found) -> Schedule:
    """Return orders as a schedule, with I and W as one B where that delays nothing."""
    problem = found.problem
    timing = problem.time(found.orders)
    assert timing is not None
    starts = [end - time for end, time in zip(timing.ends, problem.times, strict=True)]

    def joined(i: int, w: int) -> bool:
        stage, kind, microbatch = problem.actions[i]
        if kind != "I" or problem.actions[w] != Action(stage, "W", microbatch):
            return False
        if stage == 0:
            return True
        reader = problem.number[Action(stage - 1, "I", microbatch)]
        lag = dict(problem.preds[reader])[i]
        return timing.ends[w] + lag <= starts[reader] + 1e-12 * timing.makespan

    ranks: list[list[Action]] = []
    for row in found.orders:
        cells: list[Action] = []
        for i, w in pairwise([*row, -1]):
            if cells and problem.actions[i].kind == "W" and cells[-1] == problem.actions[i]._replace(kind="B"):
                continue
            fused = w >= 0 and joined(i, w)
            cells.append(problem.actions[i]._replace(kind="B") if fused else problem.actions[i])
        ranks.append(cells)
    return aligned("auto", ranks, problem.rank_of, problem.num_microbatches)
