"""What an optimizer is: which slots a parameter has, and one function that updates all shards of a rank in place.

Slots are described without a mesh, by their global shape, so that a checkpoint holds them like parameters and any mesh
reads any mesh's. They have the parameters' dtype (fp32, or fp64 where computed so). An update gets every parameter of
the model at once, also those of which this rank holds nothing: what it communicates, it communicates for all together,
and all ranks issue the same collectives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from dtengine.layout import Placements
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.torch_private import add, scale

Slots = dict[str, Tensor]


class Slot(NamedTuple):
    """One tensor of an optimizer's state; it starts at zero.

    Attributes:
        shape: global.
        whole: every rank holds all of it; else it has the parameter's shape and lies as the parameter does.
    """

    shape: tuple[int, ...]
    whole: bool = False

    def placements(self, of_parameter: Placements) -> Placements:
        """Return where the slot of a parameter lies."""
        return tuple(Replicate() for _ in of_parameter) if self.whole else of_parameter


class Update(NamedTuple):
    """What an update needs beside parameters, gradients and slots; all scalar tensors, for a step is traced once.

    Attributes:
        lr: learning rate, float64.
        step: number of this update, from 1, float32.
        skip: 1.0 where the update must not happen (a non-finite loss or norm), else 0.0; float32.
    """

    lr: Tensor
    step: Tensor
    skip: Tensor


class Leaf(NamedTuple):
    """One parameter at an update, as one rank holds it.

    Attributes:
        spec: its axes and global shape.
        placements: of param and grad, in the optimizer layout.
        param: local shard, maybe empty; to be changed in place.
        grad: local shard, to be read only.
        slots: local shards, to be changed in place.
    """

    spec: Param
    placements: Placements
    param: Tensor
    grad: Tensor
    slots: Slots


class Optimizer(NamedTuple):
    """A pair of functions.

    Attributes:
        slots: parameter -> {name: slot}.
        update: (all parameters in the model's order, mesh, Update) -> None, in place. Where skip is set it changes no
            bit of a parameter or slot, whatever the gradients hold.
        weight_decay: decoupled decay of the parameters that it applies to.
    """

    slots: Callable[[Param], dict[str, Slot]]
    update: Callable[[Sequence[Leaf], Mesh, Update], None]
    weight_decay: float


# --- what optimizers share ----------------------------------------------------------------------------------------


def like_parameter(*names: str) -> Callable[[Param], dict[str, Slot]]:
    """Return the function ``slots`` of an optimizer whose slots all have the parameter's shape."""
    return lambda param: {name: Slot(param.shape) for name in names}


def held(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves of which this rank holds something."""
    return [p for p in leaves if p.param.numel()]


def rate(now: Update, like: Tensor) -> Tensor:
    """Return the learning rate as a scalar of a tensor's dtype and device."""
    return now.lr.to(like.device, like.dtype)


def with_decay(changes: list[Tensor], leaves: Sequence[Leaf], weight_decay: float) -> list[Tensor]:
    """Add weight_decay x parameter to the changes of parameters that decay.

    Product and sum are rounded one after the other: a fused one would not be the same for a tensor's body and tail, and
    so depend on where a shard is cut.
    """
    if not weight_decay:
        return changes
    return add(changes, scale([p.param for p in leaves], [weight_decay * p.spec.decayed for p in leaves]))


def commit(old: list[Tensor], new: list[Tensor], now: Update) -> None:
    """Store new values in place, unless the update must not happen."""
    go = now.skip == 0
    for tensor, value in zip(old, new, strict=True):
        torch.where(go, value, tensor, out=tensor)


class Matrix(NamedTuple):
    """A parameter of two dims or more, read as a matrix (or, for experts, as many of one shape).

    Attributes:
        batch: dims that count matrices.
        row: the dim of the rows.
        columns: all others; together they are the columns.
    """

    batch: tuple[int, ...]
    row: int
    columns: tuple[int, ...]


def matrix(param: Param) -> Matrix | None:
    """Read a parameter as a matrix: embed by all else; where it has no embed, the first dim by all others.

    None for vectors, and for norms and biases of any number of dims: what starts constant.
    """
    batch = tuple(i for i, axis in enumerate(param.names) if axis == "experts")
    rest = [i for i in range(len(param.shape)) if i not in batch]
    if len(rest) < 2 or param.std == 0:
        return None
    row = param.names.index("embed") if "embed" in param.names else rest[0]
    return Matrix(batch, row, tuple(i for i in rest if i != row))
