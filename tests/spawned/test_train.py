"""python -m dtengine.train on real processes: what a run leaves, how it resumes, what it refuses, how it ends."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commands import Command, Done, WarmCommands, run
from ranks_pool import Pool
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dtengine import checkpoint, config
from dtengine.mesh import build_mesh
from dtengine.monitor import STATUS_FIELDS, TAGS
from dtengine.options import from_json
from dtengine.passes import PASSES
from dtengine.rates import LearningRate
from dtengine.step import init_state

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
pytestmark = linux_only

# Odd sizes: 18 over 4 ranks, 26 and 15 over 2 and 4, 7 held-out sequences over 2 x 2 rows.
SIZES = "--layers 1 --embed 18 --heads 2 --head-dim 6 --mlp 26 --seq 15 --global-batch 4 --dropout 0.1 --warmup 3"
QUICK = f"{SIZES} --eval-sequences 7 --eager --sample 0"
STEPS = "--steps 8 --save-every 4 --eval-every 4"
RATE = LearningRate(4e-3, 8, 3, "cosine", 0.1)
TRAIN = "dtengine.train"

# Llama whose ranks stop for good at the beginning of step HOLD; for --eager, where the functions run at every step.
HOLD_MODEL = """
import os, time
from dataclasses import replace
from pathlib import Path
from dtengine.models import llama

calls = 0

def embed(params, batch, ops):
    global calls
    calls += ops.dropout_key is not None  # not evaluations
    if calls == int(os.environ.get("HOLD", -1)):
        Path(f"held-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(600)
    return llama.embed(params, batch, ops)

MODEL = replace(llama.MODEL, embed=embed)
"""


class Finished(NamedTuple):
    """A run that ended, where it was started and where it lies."""

    done: Done
    cwd: Path
    folder: Path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 40 kB that a bigram model knows more of than one byte at a time."""
    draw = random.Random(0)
    some = [
        "the",
        "of",
        "and",
        "def",
        "return",
        "self",
        "for",
        "in",
        "import",
        "class",
        "value",
        "mesh",
        "axis",
        "rank",
    ]
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choice(some) for _ in range(9)) for _ in range(900)))
    return path


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmCommands]:
    with WarmCommands() as commands:
        yield commands


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Eight steps on 2x2 without a stop, from a folder that is not the repository; its data has a relative path."""
    cwd = tmp_path_factory.mktemp("unbroken")
    shutil.copy(text, cwd)
    arguments = f"{SIZES} {STEPS} --eval-sequences 7 --mesh 2x2 --data words.txt --run-dir first --sample 40"
    return Finished(run(TRAIN, arguments, cwd), cwd, cwd / "first")


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same run killed in step 7, with a checkpoint of step 4 and events up to step 6; untraced, to be held there."""
    cwd = tmp_path_factory.mktemp("killed")
    shutil.copy(text, cwd)
    (cwd / "hold.py").write_text(HOLD_MODEL)
    model = f"--model {cwd / 'hold.py'}:MODEL"
    arguments = f"{QUICK} {STEPS} {model} --mesh 2x2 --data {text} --run-dir first"
    with Command(TRAIN, arguments, cwd, environ={"HOLD": "7"}) as command:
        command.until(lambda: held(cwd, 4), "rank in step 7")
        command.until(lambda: scalars(cwd / "first").get(TAGS["loss"], {}).get(6), "event of step 6")
        command.process.kill()
        return Finished(command.end(), cwd, cwd / "first")


@pytest.fixture
def copied(killed: Finished, tmp_path: Path) -> Path:
    """A copy of the killed run."""
    return Path(shutil.copytree(killed.folder, tmp_path / "copy"))


def held(folder: Path, ranks: int) -> list[int]:
    """Process ids of the ranks that are held, by rank; empty until all are."""
    paths = [folder / f"held-{rank}" for rank in range(ranks)]
    texts = [path.read_text() for path in paths if path.exists()]
    return [int(text) for text in texts] if len(texts) == ranks and all(texts) else []


def accumulated(folder: Path) -> EventAccumulator:
    """Read a run's events with the stock reader, as TensorBoard does."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}}; a step that comes twice or out of order is an error."""
    if not (folder / "tensorboard").is_dir():
        return {}
    events = accumulated(folder)
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag, points in found.items():
        assert [s for s, _ in points] == sorted({s for s, _ in points}), f"{tag}: {points}"
    return {tag: dict(points) for tag, points in found.items()}


