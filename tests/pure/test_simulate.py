"""The simulator of schedules: times, memory and deadlocks against an event loop and a count by time; published figures."""

import heapq
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtengine.pipeline.actions import Action, Schedule, make_schedule
from dtengine.pipeline.formulas import FORMULAS, Setting
from dtengine.pipeline.orders import Problem
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make
from dtengine.pipeline.simulate import Costs, simulate

COST = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])  # sums of these are exact


@st.composite
def schedules(draw: st.DrawFn, overlap: bool = True, blocked: bool = True) -> Schedule:
    """Any placement of stages, backwards split or not, in an order in which they can run; pairs that overlap, and ranks
    whose order is shuffled, may then wait for ever."""
    num_ranks = draw(st.integers(1, 4))
    rank_of = draw(st.permutations([*range(num_ranks), *draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))]))
    num_stages, microbatches = len(rank_of), draw(st.integers(1, 4))
    chains = []
    for k in range(microbatches):
        back = [(s, draw(st.booleans())) for s in reversed(range(num_stages))]
        chains.append(
            [Action(s, "F", k) for s in range(num_stages)] + [Action(s, "I" if split else "B", k) for s, split in back]
        )
    rows: list[list[list[Action]]] = [[] for _ in range(num_ranks)]
    late: list[Action] = []
    while any(chains) or late:
        choices = [c for c in chains if c]
        pick = draw(st.integers(0, len(choices) + len(late) - 1))
        action = choices[pick].pop(0) if pick < len(choices) else late.pop(pick - len(choices))
        if action.kind == "I":
            late.append(action._replace(kind="W"))
        rows[rank_of[action.stage]].append([action])
    if overlap:
        for row in rows:
            for k, (a, b) in reversed(list(enumerate(pairwise(row)))):
                if (
                    {a[0].kind, b[0].kind} == {"F", "B"}
                    and k + 1 < len(row)
                    and len(row[k + 1]) == 1
                    and draw(st.booleans())
                ):
                    row[k : k + 2] = [[*a, *b]]
    if blocked and draw(st.booleans()):
        rank = draw(st.integers(0, num_ranks - 1))
        rows[rank] = draw(st.permutations(rows[rank]))
    return make_schedule("drawn", [[None, *row] for row in rows], rank_of, microbatches)


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int, cost: st.SearchStrategy[float] = COST) -> Costs:
    def one():
        return draw(st.one_of(cost, st.tuples(*[cost] * num_stages)))

    return Costs(one(), one(), one(), one())


def at(cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


def event_loop(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], tuple[float, float]]:
    """Run a schedule by a clock: {(rank, cell): (start, end)} of all cells that run."""
    rows = [[cell for cell in row if cell] for row in schedule.ranks]
    here: list[set[tuple[str, int, int]]] = [
        set() for _ in rows
    ]  # what each rank has: outputs (F), gradients (G) of stages
    next_cell, busy, ran = [0] * len(rows), [False] * len(rows), {}
    clock: list[tuple[float, int, int, tuple]] = []  # (time, serial, rank, what happens)
    serial = 0
    last = schedule.num_stages - 1

    def start(rank: int, now: float) -> None:
        nonlocal serial
        if busy[rank] or next_cell[rank] == len(rows[rank]):
            return
        cell, time = rows[rank][next_cell[rank]], 0.0
        for s, kind, k in cell:
            needs = {("F", s - 1, k)} if kind == "F" and s else set()
            if kind in "IB":
                needs = {("F", s, k)} | ({("G", s + 1, k)} if s < last else set())
            if kind == "W":
                needs = {("G", s, k)}
            if not needs <= here[rank]:
                return
            time += {"F": at(costs.f, s), "I": at(costs.i, s), "W": at(costs.w, s)}.get(
                kind, at(costs.i, s) + at(costs.w, s)
            )
        busy[rank], ran[rank, next_cell[rank]] = True, (now, now + time)
        serial += 1
        heapq.heappush(clock, (now + time, serial, rank, ("end",)))

    for rank in range(len(rows)):
        start(rank, 0.0)
    while clock:
        now, _, rank, what = heapq.heappop(clock)
        if what[0] == "end":
            for s, kind, k in rows[rank][next_cell[rank]]:
                if kind == "W":
                    continue
                made = ("F" if kind == "F" else "G", s, k)
                here[rank].add(made)
                to = s + (1 if kind == "F" else -1)
                if 0 <= to <= last and schedule.rank_of[to] != rank:
                    serial += 1
                    heapq.heappush(clock, (now + at(costs.send, s), serial, schedule.rank_of[to], ("arrive", made)))
            busy[rank] = False
            next_cell[rank] += 1
        else:
            here[rank].add(what[1])
        start(rank, now)
    return ran


