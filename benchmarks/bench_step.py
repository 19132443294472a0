"""Time of one optimizer step, beside torch's own ways to run the same model.

    python -m benchmarks.bench_step [--widths 64 256] [--peers ddp fsdp2] [--pairs 15] [--json]
    python -m benchmarks.bench_step --widths 256 --profile tp

A step is forward, backward, reduction, clipping by global norm 1, AdamW, in fp32 where the row does not say bf16. Both
sides start from the same weights, take the same batch and read the loss once a step; their losses are compared first.
The model is a Llama (vocabulary 256, 128 tokens in a sequence, heads of 32, four at least), on gloo ranks with one
thread and one core each. A batch of 8 sequences makes width 64 bound by overhead and width 512 by arithmetic.
"""

import argparse
import json
import os
import tempfile
import time

import torch.distributed as dist

from benchmarks.harness import RunStep, compare, failing, on_ranks, profile_beside, table
from benchmarks.rows import ROWS, TOLERANCE, Compared, Work, check_compiler, rows_text, sizes_of

HEADER = (
    *("peer", "dtengine", "mesh", "width", "peer ms", "dtengine ms", "ratio", "spread", "loss difference"),
    *("peer first s", "dtengine first s", "peer tuned"),
)


def measure(work: Compared, pairs: int, tune_steps: int, profiled: bool) -> dict | str:
    """Compare dtengine with one peer; run by every rank.

    Args:
        pairs: timed steps of each side.
        tune_steps: timed steps of each of the peer's candidates.
        profiled: return a table of operators instead of times.
    """
    weights, batches = work.weights(), work.batches(work.coordinate(dist.get_rank()))
    chosen = work.tune(batches, weights, tune_steps)
    first = []
    sides = []
    for build in (lambda: work.theirs(batches, weights, chosen), lambda: work.ours(batches)):
        began = time.perf_counter()
        side = build()
        losses = [side.run()]  # the first step of both is compared as well
        first.append(time.perf_counter() - began)
        sides.append(after(losses, side.run))
    theirs, ours = sides
    if profiled:
        return profile_beside(theirs, ours)
    result = compare(theirs, ours, pairs, tolerance=TOLERANCE[work.dtype])
    return {
        "peer_ms": result.peer_ms, "dtengine_ms": result.ours_ms, "ratio": result.ratio, "spread": result.spread,
        "loss_difference": result.loss_difference, "peer_first_s": first[0], "dtengine_first_s": first[1],
        "tuned": dict(chosen),
    }  # fmt: skip


def after(losses: list[float], run: RunStep) -> RunStep:
    """Return a step that first gives the losses that were read already."""
    return lambda: losses.pop() if losses else run()


def main() -> None:
    """Measure every chosen peer at every chosen width."""
    # 1. options; 2. refuse what cannot run; 3. measure row by row; 4. table and JSON
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_step",
        description="Time of one optimizer step.",
        epilog="rows:\n" + rows_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512], help="embed (default 64 256 512)")
    parser.add_argument("--peers", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="default: all rows")
    parser.add_argument("--pairs", type=int, default=15, help="timed steps of each side (default 15)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--sequences", type=int, default=8, help="global batch (default 8)")
    parser.add_argument("--tune", type=int, default=5, help="timed steps of each of a peer's tunings; 0: its default")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--profile", choices=ROWS, metavar="ROW", help="show operators beside this peer's, no times")
    args = parser.parse_args()
    peers = [args.profile] if args.profile else args.peers
    works = [
        Work(peer, sizes_of(width, args.layers), 1 if ROWS[peer].axis == "" else 2, args.sequences)
        for width in args.widths
        for peer in peers
    ]
    with failing(parser):
        check_compiler(peers)
        for work in works:
            work.share()
    lines: list[tuple[str, ...]] = [HEADER]
    found: list[dict] = []
    try:
        for work in works:
            with tempfile.TemporaryDirectory(prefix="dtengine-bench-") as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # each row compiles anew
                result = on_ranks(measure, (work, args.pairs, args.tune, bool(args.profile)), work.ranks)
            if args.profile:
                print(f"{work.peer}, width {work.config.embed}: one step on rank 0, under the profiler\n{result}\n")
                continue
            row = work.row
            where = {
                "peer": work.peer,
                "plan": row.words(),
                "mesh": row.mesh_text(work.ranks),
                "width": work.config.embed,
            }
            found.append({**where, "ranks": work.ranks, **result})
            lines.append((*map(str, where.values()), *cells(result)))
    finally:  # where a row fails, those before it are not lost
        if lines[1:]:
            print(table(lines))
    if args.json:
        print(json.dumps({"rows": found}))


def cells(result: dict) -> tuple[str, ...]:
    """Return the cells of a result, as HEADER names them."""
    times = [f"{result[name]:.1f}" for name in ("peer_ms", "dtengine_ms")]
    ratios = [f"{result[name]:.3f}" for name in ("ratio", "spread")]
    first = [f"{result[name]:.1f}" for name in ("peer_first_s", "dtengine_first_s")]
    tuned = " ".join(f"{name}={value}" for name, value in result["tuned"].items())
    return (*times, *ratios, f"{result['loss_difference']:.1e}", *first, tuned or "-")


if __name__ == "__main__":
    main()
