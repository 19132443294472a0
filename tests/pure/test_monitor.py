"""Monitor: what a person or a program reads of a run is whole, true, and printed once."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dtengine import monitor
from dtengine.layout import Plan, Rule, make_plan
from dtengine.monitor import STATUS_FIELDS, TAGS, Events, Progress, Status, memory_gb, utc_now, write_atomically
from dtengine.screens import batch_text, bytes_text, clean, count_text, end_screen, layout_rows, plan_text, start_screen


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(monitor, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def plan(name: str = "fsdp", kv_heads: int = 4, **mesh: int) -> Plan:
    return make_plan(name, mesh or {"dp": 2, "tp": 2}, {"kv_heads": kv_heads, "q_per_kv": 2})


def read(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


# --- status.json --------------------------------------------------------------------------------------------------


def test_status_shows_every_field_from_the_start(tmp_path: Path) -> None:
    """All keys are there from the start, None where unknown; updates merge."""
    path = tmp_path / "run" / "status.json"
    status = Status(path, rank=0, world_size=4, backend="gloo", mesh="dp=2,tp=2", plan="fsdp", run="run")
    first = read(path)
    assert set(first) == {*STATUS_FIELDS, "updated_at"}
    assert first["status"] == "starting"
    assert (first["rank"], first["world_size"], first["backend"]) == (0, 4, "gloo")
    unknown = ("step", "loss", "checkpoint_saved_at", "gpu_memory_used_gb", "gpu_memory_total_gb", "error")
    assert [first[name] for name in unknown] == [None] * 6
    saved = utc_now()
    status.update(status="running", step=3, loss=torch.tensor(2.5), throughput_samples_per_sec=10.5)
    status.update(checkpoint_saved_at=saved)
    last = read(path)
    assert (last["step"], last["loss"], last["plan"], last["checkpoint_saved_at"]) == (3, 2.5, "fsdp", saved)
    for stamp in (last["updated_at"], saved):
        assert datetime.fromisoformat(stamp).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": "done"}, "no status is called 'done'. Use starting, running, saving, finished, failed."),
        ({"lost": 1, "found": 2}, "no field is called lost, found. Use status, "),
    ],
)
def test_status_refuses_what_it_does_not_know(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """Another status or field is a ValueError that lists what there is, at the start and later, and changes nothing."""
    status = Status(tmp_path / "status.json")
    before = read(status.path)
    with pytest.raises(ValueError, match=re.escape(message)):
        status.update(**fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        Status(tmp_path / "other.json", **fields)
    status.update(status="running")
    assert read(status.path) | {"updated_at": None} == before | {"status": "running", "updated_at": None}


def test_numbers_are_written_four_times_a_second_and_events_at_once(tmp_path: Path, clock: Clock) -> None:
    """Numbers wait up to 0.25 s; a change of status, error or checkpoint_saved_at carries all of them at once."""
    path = tmp_path / "status.json"
    status = Status(path, status="running")
    seen = []
    for step in range(1, 101):  # ten seconds
        clock.now += 0.1
        status.update(step=step)
        seen.append(read(path)["step"])
    assert len({step for step in seen if step}) == 33
    assert all(shown is None or step - shown <= 2 for step, shown in enumerate(seen, 1))
    urgent = ({"checkpoint_saved_at": utc_now()}, {"error": "no more disk"}, {"status": "failed"})
    for step, fields in enumerate(urgent, 101):
        status.update(step=step, **fields)
        assert read(path).items() >= {"step": step, **fields}.items()


def test_numbers_that_are_not_finite_stay_json(tmp_path: Path, clock: Clock) -> None:
    """NaN and inf become null, and error says which, beside an error that was given, until they are finite again."""
    path = tmp_path / "status.json"
    status = Status(path, status="running")
    status.update(loss=float("nan"), heldout_loss=float("-inf"))
    assert read(path)["loss"] is None
    assert read(path)["heldout_loss"] is None
    assert read(path)["error"] == "loss is nan; heldout_loss is -inf"
    status.update(error="step 3: the loss is not finite", heldout_loss=2.0)
    assert read(path)["error"] == "step 3: the loss is not finite; loss is nan"
    status.update(error=None, loss=1.5)
    assert (read(path)["loss"], read(path)["error"]) == (1.5, None)


def test_a_full_disk_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once started, a status that cannot be written is logged and no error, and the old file stays, without litter."""
    status = Status(tmp_path / "status.json", step=1)

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        status.update(status="running", step=2)
    assert "status.json cannot be written, the run goes on" in caplog.text
    assert read(status.path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    with pytest.raises(OSError, match="No space"):
        write_atomically(status.path, "")


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While a file is rewritten as fast as it goes, whatever is read is one of the texts."""
    path = tmp_path / "text"
    texts = ["a" * 100_000, "b" * 200_000]
    write_atomically(path, texts[0])
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for text in texts:
                write_atomically(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen, limit = set(), time.monotonic() + 60
        for number in count():
            seen.add(path.read_text())
            if (number >= 500 and len(seen) > 1) or time.monotonic() > limit:
                break
    finally:
        done.set()
        writer.join()
    assert seen == set(texts)


def test_killing_a_writer_leaves_valid_json(tmp_path: Path) -> None:
    """A process killed with SIGKILL in the middle of rewriting its status leaves a whole status."""
    path = tmp_path / "status.json"
    program = (
        "import sys; from dtengine.monitor import Status\n"
        "status, step = Status(sys.argv[1], error='x' * 50_000), 0\n"
        "while True: step += 1; status.update(step=step, status='saving' if step % 2 else 'running')"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or (read(path)["step"] or 0) < 200:  # each reading must parse as well
            assert child.poll() is None
            assert time.monotonic() < deadline
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    last = read(path)
    assert last["step"] >= 200
    assert last["error"] == "x" * 50_000


# --- TensorBoard --------------------------------------------------------------------------------------------------


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read each tag's (step, value) with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def log_step(events: Events, step: int, run: int) -> None:
    events.scalars(step, **{name: step + run / 4 for name in TAGS if name != "heldout_loss"})
    if step % 2 == 0:
        events.scalars(step, heldout_loss=step + run / 4)


@pytest.mark.parametrize("torn", [0, 5])
def test_a_resumed_run_is_one_curve(tmp_path: Path, torn: int) -> None:
    """C35: 20 steps, checkpoint at 10, kill at 14 (also amid a write), resume: each tag has its steps once, in order."""
    first = Events(tmp_path)
    for step in range(1, 15):
        log_step(first, step, run=0)
    first.flush()  # and no close: killed
    if torn:
        file = next(tmp_path.iterdir())
        os.truncate(file, file.stat().st_size - torn)
    second = Events(tmp_path, resume_step=10)
    for step in range(11, 21):
        log_step(second, step, run=1)
    second.close()
    found = curves(tmp_path)
    assert set(found) == set(TAGS.values())
    for tag, points in found.items():
        steps = range(2, 21, 2) if tag == "heldout/loss" else range(1, 21)
        assert points == [(step, step + (step > 10) / 4) for step in steps], tag
    first.close()


def test_a_run_that_starts_over_hides_the_killed_one(tmp_path: Path) -> None:
    """Killed before its first checkpoint and started again in the same folder, a run shows its own steps only."""
    for run in (0, 1):
        events = Events(tmp_path)
        for step in range(1, 4):
            log_step(events, step, run)
        events.close()
    assert curves(tmp_path)["train/loss"] == [(1, 1.25), (2, 2.25), (3, 3.25)]


def test_unknown_values_leave_no_point(tmp_path: Path) -> None:
    """None logs nothing, tensors log their value, other names keep their name, and NaN stays NaN."""
    events = Events(tmp_path)
    events.scalars(1, loss=torch.tensor(0.5).item(), memory_gb=None, skipped=1.0, gradient_norm=float("nan"))
    events.close()
    found = curves(tmp_path)
    assert set(found) == {"train/loss", "skipped", "train/gradient_norm"}
    assert found["train/loss"] == [(1, 0.5)]
    assert str(found["train/gradient_norm"]) == "[(1, nan)]"


def test_text_is_shown_by_tensorboard(tmp_path: Path) -> None:
    """Text logged by a run and its resumption reaches the stock reader, at the steps that they began from."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step in (None, 10):
        events = Events(tmp_path, resume_step)
        events.text("plan", f"resumed from {resume_step}")
        events.close()
    found = EventAccumulator(str(tmp_path)).Reload().Tensors("plan/text_summary")
    assert [(e.step, e.tensor_proto.string_val[0]) for e in found] == [
        (0, b"resumed from None"),
        (10, b"resumed from 10"),
    ]


def test_a_watching_person_sees_events_without_a_flush(tmp_path: Path) -> None:
    """What is logged reaches the file by itself within the time promised (1 s here, 5 by default)."""
    events = Events(tmp_path, flush_seconds=1)
    events.scalars(1, loss=1.0)
    time.sleep(0.1)
    events.scalars(2, loss=2.0)
    deadline = time.monotonic() + 10
    while len(curves(tmp_path).get("train/loss", [])) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    events.close()


def test_events_end_quietly_when_they_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An event file on a full disk is logged once; the calls after it, also close, do nothing."""
    events = Events(tmp_path)

    class Full:
        log_dir = tmp_path

        def add_text(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

    writer, events.writer = events.writer, Full()  # type: ignore[assignment]
    assert writer is not None
    with caplog.at_level(logging.WARNING):
        events.text("plan", "")
        events.scalars(1, loss=1.0)
        events.close()
    writer.close()
    assert [record.message.count("No space left") for record in caplog.records] == [1]


def test_tensorboard_comes_late_and_without_tensorflow(tmp_path: Path) -> None:
    """Importing the module imports no tensorboard, and making events imports no tensorflow that is installed."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from dtengine.monitor import Events\n"
        "assert not [m for m in sys.modules if m.startswith('tensorboard')]\n"
        "events = Events(sys.argv[1] + '/events'); events.scalars(1, loss=1.0); events.text('a', 'b'); events.close()\n"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- progress -----------------------------------------------------------------------------------------------------


def plain(**options: Any) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80, **options), file