@given(st.data())
def test_times_are_those_of_an_event_loop(data):
    """Start and end of every action, makespan, and who gets stuck, for any placement, order, overlap and costs."""
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.num_stages))
    simulation = simulate(schedule, costs)
    ran = event_loop(schedule, costs)
    for rank, row in enumerate(schedule.ranks):
        cells, events = [cell for cell in row if cell], list(simulation.events[rank])
        for k, cell in enumerate(cells):
            if (rank, k) not in ran:
                break
            own = [events.pop(0) for _ in cell]
            assert [e.action for e in own] == list(cell)
            assert (own[0].start, own[-1].end) == ran[rank, k]
            assert all(a.end == b.start for a, b in pairwise(own))
        assert not events
    everything = sum(1 for row in schedule.ranks for cell in row if cell)
    assert (simulation.deadlock is None) == (len(ran) == everything)
    times = list(ran.values())
    assert simulation.makespan == (max(e for _, e in times) - min(s for s, _ in times) if times else 0.0)
    for rank, figures in enumerate(simulation.ranks):
        own = [times for (r, _), times in ran.items() if r == rank]
        busy = sum(end - start for start, end in own)
        assert figures.busy == busy
        assert figures.bubble == (max(e for _, e in own) - min(s for s, _ in own) - busy if own else 0.0)


@given(st.data())
def test_memory_is_what_a_count_by_time_gives(data):
    """At the middle of every action: activations between start of F and end of W or B, gradients between I and W."""
    schedule = data.draw(schedules(overlap=False, blocked=False))
    costs = data.draw(costs_of(schedule.num_stages, st.sampled_from([0.5, 1.0, 2.0])))
    sizes = [float(2**s) for s in range(schedule.num_stages)]
    simulation = simulate(schedule, costs, sizes)
    assert simulation.deadlock is None
    for rank, events in enumerate(simulation.events):
        when = {e.action: e for e in events}
        live, size, waiting = [0], [0.0], [0]
        for event in events:
            middle = (event.start + event.end) / 2
            held = []
            for (s, kind, k), forward in when.items():
                end = when.get(Action(s, "W", k)) or when.get(Action(s, "B", k))
                if kind == "F" and end and forward.start < middle < end.end:
                    held.append(s)
            live.append(len(held))
            size.append(sum(sizes[s] for s in held))
            waiting.append(
                sum(
                    1
                    for (s, kind, k), inner in when.items()
                    if kind == "I" and inner.end < middle < when[Action(s, "W", k)].end
                )
            )
            after = [
                a for a, e in when.items() if a.kind == "I" and e.end <= event.end < when[a._replace(kind="W")].end
            ]
            waiting.append(len(after))
        figures = simulation.ranks[rank]
        assert (figures.peak_live, figures.peak_size, figures.peak_waiting) == (max(live), max(size), max(waiting))


@given(st.data())
def test_split_orders_are_timed_alike(data):
    """The search's own timing of a split schedule is the simulator's, and no schedule is faster than the bound."""
    schedule = data.draw(schedules(overlap=False))
    costs = data.draw(costs_of(schedule.num_stages))
    problem = Problem(schedule.rank_of, schedule.num_microbatches, costs)
    orders = problem.orders_of(schedule)
    split = make_schedule(
        "split", [[problem.actions[x] for x in row] for row in orders], schedule.rank_of, schedule.num_microbatches
    )
    timing, simulation = problem.time(orders), simulate(split, costs)
    assert (timing is None) == (simulation.deadlock is not None)
    if timing:
        assert timing.makespan == max(row[-1].end for row in simulation.events)
        assert timing.makespan >= problem.bound - 1e-9
        assert tuple(problem.peak(row) for row in orders) == simulation.peak_live
        assert timing.makespan <= max(e.end for row in simulate(schedule, costs).events for e in row)


EXACT = ["gpipe", "1f1b", "interleaved", "loopedbfs", "zb-h1", "zb-h2"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.25, 0.75), (2, 1.5, 0.5), (1, 2, 0.25)])
def test_published_figures(name, times):
    """Bubble of the slowest rank and its share, and peak of live activations, for 1 to 9 ranks."""
    for p in range(1, 10):
        for rounds in (2, 3):
            m = rounds * p
            chunks = FIXED_CHUNKS.get(name, 2)
            schedule = make(name, p, m, FIXED_CHUNKS.get(name))
            simulation = simulate(schedule, Costs(*times))
            formula, setting = FORMULAS[name], Setting(p, m, chunks, *times)
            bubble = formula.bubble(setting)
            if bubble is not None and bubble >= 0:
                assert simulation.bubble == pytest.approx(bubble), (p, m)
                work = m * chunks * sum(times)
                assert simulation.bubble_share == pytest.approx(bubble / (bubble + work))
            assert max(simulation.peak_live) == formula.memory(setting), (p, m)
            if name in ("gpipe", "1f1b") and times == (1, 1, 1):
                assert simulation.bubble_share == pytest.approx((p - 1) / (m + p - 1))
            if name == "1f1b":
                assert all(live <= p - rank for rank, live in enumerate(simulation.peak_live))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 16])
