"""Benchmarks run, compare losses before they time, and end with one line of JSON. No time is judged here."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.rows import ROWS, TOLERANCE
from dtengine.state import StepConfig

ROOT = Path(__file__).parents[2]
SMALL = ["--widths", "32", "--layers", "1"]
OPTIONS = {field.name for field in dataclasses.fields(StepConfig)}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict]:
    """Return the rows of the JSON line, after the table."""
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    rows = json.loads(last)["rows"]
    assert table[0].split()[0] in ("peer", "mesh", "schedule")
    return rows


def test_bench_step() -> None:
    """Every peer of bench_step takes the same steps as dtengine: losses agree, and the last line has one row for each.

    Apart from the compiled row, whose compilation takes half a minute, and fsdp2, which the next test takes.
    """
    peers = [peer for peer, row in ROWS.items() if set(row.options) <= OPTIONS - {"compile"} and peer != "fsdp2"]
    batch = ["--sequences", "8", "--pairs", "2", "--tune", "0"]
    rows = rows_of(run("-m", "benchmarks.bench_step", *SMALL, *batch, "--peers", *peers, "--json"))
    assert [row["peer"] for row in rows] == peers
    for row in rows:
        assert row["width"] == 32
        assert row["ranks"] == (1 if row["peer"] == "torch" else 2)
        assert min(row[name] for name in ("peer_ms", "dtengine_ms", "ratio", "peer_first_s", "dtengine_first_s")) > 0
        assert row["spread"] >= 0
        assert row["loss_difference"] <= TOLERANCE[ROWS[row["peer"]].dtype]


def test_tuning_and_help() -> None:
    """A peer's tuning is chosen among its candidates; --help says what each row is."""
    few = ["--sequences", "2", "--pairs", "1", "--tune", "1"]
    (row,) = rows_of(run("-m", "benchmarks.bench_step", *SMALL, *few, "--peers", "fsdp2", "--json"))
    assert row["tuned"] in ({"prefetch": False}, {"prefetch": True})
    shown = run("-m", "benchmarks.bench_step", "--help").stdout
    assert all(row.text in shown for row in ROWS.values())


def test_batch_that_does_not_divide() -> None:
    """A batch that a row cannot cut into equal parts is refused before any rank starts, with the cure."""
    done = run("-m", "benchmarks.bench_step", "--sequences", "6", "--peers", "ddp-accumulate")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "--sequences 6: row ddp-accumulate on 2 ranks cuts a batch into 8 parts, which must be equal. Use a multiple of 8.\n"
    )


def test_tolerances() -> None:
    """Losses in float32 may differ by 1.2e-4, in bfloat16 by 1e-3; both far below what a missing term changes."""
    shown = {dtype: f"{value:.1e}" for dtype, value in TOLERANCE.items()}
    assert shown == {torch.float32: "1.2e-04", torch.bfloat16: "9.8e-04"}