def test_a_log_gets_few_whole_lines(clock: Clock) -> None:
    """Not on a terminal: the first step, one line in 5 s, each held-out loss, the last step, though colour is forced."""
    console, file = plain(force_terminal=True)
    loss = torch.tensor(2.3456789).item()
    with Progress(console, total_steps=200, first_step=1) as progress:
        for step in range(1, 201):
            clock.now += 0.1
            progress.update(step, loss, 12345.6)
            if step == 120:
                progress.heldout(step, 2.5)
    assert file.getvalue().splitlines() == [
        "step 1/200  loss 2.34567881  12,346 tokens/s",
        "step 51/200  loss 2.34567881  12,346 tokens/s  0:00:14 left",
        "step 101/200  loss 2.34567881  12,346 tokens/s  0:00:09 left",
        "step 120/200  held-out loss 2.50000000",
        "step 151/200  loss 2.34567881  12,346 tokens/s  0:00:04 left",
        "step 200/200  loss 2.34567881  12,346 tokens/s",
    ]


@given(st.floats(width=32, allow_nan=False), st.booleans())
@example(1000.00006103515625, True)  # needs all nine digits
def test_plain_losses_tell_runs_apart(loss: float, up: bool) -> None:
    """A float32 loss and its neighbour print differently, and the print reads back as the same float32."""
    console, file = plain()
    neighbour = torch.nextafter(torch.tensor(loss), torch.tensor(float("inf" if up else "-inf"))).item()
    for value in (loss, neighbour):
        Progress(console, 1).update(1, value, 1.0)
    one, other = re.findall(r"loss (\S+)", file.getvalue())
    assert torch.tensor(float(one)).item() == loss
    assert (one == other) == (loss == neighbour)


