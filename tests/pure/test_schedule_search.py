"""The search for a schedule: never worse than the named ones, better on stated costs, and near what is possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtengine.pipeline.actions import loop_placement, v_placement
from dtengine.pipeline.check import check
from dtengine.pipeline.orders import Problem
from dtengine.pipeline.search import auto, named_schedules
from dtengine.pipeline.simulate import Costs, simulate

COST = st.one_of(st.floats(0.05, 4.0), st.sampled_from([0.0, 1.0]))


def best_named(num_ranks: int, num_microbatches: int, costs: Costs, chunks: int, limit: int | None = None) -> float:
    """Return the least makespan of the named schedules that fit the limit."""
    found = [simulate(s, costs) for s in named_schedules(num_ranks, num_microbatches, chunks)]
    return min((s.makespan for s in found if limit is None or max(s.peak_live) <= limit), default=float("inf"))


@given(st.data())
def test_never_worse_than_a_named_schedule(data):
    """For any costs, ranks, microbatches, stages a rank and memory limit; the result is valid and within the limit."""
    p, m, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    cost = st.one_of(COST, st.tuples(*[COST] * (p * chunks)))
    costs = Costs(*(data.draw(cost) for _ in range(4)))
    limit = data.draw(st.one_of(st.none(), st.integers(chunks, 2 * p * chunks)))
    schedule = auto(p, m, costs, limit, chunks, work=100_000)
    assert check(schedule) == []
    assert (schedule.num_stages, schedule.num_microbatches) == (p * chunks, m)
    simulation = simulate(schedule, costs)
    assert simulation.makespan <= best_named(p, m, costs, chunks, limit) * (1 + 1e-9) + 1e-12
    assert limit is None or max(simulation.peak_live) <= limit


HEAVY_HEAD = Costs(f=(1, 1, 1, 1.6), i=(1, 1, 1, 1.9), w=(1, 1, 1, 1.3))
STATED = {  # what a rank's part of the model takes on 4 ranks, and the most microbatches of it that a rank may hold
    "a heavy head on the last stage": (HEAVY_HEAD, 4),
    "a heavy head, memory free": (HEAVY_HEAD, None),
    "sends of half a forward": (Costs(1, 1.2, 0.8, 0.5), 6),
    "sends longer than a forward": (Costs(1, 1.2, 0.8, 1.5), 4),
    "sends longer than a forward, memory free": (Costs(1, 1.2, 0.8, 1.5), None),
    "F : I : W as 1 : 2 : 0.3, as with recomputation": (Costs(1, 2, 0.3), None),
    "F : I : W as 1 : 2 : 0.3, 6 microbatches": (Costs(1, 2, 0.3), 6),
}


@pytest.mark.parametrize("name", STATED)
def test_better_than_every_named_schedule(name):
    """On 4 ranks with 8 microbatches the best of one and two stages a rank beats all named schedules on the same model."""
    costs, microbatches = STATED[name]
    named, ours = [], []
    for chunks in (1, 2):
        own = costs.split(4, 4 * chunks)
        limit = None if microbatches is None else microbatches * chunks
        named.append(best_named(4, 8, own, chunks, limit))
        simulation = simulate(auto(4, 8, own, limit, chunks, work=2_000_000), own)
        assert limit is None or max(simulation.peak_live) <= limit
        ours.append(simulation.makespan)
    assert min(ours) < min(named) * 0.999, (ours, named)


def test_the_result_follows_from_the_arguments():
    costs = Costs(1, 2, 0.3, 0.4)
    assert auto(3, 5, costs, 4, work=200_000) == auto(3, 5, costs, 4, work=200_000)


def optimum(rank_of: tuple[int, ...], m: int, costs: Costs, limit: int) -> float:
    """Return the least makespan by trying all orders, microbatches in turn in each stage.

    Actions are added by time, so that each set of orders is met once; a branch ends where the work that is left does not
    fit before the best found.
    """
    num_stages, num_ranks = len(rank_of), max(rank_of) + 1
    table = costs.per_stage(num_stages)
    best = float("inf")
    left = [m * sum(table[k][s] for k in "FIW" for s in range(num_stages) if rank_of[s] == r) for r in range(num_ranks)]
    count = {(k, s): 0 for k in "FIW" for s in range(num_stages)}
    ends: dict[tuple[str, int, int], float] = {}
    free, live = [0.0] * num_ranks, [0] * num_ranks

    def lag(a: int, b: int) -> float:
        return 0.0 if rank_of[a] == rank_of[b] else table["send"][a]

    def ready(kind: str, s: int, k: int) -> float | None:
        needs = [] if kind != "F" or s == 0 else [("F", s - 1, k, lag(s - 1, s))]
        if kind == "I":
            needs = [("F", s, k, 0.0)] + ([("I", s + 1, k, lag(s + 1, s))] if s + 1 < num_stages else [])
        if kind == "W":
            needs = [("I", s, k, 0.0)]
        if any((a, b, c) not in ends for a, b, c, _ in needs):
            return None
        return max([free[rank_of[s]], *(ends[a, b, c] + d for a, b, c, d in needs)])

    def add(now: float, last: int) -> None:
        nonlocal best
        if sum(count.values()) == 3 * num_stages * m:
            best = min(best, max(free))
            return
        for s in range(num_stages):
            r = rank_of[s]
            for kind in "IFW":
                k = count[kind, s]
                if k == m or (kind == "F" and live[r] == limit):
                    continue
                start = ready(kind, s, k)
                if start is None or (start, r) < (now, last):
                    continue
                if any(max(start if q == r else now, free[q]) + left[q] >= best - 1e-9 for q in range(num_ranks)):
                    continue
                before, time, change = free[r], table[kind][s], {"F": 1, "I": 0, "W": -1}[kind]
                ends[kind, s, k] = free[r] = start + time
                count[kind, s] += 1
                left[r] -= time
                live[r] += change
                add(start, r)
                del ends[kind, s, k]
                free[r] = before
                count[kind, s] -= 1
                left[r] += time
                live[r] -= change

    add(0.0, 0)
    return best


@pytest.mark.parametrize(
    ("rank_of", "m", "limit"),
    [
        ((0, 1), 3, 3),
        ((0, 1), 3, 2),
        ((0, 1), 3, 1),
        ((0, 1, 2), 2, 2),
        (v_placement(2), 2, 3),
        (loop_placement(2, 2), 2, 4),
    ],
)
@pytest.mark.parametrize(
    "costs", [Costs(1, 2, 0.3, 0.4), Costs(1, 1.2, 0.8, 1.5), Costs(1, 1, 2, 0), Costs(2, 1, 1, 0.1)]
)
def test_small_cases_are_solved(rank_of, m, limit, costs):
    """The search finds the optimum of all orders, and the bound is not above it."""
    chunks, p = len(rank_of) // (max(rank_of) + 1), max(rank_of) + 1
    least = optimum(rank_of, m, costs, limit)
    assert Problem(rank_of, m, costs).bound <= least + 1e-9
    found = simulate(auto(p, m, costs, limit, chunks, work=400_000), costs).makespan
    assert found <= least + 1e-9
    if chunks == 1:
        assert found == pytest.approx(least)


REFUSED = {
    "--pp 0: must be at least 1.": lambda: auto(0, 4, Costs()),
    "--chunks 0: must be at least 1.": lambda: auto(2, 4, Costs(), chunks=0),
    "--memory-limit 1: a rank has 2 stages and holds each microbatch in all of them at once. Allow at least 2.": lambda: (
        auto(2, 4, Costs(), memory_limit=1, chunks=2)
    ),
    "--cost-f: 3 numbers for 2 stages. Give one number, or one for each stage.": lambda: auto(2, 4, Costs(f=(1, 2, 3))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message
