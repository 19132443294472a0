"""When ranks ran the actions of a real step, on one clock, and what that says of a schedule."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from dtengine.mesh import Pipe
from dtengine.pipeline.actions import Action, Schedule, inputs, result
from dtengine.pipeline.partition import deal
from dtengine.pipeline.simulate import Costs, Event, Simulation, observed, simulate
from dtengine.torch_private import all_gather_flat


class Timeline:
    """Begin and end of each action of one rank's step.

    Times are of the machine's clock; ranks of several machines agree as well as their clocks do. On a GPU they are taken
    on its own stream, so that a rank that runs ahead of its GPU says nothing wrong.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []
        if self.on_gpu:
            torch.cuda.synchronize(device)
        self.origin, self.zero = time.time_ns(), self.mark()

    def mark(self) -> Any:
        """Return now."""
        if not self.on_gpu:
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Note when an action begins and ends, here and for a profiler that records."""
        begin = self.mark()
        with record_function(str(action)):
            yield
        self.marks.append((begin, self.mark()))

    def nanoseconds(self) -> Tensor:
        """Return [actions, 2] int64: begin and end of each."""
        if not self.on_gpu:
            return torch.tensor(self.marks, dtype=torch.int64).view(-1, 2)
        torch.cuda.synchronize()
        pairs = [[self.origin + round(1e6 * self.zero.elapsed_time(one)) for one in pair] for pair in self.marks]
        return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def gather_times(timeline: Timeline, schedule: Schedule, pipe: Pipe, device: torch.device) -> Simulation:
    """Return what all stages' ranks at this place of their meshes did, as the simulator tells it.

    Collectives:
        One small all-gather over the pipeline.
    """
    longest = max(sum(1 for _ in schedule.actions(rank)) for rank in range(schedule.num_ranks))
    mine = torch.zeros(longest, 2, dtype=torch.int64)
    times = timeline.nanoseconds()
    mine[: len(times)] = times
    table = all_gather_flat(mine.to(device), pipe.size, pipe.group).cpu().view(pipe.size, longest, 2)
    rows = [list(schedule.actions(rank)) for rank in range(schedule.num_ranks)]
    first = min(int(table[rank, 0, 0]) for rank in range(pipe.size))
    seconds = ((table - first).double() / 1e9).tolist()
    return observed(
        schedule, [[Event(a, *t) for a, t in zip(row, s, strict=False)] for row, s in zip(rows, seconds, strict=True)]
    )


def costs_of(schedule: Schedule, runs: Sequence[Simulation]) -> Costs:
    """Return what actions cost in real steps, in seconds: medians of each stage.

    A whole backward that never ran in halves counts as an input gradient. What a rank does between two actions though the
    second one's inputs are there (it posts messages) counts to each action. A transfer's time is what a rank waits for it
    behind the end of the action that made it.
    """
    found: dict[tuple[str, int], list[float]] = {}
    between: list[float] = []
    rank_of = schedule.rank_of
    for one in runs:
        ends = {result(event.action): event.end for row in one.events for event in row}
        for row in one.events:
            free = -math.inf
            for event in row:
                (stage, kind, _), start, end = event
                needs = [n for n in inputs(event.action, schedule.num_stages) if rank_of[n.stage] != rank_of[stage]]
                late = max(((ends[n], n.stage) for n in needs), default=(-math.inf, 0))
                found.setdefault((kind, stage), []).append(end - start)
                if -math.inf < late[0] <= free or (not needs and free > -math.inf):
                    between.append(start - free)
                elif needs:
                    found.setdefault(("send", late[1]), []).append(start - late[0])
                free = end
    more = statistics.median(between or [0.0])

    def middle(kind: str, stage: int) -> float:
        seen = found.get((kind, stage))
        return max(0.0, statistics.median(seen) + (0.0 if kind == "send" else more)) if seen else 0.0

    stages = range(schedule.num_stages)
    split = [("I", stage) in found for stage in stages]
    i = tuple(middle("I" if split[s] else "B", s) for s in stages)
    w = tuple(middle("W", s) if split[s] else 0.0 for s in stages)
    return Costs(tuple(middle("F", s) for s in stages), i, w, tuple(middle("send", s) for s in stages))


class Report(NamedTuple):
    """What some steps of a pipeline took, beside what the simulator finds for the costs that they had.

    Attributes:
        text: one line.
        markdown: the same, with the costs of each stage and the command that searches for a schedule for them.
        bubble, simulated: largest share of a rank, median of the steps.
    """

    text: str
    markdown: str
    bubble: float
    simulated: float


def report(schedule: Schedule, runs: Sequence[Simulation], layers: Sequence[int]) -> Report:
    """Sum up steps of a schedule whose stages have so many layers."""
    costs = costs_of(schedule, runs)
    table, expected = costs.per_stage(schedule.num_stages), simulate(schedule, costs)
    seconds = statistics.median(one.makespan for one in runs)
    bubble = statistics.median(one.bubble_share for one in runs)
    split = any(table["W"])
    kinds = {kind: table[kind] for kind in (("F", "I", "W", "send") if split else ("F", "B", "send"))}
    means = ", ".join(f"{kind} {1e3 * statistics.fmean(times):.2f}" for kind, times in kinds.items())
    text = (
        f"pipeline: {means} ms, mean over stages; all actions {1e3 * seconds:.1f} ms, simulated "
        f"{1e3 * expected.makespan:.1f}; bubble {bubble:.1%}, simulated {expected.bubble_share:.1%}"
    )
    lines = [f"| stage | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for stage in range(schedule.num_stages):
        lines.append(f"| {stage} | {' | '.join(f'{1e3 * times[stage]:.3f}' for times in kinds.values())} |")
    half = tuple(b / 2 for b in table["B"])
    searched = kinds if split else {**kinds, "I": half, "W": half}
    words = ["python -m dtengine.schedule --name auto"]
    words += [f"--pp {schedule.num_ranks} --microbatches {schedule.num_microbatches}"]
    for kind in ("F", "I", "W", "send"):
        words.append(f"--cost-{kind.lower()} {','.join(f'{1e3 * t:.3g}' for t in searched[kind])}")
    search = f"A schedule for these costs{'' if split else ', with B halved into I and W'}:\n\n    "
    search += " ".join([*words, "--csv mine.csv"])
    better = dealt_by_time([f + b for f, b in zip(table["F"], table["B"], strict=True)], layers)
    cut = f"Layers dealt by these times: --stage-layers {','.join(map(str, better))}" if better != tuple(layers) else ""
    markdown = "\n\n".join([text, "\n".join(lines), "Times in ms.", search, cut]) + "\n"
    return Report(text, markdown, bubble, expected.bubble_share)


def dealt_by_time(seconds: Sequence[float], layers: Sequence[int]) -> tuple[int, ...]:
    """Deal layers anew by what stages took: a layer costs the median over stages, the ends what they took beyond that.

    Args:
        seconds: of each stage for a microbatch, forward and backward.
        layers: that each has.
    """
    each = statistics.median([s / n for s, n in zip(seconds, layers, strict=True) if n] or [1.0])
    first, last = (max(0.0, seconds[end] - each * layers[end]) for end in (0, -1))
    return deal([each] * sum(layers), len(layers), first, last)