def test_a_resumed_log_starts_with_its_first_step(clock: Clock) -> None:
    """The first line is that of the first step run, whatever its number, and time left is measured from there."""
    console, file = plain()
    with Progress(console, total_steps=10_000, first_step=5001) as progress:
        progress.update(5001, 1.0, 1.0)
        clock.now += 10
        progress.update(5002, 1.0, 1.0)
    assert file.getvalue().splitlines() == [
        "step 5001/10000  loss 1.00000000  1 tokens/s",
        "step 5002/10000  loss 1.00000000  1 tokens/s  13:53:00 left",
    ]


def test_notes_are_whole_and_warnings_come_once() -> None:
    """A note is one line however long, with brackets and without control characters; equal warnings are one."""
    console, file = plain(force_terminal=True)
    with Progress(console, 10) as progress:
        progress.note("saved [bold] to " + "x" * 100)
        progress.note("a\x1b[2Jb\rc")
        for text in ("slow", "slow", "hot", "slow"):
            progress.warn(text)
    assert file.getvalue() == f"saved [bold] to {'x' * 100}\na␛[2Jb␍c\nwarning: slow\nwarning: hot\n"


def test_a_terminal_gets_a_bar() -> None:
    """On a terminal: one live line of at most 80 columns with step, both losses, speed and time left; notes above."""
    file = Terminal()
    console = Console(file=file, force_terminal=True, width=80, legacy_windows=False)
    with Progress(console, total_steps=2000, first_step=1001) as progress:
        progress.update(1001, 2.34567, 1_234_567)
        progress.heldout(1001, 2.5)
        progress.note("checkpoint [x] saved")
        progress.warn("slow")
        progress.warn("slow")
        progress.update(1500, 2.25, 1_234_567)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert max(map(cell_len, lines)) <= 80
    assert re.fullmatch(r".*step 1500/2000 .*loss 2\.2500  held-out 2\.5000  1\.23M tok/s \S+ left", lines[-1])
    assert lines.count("checkpoint [x] saved") == 1
    assert lines.count("warning: slow") == 1


