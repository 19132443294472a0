"""The same commands on a GPU, over NCCL. Written without one at hand: these tests have never run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

SMALL = [
    "--layers",
    "2",
    "--embed",
    "64",
    "--heads",
    "4",
    "--seq",
    "32",
    "--global-batch",
    "8",
    "--steps",
    "5",
    "--eval-sequences",
    "8",
    "--sample",
    "0",
]


def losses(folder: Path, *options: str) -> list[float]:
    command = [sys.executable, "-m", "dtengine.train", *SMALL, "--run-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((folder / "status.json").read_text())
    return [status["loss"], status["heldout_loss"]]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nccl_gives_what_gloo_gives(tmp_path: Path, precision: str) -> None:
    """As many ranks as GPUs, over NCCL, end at the loss that one CPU rank ends at."""
    gpus = torch.cuda.device_count()
    ours = losses(
        tmp_path / "gpu", "--mesh", str(gpus), "--backend", "nccl", "--precision", precision, "--loss-scale", "256"
    )
    cpu = losses(tmp_path / "cpu", "--mesh", "1", "--backend", "gloo")
    assert ours == pytest.approx(cpu, rel=1e-4 if precision == "fp32" else 2e-2)
    status = json.loads((tmp_path / "gpu" / "status.json").read_text())
    assert status["backend"] == "nccl"
    assert status["gpu_memory_used_gb"] > 0


@pytest.mark.parametrize(
    "options", [["--cuda-graphs"], ["--offload", "optimizer"], ["--compile"], ["--recompute", "full"]]
)
def test_options_change_no_loss(tmp_path: Path, options: list[str]) -> None:
    """On one GPU a replayed, offloaded, compiled or recomputed run ends at the plain one's loss."""
    plain = losses(tmp_path / "plain", "--mesh", "1")
    assert losses(tmp_path / "other", "--mesh", "1", *options) == pytest.approx(plain, rel=1e-5)
