"""Efficiency from one rank to two, one core each, beside torch's own ways to run the same model.

    python -m benchmarks.bench_scaling [--widths 64 256 512] [--peers ddp fsdp2] [--rounds 3] [--json]

    strong   the same global batch on more ranks: efficiency = time on one / (ranks x time on all)
    weak     the same batch for each rank: efficiency = time on one / time on all

One rank is dtengine's mesh 1 for dtengine, and a plain module for every peer: the fastest that each side has there. A
round starts one rank, all ranks with the strong batch and all ranks with the weak one; all sides take their steps in
turn within a start. An efficiency is that of a round; shown are the median and the interquartile range over rounds.
"""

import argparse
import json
import statistics
from collections.abc import Sequence

import torch.distributed as dist

from benchmarks.harness import check_losses, failing, on_ranks, spread, table, time_in_turn
from benchmarks.rows import ROWS, TOLERANCE, Work, rows_text, sizes_of

CHOICES = [name for name, row in ROWS.items() if row.axis and not row.options]
SIDES = ("peer", "dtengine")
HEADER = ("peer", "dtengine", "mesh", "width", "work", "side", "1 rank ms", "all ms", "efficiency", "spread")


def measure(works: Sequence[Work], steps: int, tune_steps: int) -> dict[str, list[float]]:
    """Time both sides of every row in turn; run by every rank.

    Args:
        works: rows of one number of ranks and one global batch.
        steps: timed steps of each side.
        tune_steps: timed steps of each of a peer's candidates.

    Returns:
        {row: [the peer's median seconds, dtengine's]}.
    """
    runs = []
    for work in works:
        weights, batches = work.weights(), work.batches(work.coordinate(dist.get_rank()))
        chosen = work.tune(batches, weights, tune_steps)
        theirs, ours = work.theirs(batches, weights, chosen).run, work.ours(batches).run
        check_losses(theirs, ours, 3, TOLERANCE[work.row.dtype])
        runs += [theirs, ours]
    medians = time_in_turn(runs, steps).median(0).values.view(-1, 2).tolist()
    return {work.peer: pair for work, pair in zip(works, medians, strict=True)}


def main() -> None:
    """Measure every chosen width."""
    # 1. options; 2. refuse what cannot run; 3. rounds of starts; 4. table and JSON
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_scaling",
        description="Efficiency from one rank to two.",
        epilog=(__doc__ or "").partition("\n\n")[2].partition("\n\n")[2] + "\nrows:\n" + rows_text(CHOICES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512], help="embed (default 64 256 512)")
    parser.add_argument(
        "--peers", nargs="+", choices=CHOICES, default=["ddp", "fsdp2", "tp"], metavar="ROW", help="ddp fsdp2 tp"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks to scale to (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default 3)")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each side in a start (default 9)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--sequences", type=int, default=8, help="batch of one rank (default 8)")
    parser.add_argument("--tune", type=int, default=3, help="timed steps of each of a peer's tunings; 0: its default")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    rows: list[dict] = []
    with failing(parser):
        plans = [starts_of(width, args) for width in args.widths]
    for starts in plans:
        rounds = [
            {kind: on_ranks(measure, (works, args.steps, args.tune), works[0].ranks) for kind, works in starts.items()}
            for _ in range(args.rounds)
        ]
        rows += [
            row for kind in ("strong", "weak") for work in starts[kind] for row in efficiencies(kind, work, rounds)
        ]
    shown = [
        (*(str(row[name]) for name in ("peer", "plan", "mesh", "width", "work", "side")),
         *(f"{row[name]:.1f}" for name in ("one_rank_ms", "all_ranks_ms")),
         *(f"{row[name]:.3f}" for name in ("efficiency", "spread")))
        for row in rows
    ]  # fmt: skip
    print(table([HEADER, *shown]))
    if args.json:
        print(json.dumps({"rows": rows}))


def starts_of(width: int, args: argparse.Namespace) -> dict[str, list[Work]]:
    """Return {kind of start: its rows}; raises ValueError where a batch does not divide."""
    config, batch = sizes_of(width, args.layers), args.sequences
    starts = {
        "one": [Work("torch", config, 1, batch)],
        "strong": [Work(peer, config, args.ranks, batch) for peer in args.peers],
        "weak": [Work(peer, config, args.ranks, batch * args.ranks) for peer in args.peers],
    }
    for works in starts.values():
        for work in works:
            work.share()
    return starts


def efficiencies(kind: str, work: Work, rounds: Sequence[dict[str, dict[str, list[float]]]]) -> list[dict]:
    """Return a line of the result for each side of one row.

    Args:
        kind: "strong" or "weak".
        rounds: for each round, {kind of start: what ``measure`` found}.
    """
    useful = 1 / work.ranks if kind == "strong" else 1.0
    rows = []
    for index, side in enumerate(SIDES):
        pairs = [(one["one"]["torch"][index], one[kind][work.peer][index]) for one in rounds]
        found = [useful * alone / together for alone, together in pairs]
        one_ms, all_ms = (statistics.median(pair[i] for pair in pairs) * 1e3 for i in (0, 1))
        rows.append({
            "peer": work.peer, "plan": work.row.words(), "mesh": work.row.mesh_text(work.ranks),
            "width": work.config.embed, "ranks": work.ranks, "work": kind, "side": side, "one_rank_ms": one_ms,
            "all_ranks_ms": all_ms, "efficiency": statistics.median(found), "spread": spread(found),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