# --- screens ------------------------------------------------------------------------------------------------------

FACTS = [
    ("parameters", "3.25M whole, 812k per rank"),
    ("bytes per rank", "3.25 MB parameters + 3.25 MB gradients + 6.50 MB optimizer"),
    ("global batch", "32 = 1 rep x 2 dp x 1 microbatches x 16"),
    ("tokens per step", "4,096"),
    ("model", "gpt: 4 layers, embed 256, 8 heads, vocab 256, seq 128"),
    ("steps", "2,000 (8.19M tokens)"),
    ("learning rate", "0.001, not scaled with the batch"),
    ("backend", "gloo"),
    ("device", "cpu, 1 thread per rank"),
    ("output", "/somewhere/" + "deep/" * 15 + "[bold]run"),
]


def render(show: Any, *args: Any, encoding: str = "utf-8", **options: Any) -> list[str]:
    """Return the lines that a screen prints into 80 columns."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, record=True, width=80)
    show(console, *args, **options)
    lines = console.export_text().splitlines()
    assert max(map(cell_len, lines)) <= 80
    return lines


def squeeze(lines: list[str]) -> str:
    return re.sub(r"[\s│|]+", " ", " ".join(lines))


def test_layout_rows_say_what_splits_what() -> None:
    """The table of fsdp on 2x2: embed over dp in storage, batch over dp and res_seq over tp in compute, dp's fallbacks
    in parentheses, and tp before them."""
    rows, notes = layout_rows(plan())
    assert rows == [
        ("batch", "", "", "", "dp"),
        ("res_seq", "", "", "", "tp"),
        ("embed", "dp", "dp", "dp", ""),
        ("kv_heads", "tp", "tp", "tp", "tp"),
        ("head_dim", "(dp)", "(dp)", "(dp)", ""),
        ("mlp", "tp", "tp", "tp", "tp"),
        ("vocab", "tp", "tp", "tp", "tp"),
        ("positions", "(dp)", "(dp)", "(dp)", ""),
    ]
    assert (
        notes[0] == "(dp): a parameter with no embed is split over dp on the first that it has of head_dim, positions."
    )
    rows, notes = layout_rows(plan(), axes=("batch", "embed", "mlp"))
    assert [row[0] for row in rows] == ["batch", "embed", "mlp"]
    assert notes == ["Every other axis is whole on each rank."]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (plan("ddp", dp=2, tp=1), [("batch", "", "", "", "dp")]),
        (plan("fsdp", dp=1, tp=1), []),
        (plan("zero2", rep=2, dp=2), [("batch", "", "", "", "rep, dp"), ("embed", "", "dp", "dp", "")]),
        (plan("ddp", kv_heads=1, tp=2), [("q_per_kv", "tp", "tp", "tp", "tp")]),
    ],
    ids=lambda value: f"{value.name} {value.mesh_text()}" if isinstance(value, Plan) else "",
)
def test_layout_rows_skip_what_splits_nothing(made: Plan, expected: list[tuple[str, ...]]) -> None:
    """Mesh axes of size 1 appear nowhere; one rank has no table; heads that tp cannot take leave it to q_per_kv."""
    rows, notes = layout_rows(made, axes=("batch", "embed", "q_per_kv"))
    assert rows == expected
    assert ("Nothing is split" in notes[0]) == (not expected)


def test_layout_rows_agree_with_the_placements_of_parameters() -> None:
    """What a row says is what a weight gets: the axes that split [embed, mlp] are those of its two rows."""
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        made = plan(name, rep=2, dp=3, tp=2)
        cells = {row[0]: row[1:] for row in layout_rows(made)[0]}
        for column, layout in enumerate((made.params, made.grads, made.optimizer)):
            taken, _ = layout.decide(("embed", "mlp"), made.sizes)
            for axis in ("embed", "mlp"):
                split = [m for m, logical in taken.items() if logical == axis]
                shown = cells.get(axis, ("",) * 4)[column]
                assert split == [m for m in shown.split(", ") if m and m != "(dp)"]
    assert Rule("embed", "dp") in made.params.rules


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"rep": 2, "dp": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_the_start_screen_fits(name: str, mesh: dict[str, int]) -> None:
    """80 columns and 35 lines hold every fact, the layouts and a warning, brackets and all, for every plan."""
    warning = "[6 heads] over tp=4: one rank of tp has none and the others wait; use tp=2 or tp=3 instead."
    made = plan(name, **mesh)
    lines = render(start_screen, made, FACTS, title="dtengine: [gpt]", warnings=[warning])
    assert len(lines) <= 35
    text = squeeze(lines)
    assert f"warning: {warning}" in text
    assert "dtengine: [gpt]" in lines[0]
    assert f"mesh {made.mesh_text()} ({made.num_ranks} rank" in text
    for label, value in FACTS[:-1]:
        assert f"{label} {value}" in text
    assert "deep/[bold]run" in text.replace(" ", "")
    for row in layout_rows(made)[0]:
        assert " ".join(cell or "–" for cell in row) in text
    assert ("split over" in text) == (made.num_ranks > 1)


def test_screens_print_on_a_terminal_without_unicode() -> None:
    """A latin-1 terminal gets every screen in its own characters."""
    lines = render(start_screen, plan(), FACTS, warnings=["漢字"], encoding="latin-1")
    lines += render(end_screen, [("loss", "1")], "漢字 é", [("watch", "tensorboard")], encoding="latin-1")
    "\n".join(lines).encode("latin-1")
    assert "res_seq - - - tp" in squeeze(lines)
    assert "?? é" in squeeze(lines)


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # tensorboard's own copy of it
def test_the_plan_is_markdown_that_tensorboard_renders() -> None:
    """TensorBoard's own renderer makes two tables of it, with markup characters as they were."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(plan_text(plan(), [*FACTS, ("odd", "a|b <strong> *c* _d_ `e` \\ & [f](g)")]))
    assert page.count("<table>") == 2
    assert "<td>a|b &lt;strong&gt; *c* _d_ `e` \\ &amp; [f](g)</td>" in page
    assert "<td>global batch</td>\n<td>32 = 1 rep x 2 dp x 1 microbatches x 16</td>" in page
    cells = "".join(f"\n<td>{cell}</td>" for cell in ("res_seq", "–", "–", "–", "tp"))
    assert cells.strip() in page
    assert "on the first that it has of head_dim, positions" in page


