"""python -m dtengine.verify on real processes: it passes what is right, and catches what is wrong only on a mesh."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import WarmCommands, run

from dtengine.verify import difference

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

VERIFY = "dtengine.verify"
KEYS = [
    "ok", "loss", "grads", "worst_parameter", "norm", "params", "buffers", "replicas_equal", "collectives", "command",
]  # fmt: skip
# The smallest that is still odd: nothing divides, rows are padded, labels are ignored.
SMALL = (
    "--layers 1 --embed 10 --heads 3 --kv-heads 3 --head-dim 2 --mlp 6 --vocab 13 --seq 5 --global-batch 3 --steps 2"
)
QUICK = f"{SMALL} --eager"

# Llama with one more operation in each block: DAMAGE(x) on [batch, res_seq, embed].
MODEL = """
import os
from dataclasses import replace
from dtengine.models import llama

AXES = "batch res_seq embed"

def block(params, x, ops):
    return ops.local(lambda x: {damage}, AXES + " -> " + AXES, llama.block(params, x, ops), whole="{whole}")

MODEL = replace(llama.MODEL, block=block)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmCommands]:
    with WarmCommands() as commands:
        yield commands


def report(warm: WarmCommands, arguments: str, folder: Path) -> tuple[int, dict]:
    """Run verify; return exit code and its line of JSON."""
    done = warm.run(VERIFY, f"{arguments} --json", folder)
    assert done.err == "", done
    assert len(done.out.splitlines()) == 1, done
    return done.code, json.loads(done.out)


def test_json_line_and_its_command(tmp_path: Path) -> None:
    """--json prints one line with exactly these keys; the command in it gives the same report again."""
    done = run(VERIFY, f"{SMALL} --mesh 2x2 --plan fsdp --model gpt --microbatches 2 --weights --json", tmp_path)
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    first = json.loads(line)
    assert list(first) == KEYS
    assert first["ok"] is True and first["replicas_equal"] is True
    assert 0 <= max(first[k] for k in ("loss", "grads", "norm", "params")) < 1e-9
    assert first["worst_parameter"].split(".")[0] in ("embed", "blocks", "head")
    assert set(first["collectives"]) == {"dp", "tp", "dp+tp"}
    python, flag, module, *arguments = shlex.split(first["command"])
    assert (python, flag, module) == ("python", "-m", VERIFY)
    again = run(module, [*arguments, "--json"], tmp_path)
    assert json.loads(again.out) == first
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "plan",
    ["--mesh 2x2 --plan ddp", "--mesh 2x2 --plan zero1", "--mesh 2x2 --plan zero2", "--mesh 2x2 --plan fsdp --no-sp",
     "--mesh rep=2,dp=2", "--mesh 1x2 --momentum 0.9 --dropout 0.2 --tied"],
)  # fmt: skip
def test_right_plans_pass(warm: WarmCommands, tmp_path: Path, plan: str) -> None:
    """Every plan computes what one device does: exit code 0."""
    code, found = report(warm, f"{QUICK} {plan}", tmp_path)
    assert (code, found["ok"], found["replicas_equal"]) == (0, True, True), found


def test_table_for_people(warm: WarmCommands, tmp_path: Path) -> None:
    """Without --json a table says what was compared, the verdict, and the command."""
    done = warm.run(VERIFY, f"{SMALL} --mesh 2", tmp_path)
    assert (done.code, done.err) == (0, "")
    for words in ("fsdp on dp=2 against one device, fp64", "raw gradients of step 1", "replicas bit-equal", "a step"):
        assert words in done.out
    assert f"equal within 1e-09.  python -m dtengine.verify {SMALL} --mesh 2\n" in done.out


