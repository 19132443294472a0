"""Redistribution between any two layouts: every element arrives where it belongs, in few collectives."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch
from graphs import traced
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from dtengine.layout import Placements
from dtengine.mesh import build_mesh, parse_mesh
from dtengine.program import count_collectives
from dtengine.shard import Move, redistribute, take

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

SHAPES = [(5, 3, 4), (1, 7, 2), (2, 2, 9)]
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def counting(shape: tuple[int, ...]) -> Tensor:
    """A tensor filled with its flat indices."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def run_moves(rank: int, mesh_text: str) -> list[str]:
    """What did not arrive, of all moves between layouts of a tensor with three dims, many of them at once."""
    mesh = build_mesh(parse_mesh(mesh_text))
    layouts = list(itertools.product((R, S0, S1, S2), repeat=len(mesh.axes)))
    wrong = []
    for source in layouts:
        moves = [Move(source, target, shape) for target in layouts for shape in SHAPES]
        got = redistribute([take(counting(m.shape), m.source, mesh) for m in moves], moves, mesh)
        for move, tensor in zip(moves, got, strict=True):
            if not torch.equal(tensor, take(counting(move.shape), move.target, mesh)):
                wrong.append(str(move))
    return wrong


@pytest.mark.parametrize("mesh", ["1", "3", "2x2", "2x3", "rep=2,dp=2,tp=2"])
def test_every_move_keeps_every_element(pool: Pool, mesh: str) -> None:
    """Between all pairs of layouts, also where two axes split one dim, with sizes that do not divide and shards that
    are empty."""
    assert pool.run(math.prod(parse_mesh(mesh).values()), run_moves, mesh) == [[]] * math.prod(
        parse_mesh(mesh).values()
    )


def run_counts(rank: int, mesh_text: str, source: Placements, target: Placements) -> dict[str, dict[str, int]]:
    """Collectives of one move of several tensors."""
    mesh = build_mesh(parse_mesh(mesh_text))
    moves = [Move(source, target, shape) for shape in SHAPES]
    local = [take(counting(m.shape), m.source, mesh) for m in moves]
    return count_collectives([(traced(lambda *x: redistribute(x, moves, mesh), local, mesh), 1)])


ONE = {"all_to_all": 1}


@pytest.mark.parametrize(
    ("mesh", "source", "target", "expected"),
    [
        ("4", (S1,), (S0,), {"dp": ONE}),
        ("2x2", (S1, S2), (S0, S0), {"dp": ONE, "tp": ONE}),
        ("2x2", (S0, S0), (S1, S2), {"dp": ONE, "tp": ONE}),
        ("2x2", (S1, R), (S0, S0), {"dp": ONE}),
        ("2x2", (S0, S0), (S1, R), {"dp": ONE, "tp": {"all_gather": 1}}),
        ("rep=2,dp=2", (R, S1), (S0, S0), {"dp": ONE}),
        ("rep=2,dp=2", (S0, S0), (R, S1), {"dp": ONE, "rep": {"all_gather": 1}}),
        ("2x2", (S1, S2), (R, S2), {"dp": {"all_gather": 1}}),
        ("2x2", (R, R), (S0, S1), {}),
        ("2x2", (R, S0), (S1, S0), {}),
        ("2x2", (R, S0), (S0, S0), {"tp": {"all_gather": 1}}),  # the pieces would interleave
    ],
)
def test_a_split_that_changes_its_dim_is_one_exchange(
    pool: Pool, mesh: str, source: Placements, target: Placements, expected: dict[str, dict[str, int]]
) -> None:
    """One all-to-all over each mesh axis that is to split another dim, no gather of the whole."""
    ranks = math.prod(parse_mesh(mesh).values())
    assert pool.run(ranks, run_counts, mesh, source, target) == [expected] * ranks