def test_the_end_screen_shows_any_sample_and_whole_commands() -> None:
    """Generated text keeps its brackets, loses its escape codes and its excess; commands are lines of their own."""
    sample = "def [red]f(x):\r\n\treturn \x1b[31mx\x1b[0m\x07\u202e 漢字\n" + "word " * 40 + "\n" * 100
    facts = [("held-out loss", "2.2345 (bigram 2.5512)")]
    lines = render(end_screen, facts, sample, [("draw more text", "python -m dtengine.sample --prompt '[a]' runs/a")])
    text = squeeze(lines)
    assert "held-out loss 2.2345 (bigram 2.5512)" in text
    assert "def [red]f(x):" in text
    assert "return ␛[31mx␛[0m␇� 漢字" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", "\n".join(lines))
    assert len(lines) < 30
    assert "more lines" in text
    assert lines[-2:] == ["# draw more text", "python -m dtengine.sample --prompt '[a]' runs/a"]
    long = "python -m dtengine.sample " + "x" * 100
    console, file = plain()
    end_screen(console, facts, None, [("more", long)])
    assert file.getvalue().splitlines()[-1] == long
    assert "sample ─" not in file.getvalue()


# --- small texts and memory ---------------------------------------------------------------------------------------


@given(st.text(), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_clean_text_is_safe_to_print(text: str, encoding: str) -> None:
    """Nothing but newlines steers a terminal, and the text encodes; cleaning twice changes nothing more."""
    shown = clean(text, encoding)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", shown)
    assert shown.encode(encoding).decode(encoding) == shown
    assert clean(shown, encoding) == shown


@pytest.mark.parametrize(
    ("number", "count", "size"),
    [
        (0, "0", "0 B"),
        (999, "999", "999 B"),
        (999.6, "1.00k", "1.00 kB"),
        (12_345, "12.3k", "12.3 kB"),
        (999_499, "999k", "999 kB"),
        (999_999, "1.00M", "1.00 MB"),
        (4_560_000, "4.56M", "4.56 MB"),
        (99_960_000, "100M", "100 MB"),
        (7e9, "7.00B", "7.00 GB"),
        (1.5e12, "1500B", "1.50 TB"),
    ],
)
def test_numbers_for_people(number: float, count: str, size: str) -> None:
    """Three digits and a unit, with rounding that carries into the next unit."""
    assert (count_text(number), bytes_text(number)) == (count, size)


def test_the_global_batch_is_spelled_out() -> None:
    """The product comes first, and a mesh without rep counts one."""
    assert batch_text(plan("fsdp", dp=2), 1, 16) == "32 = 1 rep x 2 dp x 1 microbatches x 16"
    assert batch_text(plan("ddp", rep=3, dp=2), 4, 5) == "120 = 3 rep x 2 dp x 4 microbatches x 5"


def test_memory_is_that_of_this_process() -> None:
    """On the CPU no accelerator memory is told; the resident memory grows by what is touched."""
    used, total, before = memory_gb("cpu")
    block = bytearray(b"x") * 200_000_000
    assert (used, total) == (None, None)
    assert 0.15 < memory_gb(torch.device("cpu"))[2] - before < 0.3
    del block


def test_memory_of_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Used is total less free, in 10^9 bytes, and status.json shows it; a device that does not tell shows None."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (30e9, 80e9))
    assert memory_gb("cuda:0")[:2] == (50.0, 80.0)
    shown = read(Status(tmp_path / "status.json", device="cuda:0").path)
    assert (shown["gpu_memory_used_gb"], shown["gpu_memory_total_gb"]) == (50.0, 80.0)

    def silent(device: Any) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", silent)
    assert memory_gb("cuda:0")[:2] == (None, None)
