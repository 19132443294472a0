"""Memory of one optimizer step on each rank, beside torch's own ways to run the same model.

    python -m benchmarks.bench_memory [--ranks 2 4] [--widths 256] [--peers ddp fsdp2] [--json]

Each side runs in processes of its own, so that neither holds the other's tensors. After three steps, torch's CPU
allocator says what is alive before a step (beyond the initial weights that both sides were given, and the batch) and how
far it rises during one; the sum of both, on the rank where it is largest, is what the ratio compares.

    state   parameters, gradients, optimizer state that are alive between two steps, each storage once
    kept    what else is: buckets, tables, the program's constants
    rise    the highest level within a step, above the level before it
"""

import argparse
import gc
import json

import torch
import torch.distributed as dist

from benchmarks.harness import count_memory, failing, live_bytes, on_ranks, peak_bytes, storage_bytes, table
from benchmarks.rows import ROWS, Compared, Work, check_compiler, rows_text, sizes_of

SIDES = ("peer", "dtengine")
HEADER = ("peer", "dtengine", "mesh", "width", "side", "state MB", "kept MB", "rise MB", "peak MB", "ratio")


def measure(work: Compared, side: str, steps: int) -> list[dict[str, int]]:
    """Measure one side; run by every rank.

    Args:
        side: one of SIDES.
        steps: steps before the one that is measured.

    Returns:
        For each rank its bytes: "state", "kept", "rise" and their sum "peak".
    """
    weights, batches = work.weights(), work.batches(work.coordinate(dist.get_rank()))
    count_memory()
    built = work.theirs(batches, weights) if side == "peer" else work.ours(batches)
    for _ in range(steps):
        built.run()
    gc.collect()
    alive, state = live_bytes(), storage_bytes(built.tensors())
    rise = peak_bytes(built.run)
    mine = torch.tensor([state, alive - state, rise, alive + rise])
    every = [torch.empty_like(mine) for _ in range(work.ranks)]
    dist.all_gather(every, mine)
    return [dict(zip(("state", "kept", "rise", "peak"), one.tolist(), strict=True)) for one in every]


def main() -> None:
    """Measure every chosen peer on every chosen number of ranks."""
    # 1. options; 2. refuse what cannot run; 3. measure row by row, each side alone; 4. table and JSON
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_memory",
        description="Memory of one optimizer step on each rank.",
        epilog="rows:\n" + rows_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4; row torch always takes 1")
    parser.add_argument("--widths", type=int, nargs="+", default=[256], help="embed (default 256)")
    parser.add_argument("--peers", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="default: all rows")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--sequences", type=int, default=16, help="global batch (default 16)")
    parser.add_argument("--steps", type=int, default=3, help="steps before the measured one (default 3)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    works = [
        Work(peer, sizes_of(width, args.layers), ranks, args.sequences)
        for width in args.widths
        for peer in args.peers
        for ranks in ([1] if ROWS[peer].axis == "" else args.ranks)
    ]
    with failing(parser):
        check_compiler(args.peers)
        for work in works:
            work.share()
    lines: list[tuple[str, ...]] = [HEADER]
    found: list[dict] = []
    try:
        for work in works:
            sides = {side: on_ranks(measure, (work, side, args.steps), work.ranks) for side in SIDES}
            largest = {side: max(ranks, key=lambda one: one["peak"]) for side, ranks in sides.items()}
            ratio = largest["dtengine"]["peak"] / largest["peer"]["peak"]
            row = work.row
            where = {
                "peer": work.peer,
                "plan": row.words(),
                "mesh": row.mesh_text(work.ranks),
                "width": work.config.embed,
            }
            each = {f"{side}_bytes": ranks for side, ranks in sides.items()}  # a list with each rank's
            found.append({**where, "ranks": work.ranks, "ratio": ratio, **each})
            for side, one in largest.items():
                megabytes = (f"{value / 1e6:.2f}" for value in one.values())
                lines.append((*map(str, where.values()), side, *megabytes, f"{ratio:.3f}"))
    finally:  # where a row fails, those before it are not lost
        if lines[1:]:
            print(table(lines))
    if args.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
