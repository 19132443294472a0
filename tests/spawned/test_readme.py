"""The README does what it says: its code runs, its commands parse, its file tree names what is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dtengine.mesh import parse_mesh
from dtengine.options import TrainOptions, parse
from dtengine.schedule import ScheduleOptions
from dtengine.verify import VerifyOptions

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXPORT, MIXER, SCRIPT = BLOCKS
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ")]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_own_model_is_short_and_right(tmp_path: Path) -> None:
    """The README's own model has at most 40 lines, computes on a mesh what one device computes, and trains."""
    assert len(MIXER.splitlines()) <= 40
    (tmp_path / "mixer.py").write_text(MIXER)
    verify, train = (c for c in COMMANDS if "mixer.py:MIXER" in c)
    assert "equal within 1e-09" in run(tmp_path, *shlex.split(verify)[1:])
    small = ["--steps", "3", "--embed", "16", "--mlp", "32", "--seq", "16", "--global-batch", "4", "--sample", "0"]
    assert "held-out loss" in run(tmp_path, *shlex.split(train)[1:], *small, "--run-dir", "run")

    (tmp_path / "export.py").write_text(EXPORT)
    run(tmp_path, "export.py", "run/checkpoints/step-3")
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "embed.table": (256, 16),
        **{
            f"blocks.{i}.{name}": shape
            for i in range(2)
            for name, shape in {"norm": (16,), "up": (16, 32), "down": (16, 32)}.items()
        },
        "head.norm": (16,),
    }
    assert all(bool(w.isfinite().all()) for w in weights.values())


def test_script_trains(tmp_path: Path) -> None:
    """The README's script has at most 20 lines and its loss falls."""
    script = SCRIPT
    body = [line for line in script.split("if __name__")[0].splitlines() if line.strip() and "import" not in line]
    assert len(body) <= 20
    (tmp_path / "script.py").write_text(script)
    losses = [float(line.split()[1]) for line in run(tmp_path, "script.py").splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m dtengine." in c])
def test_commands_parse(command: str) -> None:
    """Every command in the README has options and a mesh that exist."""
    words = shlex.split(command.split("&&")[-1])
    module = next(word for word in words if word.startswith("dtengine."))
    arguments = words[words.index(module) + 1 :]
    if arguments == ["--help"]:
        return
    kinds = {"dtengine.verify": VerifyOptions, "dtengine.schedule": ScheduleOptions, "dtengine.train": TrainOptions}
    options = parse(kinds[module], "x", arguments)
    assert module == "dtengine.schedule" or parse_mesh(options.mesh.mesh)


def test_tree_names_every_module() -> None:
    """The README's file tree has every module of the engine."""
    tree = README.split("## What is here")[1].split("```")[1]
    named = set(re.findall(r"\w+", tree))
    modules = {path.stem for path in (ROOT / "dtengine").rglob("*.py")} - {"__init__"}
    assert modules <= named, modules - named
