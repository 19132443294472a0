"""Time and peak memory of one pipeline step on two ranks, beside ``torch.distributed.pipelining``.

    python -m benchmarks.bench_pipeline [--schedules 1f1b zbv] [--widths 64 256] [--pairs 15] [--microbatches 8] [--json]
    python -m benchmarks.bench_pipeline --widths 64 --profile 1f1b

Both sides have the same layers in each stage, the same stages on each rank, microbatches, weights and optimizer: AdamW,
gradients of all stages clipped by global norm 1, fp32. The loss is the mean over the tokens of the whole batch; both sides
share it with the ranks that lack the last stage by the all-reduce that sums the norm, within the step. Losses are compared
before anything is timed. The model is bench_step's, on gloo ranks of one thread and one core each.

Then dtengine's steps run alone with a mark at the begin and end of each action. What the marks say of F, I, W and
transfers goes into the simulator: its time, and its bubble, stand beside those of the marks.

Bytes are measured in processes of their own, each side alone: the most on any rank that a step holds beyond the initial
weights that both were given, the state that lives between steps included (as bench_memory's peak).

Where a row fails, its error stands in the last column, its traceback on the error stream, and the exit code is 1.
"""

import argparse
import json
import os
import sys
import tempfile
from typing import Any

from benchmarks import bench_memory, bench_step
from benchmarks.harness import failing, on_ranks, table
from benchmarks.pipelines import PIPELINES, PipelineWork, pipelines_text, simulated, work_of
from dtengine.launch import RankFailed

HEADER = (
    *("schedule", "peer", "width", "peer ms", "dtengine ms", "ratio", "spread", "loss difference"),
    *(
        "peer first s",
        "dtengine first s",
        "actions ms",
        "simulated ms",
        "simulated ratio",
        "bubble",
        "simulated bubble",
    ),
    *("peer MB", "dtengine MB", "MB ratio", "peer tuned, or error"),
)
CELLS = {
    "peer_ms": ".1f", "dtengine_ms": ".1f", "ratio": ".3f", "spread": ".3f", "loss_difference": ".1e",
    "peer_first_s": ".1f", "dtengine_first_s": ".1f", "actions_ms": ".1f", "simulated_ms": ".1f",
    "simulated_ratio": ".3f", "bubble": ".3f", "simulated_bubble": ".3f",
    "peer_peak": "MB", "dtengine_peak": "MB", "peak_ratio": ".3f",
}  # fmt: skip
WARM_UP = 3  # steps before the one whose bytes are measured


def measure(work: PipelineWork, pairs: int, tune_steps: int, timed: bool, counted: bool) -> dict[str, Any]:
    """Measure a row, time first, each in processes of its own; what fails is under "error".

    Args:
        work: the row at its size.
        pairs: timed steps of each side.
        tune_steps: timed steps of each of the peer's candidates.
        timed: measure time.
        counted: measure bytes.
    """
    result: dict[str, Any] = {"schedule": work.name, "peer": work.row.words(), "width": work.config.embed}
    try:
        if timed:
            result |= on_ranks(bench_step.measure, (work, pairs, tune_steps, False), work.ranks)
            result |= on_ranks(simulated, (work, pairs), work.ranks)
            result["simulated_ratio"] = result["simulated_ms"] / result["actions_ms"]
        if counted:
            for side in bench_memory.SIDES:
                ranks = on_ranks(bench_memory.measure, (work, side, WARM_UP), work.ranks)
                result |= {f"{side}_bytes": ranks, f"{side}_peak": max(one["peak"] for one in ranks)}
            result["peak_ratio"] = result["dtengine_peak"] / result["peer_peak"]
    except RankFailed as failure:  # a limit of one of the two is a result as well
        result["error"] = f"rank {failure.rank}: {failure.error}"
    return result


def cells(result: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row, as HEADER names them; "-" where it failed before."""
    found = [str(result[name]) for name in ("schedule", "peer", "width")]
    for name, form in CELLS.items():
        value = result.get(name)
        found.append("-" if value is None else f"{value / 1e6:.2f}" if form == "MB" else format(value, form))
    tuned = " ".join(f"{name}={value}" for name, value in result.get("tuned", {}).items()) or "-"
    error = " ".join(result.get("error", "").split())
    return (*found, error[:150] or tuned)


def main() -> None:
    """Measure every chosen schedule at every chosen width."""
    # 1. options; 2. refuse what cannot run; 3. profile, or measure row by row; 4. table and JSON
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_pipeline",
        description="Time and peak memory of one pipeline step on two ranks.",
        epilog="rows, by the name of dtengine's schedule:\n" + pipelines_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256], help="embed (default 64 256)")
    parser.add_argument(
        "--schedules", nargs="+", choices=PIPELINES, default=list(PIPELINES), metavar="ROW", help="default: all rows"
    )
    parser.add_argument("--pairs", type=int, default=15, help="timed steps of each side (default 15)")
    parser.add_argument("--layers", type=int, default=8, help="default 8")
    parser.add_argument("--sequences", type=int, default=16, help="global batch (default 16)")
    parser.add_argument("--microbatches", type=int, default=8, help="equal parts of the batch (default 8)")
    parser.add_argument("--tune", type=int, default=5, help="timed steps of each of a peer's tunings; 0: its default")
    parser.add_argument("--only", choices=("time", "memory"), help="measure one of the two")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--profile", choices=PIPELINES, metavar="ROW", help="show operators beside the peer's, no times"
    )
    args = parser.parse_args()
    names = [args.profile] if args.profile else args.schedules
    with failing(parser):
        works = [
            work_of(name, width, args.layers, args.sequences, args.microbatches)
            for width in args.widths
            for name in names
        ]
        for work in works:
            work.check()
    found: list[dict[str, Any]] = []
    try:
        for work in works:
            with tempfile.TemporaryDirectory(prefix="dtengine-bench-") as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # each row compiles anew
                if args.profile:
                    shown = on_ranks(bench_step.measure, (work, args.pairs, args.tune, True), work.ranks)
                    print(f"{work.name}, width {work.config.embed}: one step on rank 0, under the profiler\n{shown}\n")
                    continue
                found.append(measure(work, args.pairs, args.tune, args.only != "memory", args.only != "time"))
    finally:  # where a row ends the run, those before it are not lost
        if found:
            print(table([HEADER, *map(cells, found)]))
    if args.json:
        print(json.dumps({"rows": found}))
    if any("error" in row for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
