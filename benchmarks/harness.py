"""What benchmarks share: ranks pinned to cores, two steps measured in alternation, a table and one JSON line."""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from dtengine.launch import RankFailed, start_ranks
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
        try:
            start_ranks(_rank, (function, args, answer), num_ranks, log_dir=None)
        except RankFailed as failure:
            print(failure.traceback, file=sys.stderr)
            raise
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

    Args:
        pairs: how often each is timed.
        steps: steps of the check, which also warm both up.
        tolerance: largest relative difference of losses.
    """
    difference = check_losses(peer, ours, steps, tolerance)
    times = time_in_turn([peer, ours], pairs)
    ratios = (times[:, 1] / times[:, 0]).tolist()
    peer_ms, ours_ms = (times.median(0).values * 1e3).tolist()
    return Comparison(peer_ms, ours_ms, statistics.median(ratios), spread(ratios), difference)


def time_in_turn(runs: Sequence[RunStep], rounds: int) -> Tensor:
    """Time steps in turn, each round in the opposite order of the one before.

    A barrier comes before each step, and a step's time is that of the slowest rank.

    Returns:
        [rounds, len(runs)] float64, seconds, the same on all ranks.
    """
    times = torch.zeros(rounds, len(runs), dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for which in range(len(runs)) if number % 2 == 0 else reversed(range(len(runs))):
                dist.barrier()
                began = time.perf_counter()
                runs[which]()
                times[number, which] = time.perf_counter() - began
    finally:
        gc.enable()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range; 0 of a single value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (0.0, 0.0, 0.0)
    return high - low


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


# --- memory ---------------------------------------------------------------------------------------------------------


def count_memory() -> None:
    """Have torch's CPU allocator count the bytes of all tensors that are allocated from now on, in all threads.

    The profiler switches that on for one thread and its own time alone, but gloo's threads free tensors too. The switch
    is a flag of c10 that Python has no name for.
    """
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _levels(run: Callable[[], object]) -> list[int]:
    """Return the bytes that live tensors hold after each allocation and release of ``run``, in order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    waiting = list(recorded.profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.total_allocated))  # type: ignore[attr-defined]
    return [level for _, level in sorted(found, key=lambda e: e[0])]


def live_bytes() -> int:
    """Return the bytes that live tensors hold which were allocated since ``count_memory``."""
    return _levels(lambda: torch.empty(1, dtype=torch.uint8))[0] - 1


def peak_bytes(run: Callable[[], object]) -> int:
    """Return how far the bytes of live CPU tensors rise, while ``run`` runs, above what they are before.

    From the CPU allocator's own events, after ``count_memory``. What a library allocates by itself (gloo's and oneDNN's
    scratch memory) is not in it, nor what another thread allocates and frees between two events of this one.
    """
    before = live_bytes()
    return max([before, *_levels(run)]) - before


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


# --- output ---------------------------------------------------------------------------------------------------------


@contextmanager
def failing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the command with a ValueError's message and exit code 2."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))


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