@pytest.mark.parametrize(
    ("damage", "whole", "mesh"),
    [
        ("x - x.mean(0)", "", "2"),  # mixes rows, and says that it does not
        ("x.cumsum(1)", "", "1x2"),  # mixes positions, which sequence parallelism splits
        ("x / x.shape[1]", "", "1x2"),  # a local size in place of a global one
    ],
)
def test_wrong_model_is_caught(warm: WarmCommands, tmp_path: Path, damage: str, whole: str, mesh: str) -> None:
    """A model that is right on one device and wrong on a mesh: exit code 1 on the mesh, 0 on one device."""
    (tmp_path / "mine.py").write_text(MODEL.format(damage=damage, whole=whole))
    arguments = f"{QUICK} --model mine.py:MODEL"
    code, found = report(warm, f"{arguments} --mesh 1", tmp_path)
    assert (code, found["ok"], found["collectives"]) == (0, True, {})
    code, found = report(warm, f"{arguments} --mesh {mesh}", tmp_path)
    assert (code, found["ok"]) == (1, False)
    assert found["loss"] > 1e-6 and found["grads"] > 1e-6
    done = warm.run(VERIFY, f"{arguments} --mesh {mesh}", tmp_path)
    assert done.code == 1
    assert "DIFFERENT within 1e-09" in done.out and "above 1e-09" in done.out


def test_replicas_that_drift_are_caught(warm: WarmCommands, tmp_path: Path) -> None:
    """A term that depends on the rank, in a value that ranks hold alike: replicas are no longer equal, exit code 1."""
    (tmp_path / "mine.py").write_text(MODEL.format(damage="x * (1 + int(os.environ['RANK']))", whole=""))
    code, found = report(warm, f"{QUICK} --model mine.py:MODEL --mesh 1x2 --no-sp", tmp_path)
    assert (code, found["ok"], found["replicas_equal"]) == (1, False, False)


def test_undeclared_whole_axis_is_refused(warm: WarmCommands, tmp_path: Path) -> None:
    """The same operation with its claim stated is refused by name before anything is computed."""
    (tmp_path / "mine.py").write_text(MODEL.format(damage="x.cumsum(1)", whole="res_seq"))
    done = warm.run(VERIFY, f"{QUICK} --model mine.py:MODEL --mesh 1x2", tmp_path)
    assert done.code == 2
    message = done.err.strip().splitlines()[-1]
    assert "blocks.0" in message or "local 'batch res_seq embed" in message
    assert "tp splits res_seq, which must be whole here" in message
    assert "Traceback" not in done.err, "a ValueError is one message"


def test_what_is_not_finite_is_different(warm: WarmCommands, tmp_path: Path) -> None:
    """A number that is not finite on either side makes the verdict; a later finite tensor does not hide it."""
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    assert difference({"a": nan, "b": one}, {"a": one, "b": one}) == (math.inf, "a")
    assert difference({"a": one, "b": one}, {"a": nan, "b": one}) == (math.inf, "a")
    done = warm.run(VERIFY, f"{QUICK} --mesh 2 --lr 1e300 --clip 0", tmp_path)
    assert done.code == 1 and "DIFFERENT" in done.out


def test_logs_stay_where_a_rank_died(tmp_path: Path) -> None:
    """The message names a log, which is there with what the rank wrote last; other endings leave nothing."""
    damage = "os.write(2, b'last words') and os.environ['RANK'] == '1' and os.abort() or x"
    (tmp_path / "mine.py").write_text(MODEL.format(damage=damage, whole=""))
    (temporary := tmp_path / "tmp").mkdir()
    done = run(VERIFY, f"{QUICK} --model mine.py:MODEL --mesh 2", tmp_path, environ={"TMPDIR": str(temporary)})
    assert done.code == 134 and "rank 1: killed by SIGABRT (log: " in done.err
    assert "last words" in Path(done.err.partition("(log: ")[2].partition(")")[0]).read_text()
    (tmp_path / "mine.py").write_text(MODEL.format(damage="x.cumsum(1)", whole="res_seq"))
    (other := tmp_path / "other").mkdir()
    done = run(VERIFY, f"{QUICK} --model mine.py:MODEL --mesh 1x2", tmp_path, environ={"TMPDIR": str(other)})
    assert done.code == 2
    assert not list(other.glob("dtengine*"))


