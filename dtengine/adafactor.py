"""Adafactor: a second moment that is kept as one number for each row and one for each column of a matrix."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from dtengine.layout import Placements
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.optimizer import Leaf, Matrix, Optimizer, Slot, Slots, Update, commit, matrix, rate
from dtengine.shard import bounds_of
from dtengine.torch_private import all_reduce


def adafactor(
    beta2_power: float = 0.8,
    eps_square: float = 1e-30,
    eps_scale: float = 1e-3,
    clip: float = 1.0,
    weight_decay: float = 0.1,
) -> Optimizer:
    """Adam without momentum whose second moment of a matrix is the product of its row and column means.

    For number t of the update, beta2 = 1 - t^-beta2_power; an update is clipped to a root mean square of ``clip``, and
    scaled by that of the parameter, so the rate is relative: p = p - lr (max(eps_scale, rms(p)) u + decay p). The paper's
    min(lr, 1/sqrt(t)) is the schedule's business here (``rsqrt``). What is no matrix keeps its second moment whole.
    Source: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, algorithms 4 to 6;
    torch.optim.Adafactor in its treatment of rate and decay.

    Row and column means are held whole by every rank: they are as small as a norm's weight, and the mean over all rows
    is then at hand. Parameters of one kind are stacked and updated as one, which makes a trace several times shorter.

    Collectives:
        Over the whole mesh two small all-reduces, whatever the number of parameters: of row and column sums, and of the
        updates' sums of squares.
    """

    def slots(param: Param) -> dict[str, Slot]:
        form = matrix(param)
        if form is None:
            return {"square": Slot(param.shape)}
        return {
            name: Slot(tuple(param.shape[d] for d in kept), True)
            for name, kept in zip(("rows", "columns"), _kept(form), strict=True)
        }

    def update(leaves: Sequence[Leaf], mesh: Mesh, now: Update) -> None:
        # 1. sums over each shard, added up over the mesh; 2. second moments, and changes from them; 3. the changes' sums
        # of squares likewise; 4. store
        first = leaves[0].param
        fresh = now.step.to(first.device, first.dtype).pow(-beta2_power)  # 1 - beta2
        lr = rate(now, first)
        stacks, lengths, changes = _stacked(leaves), [], []

        def moment(stack: _Stack, slot: str, mean: Tensor) -> Tensor:
            value = stack.slots[slot]
            new = value + (mean.view(value.shape) + eps_square - value) * fresh
            commit([p.slots[slot] for p in stack.leaves], list(new.unbind(0)), now)
            return new

        summed = iter(_over_mesh([t for stack in stacks for t in _sums(stack, mesh)], mesh))
        for stack in stacks:
            shape, form = stack.shape, stack.form
            lengths.append((next(summed) / math.prod(shape[1:])).sqrt().clamp(min=eps_scale))
            if form is None:
                changes.append(stack.grad * moment(stack, "square", stack.grad.square()).rsqrt())
                continue
            rows = moment(stack, "rows", next(summed) / math.prod(shape[d] for d in form.columns))
            columns = moment(stack, "columns", next(summed) / shape[form.row])
            of_rows, of_columns = _kept(form)
            # Two roots, for the product of both means may be too small for fp32.
            rows = (rows / rows.mean(of_rows.index(form.row), keepdim=True)).rsqrt()
            by_row = _mine(rows, of_rows, stack, mesh)
            changes.append(stack.grad * by_row * _mine(columns.rsqrt(), of_columns, stack, mesh))

        squares = _over_mesh([_owned(_each(c.square()), s, mesh) for c, s in zip(changes, stacks, strict=True)], mesh)
        for stack, change, length, square in zip(stacks, changes, lengths, squares, strict=True):
            over = (square / math.prod(stack.shape[1:])).sqrt() / clip
            factor = length / over.clamp(min=1.0)
            step = change * factor.view(-1, *(1 for _ in stack.shape[1:]))
            if weight_decay and stack.decayed:
                step = step + stack.param * weight_decay
            commit([p.param for p in stack.leaves], list((stack.param - step * lr).unbind(0)), now)

    return Optimizer(slots, update, weight_decay)


class _Stack(NamedTuple):
    """Parameters of one kind, stacked: dim 0 counts them, and is a batch dim of their matrices."""

    leaves: list[Leaf]
    shape: tuple[int, ...]  # global
    placements: Placements
    form: Matrix | None
    decayed: bool
    param: Tensor
    grad: Tensor
    slots: Slots


def _stacked(leaves: Sequence[Leaf]) -> list[_Stack]:
    kinds: dict[tuple, list[Leaf]] = {}
    for leaf in leaves:
        spec = leaf.spec
        kinds.setdefault((spec.axes, spec.shape, leaf.placements, matrix(spec), spec.decayed), []).append(leaf)
    found = []
    for (_, shape, placements, form, decayed), same in kinds.items():

        def stack(tensors: list[Tensor]) -> Tensor:
            return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)

        found.append(
            _Stack(
                same,
                (len(same), *shape),
                tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements),
                form and Matrix((0, *(d + 1 for d in form.batch)), form.row + 1, tuple(d + 1 for d in form.columns)),
                decayed,
                stack([p.param for p in same]),
                stack([p.grad for p in same]),
                {name: stack([p.slots[name] for p in same]) for name in same[0].slots},
            )
        )
    return found


def _kept(form: Matrix) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims that the row means have, and those that the column means have, in the parameter's order."""
    return tuple(sorted((*form.batch, form.row))), tuple(sorted((*form.batch, *form.columns)))


def _each(x: Tensor) -> Tensor:
    """Sum over all dims but the first."""
    return x.sum(list(range(1, x.dim()))) if x.dim() > 1 else x


def _sums(stack: _Stack, mesh: Mesh) -> list[Tensor]:
    """Return this rank's terms, flat: each parameter's sum of squares; of matrices also whole row and column sums."""
    terms = [_each(stack.param.square())]
    if stack.form is not None:
        square, bounds = stack.grad.square(), bounds_of(stack.shape, stack.placements, mesh)
        for kept in _kept(stack.form):
            local = square.sum([d for d in range(square.dim()) if d not in kept])
            missing = [(bounds[d][0], stack.shape[d] - bounds[d][1]) for d in reversed(kept)]
            terms.append(F.pad(local, [n for pair in missing for n in pair]).reshape(-1))
    return [_owned(t, stack, mesh) for t in terms]


def _owned(term: Tensor, stack: _Stack, mesh: Mesh) -> Tensor:
    """Return a term of a sum over the whole mesh: of ranks that hold the same shard the first one's counts."""
    holders = zip(stack.placements, mesh.coordinate, strict=True)
    return torch.zeros_like(term) if any(isinstance(p, Replicate) and c for p, c in holders) else term


def _over_mesh(terms: Sequence[Tensor], mesh: Mesh) -> Sequence[Tensor]:
    """Add vectors up over all ranks, in one all-reduce."""
    group = mesh.groups.get(mesh.split_axes())
    if group is None:
        return terms
    return all_reduce(torch.cat(list(terms)), "sum", group).split([t.numel() for t in terms])


def _mine(whole: Tensor, kept: tuple[int, ...], stack: _Stack, mesh: Mesh) -> Tensor:
    """Cut what belongs to this rank's shards out of row or column factors, shaped to multiply them."""
    bounds = bounds_of(stack.shape, stack.placements, mesh)
    local = whole[tuple(slice(*bounds[d]) for d in kept)]
    return local.reshape([n if d in kept else 1 for d, n in enumerate(stack.param.shape)])