def losses(folder: Path) -> list[float]:
    return list(scalars(folder)[TAGS["loss"]].values())


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Put the whole tensors of a checkpoint together with the stock library; every element must be there exactly once."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(p.name for p in path.iterdir()) == sorted(["manifest.json", *manifest["files"]])
    files = {name: safe_open(path / name, framework="pt") for name in manifest["files"]}
    sizes = {name: [(path / name).stat().st_size, zlib.crc32((path / name).read_bytes())] for name in files}
    assert sizes == manifest["files"]
    unread = {(name, key) for name, file in files.items() for key in file.keys()}  # noqa: SIM118
    wholes = {}
    for name, stored in manifest["tensors"].items():
        dtype = {"F32": torch.float32, "F64": torch.float64}[stored["dtype"]]
        whole, seen = torch.empty(stored["shape"], dtype=dtype), torch.zeros(stored["shape"], dtype=torch.int64)
        for part in stored["slices"]:
            where = tuple(slice(a, b) for a, b in part["bounds"])
            piece = files[part["file"]].get_tensor(name)
            assert (piece.dtype, piece.shape) == (dtype, whole[where].shape)
            whole[where] = piece
            seen[where] += 1
            unread.discard((part["file"], name))
        assert (seen == 1).all(), f"{name}: {seen}"
        wholes[name] = whole
    assert not unread
    return wholes


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a)


