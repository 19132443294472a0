"""Benchmarks run, compare losses before they time, and end with one line of JSON. No time is judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )


def test_bench_step() -> None:
    """Every peer of bench_step takes the same steps as dtengine: losses agree, and the last line has one row for each."""
    peers = ["torch", "ddp", "fsdp2", "tp", "tp+sp"]
    options = ["--widths", "32", "--layers", "1", "--sequences", "2", "--pairs", "2", "--json"]
    done = run("-m", "benchmarks.bench_step", *options)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["peer"] for row in rows] == peers
    for row in rows:
        assert set(row) == {"peer", "plan", "mesh", "width", "ranks", "ratio", "spread"}
        assert row["width"] == 32
        assert row["ranks"] == (1 if row["peer"] == "torch" else 2)
        assert row["ratio"] > 0
        assert row["spread"] >= 0
    assert lines[0].endswith("loss difference")
    table = [line.split() for line in lines[2:]]
    assert [cells[0] for cells in table] == peers
    assert all(float(cells[-1]) <= 1e-4 for cells in table)


def test_profile() -> None:
    """--profile shows dtengine's operators beside the peer's."""
    done = run("-m", "benchmarks.bench_step", "--widths", "32", "--layers", "1", "--sequences", "2", "--profile", "ddp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["operator", "dtengine", "ms", "calls", "peer", "ms", "calls"]
    assert "aten::mm" in done.stdout


def test_other_work_is_not_timed() -> None:
    """Two steps whose losses differ by 1 % are refused before any is timed."""
    code = "from benchmarks.harness import compare, on_ranks; on_ranks(compare, (lambda: 1.0, lambda: 1.01, 5), 1)"
    done = run("-c", code)
    assert done.returncode == 1
    assert "RuntimeError: losses of 3 steps differ by 1.0e-02" in done.stderr
