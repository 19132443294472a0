"""What goes from stage to stage: x, and its gradient on the way back.

Where several ranks of a stage hold the same x (tensor parallel without sequence parallel), each sends one piece, and the
ranks that receive them gather: between stages, which may lie far apart, nothing travels twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from dtengine.layout import Placements
from dtengine.mesh import Mesh
from dtengine.torch_private import all_gather


@dataclass(frozen=True)
class Stream:
    """x as it is between stages, for batches of one shape.

    Attributes:
        like: a tensor of its local shape and dtype.
        pieces: ranks of a stage that hold the same x.
        index: of this rank's piece.
        group: process-group name of these ranks; "" where each has its own x.
    """

    like: Tensor
    pieces: int = 1
    index: int = 0
    group: str = ""

    @property
    def message(self) -> Tensor:
        """A tensor of the form in which it travels."""
        if self.pieces == 1:
            return self.like
        return torch.empty(-(-self.like.numel() // self.pieces), dtype=self.like.dtype, device=self.like.device)

    def cut(self, run: Any, x: Any) -> Any:
        """Return this rank's piece of x; x itself where no other rank has it."""
        if self.pieces == 1:
            return x
        size, index = self.message.numel(), self.index

        def piece(x: Tensor) -> list[Tensor]:
            flat = F.pad(x.reshape(-1), (0, self.pieces * size - x.numel()))
            return [flat[index * size : (index + 1) * size].clone()]

        return run.call(("cut", self.pieces, index), piece, [x])[0]

    def join(self, run: Any, piece: Any) -> Any:
        """Return x, gathered from the pieces.

        Collectives:
            One all-gather over the ranks that hold the same x.
        """
        if self.pieces == 1:
            return piece
        shape = tuple(self.like.shape)

        def whole(piece: Tensor) -> list[Tensor]:
            flat = all_gather([piece], self.group)[0].reshape(-1)
            return [flat[: self.like.numel()].view(shape)]

        return run.call(("join", self.pieces, shape), whole, [piece])[0]


def stream_of(like: Tensor, placements: Placements, mesh: Mesh) -> Stream:
    """Return the form of x between stages from its layout within one."""
    laid = zip(mesh.sizes.items(), mesh.coordinate, placements, strict=True)
    same = [(axis, size, at) for (axis, size), at, p in laid if size > 1 and isinstance(p, Replicate)]
    pieces, index = 1, 0
    for _, size, at in same:
        pieces, index = pieces * size, index * size + at
    return Stream(like, pieces, index, mesh.groups[tuple(axis for axis, *_ in same)]) if same else Stream(like)