def contents(folder: Path) -> dict[str, str]:
    """{path: hash} of all files below a folder, and its empty folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def flat(text: str) -> str:
    """Return what a panel says as one line."""
    return " ".join(re.sub("[─│╭╮╰╯]", " ", text).split())


def said(done: Done, *parts: str) -> None:
    """Assert that a command refused: exit code 2, one short message with these parts, no traceback, in seconds."""
    assert done.code == 2, done
    assert done.out == "", done
    assert "Traceback" not in done.err
    boxed = done.err.startswith("╭")  # the option parser's own form
    message = flat(done.err) if boxed else done.err
    assert boxed or re.fullmatch(r"dtengine: [^\n]+\n", message), done.err
    assert len(message) < 450, done.err
    assert done.seconds < 5
    for part in parts:
        assert part in message, done.err


# What a run leaves.


def test_run_folder(unbroken: Finished) -> None:
    """A run started from another folder exits 0, says nothing on stderr, and its folder holds what is promised."""
    assert (unbroken.done.code, unbroken.done.err) == (0, "")
    assert {p.name for p in unbroken.folder.iterdir()} == {
        "checkpoints", "config.json", "logs", "status.json", "tensorboard"
    }  # fmt: skip
    assert {p.name for p in (unbroken.folder / "checkpoints").iterdir()} == {"step-4", "step-8"}
    assert {f"rank-{r}.log" for r in range(4)} <= {p.name for p in (unbroken.folder / "logs").iterdir()}
    options = from_json((unbroken.folder / "config.json").read_text())
    assert (options.mesh.mesh, options.model.embed, options.optimizer.steps) == ("2x2", 18, 8)
    assert {p.name for p in unbroken.cwd.iterdir()} == {"first", "words.txt"}


def test_status(unbroken: Finished) -> None:
    """status.json has every key, says finished, and agrees with the events."""
    found = status(unbroken.folder)
    assert set(found) == {*STATUS_FIELDS, "updated_at"}
    wanted = {
        "rank": 0, "world_size": 4, "backend": "gloo", "status": "finished", "gpu_memory_used_gb": None,
        "gpu_memory_total_gb": None, "step": 8, "steps": 8, "run": "first", "mesh": "2x2", "plan": "fsdp", "error": None,
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    curves = scalars(unbroken.folder)
    assert np.float32(found["loss"]) == np.float32(curves[TAGS["loss"]][8])
    assert np.float32(found["heldout_loss"]) == np.float32(curves[TAGS["heldout_loss"]][8])
    assert found["tokens_per_sec"] == pytest.approx(15 * found["throughput_samples_per_sec"])
    assert found["tokens_per_sec"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(found["checkpoint_saved_at"]))


def test_events(unbroken: Finished) -> None:
    """The stock reader finds every tag, each step once; the rate is the pure function; the plan is a text."""
    curves = scalars(unbroken.folder)
    assert set(curves) == set(TAGS.values())
    for tag, points in curves.items():
        known = {TAGS["heldout_loss"]: [4, 8], TAGS["trace_seconds"]: [0]}
        assert list(points) == known.get(tag, list(range(1, 9))), tag
        assert all(math.isfinite(value) and value >= 0 for value in points.values()), tag
    rates = list(curves[TAGS["learning_rate"]].values())
    assert rates == [float(np.float32(RATE(step))) for step in range(8)]
    (plan,) = accumulated(unbroken.folder).Tensors("plan/text_summary")
    words = plan.tensor_proto.string_val[0].decode()
    assert all(part in words for part in ("dp=2,tp=2", "fsdp", "kv\\_heads", "words.txt"))


def test_console(unbroken: Finished) -> None:
    """The console shows the screen, steps, held-out and bigram loss, text, next commands; losses are those of the events."""
    out, curves = unbroken.done.out, scalars(unbroken.folder)
    assert "dp=2,tp=2 (4 ranks)" in out and "2 dp x 1 microbatches x 2" in out
    for step in (1, 8):
        (shown,) = re.findall(rf"^step {step}/8  loss (\S+)  [\d,]+ tokens/s", out, re.MULTILINE)
        assert np.float32(shown) == np.float32(curves[TAGS["loss"]][step])
    for step in (4, 8):
        (shown,) = re.findall(rf"^step {step}/8  held-out loss (\S+)$", out, re.MULTILINE)
        assert np.float32(shown) == np.float32(curves[TAGS["heldout_loss"]][step])
    (bigram,) = re.findall(r"bigram model +(\d\.\d{4}) on the same sequences", out)
    assert 0 < float(bigram) < 3
    assert f"held-out loss  {curves[TAGS['heldout_loss']][8]:.4f}" in out
    assert re.search(r"─ sample ─.*\n(│.*│\n)*│ def ", out)
    assert "\npython -m dtengine.train --run-dir first --resume --steps 16\n" in out
    assert "\ntensorboard --logdir first/tensorboard\n" in out
    sizes = "--layers 1 --embed 18 --heads 2 --head-dim 6 --mlp 26 --seq 15 --dropout 0.1 --global-batch 4"
    assert f"\npython -m dtengine.verify --mesh 2x2 --plan fsdp --model llama {sizes}\n" in out
    assert "warning" not in out


def test_checkpoint_files(unbroken: Finished) -> None:
    """The stock safetensors library reads what the manifest says, and its slices tile each tensor exactly once."""
    shapes = {}
    for step in (4, 8):
        path = unbroken.folder / "checkpoints" / f"step-{step}"
        manifest = json.loads((path / "manifest.json").read_text())
        facts = manifest["facts"]
        assert (manifest["step"], facts["consumed"], facts["mesh"]) == (step, 4 * step, "dp=2,tp=2")
        assert facts["learning_rate"] == RATE(step - 1)
        shapes[step] = {name: tuple(x.shape) for name, x in tensors(path).items()}
    assert shapes[4] == shapes[8]
    params = {name for name in shapes[8] if name.startswith("params.")}
    assert shapes[8]["params.embed.table"] == (256, 18)
    assert set(shapes[8]) == params | {n.replace("params.", f"slots.{s}.") for n in params for s in ("mean", "square")}


# Resume.


def test_killed_run_resumes_to_the_same_bits(
    unbroken: Finished, killed: Finished, copied: Path, tmp_path: Path
) -> None:
    """Killed in step 7 and resumed from step 4, traced: losses, rates, checkpoint are the bits of the unbroken run.

    Curves have each step once. Half-written checkpoints are passed over. Options that changed are said.
    """
    assert killed.done.code == -signal.SIGKILL
    assert list(scalars(killed.folder)[TAGS["loss"]])[-1] == 6
    assert status(killed.folder)["status"] == "running"
    for name in (".staging-step-6", ".staging-step-8", "step-6"):
        (copied / "checkpoints" / name).mkdir()
        (copied / "checkpoints" / name / "rank-00000.safetensors").write_bytes(b"half")
    done = run(TRAIN, "--run-dir copy --resume --model llama --no-eager", tmp_path)
    assert (done.code, done.err) == (0, "")
    once, again = scalars(unbroken.folder), scalars(copied)
    for name in ("loss", "gradient_norm", "learning_rate", "heldout_loss"):
        assert again[TAGS[name]] == once[TAGS[name]], name
    assert set(again) == set(once)
    (console,) = re.findall(r"^step 8/8 .*loss (\S+)  ", unbroken.done.out, re.MULTILINE)
    assert f"step 8/8  loss {console}  " in done.out
    assert "step 5/8  loss" in done.out and "step 4/8" not in done.out
    one, two = (tensors(folder / "checkpoints" / "step-8") for folder in (unbroken.folder, copied))
    assert same_bits(one, two)
    assert "resumed at step 4" in flat(done.out)
    changed = f"changed on resume: --model {killed.cwd / 'hold.py'}:MODEL to llama, --eager True to False"
    assert changed.replace(" ", "") in flat(done.out).replace(" ", "")  # a long path is cut where the line ends
    assert status(copied)["status"] == "finished"


@pytest.mark.parametrize("other", ["--mesh 4", "--mesh 1", "--mesh 1x4", "--plan ddp"])
def test_resume_on_another_mesh(
    unbroken: Finished, copied: Path, warm: WarmCommands, tmp_path: Path, other: str
) -> None:
    """Another mesh or plan continues the run: losses to 1e-5; options that are not typed are those of the stored run.

    A rank that has no head is legal and warned of once.
    """
    done = warm.run(TRAIN, f"--run-dir copy --resume {other}", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert losses(copied) == pytest.approx(losses(unbroken.folder), rel=1e-5)
    heldout = [scalars(folder)[TAGS["heldout_loss"]][8] for folder in (unbroken.folder, copied)]
    assert heldout[1] == pytest.approx(heldout[0], rel=1e-5)
    option, value = other.split()
    before = "2x2" if option == "--mesh" else "fsdp"
    assert f"changed on resume: {option} {before} to {value}" in flat(done.out)
    assert done.out.count("warning:") == 1 + (other == "--mesh 1x4")
    assert flat(done.out).count("have no head and idle") == (other == "--mesh 1x4")
    stored = from_json((copied / "config.json").read_text())
    assert (stored.mesh.mesh, stored.model.embed, stored.program.eager) == (
        value if option == "--mesh" else "2x2", 18, True
    )  # fmt: skip


def save_again(rank: int, source: Path, target: Path, mesh: str, plan: str) -> None:
    """Load a checkpoint on some mesh and save it as it is."""
    stored = from_json((source.parents[1] / "config.json").read_text())
    setup = config.resolve(replace(stored, mesh=replace(stored.mesh, mesh=mesh, plan=plan)), vocab=256)
    there = build_mesh(setup.plan.sizes)
    optimizer = setup.optimizer(stored.optimizer)
    step = setup.bind(there, optimizer, RATE)
    checkpoint.save(target, checkpoint.load(source, init_state(step), there), there, {})


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("1", "fsdp"), ("4", "fsdp"), ("1x4", "fsdp"), ("3", "zero2"), ("rep=2,dp=2,tp=2", "fsdp"), ("2x2", "ddp")],
)  # fmt: skip
def test_every_mesh_reads_every_checkpoint(
    pool: Pool, unbroken: Finished, tmp_path: Path, mesh: str, plan: str
) -> None:
    """Parameters and optimizer state that were saved on 2x2 are bit-equal once loaded and saved on another mesh."""
    ranks = math.prod(int(size) for size in re.findall(r"\d+", mesh))
    source = unbroken.folder / "checkpoints" / "step-8"
    pool.run(ranks, save_again, source, tmp_path, mesh, plan)
    assert same_bits(tensors(tmp_path / "step-8"), tensors(source))


def test_existing_run_is_not_touched(warm: WarmCommands, unbroken: Finished) -> None:
    """Without --resume a folder that holds a run is refused; finished, with --resume, nothing is done. Nothing changes."""
    before = contents(unbroken.folder)
    again = f"{SIZES} {STEPS} --mesh 2x2 --data words.txt --run-dir first"
    said(warm.run(TRAIN, again, unbroken.cwd), "--run-dir first: holds a run; nothing is overwritten", "--resume")
    done = warm.run(TRAIN, "--run-dir first --resume", unbroken.cwd)
    assert (done.code, done.err) == (0, "")
    assert done.out == "first: finished, all 8 steps are done. Give more --steps to go on.\n"
    assert contents(unbroken.folder) == before


def test_resume_from_another_folder(warm: WarmCommands, unbroken: Finished, tmp_path: Path) -> None:
    """A run whose --data was a relative path is resumed from anywhere: the stored path does not depend on the folder."""
    done = warm.run(TRAIN, f"--run-dir {unbroken.folder} --resume", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "finished, all 8 steps are done" in done.out


@pytest.mark.parametrize("exists", [True, False])
def test_resume_of_nothing_starts(warm: WarmCommands, text: Path, tmp_path: Path, exists: bool) -> None:
    """--resume on a folder that is empty or does not exist starts a run, so that one command serves every start."""
    if exists:
        (tmp_path / "run").mkdir()
    done = warm.run(TRAIN, f"{QUICK} --steps 1 --data {text} --run-dir run --resume", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert list(scalars(tmp_path / "run")[TAGS["loss"]]) == [1]
    assert "resumed" not in done.out


@pytest.mark.parametrize("other", ["--data other.txt", "--seq 14", "--seed 3", "--heldout-fraction 0.2"])
def test_resume_with_other_data_is_refused(
    warm: WarmCommands, text: Path, copied: Path, tmp_path: Path, other: str
) -> None:
    """Other data, split, order or length of sequences would skip or repeat some: refused, nothing changed."""
    before = contents(copied)
    (tmp_path / "other.txt").write_text(text.read_text().replace("mesh", "Mesh"))
    said(warm.run(TRAIN, f"--run-dir copy --resume {other}", tmp_path), "--data: not the data that copy/checkpoints")
    assert contents(copied) == before


def test_resume_with_another_batch_reads_on(warm: WarmCommands, killed: Finished, tmp_path: Path) -> None:
    """A larger global batch goes on at the sequence where the run stopped: none is skipped, none comes twice.

    Nothing is learned here, so step 5 of twice the batch has the mean loss of steps 5 and 6.
    """
    still = "--resume --lr 0 --weight-decay 0 --dropout 0 --mesh 1"
    found = []
    for name, batch in (("small", 4), ("large", 8)):
        shutil.copytree(killed.folder, tmp_path / name)
        done = warm.run(TRAIN, f"--run-dir {name} {still} --global-batch {batch}", tmp_path)
        assert (done.code, done.err) == (0, "")
        found.append(losses(tmp_path / name)[4:])
    small, large = found
    assert large[0] == pytest.approx((small[0] + small[1]) / 2, rel=1e-6)
    assert large[1] == pytest.approx((small[2] + small[3]) / 2, rel=1e-6)
    manifest = json.loads((tmp_path / "large" / "checkpoints" / "step-8" / "manifest.json").read_text())
    assert manifest["facts"]["consumed"] == 4 * 4 + 4 * 8


def test_resume_of_another_model_is_refused(warm: WarmCommands, copied: Path, tmp_path: Path) -> None:
    """A model that the checkpoint does not fit: all differences in one message, and the run can still be resumed."""
    before = (copied / "config.json").read_text()
    done = warm.run(TRAIN, "--run-dir copy --resume --embed 20 --mesh 1", tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "params.embed.table has shape [256, 18], the model [256, 20]" in done.err
    assert "params.head.norm has shape [18], the model [20]" in done.err
    assert (copied / "config.json").read_text() == before


def truncate(step: Path) -> None:
    with (step / "rank-00001.safetensors").open("r+b") as file:
        file.truncate(100)


def remove(step: Path) -> None:
    (step / "rank-00001.safetensors").unlink()


def rename(step: Path) -> None:
    (step / "rank-00001.safetensors").rename(step / "rank-00009.safetensors")


def name_outside(step: Path) -> None:
    (step.parent / "evil").write_bytes((step / "rank-00001.safetensors").read_bytes())
    manifest = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(manifest.replace("rank-00001.safetensors", "../evil"))


def cut_manifest(step: Path) -> None:
    (step / "manifest.json").write_text((step / "manifest.json").read_text()[:-40])


def spoil(place: int) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        with (step / "rank-00001.safetensors").open("r+b") as file:
            file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x40]))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncate, "rank-00001.safetensors has 100 bytes, not ", id="truncated"),
        pytest.param(remove, "rank-00001.safetensors is missing", id="missing"),
        pytest.param(rename, "rank-00001.safetensors is missing", id="renamed"),
        pytest.param(name_outside, "'../evil' is no name of a file in it", id="name-outside"),
        pytest.param(cut_manifest, "its manifest cannot be read", id="manifest-cut"),
        pytest.param(spoil(9), "damaged", id="header-spoiled"),
        pytest.param(spoil(-9), "damaged", id="value-spoiled"),
    ],
)  # fmt: skip
def test_damaged_checkpoint_is_one_message(
    warm: WarmCommands, copied: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    """A checkpoint that is damaged, where there is no other, is one message that names it: exit code 2, no traceback."""
    damage(copied / "checkpoints" / "step-4")
    done = warm.run(TRAIN, "--run-dir copy --resume --mesh 1", tmp_path)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    first = done.err.splitlines()[0]
    assert first.startswith("dtengine: checkpoint copy/checkpoints/step-4") and message in first
    assert len(done.err.splitlines()) <= 2  # the second says where the logs are
    assert "step 5/8" not in done.out


def test_resume_takes_the_newest_checkpoint_that_verifies(
    warm: WarmCommands, unbroken: Finished, tmp_path: Path
) -> None:
    """Where the newest checkpoint is damaged, the run goes on from the one before it, and says so."""
    folder = Path(shutil.copytree(unbroken.folder, tmp_path / "copy"))
    shutil.copy(unbroken.cwd / "words.txt", tmp_path)
    truncate(folder / "checkpoints" / "step-8")
    done = warm.run(TRAIN, "--run-dir copy --resume --steps 9 --eager --mesh 1 --sample 0", tmp_path)
    assert done.code == 0, done
    assert "resumed at step 4" in flat(done.out)
    assert "step-8" in done.out + done.err


# Mistakes.


@pytest.fixture(scope="module")
def mistakes(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the table below names."""
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copy(text, folder)
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("abc")
    (folder / "binary.dat").write_bytes(bytes(range(256)) * 10)
    (folder / "nothing.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "letter.txt").write_text("dear")
    np.save(folder / "ids.npy", (np.arange(4000) % 500).astype("uint16"))
    return folder


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--mesh 0x4", ["--mesh 0x4: 0 for dp"]),
        ("--mesh 2x", ["--mesh 2x: an empty size for tp"]),
        ("--mesh -1x2", ["--mesh -1x2: -1 for dp"]),
        ("--mesh dp=2,dp=2", ["--mesh dp=2,dp=2: axis dp is given twice"]),
        ("--mesh foo=2", ["--mesh foo=2: no mesh axis is called 'foo'", "Use pp, rep, dp, tp"]),
        ("--mesh 2x2x2x2", ["--mesh 2x2x2x2: 4 sizes, but at most 3"]),
        ("--mesh 99999999", ["--mesh 99999999"]),
        ("--data missing.txt", ["--data missing.txt: there is no such file"]),
        ("--data empty.txt", ["--data empty.txt: the file is empty"]),
        ("--data empty", ["--data empty: the folder has no text"]),
        ("--data short.txt", ["--data short.txt: 5 tokens", "seq + 1 = 16"]),
        ("--data binary.dat", ["--data binary.dat: byte 0 is 0, so this is a binary file"]),
        ("--run-dir words.txt", ["--run-dir words.txt: is a file"]),
        ("--run-dir words.txt/run", ["--run-dir words.txt/run: cannot write to words.txt (Not a directory)"]),
        ("--run-dir /proc/run", ["--run-dir /proc/run: cannot write to /proc"]),
        ("--run-dir other", ["--run-dir other: is not empty"]),
        ("--run-dir other --resume", ["--run-dir other: is not empty and holds no run"]),
        ("--model bert", ["--model bert: no such model. Use gpt, llama, mlp"]),
        ("--model nofile.py:MODEL", ["--model nofile.py:MODEL: there is no file nofile.py"]),
        ("--model nothing.py:MODEL", ["--model nothing.py:MODEL: MODEL in nothing.py is missing"]),
        ("--model nothing.py:x", ["--model nothing.py:x: x in nothing.py is no dtengine.Model"]),
        ("--model broken.py:MODEL", ["--model broken.py:MODEL", "No module named 'there_is_no_such_module'"]),
        ("--size gpt9", ["--size gpt9: llama has no such size", "llama3-8b"]),
        ("--plan zero9", ["'zero9'", "--plan", "'ddp', 'zero1', 'zero2', 'fsdp'"]),
        ("--optimizer adamx", ["'lion'", "--optimizer", "'adamw', 'sgd'"]),
        ("--global-batch 9 --microbatch 2 --microbatches 3", ["--global-batch 9 --microbatch 2 --microbatches 3: 1 data"]),
        ("--global-batch 0", ["--global-batch 0"]),
        ("--microbatch -1", ["--microbatch -1"]),
        ("--kv-heads 3", ["--kv-heads 3: does not divide --heads 2"]),
        ("--dropout 1", ["--dropout 1", "0"]),
        ("--steps 0", ["--steps 0: must be at least 1"]),
        ("--steps many", ["--steps", "'many'"]),
        ("--vocab 100", ["--vocab 100", "256"]),
        ("--data ids.npy --vocab 100", ["--vocab 100", "ids.npy"]),
        ("--backend nccl", ["--backend nccl: 1 ranks on this machine, but 0 CUDA GPUs"]),
        ("--trace-step 9", ["--trace-step 9: the run has steps 1 to 2"]),
        ("--lr -1", ["--lr -1"]),
        ("--lr inf", ["--lr inf"]),
        ("--lr-floor nan", ["--lr-floor nan"]),
        ("--lr-floor -1", ["--lr-floor -1"]),
        ("--momentum -1", ["--momentum -1"]),
        ("--sample -5", ["--sample -5"]),
        ("--heldout-fraction 0.9", ["--heldout-fraction 0.9"]),
        ("--nonsense 3", ["--nonsense"]),
    ],
)  # fmt: skip
def test_mistake_is_one_message(warm: WarmCommands, mistakes: Path, arguments: str, parts: list[str]) -> None:
    """A mistake is one short message with option and value, exit code 2, no traceback, and leaves nothing behind."""
    if "nccl" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = set(mistakes.rglob("*"))
    try:
        said(warm.run(TRAIN, f"{QUICK} --steps 2 --data words.txt --run-dir run {arguments}", mistakes, 30), *parts)
        assert set(mistakes.rglob("*")) == before
    finally:
        shutil.rmtree(mistakes / "run", ignore_errors=True)


