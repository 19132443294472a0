"""``python -m dtengine.schedule``: what it prints and writes, and how it refuses."""

import json
import struct
import xml.etree.ElementTree as xml
import zlib

import pytest
from commands import run

from dtengine.pipeline.schedules import SCHEDULES, make
from dtengine.pipeline.simulate import Costs, simulate
from dtengine.schedule import main


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run the command in this process, in an empty folder: words -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(words: str) -> tuple[int | str | None, str, str]:
        try:
            code = main(words.split())
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("name", [*SCHEDULES, "auto"])
def test_json_is_one_line_of_four_figures(command, name):
    code, out, err = command(f"--name {name} --pp 3 --microbatches 6 --json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    figures = json.loads(out)
    assert list(figures) == ["makespan", "bubble", "peak_live", "deadlock"]
    assert len(figures["peak_live"]) == 3 and figures["deadlock"] is None
    if name != "auto":
        simulation = simulate(make(name, 3, 6), Costs())
        assert figures["makespan"] == simulation.makespan
        assert figures["bubble"] == simulation.bubble_share


def test_a_schedule_is_printed_beside_its_formula(command):
    code, out, _ = command("--name zb-h1 --pp 4 --microbatches 8 --cost-i 1.2 --cost-w 0.8")
    assert code == 0
    assert out.startswith("zb-h1: 4 ranks, 8 microbatches\n\nrank 0  0F0")
    words = out.split()
    bubble = words.index("(p-1)(f+i-w)")
    assert words[bubble - 2 : bubble] == ["4.2", "4.2"]
    assert "Zero Bubble Pipeline Parallelism" in " ".join(words) and "arXiv:2401.10241" in out
    code, out, _ = command("--name interleaved-zb --cost-send 0.5 --chunks 3")
    assert code == 0 and "3 stages a rank (ranks 0 1 2 3 0 1 2 3 0 1 2 3)" in out
    assert "Nothing is published for this schedule." in out
    assert "sends that take no time" in " ".join(command("--name gpipe --cost-send 0.5")[1].split())


def test_compare_puts_all_side_by_side(command):
    """On one model: with two stages a rank each takes half the time, so that a rank is as busy."""
    code, out, _ = command("--compare --pp 2 --microbatches 4 --memory-limit 3")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1]}
    assert {*SCHEDULES, "auto"} <= set(rows)
    assert rows["gpipe"][1:] == ["1", "15", "20.0%", "20.0%", "4", "4", "4", ">"]
    code, out, _ = command("--compare --pp 2 --microbatches 4 --json --cost-f 1,2 --cost-send 0.3")
    figures = json.loads(out)
    assert code == 0 and len(figures) == len(SCHEDULES) + 2
    ours = min(figures[f"auto, {n} stages a rank"]["makespan"] for n in (1, 2))
    assert ours <= min(f["makespan"] for f in figures.values())


def test_a_table_goes_out_and_in(command, tmp_path):
    assert command("--name zbv --pp 3 --microbatches 5 --csv mine.csv")[0] == 0
    assert (tmp_path / "mine.csv").read_text() == make("zbv", 3, 5).to_csv()
    given = json.loads(command("--name zbv --pp 3 --microbatches 5 --json --cost-w 0.5")[1])
    assert json.loads(command("--file mine.csv --json --cost-w 0.5")[1]) == given
    code, out, _ = command("--file mine.csv")
    assert code == 0 and out.startswith("mine.csv: 3 ranks, 5 microbatches, 2 stages a rank (ranks 0 1 2 2 1 0)")


