"""What benchmarks share: ranks pinned to cores, two steps measured in alternation, a table and one JSON line."""

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dtengine.launch import start_ranks
from dtengine.ranks import launcher_environment, process_group

RunStep = Callable[[], float]  # runs one optimizer step and returns the loss that it read


class Comparison(NamedTuple):
    """Two steps measured in alternation.

    Attributes:
        peer_ms: median time of the peer's step, in milliseconds.
        ours_ms: median time of dtengine's.
        ratio: median over pairs of dtengine's time / the peer's.
        spread: interquartile range of those ratios.
        loss_difference: largest relative difference of the losses that were compared first.
    """

    peer_ms: float
    ours_ms: float
    ratio: float
    spread: float
    loss_difference: float


def on_ranks(function: Callable[..., Any], args: tuple[Any, ...], num_ranks: int) -> Any:
    """Run ``function(*args)`` on gloo ranks of one thread and one core each, and return rank 0's result.

    Args:
        function: gives something that JSON can carry.
        args: passed by fork, so anything goes.
        num_ranks: ranks on this machine; they share cores where there are too few.
    """
    with tempfile.TemporaryDirectory(prefix="dtengine-bench-") as folder:
        answer = Path(folder) / "answer.json"
        start_ranks(_rank, (function, args, answer), num_ranks, log_dir=None)
        return json.loads(answer.read_text())


def _rank(function: Callable[..., Any], args: tuple[Any, ...], answer: Path) -> None:
    environment = launcher_environment()
    assert environment is not None
    if hasattr(os, "sched_setaffinity"):  # before the group: gloo's threads inherit it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[environment.local_rank % len(cores)]})
    torch.set_num_threads(1)
    with process_group(environment, "gloo"):
        result = function(*args)
        dist.barrier()
        if environment.rank == 0:
            answer.write_text(json.dumps(result))


def check_losses(peer: RunStep, ours: RunStep, steps: int, tolerance: float) -> float:
    """Run some steps of both and return the largest relative difference of their losses, the same on all ranks.

    Raises:
        RuntimeError: it is above the tolerance: the two do not do the same work.
    """
    pairs = torch.tensor([(peer(), ours()) for _ in range(steps)], dtype=torch.float64)
    pairs /= dist.get_world_size()  # a data-parallel rank reads the loss of its own rows
    dist.all_reduce(pairs)
    difference = ((pairs[:, 0] - pairs[:, 1]).abs() / pairs[:, 0]).max().item()
    if not difference <= tolerance:
        raise RuntimeError(
            f"losses of {steps} steps differ by {difference:.1e} (peer, dtengine: {pairs.tolist()}), at most "
            f"{tolerance:.0e} is allowed; times of different work must not be compared."
        )
    return difference


def compare(peer: RunStep, ours: RunStep, pairs: int, steps: int = 3, tolerance: float = 1e-4) -> Comparison:
    """Check that two steps give equal losses, then time them in alternating order.

    A barrier comes before each step, and a step's time is that of the slowest rank.

    Args:
        pairs: how often each is timed.
        steps: steps of the check, which also warm both up.
        tolerance: largest relative difference of losses.
    """
    difference = check_losses(peer, ours, steps, tolerance)
    times = torch.zeros(pairs, 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                run = (peer, ours)[which]
                dist.barrier()
                began = time.perf_counter()
                run()
                times[pair, which] = time.perf_counter() - began
    finally:
        gc.enable()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ratios = (times[:, 1] / times[:, 0]).tolist()
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    peer_ms, ours_ms = (times.median(0).values * 1e3).tolist()
    return Comparison(peer_ms, ours_ms, statistics.median(ratios), high - low, difference)


def profile_beside(peer: RunStep, ours: RunStep, steps: int = 10, rows: int = 25) -> str:
    """Return a table of where dtengine's step goes beside the peer's: self CPU milliseconds and calls of one step.

    Operators are sorted by dtengine's self CPU time; the peer's own largest follow. This rank's main thread only:
    what gloo's threads do shows as time in a wait.
    """
    found: list[dict[str, tuple[float, float]]] = []
    for run in (ours, peer):
        run()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(steps):
                dist.barrier()
                run()
        events = [e for e in recorded.key_averages() if "barrier" not in e.key]
        found.append({e.key: (e.self_cpu_time_total / 1e3 / steps, e.count / steps) for e in events})
    first, second = found
    top = sorted(first, key=lambda k: -first[k][0])[:rows]
    top += [k for k in sorted(second, key=lambda k: -second[k][0])[:rows] if k not in top]
    none = (0.0, 0.0)
    lines = [("operator", "dtengine ms", "calls", "peer ms", "calls")]
    chosen = [(k, first.get(k, none), second.get(k, none)) for k in top]
    others = [_sum(v for k, v in side.items() if k not in top) for side in found]
    chosen.append(("(others)", others[0], others[1]))
    chosen.append(("(all)", _sum(first.values()), _sum(second.values())))
    lines += [(k[:60], f"{a[0]:.2f}", f"{a[1]:.0f}", f"{b[0]:.2f}", f"{b[1]:.0f}") for k, a, b in chosen]
    return table(lines)


def _sum(values: Iterable[tuple[float, float]]) -> tuple[float, float]:
    pairs = list(values)
    return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lay out lines as aligned columns, the first line as header; numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [all(_is_number(line[i]) for line in lines[1:]) for i in range(len(lines[0]))]

    def show(line: Sequence[str]) -> str:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([show(lines[0]), "  ".join("-" * w for w in widths), *map(show, lines[1:])])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