def test_published_figures_of_v_shapes(p):
    """At equal costs: zbv without bubble at 1F1B's memory; v-half half of its bubble at about half its memory; v-min two
    thirds of it and a constant at a third; dualpipev as DualPipe."""
    m, equal = 2 * p + 1, Costs()
    found = {name: simulate(make(name, p, m), equal) for name in ("zbv", "v-half", "v-min", "dualpipev")}
    whole = 2 * simulate(make("1f1b", p, m), equal).bubble  # of ranks as deep as two of these stages
    live = {name: max(s.peak_live) / 2 for name, s in found.items()}
    assert (found["zbv"].bubble, live["zbv"]) == (0, p)
    assert found["v-half"].bubble <= whole / 2 + 2 and live["v-half"] <= (p + 2) // 2
    assert found["v-min"].bubble <= whole * 2 / 3 + 2 and live["v-min"] <= max(2, (p + 4) // 3)
    setting = Setting(p, m, 2, 1, 1, 1)
    assert found["dualpipev"].bubble == FORMULAS["dualpipev"].bubble(setting)
    assert max(found["dualpipev"].peak_live) == FORMULAS["dualpipev"].memory(setting)


def test_every_schedule_has_a_formula_or_is_known_to_have_none():
    assert set(SCHEDULES) - set(FORMULAS) == {"interleaved-zb"}
    assert all("arXiv:" in formula.source for formula in FORMULAS.values())


def test_a_gradient_leaves_a_fused_backward_at_its_end():
    """Split, the stage before starts after I; fused, after W. A send delays between ranks only."""
    fused = make_schedule(
        "fused", [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], (0, 1), 1
    )
    split = make_schedule(
        "split",
        [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)]],
        (0, 1),
        1,
    )
    costs = Costs(1, 2, 4, 0.5)
    assert [simulate(s, costs).makespan for s in (fused, split)] == [
        1 + 0.5 + 1 + 6 + 0.5 + 6,
        1 + 0.5 + 1 + 2 + 0.5 + 6,
    ]
    (forward, back) = simulate(fused, costs).transfers
    assert (forward[1:], back[1:]) == ((0, 1, 1, 1.5), (1, 0, 8.5, 9.0))
    alone = make_schedule(
        "alone", [[Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]], (0, 0), 1
    )
    assert simulate(alone, costs).makespan == 14


def test_a_deadlock_says_who_waits_for_whom():
    crossed = make_schedule(
        "crossed", [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], (0, 1), 1
    )
    assert list(map(str, simulate(crossed, Costs()).deadlock or ())) == [
        "rank 0 waits in 0B0 for 0F0, of rank 0",
        "rank 1 waits in 1F0 for 0F0, of rank 0",
    ]
    absent = make_schedule("absent", [[], [Action(1, "F", 0), Action(1, "B", 0)]], (0, 1), 1)
    assert list(map(str, simulate(absent, Costs()).deadlock or ())) == [
        "rank 1 waits in 1F0 for 0F0, which no rank runs"
    ]


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_costs_of_other_stages_are_of_the_same_model(num_parts, num_stages, data):
    costs = data.draw(costs_of(num_parts))
    cut = costs.split(num_parts, num_stages)
    for kind in "FIW":
        before, after = costs.per_stage(num_parts)[kind], cut.per_stage(num_stages)[kind]
        assert math.fsum(before) == pytest.approx(math.fsum(after))
    assert set(cut.per_stage(num_stages)["send"]) <= set(costs.per_stage(num_parts)["send"])
    same = costs.split(num_parts, num_parts).per_stage(num_parts)
    assert all(values == pytest.approx(same[kind]) for kind, values in costs.per_stage(num_parts).items())


def test_costs_that_do_not_fit_are_refused():
    schedule = make("1f1b", 3, 2)
    for costs, message in (
        (Costs(f=(1.0, 2.0)), "--cost-f: 2 numbers for 3 stages. Give one number, or one for each stage."),
        (Costs(w=(1.0, -2.0, math.nan)), "--cost-w: -2.0, nan. A cost is a number of at least 0."),
    ):
        with pytest.raises(ValueError) as error:
            simulate(schedule, costs)
        assert str(error.value) == message
    with pytest.raises(ValueError, match="sizes: 1 numbers for 3 stages"):
        simulate(schedule, Costs(), [1.0])
