"""Ranks that must agree are compared: tokens within a data-parallel coordinate, replicas before a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dtengine.checkpoint import newest, replicas_equal, save
from dtengine.config import Setup, resolve
from dtengine.mesh import build_mesh, parse_mesh
from dtengine.options import MeshOptions, OptimizerOptions, StepOptions
from dtengine.step import init_state, make_step
from dtengine.train import check_same_tokens
from dtengine.verify import DEFAULTS

if TYPE_CHECKING:
    from tests.ranks_pool import Pool


def setup_of(mesh: str, plan: Any) -> Setup:
    return resolve(StepOptions(MeshOptions(mesh, plan)), **DEFAULTS)


def compare_tokens(rank: int, mesh_text: str, checksums: list[int]) -> str:
    setup = setup_of(mesh_text, "fsdp")
    try:
        check_same_tokens(checksums[rank], build_mesh(parse_mesh(mesh_text)), setup.plan)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mesh", "checksums", "said"),
    [
        ("2x2", [5, 5, 9, 9], ""),
        ("2x2", [5, 5, 9, 8], "rank 3 differs from rank 2"),
        ("rep=2,dp=1,tp=2", [5, 4, 9, 9], "rank 1 differs from rank 0"),
        ("2x2x1", [5, 9, 5, 9], ""),  # the first stage reads tokens, the last one labels
        ("2x2x1", [5, 9, 5, 8], "rank 3 differs from rank 1"),
        ("1x4", [5, 6, 5, 7], "rank 1 differs from rank 0, rank 3 differs from rank 0"),
    ],
)
def test_c17_ranks_that_read_other_tokens_are_named(pool: Pool, mesh: str, checksums: list[int], said: str) -> None:
    """C17: ranks of one data-parallel coordinate must read the same tokens; all ranks name those that do not."""
    for text in pool.run(4, compare_tokens, mesh, checksums):
        assert (said in text) if said else text == ""


def save_drifted(rank: int, plan: str, folder: str, drifted: int | None) -> tuple[bool, str]:
    setup = setup_of("2x2", plan)
    mesh = build_mesh(setup.plan.sizes)
    optimizer = setup.optimizer(OptimizerOptions())
    state = init_state(
        make_step(setup.model, setup.model_config, setup.plan, mesh, optimizer, setup.step, lambda step: 0.0)
    )
    if rank == drifted:  # the last bit of one element of a norm, which tp replicates
        local = state.params["head.norm"].to_local().detach()
        local[0] = torch.nextafter(local[0], torch.tensor(2.0))
    try:
        save(Path(folder), state, mesh, {})
    except RuntimeError as error:
        return replicas_equal(state, mesh), str(error)
    return replicas_equal(state, mesh), ""


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize("drifted", [None, 0, 3])
def test_c06_replicas_that_drifted_are_not_saved(pool: Pool, tmp_path: Path, plan: str, drifted: int | None) -> None:
    """C06: one bit that differs between replicas is seen by all ranks, and nothing is published."""
    for equal, text in pool.run(4, save_drifted, plan, str(tmp_path), drifted):
        assert equal == (drifted is None)
        assert ("replicas of a parameter differ" in text) == (drifted is not None)
    assert (newest(tmp_path)[0] is None) == (drifted is not None)