def test_a_table_whose_ranks_wait_for_each_other(command, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    code, out, _ = command("--file bad.csv --json")
    figures = json.loads(out)
    assert code == 1 and list(figures) == ["makespan", "bubble", "peak_live", "deadlock"]
    assert (figures["makespan"], figures["peak_live"]) == (None, [1, 0])
    assert "0B0 waits for 1B0" in figures["deadlock"] and "1F1 waits for 0F1" in figures["deadlock"]
    code, out, err = command("--file bad.csv")
    assert (code, out) == (2, "") and ">0B0<" in err
    (tmp_path / "short.csv").write_text("0F0,0B0\n1F0\n")
    code, out, err = command("--file short.csv --json")
    assert (code, out) == (2, "") and "1B0 is missing" in err


def test_the_trace_is_one_of_chrome(command, tmp_path):
    """Complete events on a track for each rank, a pair of flow events for each transfer, counters that end at zero."""
    assert command("--name 1f1b --pp 3 --microbatches 4 --cost-send 0.25 --trace trace.json")[0] == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"ph", "name", "ts", "pid", "tid"} <= set(e) for e in events)
    slices = [e for e in events if e["ph"] == "X"]
    simulation = simulate(make("1f1b", 3, 4), Costs(send=0.25))
    expected = {
        (str(e.action), rank, 1e6 * e.start, 1e6 * (e.end - e.start))
        for rank, row in enumerate(simulation.events)
        for e in row
    }
    assert {(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices} == expected
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert set(starts) == set(ends) and len(starts) == 2 * 2 * 4
    assert all(starts[k]["ts"] < ends[k]["ts"] and starts[k]["tid"] != ends[k]["tid"] for k in starts)
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert list(counters.values()) == [{"stage-microbatches": 0}] * 3
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rank 0", "rank 1", "rank 2"]


def test_pictures_are_well_formed(command, tmp_path):
    """SVG that parses, with a box for each action; PNG whose chunks, checksums and pixels are as it says."""
    for name in ("a.svg", "a.png"):
        assert command(f"--name dualpipev --pp 3 --microbatches 7 --picture {name} --cost-w 0.7")[0] == 0
    root = xml.fromstring((tmp_path / "a.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    count = sum(len(list(make("dualpipev", 3, 7).actions(rank))) for rank in range(3))
    assert len(boxes) == 1 + 3 + count + 4  # ground, ranks, legend
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in boxes[1:]:
        x, y, w, h = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    wide, high, depth, palette = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert ((wide, high), depth, palette) == ((width, height), 8, 3)
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == high * (wide + 1) and max(pixels) < len(chunks[b"PLTE"]) // 3
    assert all(pixels[row * (wide + 1)] == 0 for row in range(high))


def test_a_long_schedule_has_a_picture_of_bounded_width(command, tmp_path):
    assert command("--name 1f1b --pp 8 --microbatches 200 --cost-f 0.01 --picture a.png")[0] == 0
    wide, high = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert wide < 4000 and high < 400


REFUSED = {
    "--name zb": "--name zb: no such schedule. Use one of gpipe, 1f1b,",
    "--name zbv --chunks 3": "schedule zbv: 3 stages a rank.",
    "--name zbv --file a.csv": "--name zbv --file a.csv: two schedules. Give one of them.",
    "--compare --name zbv --csv a.csv": "--compare with --name zbv, --csv a.csv: it is about all schedules. Leave",
    "--compare --cost-f 1,2,3": "--cost-f: 3 numbers",
    "--pp 0": "--pp 0: must be at least 1.",
    "--microbatches -2": "--microbatches -2: must be at least 1.",
    "--microbatches 10000000": "actions. At most 300,000 are simulated.",
    "--cost-f 1,x": "--cost-f 1,x: not a number, or numbers by comma. Write 1, or one for each stage: 1,1,1,1.6.",
    "--cost-w -1": "--cost-w: -1.0. A cost is a number of at least 0.",
    "--cost-send inf": "--cost-send: inf. A cost is a number of at least 0.",
    "--cost-i 1,2,3": "--cost-i: 3 numbers for 4 stages. Give one number, or one for each stage.",
    "--file none.csv": "--file none.csv: no such file. python -m dtengine.schedule --name 1f1b --csv none.csv writes one.",
    "--file there.csv --chunks 2": "--file there.csv: --chunks and --microbatches follow from the table. Leave them out.",
    "--file .": ".: a table is a regular file of at most 16 MiB.",
    "--cost-f 1e308": "--cost-f 1e308: at most 1e+09. Count in a larger unit.",
    "--file there.csv": "there.csv: line 1, cell 1: 'hello': no action.",
    "--file there.csv --pp 3": "there.csv: line 1, cell 1: 'hello': no action.",
    "--csv there.csv": "--csv there.csv: exists. Files are not overwritten. Delete it, or name another.",
    "--csv no/a.csv": "--csv no/a.csv: there is no folder no to write to. Make it, or name another.",
    "--picture a.gif": "--picture a.gif: a picture is SVG or PNG. End its name in .svg or .png.",
    "--csv a.svg --picture a.svg": "one file for two outputs. Name them apart.",
    "--memory-limit 0": "--memory-limit 0: must be at least 1 stage-microbatch.",
    "--name gpipe --memory-limit 5": "--memory-limit 5: schedule gpipe holds 8 stage-microbatches on rank 0. Allow 8,",
    "--name auto --chunks 2 --memory-limit 1": "--memory-limit 1: a rank has 2 stages",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_one_short_message(command, tmp_path, words):
    """Exit code 2, nothing on stdout, nothing written."""
    (tmp_path / "there.csv").write_text("hello\n")
    code, out, err = command(words)
    assert (code, out) == (2, "")
    assert REFUSED[words] in err and err.startswith("dtengine: ") and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["there.csv"]
    assert (tmp_path / "there.csv").read_text() == "hello\n"


def test_a_search_obeys_its_memory_limit(command):
    figures = json.loads(command("--name auto --pp 3 --microbatches 5 --memory-limit 2 --json")[1])
    assert max(figures["peak_live"]) <= 2
    costs = ",".join(["1"] * 6)
    figures = json.loads(command(f"--name auto --pp 3 --microbatches 5 --cost-f {costs} --json")[1])
    assert figures["makespan"] >= 5 * 2 * 3  # numbers for six stages: two a rank


def test_the_command_itself(tmp_path):
    done = run("dtengine.schedule", "--name v-half --pp 2 --microbatches 3 --json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "") and json.loads(done.out)["peak_live"]
    done = run("dtengine.schedule", "--pp 0", cwd=tmp_path)
    assert (done.code, done.out) == (2, "") and done.err == "dtengine: --pp 0: must be at least 1.\n"