def test_profile() -> None:
    """--profile shows dtengine's operators beside the peer's."""
    done = run("-m", "benchmarks.bench_step", *SMALL, "--sequences", "2", "--tune", "0", "--profile", "ddp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["operator", "dtengine", "ms", "calls", "peer", "ms", "calls"]
    assert "aten::mm" in done.stdout


def test_other_work_is_not_timed() -> None:
    """Two steps whose losses differ by 1 % are refused before any is timed."""
    code = "from benchmarks.harness import compare, on_ranks; on_ranks(compare, (lambda: 1.0, lambda: 1.01, 5), 1)"
    done = run("-c", code)
    assert done.returncode == 1
    assert "RuntimeError: losses of 3 steps differ by 1.0e-02" in done.stderr


MEMORY = """
import threading
import torch
from benchmarks.harness import count_memory, live_bytes, peak_bytes, storage_bytes

def new(size):
    return torch.empty(size, dtype=torch.uint8)

before = new(5000)  # not counted: older than count_memory
count_memory()
kept = [new(1000)]
print(live_bytes(), storage_bytes([kept[0], kept[0][100:200], before]))

def steps():
    del new(300)[0:0]            # 1300
    kept.clear()                 #    0
    first = new(1500)            # 1500
    second = new(200)            # 1700: the peak
    del first                    #  200
    kept.append(new(1000))       # 1200

def threads():
    held = []
    def work():
        held.append(new(4000))   # 5000
    one = threading.Thread(target=work)
    one.start(), one.join()
    small = new(8)               # 5008: the peak
    two = threading.Thread(target=held.clear)
    two.start(), two.join()      # 1008
    large = new(2000)            # 3008

print(peak_bytes(steps), live_bytes(), peak_bytes(threads), live_bytes(), peak_bytes(lambda: None))
"""


def test_peak_bytes_is_exact() -> None:
    """A known pattern of tensors, some released within it and some by another thread, is measured to the byte."""
    done = run("-c", MEMORY.replace("del new(300)[0:0]", "temporary = new(300); del temporary"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1000 6000", "700 1000 4008 1000 0"]


def test_bench_memory() -> None:
    """bench_memory measures both sides on every rank, and its numbers add up."""
    options = ["--ranks", "2", "--sequences", "2", "--peers", "ddp", "fsdp2", "--json"]
    rows = rows_of(run("-m", "benchmarks.bench_memory", *SMALL, *options))
    assert [(row["peer"], row["ranks"]) for row in rows] == [("ddp", 2), ("fsdp2", 2)]
    for row in rows:
        for side in ("peer_bytes", "dtengine_bytes"):
            assert len(row[side]) == 2
            assert all(one["peak"] == one["state"] + one["kept"] + one["rise"] for one in row[side])
            assert all(one["kept"] >= 0 and one["rise"] > 0 for one in row[side])
        largest = [max(one["peak"] for one in row[side]) for side in ("dtengine_bytes", "peer_bytes")]
        assert row["ratio"] == largest[0] / largest[1]
    ddp, fsdp = (row["peer_bytes"][0]["state"] for row in rows)
    assert ddp > 1.9 * fsdp


def test_bench_start() -> None:
    """bench_start finds the first step of both commands."""
    (row,) = rows_of(run("-m", "benchmarks.bench_start", "--meshes", "1", "--repeats", "1", "--no-cold", "--json"))
    assert (row["mesh"], row["ranks"], row["start"]) == ("1", 1, "warm")
    assert row["peer_s"] > 0 and row["dtengine_s"] > 0


def test_bench_scaling() -> None:
    """bench_scaling gives both efficiencies of both sides."""
    options = ["--sequences", "2", "--rounds", "1", "--steps", "2", "--tune", "0", "--peers", "ddp", "tp", "--json"]
    rows = rows_of(run("-m", "benchmarks.bench_scaling", *SMALL, *options))
    assert [(row["work"], row["peer"], row["side"]) for row in rows] == [
        (work, peer, side) for work in ("strong", "weak") for peer in ("ddp", "tp") for side in ("peer", "dtengine")
    ]
    for row in rows:
        useful = 2 if row["work"] == "strong" else 1
        assert abs(row["efficiency"] - row["one_rank_ms"] / useful / row["all_ranks_ms"]) < 1e-9


def test_bench_pipeline() -> None:
    """bench_pipeline runs torch's stages as dtengine cuts and places them: in a row, and in a V with split backwards."""
    few = ["--widths", "32", "--layers", "4", "--sequences", "4", "--microbatches", "4", "--pairs", "1", "--tune", "0"]
    rows = rows_of(run("-m", "benchmarks.bench_pipeline", *few, "--schedules", "1f1b", "zbv", "--json"))
    assert [(row["schedule"], row["peer"]) for row in rows] == [
        ("1f1b", "Schedule1F1B"),
        ("zbv", "ScheduleZBVZeroBubble"),
    ]
    for row in rows:
        assert min(row[name] for name in ("peer_ms", "dtengine_ms", "ratio", "peer_peak", "dtengine_peak")) > 0
        assert row["loss_difference"] <= TOLERANCE[torch.float32]
        for side in ("peer", "dtengine"):
            assert row[f"{side}_peak"] == max(one["peak"] for one in row[f"{side}_bytes"])


def test_bench_pipeline_shows_what_fails() -> None:
    """A row that fails has its error in the table; unequal microbatches and empty stages are refused before any starts."""
    few = ["--widths", "32", "--layers", "4", "--schedules", "interleaved-zb", "--only", "time", "--json"]
    done = run("-m", "benchmarks.bench_pipeline", *few, "--sequences", "5", "--microbatches", "5")
    assert done.returncode == 1
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert "ValueError: Zero bubble requires the number of microbatches" in row["error"]
    assert "Zero bubble requires" in done.stdout.splitlines()[2]
    done = run("-m", "benchmarks.bench_pipeline", "--sequences", "6", "--microbatches", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("--sequences 6: --microbatches 4 must be equal parts of it. Use a multiple of 4.\n")
    done = run("-m", "benchmarks.bench_pipeline", "--layers", "2", "--schedules", "zbv")
    assert (done.returncode, done.stdout) == (2, "")
    assert "schedule zbv has 4 stages" in done.stderr