def test_own_model_passes(warm: WarmCommands, tmp_path: Path) -> None:
    """A person's own model whose operations keep what they claim passes."""
    (tmp_path / "mine.py").write_text(MODEL.format(damage="x * 1.5 + 0.25", whole=""))
    code, found = report(warm, f"{QUICK} --model mine.py:MODEL --mesh 2x2", tmp_path)
    assert (code, found["ok"]) == (0, True)


def test_tolerance_decides(warm: WarmCommands, tmp_path: Path) -> None:
    """A tolerance below rounding gives exit code 1 with the same figures; the default of fp32 is wider than of fp64."""
    code, found = report(warm, f"{QUICK} --mesh 2x2 --tolerance 1e-30", tmp_path)
    assert (code, found["ok"], found["replicas_equal"]) == (1, False, True)
    assert found["grads"] < 1e-9
    code, found = report(warm, f"{QUICK} --mesh 2x2 --precision fp32", tmp_path)
    assert (code, found["ok"]) == (0, True)
    assert 1e-9 < max(found["grads"], found["params"]) < 2e-4


@pytest.mark.parametrize("share", ["0", "0.95", "1"])
def test_ignored_labels(warm: WarmCommands, tmp_path: Path, share: str) -> None:
    """With no, most or all but one label ignored the plan still computes what one device does."""
    code, found = report(warm, f"{QUICK} --mesh 2 --microbatches 2 --ignore-fraction {share}", tmp_path)
    assert (code, found["ok"]) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--mesh 2x", "--mesh 2x: an empty size for tp"),
        ("--mesh 0x4", "--mesh 0x4: 0 for dp"),
        ("--mesh cp=2", "--mesh cp=2"),
        ("--plan zero9", "'zero9'"),
        ("--model bert", "--model bert: no such model"),
        ("--model nofile.py:MODEL", "there is no file nofile.py"),
        ("--kv-heads 2", "--kv-heads 2: does not divide --heads 3"),
        ("--dropout 1", "--dropout 1.0"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--ignore-fraction 1.5", "--ignore-fraction 1.5: a share, from 0 to 1"),
        ("--tolerance -1", "--tolerance -1"),
        ("--tolerance nan", "--tolerance nan"),
        ("--global-batch 9 --microbatch 2 --microbatches 3", "--global-batch 9 --microbatch 2 --microbatches 3"),
        ("--resume", "--resume"),
    ],
)
def test_bad_options(warm: WarmCommands, tmp_path: Path, arguments: str, part: str) -> None:
    """A mistake is one short message with option and value, exit code 2, no traceback; no option is silently ignored."""
    done = warm.run(VERIFY, f"{QUICK} {arguments}", tmp_path)
    assert done.code == 2, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert part in " ".join(done.err.replace("│", " ").split()), done.err
    assert len(done.err) < 900 and done.seconds < 5


def test_under_a_launcher(tmp_path: Path) -> None:
    """Started by torchrun it says that it starts its own ranks."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run(VERIFY, f"{QUICK} --mesh 2", tmp_path, environ=place)
    assert done.code == 2
    assert done.err.startswith("dtengine: dtengine.verify: started by torchrun; it starts its own ranks")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--optimizer adamw", "--backend nccl", "--warmup 5", "--base-batch 4"])
def test_options_that_change_nothing_are_named(warm: WarmCommands, tmp_path: Path, option: str) -> None:
    """An option of dtengine.train that verify does not use is said, not silently ignored; the answer stands."""
    done = warm.run(VERIFY, f"{QUICK} --json {option}", tmp_path)
    assert done.code == 0, done
    assert done.err == f"dtengine: {option}: not used; verify trains with SGD at a constant rate, on gloo.\n"
    assert json.loads(done.out)["ok"]
