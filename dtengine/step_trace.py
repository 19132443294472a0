"""One step of all ranks as a trace for Perfetto and chrome://tracing: ``--trace-step N``.

torch's profiler records each rank's operators, collectives and kernels; under a pipeline the actions of the schedule stand
above them (2F0, 2B0). Rank 0 puts all ranks into one file, each a process of its own. Clocks are those of the machines.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced_step(folder: Path, number: int, rank: int, device: torch.device) -> Iterator[None]:
    """Record what runs inside, on all ranks together, into FOLDER/trace-step-NUMBER.json.

    Args:
        folder: of the run; where machines do not share it, the file has the ranks of the first one.
        number: of the step, from 1.
        rank: of this process.
        device: of this rank.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its start and stop
    parts = folder / f"trace-step-{number}"
    parts.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(parts / f"rank-{rank}.json"))
    dist.barrier()
    if rank == 0:
        found = [json.loads(path.read_text()) for path in sorted_parts(parts, dist.get_world_size())]
        temporary = parts.with_suffix(".tmp")
        temporary.write_text(json.dumps(merged(found)))
        os.replace(temporary, parts.with_suffix(".json"))
        shutil.rmtree(parts)


def sorted_parts(folder: Path, num_ranks: int) -> list[Path]:
    """Return the files of the ranks that are there, in the order of ranks."""
    return [path for rank in range(num_ranks) if (path := folder / f"rank-{rank}.json").is_file()]


def merged(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the profiler's traces of ranks 0, 1, ... into one: a process for each rank, and one for each of its GPUs."""
    base = min(trace["baseTimeNanoseconds"] for trace in traces)
    events, numbers = [], {}
    for rank, trace in enumerate(traces):
        shift = (trace["baseTimeNanoseconds"] - base) / 1000  # microseconds
        for event in trace["traceEvents"]:
            if event["name"].startswith("process_") or not isinstance(event.get("pid"), int):  # of the profiler itself
                continue
            key = rank, event["pid"]
            if key not in numbers:
                numbers[key] = len(numbers)
                own = (
                    f"rank {rank}" if len([k for k in numbers if k[0] == rank]) == 1 else f"rank {rank}: {event['pid']}"
                )
                events += [
                    {"ph": "M", "name": "process_name", "pid": numbers[key], "args": {"name": own}},
                    {
                        "ph": "M",
                        "name": "process_sort_index",
                        "pid": numbers[key],
                        "args": {"sort_index": numbers[key]},
                    },
                ]
            moved = {"ts": event["ts"] + shift} if "ts" in event else {}
            events.append(event | moved | {"pid": numbers[key]})
    origin = min((e["ts"] for e in events if e.get("ph") == "X"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= origin
    rest = {name: value for name, value in traces[0].items() if name not in ("traceEvents", "traceName", "trace_id")}
    return rest | {"baseTimeNanoseconds": base, "traceEvents": events}
