"""Time from a command to the first step that it prints, beside torchrun with the smallest DDP script.

    python -m benchmarks.bench_start [--meshes 2 2x4] [--repeats 5] [--no-cold] [--json]

    dtengine   python -m dtengine.train --mesh MESH, with its defaults otherwise: it reads its data, traces the step,
               shows a start screen, opens a run folder and writes TensorBoard events
    peer       torchrun --standalone --nproc-per-node RANKS benchmarks/ddp_script.py: a model of the same sizes, random
               data and nothing else

A cold start has an empty cache of Python bytecode (of torch's as well) and of whatever torch and dtengine cache; the
second start follows it with the same caches. With --no-cold there is one kind, warm, with the caches of this machine. The
operating system's file cache is not emptied. Both sides start in turn; the clock runs from the start of the process to the
line that begins with "step 1/"; then the run is stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import failing, spread, table
from dtengine.mesh import num_ranks, parse_mesh

ROOT = Path(__file__).parents[1]
SIDES = ("peer", "dtengine")
HEADER = ("mesh", "ranks", "start", "peer s", "dtengine s", "ratio", "spread")


def command(side: str, mesh: str, run_dir: Path) -> list[str]:
    """Return what a person would type."""
    if side == "dtengine":
        return ["-m", "dtengine.train", "--mesh", mesh, "--run-dir", str(run_dir)]
    ranks = num_ranks(parse_mesh(mesh))
    script = ROOT / "benchmarks" / "ddp_script.py"
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]


def seconds_to_first_step(arguments: Sequence[str], caches: Path | None) -> float:
    """Start a command and return the seconds until it prints its first step; then it is stopped.

    Args:
        arguments: of Python.
        caches: folder for everything that Python, torch and dtengine cache; None for this machine's own.

    Raises:
        RuntimeError: it ends without a step; the message holds what it wrote.
    """
    unlike = ("OMP_", "MKL_", "PYTHONDONTWRITEBYTECODE")  # what would make a start unlike a person's
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if caches is not None:
        for name in ("PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
            environment[name] = str(caches / name.lower())
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdout is not None
        shown = []
        try:
            for line in process.stdout:
                shown.append(line)
                if line.startswith("step 1/"):
                    return time.perf_counter() - began
        finally:
            process.terminate()  # both launchers end their ranks
            process.communicate(timeout=60)
        errors.seek(0)
        raise RuntimeError(f"{' '.join(arguments)}: exit code {process.returncode}\n{''.join(shown)}{errors.read()}")


def measure(mesh: str, repeats: int, cold: bool) -> dict[str, list[list[float]]]:
    """Start both sides in turn, in the other order each time.

    Returns:
        {"cold" and "second", or "warm": [[peer's seconds, dtengine's], for each repeat]}.
    """
    kinds = ("cold", "second") if cold else ("warm",)
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(prefix="dtengine-bench-") as name:
            folder = Path(name)
            for kind in kinds:
                seconds = {}
                for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                    caches = folder / side if cold else None
                    seconds[side] = seconds_to_first_step(command(side, mesh, folder / f"run-{kind}"), caches)
                found[kind].append([seconds[side] for side in SIDES])
    return found


def main() -> None:
    """Measure every chosen mesh."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_start",
        description="Time from a command to the first step that it prints.",
        epilog=(__doc__ or "").partition("\n\n")[2].partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--meshes", nargs="+", default=["2", "2x4"], help="default 2 2x4")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind and side (default 5)")
    parser.add_argument("--no-cold", action="store_true", help="leave cold starts out")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    with failing(parser):
        ranks = {mesh: num_ranks(parse_mesh(mesh)) for mesh in args.meshes}
    lines: list[tuple[str, ...]] = [HEADER]
    rows = []
    for mesh in args.meshes:
        for kind, pairs in measure(mesh, args.repeats, not args.no_cold).items():
            ratios = [ours / peer for peer, ours in pairs]
            peer_s, ours_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            ratio, width = statistics.median(ratios), spread(ratios)
            where = {"mesh": mesh, "ranks": ranks[mesh], "start": kind}
            rows.append({**where, "peer_s": peer_s, "dtengine_s": ours_s, "ratio": ratio, "spread": width})
            lines.append((*map(str, where.values()), f"{peer_s:.2f}", f"{ours_s:.2f}", f"{ratio:.3f}", f"{width:.3f}"))
    print(table(lines))
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
