"""Parameters on a plan: where each lies, how it moves to where it is used, and how its gradient comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtengine import random
from dtengine.layout import Layout, Placements, Plan
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.shard import Move, bounds_of, redistribute, wrap
from dtengine.torch_private import storage_of

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Parameters:
    """A model's parameters on a mesh, as one rank sees them.

    Attributes:
        specs: {name: Param}.
        plan: gives the four layouts.
        mesh: where they lie.
        precision: a key of COMPUTE_DTYPES.
        device: of this rank.
    """

    specs: dict[str, Param]
    plan: Plan
    mesh: Mesh
    precision: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of stored parameters, gradients and optimizer state."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype that parameters have where they are used."""
        return COMPUTE_DTYPES[self.precision]

    def placements(self, layout: Layout, name: str) -> Placements:
        """Return where a layout puts a parameter."""
        return layout.placements(self.specs[name].names, self.mesh.sizes)

    def moves(self, source: Layout, target: Layout, names: Sequence[str] | None = None) -> list[Move]:
        """Return how parameters (all by default) go from one layout to another."""
        return [
            Move(self.placements(source, n), self.placements(target, n), self.specs[n].shape)
            for n in (self.specs if names is None else names)
        ]

    def empty(self, name: str, placements: Placements) -> Tensor:
        """Return this rank's uninitialised shard."""
        bounds = bounds_of(self.specs[name].shape, placements, self.mesh)
        return torch.empty([stop - start for start, stop in bounds], dtype=self.dtype, device=self.device)

    def wrap(self, name: str, local: Tensor, placements: Placements) -> DTensor:
        """Return the DTensor of this rank's shard."""
        return wrap(local, self.mesh, placements, self.specs[name].shape)

    def initial(self, name: str, seed: int) -> DTensor:
        """Draw this rank's shard of a parameter in the params layout."""
        placements = self.placements(self.plan.params, name)
        spec = self.specs[name]
        local = init_param(spec, name, seed, bounds_of(spec.shape, placements, self.mesh), self.device)
        return self.wrap(name, local.to(self.dtype), placements)


def init_param(
    param: Param, name: str, seed: int, bounds: Sequence[tuple[int, int]], device: torch.device | str
) -> Tensor:
    """Return the initial values, in float64, of the part of a parameter within ``bounds``.

    A value depends on (seed, name, global index) alone, so any mesh starts from the same bits.
    """
    if param.std == 0:
        return torch.full([stop - start for start, stop in bounds], param.mean, dtype=torch.float64, device=device)
    index = random.global_index(param.shape, bounds, device)
    return random.normal(random.key(seed, name), index) * param.std + param.mean


def use(
    parameters: Parameters,
    names: Sequence[str],
    local: Sequence[Tensor],
    sink: dict[str, DTensor],
    token: Tensor | None,
) -> tuple[DTensor, ...]:
    """Move a part's parameters to the compute layout, all together.

    Args:
        parameters: they and others.
        names: of the part's parameters.
        local: their shards in the params layout.
        sink: its backward puts their gradients here, in the layout of the gradient buffers: split where the grads
            layout splits, else as the gradient came, so that a sum over several microbatches is reduced once.
        token: scalar that requires a gradient and so makes autograd come by; None where no gradient is wanted.
            Gradients leave through ``sink`` because a buffer's shape may differ from the parameter's (zero2), which
            autograd forbids.

    Collectives:
        Where the params layout splits over dp: one all-gather. In its backward, where the grads layout does: one
        reduce-scatter.
    """
    return _Use.apply(parameters, tuple(names), sink, token, *local)  # type: ignore[return-value]


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parameters: Parameters,
        names: tuple[str, ...],
        sink: dict[str, DTensor],
        token: Tensor | None,
        *local: Tensor,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.names, ctx.sink = parameters, names, sink
        moves = parameters.moves(parameters.plan.params, parameters.plan.compute, names)
        moved = redistribute([x.to(parameters.compute_dtype) for x in local], moves, parameters.mesh)
        # A parameter that did not have to move is viewed: autograd wants an output of its own.
        return tuple(parameters.wrap(n, x.view_as(x), m.target) for n, x, m in zip(names, moved, moves, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        parameters: Parameters = ctx.parameters
        plan, local, moves = parameters.plan, [], []
        taken = {storage_of(x.to_local()) for x in ctx.sink.values()}
        for name, grad in zip(ctx.names, grads, strict=True):
            if grad is None:  # nothing used it
                source = parameters.placements(plan.compute, name)
                local.append(parameters.empty(name, source).zero_())
            else:
                source = tuple(grad.placements)
                mine = grad.to_local().to(parameters.dtype)
                if storage_of(mine) in taken:  # autograd hands one tensor to two parameters that were added
                    mine = mine.clone()
                taken.add(storage_of(mine))
                local.append(mine)
            split = parameters.placements(plan.grads, name)
            target = tuple(b if isinstance(b, Shard) else s for s, b in zip(source, split, strict=True))
            moves.append(Move(source, target, parameters.specs[name].shape))
        reduced = redistribute(local, moves, parameters.mesh)
        for name, move, grad in zip(ctx.names, moves, reduced, strict=True):
            # Buffers are contiguous: the update is traced for that.
            ctx.sink[name] = parameters.wrap(name, grad.contiguous(), move.target)
        return None, None, None, torch.zeros((), device=parameters.device), *(None for _ in grads)
