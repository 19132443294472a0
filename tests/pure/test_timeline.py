"""What a real step says of its schedule: costs from times, and which messages are known to be read."""

from __future__ import annotations

import random

import pytest

from dtengine.pipeline.actions import Action
from dtengine.pipeline.communication import acknowledged, receiver, transfers
from dtengine.pipeline.schedules import SCHEDULES, make
from dtengine.pipeline.simulate import Costs, observed, simulate
from dtengine.pipeline.timeline import costs_of, dealt_by_time, report
from dtengine.step_trace import merged

COSTS = Costs(f=(2.0, 3.0, 1.0, 4.0), i=(2.0, 1.0, 3.0, 2.5), w=(1.0, 2.0, 0.5, 1.5), send=0.25)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_simulated_is_observed_again(name: str) -> None:
    """Times of a simulated run give its costs back, and these the same run."""
    schedule = make(name, 2, 5)
    costs = COSTS if schedule.num_stages == 4 else Costs(COSTS.f[:2], COSTS.i[:2], COSTS.w[:2], 0.25)  # type: ignore[index]
    ran = simulate(schedule, costs)
    seen = observed(schedule, ran.events)
    assert (seen.makespan, seen.ranks) == (ran.makespan, ran.ranks)
    assert {m.action for m in seen.transfers} == {m.action for m in ran.transfers}
    again = simulate(schedule, costs_of(schedule, [seen, seen]))
    assert again.makespan == pytest.approx(ran.makespan)
    assert again.bubble_share == pytest.approx(ran.bubble_share)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_known_to_be_read_has_been_read(name: str, ranks: int) -> None:
    """Whatever order ranks really take, a send that a receive acknowledges was received before; none is named twice."""
    schedule = make(name, ranks, 5)
    lists = transfers(schedule)
    known = [acknowledged(lists, schedule.rank_of, rank) for rank in range(ranks)]
    numbers, reached = random.Random(0), [0] * ranks
    sent: set[Action] = set()
    used: set[Action] = set()
    named: list[Action] = []
    while any(reached[r] < len(lists[r]) for r in range(ranks)):
        rank = numbers.choice([r for r in range(ranks) if reached[r] < len(lists[r])])
        action = lists[rank][reached[rank]]
        if action.kind.startswith("RECV"):
            send = next(
                s for s in (a for row in lists for a in row) if s.kind.startswith("SEND") and receiver(s) == action
            )
            if send not in sent:
                continue
            used.add(send)
            for one in known[rank].get(action, ()):
                assert one in used
                named.append(one)
        if action.kind.startswith("SEND"):
            sent.add(action)
        reached[rank] += 1
    assert len(named) == len(set(named))
    if name == "1f1b":  # all but what nobody answers
        assert len(sent) - len(named) <= ranks * ranks


def test_traces_of_ranks_become_one() -> None:
    """Each rank becomes a process, its times moved to one base; what is the profiler's own is dropped."""

    def trace(base: int, at: float) -> dict:
        meta = {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}}
        span = {"ph": "X", "name": "PyTorch Profiler", "pid": "Spans", "ts": 0, "dur": 9}
        ran = {"ph": "X", "name": "2F0", "pid": 7, "tid": 7, "ts": at, "dur": 2.0}
        return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": [meta, span, ran]}

    whole = merged([trace(5_000, 10.0), trace(3_000, 20.0)])
    ran = [(e["pid"], e["ts"]) for e in whole["traceEvents"] if e["name"] == "2F0"]
    assert ran == [(0, 0.0), (1, 8.0)] and whole["baseTimeNanoseconds"] == 3_000
    names = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"] and all(e["name"] != "PyTorch Profiler" for e in whole["traceEvents"])


def test_layers_are_dealt_by_measured_times() -> None:
    """A head that takes as long as two layers gets two fewer, and the report says so, and how to search."""
    assert dealt_by_time([4.0, 4.0, 4.0, 6.0], [4, 4, 4, 4]) == (5, 5, 5, 1)
    schedule = make("zb-h1", 2, 4)
    found = report(schedule, [simulate(schedule, Costs(f=(1.0, 2.0), i=(1.0, 2.0), w=(1.0, 2.0)))], [3, 3])
    assert "--stage-layers 4,2" in found.markdown or "--stage-layers 5,1" in found.markdown
    assert "--name auto --pp 2 --microbatches 4 --cost-f 1e+03,2e+03" in found.markdown
    assert found.bubble == pytest.approx(found.simulated)