def test_passes_are_reported_and_nothing_is_written(text: Path, tmp_path: Path) -> None:
    """--passes prints what each pass does to the run's own step, exits 0, and leaves no folder."""
    done = run(TRAIN, f"{SIZES} --mesh 2 --data {text} --run-dir run --passes", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert [name for name in PASSES if name not in done.out] == []
    assert "A step with all of them takes" in done.out
    assert not (tmp_path / "run").exists()


def test_resume_without_a_folder(warm: WarmCommands, tmp_path: Path) -> None:
    """--resume needs to be told which run."""
    said(warm.run(TRAIN, "--resume", tmp_path), "--resume: which run? Give its folder with --run-dir.")


@pytest.mark.parametrize("arguments", ["--mesh 2x", "--data missing.txt"])
def test_mistake_of_a_cold_start(tmp_path: Path, arguments: str) -> None:
    """The same with a fresh interpreter; most of its time is the import of torch."""
    done = run(TRAIN, arguments, tmp_path)
    said(done._replace(seconds=done.seconds / 4), arguments)  # wall time: the cores may be shared
    assert not list(tmp_path.iterdir())


def test_wrong_mesh_under_torchrun(text: Path, tmp_path: Path) -> None:
    """--mesh 2x3 on 4 ranks of torchrun: each says it once; none of ours is a traceback."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run(TRAIN, f"{QUICK} --mesh 2x3 --data {text} --run-dir run", tmp_path, launcher)
    message = (
        "dtengine: --mesh 2x3: 6 ranks, but torchrun started 4. The product of the mesh sizes must be the number of ranks. "
        "Use --mesh 2x2, or start 6."
    )
    assert done.code != 0
    assert 1 <= done.err.count(message) <= 4
    assert done.err.count("--mesh 2x3") == done.err.count(message)
    assert "dtengine/train.py" not in done.err
    assert not (tmp_path / "run").exists()


# Launchers.


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def place(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


def test_every_launcher_gives_the_same_losses(text: Path, tmp_path: Path) -> None:
    """dtengine's own start (two at once), torchrun, and ranks set by hand: bit-equal losses, each in its own folder."""
    arguments = f"{QUICK} --steps 3 --mesh 2 --data {text} --run-dir"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    port = free_port()
    with ExitStack() as stack:

        def start(name: str, *launcher: str, environ: Mapping[str, str] = MappingProxyType({})) -> Command:
            return stack.enter_context(Command(TRAIN, f"{arguments} {name}", tmp_path, launcher, environ))

        pair = [start("one"), start("two")]
        ends = [command.end() for command in pair]
        others = [start("torchrun", *torchrun), *(start("hand", environ=place(rank, port)) for rank in range(2))]
        ends += [command.end() for command in others]
    assert [done.code for done in ends] == [0] * 5, ends
    assert all(done.err == "" for done in ends[:2] + ends[3:]), ends
    names = ("one", "two", "torchrun", "hand")
    found = [losses(tmp_path / name) for name in names]
    assert len(found[0]) == 3 and found == [found[0]] * 4
    for name, started in zip(names, ("dtengine", "dtengine", "torchrun", "torchrun"), strict=True):
        assert (tmp_path / name / "logs" / "rank-1.log").exists(), name
        assert status(tmp_path / name)["status"] == "finished"
        assert started in ends[names.index(name)].out
    assert ends[4].out == "", "only rank 0 writes to the console"


def test_port_in_use(text: Path, tmp_path: Path) -> None:
    """A fixed port that another process holds is named, in one message and exit code 2."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        arguments = f"{QUICK} --steps 3 --mesh 2 --data {text} --run-dir run"
        done = run(TRAIN, arguments, tmp_path, environ=place(0, port))
    assert done.code == 2, done
    assert "Traceback" not in done.err, done.err
    assert f"MASTER_PORT {port}: rank 0 cannot open a store" in done.err
    assert "Set another MASTER_PORT." in done.err


# Ends.


@pytest.fixture
def holding(text: Path, tmp_path: Path) -> Iterator[Command]:
    """A run on 2x2 whose ranks are held in step 3, after a checkpoint of step 2."""
    (tmp_path / "hold.py").write_text(HOLD_MODEL)
    arguments = f"{QUICK} --steps 8 --save-every 2 --model hold.py:MODEL --mesh 2x2 --data {text} --run-dir run"
    with Command(TRAIN, arguments, tmp_path, environ={"HOLD": "3"}) as command:
        command.until(lambda: held(tmp_path, 4), "rank in step 3")
        yield command


def test_interrupt(holding: Command, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run: exit code 130, no process left, a status that does not say running."""
    holding.process.send_signal(signal.SIGINT)
    done = holding.end(60)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-2"
    assert len(tensors(tmp_path / "run" / "checkpoints" / "step-2")) > 0
    found = status(tmp_path / "run")
    assert found["status"] == "failed", "whoever reads status.json believes that the run goes on"
    assert "SIGINT" in str(found["error"])


def test_killed_rank_is_named(holding: Command, tmp_path: Path) -> None:
    """A rank that is killed ends the others; console and status name it and the signal."""
    os.kill(held(tmp_path, 4)[2], signal.SIGKILL)
    done = holding.end(60)
    assert done.code == 137
    assert done.err.splitlines()[0] == "dtengine: rank 2: killed by SIGKILL (log: run/logs/rank-2.log)"
    assert len(done.err.splitlines()) == 2 and "run/logs" in done.err.splitlines()[1]
    found = status(tmp_path / "run")
    assert (found["status"], found["mesh"], found["step"]) == ("failed", "2x2", 2)
    assert "rank 2: killed by SIGKILL" in str(found["error"])


@pytest.mark.parametrize(
    "options", ["--start-timeout inf", "--start-timeout 0", "--start-timeout nan", "--cuda-graphs"]
)
def test_what_cannot_be_is_refused_before_the_start(
    warm: WarmCommands, text: Path, tmp_path: Path, options: str
) -> None:
    """One message that names the option, and no folder is taken."""
    done = warm.run(TRAIN, f"{QUICK} --mesh 2 {options} --data {text} --run-dir run", tmp_path)
    assert done.code == 2 and f"dtengine: {options.split()[0]}" in done.err, done
    assert not (tmp_path / "run").exists()


def test_fp16_stops_where_the_loss_is_not_finite(warm: WarmCommands, text: Path, tmp_path: Path) -> None:
    """No loss scale mends it: the first such step ends the run, and nothing is saved."""
    diverge = "--precision fp16 --lr 1e30 --warmup 0 --lr-decay none"
    done = warm.run(TRAIN, f"{QUICK} {diverge} --steps 9 --mesh 1 --data {text} --run-dir run", tmp_path)
    assert done.code == 1 and "NonFinite: step 2: loss " in done.err, done
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") == (None, {})


def test_non_finite_loss(warm: WarmCommands, text: Path, tmp_path: Path) -> None:
    """A loss that is not finite stops all ranks in the same step; the message names it and whose data it was."""
    diverge = "--optimizer sgd --lr 1e30 --clip 0 --warmup 0 --lr-decay none"
    done = warm.run(TRAIN, f"{QUICK} {diverge} --steps 9 --mesh 2x2 --data {text} --run-dir run", tmp_path)
    assert done.code == 1, done
    message = done.err.splitlines()[-2]
    told = re.fullmatch(
        r"dtengine: rank (\d): NonFinite: step (\d): loss (\S+), gradient norm (\S+), (.+); nothing was updated\. .*",
        message,
    )
    assert told is not None, message
    step = int(told[2])
    assert not (math.isfinite(float(told[3])) and math.isfinite(float(told[4])))
    assert re.fullmatch(r"on the data of ranks [0-3, ]+|though every rank's own loss was finite", told[5])
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert f"NonFinite: step {step}: " in logs[int(told[1])]
    for log in logs:  # a rank that was ended before it could write has none
        assert re.findall(r"NonFinite: step (\d+)", log) in ([], [str(step)]), log
    found = status(tmp_path / "run")
    assert (found["status"], found["step"]) == ("failed", step - 1)
    assert f"NonFinite: step {step}: " in str(found["error"])
    assert list(scalars(tmp_path / "run")[TAGS["loss"]]) == list(range(1, step))
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") == (None, {})
