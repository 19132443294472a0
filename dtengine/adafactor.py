"""Adafactor: a second moment that is kept as one number for each row and one for each column of a matrix."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.optimizer import Matrix, Optimizer, Part, Slot, Update, commit, matrix, rate
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
    is then at hand.

    Collectives:
        Over the whole mesh two small all-reduces, whatever the number of parameters: of row and column sums, and of the
        updates' sums of squares.
    """

    def slots(param: Param) -> dict[str, Slot]:
        form = matrix(param)
        if form is None:
            return {"square": Slot(param.shape)}
        rows, columns = _kept(form)
        return {
            name: Slot(tuple(param.shape[d] for d in kept), True)
            for name, kept in (("rows", rows), ("columns", columns))
        }

    def update(parts: Sequence[Part], mesh: Mesh, now: Update) -> None:
        # 1. sums over each shard, added up over the mesh; 2. second moments, and changes from them; 3. the changes' sums
        # of squares likewise; 4. store
        forms = [matrix(p.spec) for p in parts]
        first = parts[0].param
        fresh = now.step.to(first.device, first.dtype).pow(-beta2_power)  # 1 - beta2
        lr = rate(now, first)
        old, new, changes = [], [], []

        def moment(slot: Tensor, mean: Tensor) -> Tensor:
            old.append(slot)
            new.append(slot + (mean + eps_square - slot) * fresh)
            return new[-1]

        summed = iter(_over_mesh([t for p, form in zip(parts, forms, strict=True) for t in _sums(p, form, mesh)], mesh))
        lengths = []
        for part, form in zip(parts, forms, strict=True):
            lengths.append((next(summed).view(()) / math.prod(part.spec.shape)).sqrt().clamp(min=eps_scale))
            if form is None:
                changes.append(part.grad * moment(part.slots["square"], part.grad.square()).rsqrt())
                continue
            rows, columns = part.slots["rows"], part.slots["columns"]
            of_rows = moment(rows, next(summed).view(rows.shape) / math.prod(part.spec.shape[d] for d in form.columns))
            of_columns = moment(columns, next(summed).view(columns.shape) / part.spec.shape[form.row])
            dim = _kept(form)[0].index(form.row)
            # Two roots, for the product of both means may be too small for fp32.
            by_row = (of_rows / of_rows.mean(dim, keepdim=True)).rsqrt()
            by_row, by_column = (
                _mine(x, kept, part, mesh) for x, kept in zip((by_row, of_columns.rsqrt()), _kept(form), strict=True)
            )
            changes.append(part.grad * by_row * by_column)

        squares = [_owned(c.square().sum().view(1), p, mesh) for c, p in zip(changes, parts, strict=True)]
        for part, change, length, square in zip(parts, changes, lengths, _over_mesh(squares, mesh), strict=True):
            mean_square = square.view(()) / math.prod(part.spec.shape)
            step = change * (length / (mean_square.sqrt() / clip).clamp(min=1.0))
            if weight_decay and part.spec.decayed:
                step = step + part.param * weight_decay
            commit([part.param], [part.param - step * lr], now)  # at once: no second copy of all parameters
        commit(old, new, now)

    return Optimizer(slots, update, weight_decay)


def _kept(form: Matrix) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims that the row means have, and those that the column means have, in the parameter's order."""
    return tuple(sorted((*form.batch, form.row))), tuple(sorted((*form.batch, *form.columns)))


def _sums(part: Part, form: Matrix | None, mesh: Mesh) -> list[Tensor]:
    """Return this rank's terms, flat: the parameter's sum of squares; of a matrix also whole row and column sums."""
    terms = [part.param.square().sum().view(1)]
    if form is not None:
        square, bounds = part.grad.square(), bounds_of(part.spec.shape, part.placements, mesh)
        for kept in _kept(form):
            local = square.sum([d for d in range(square.dim()) if d not in kept])
            missing = [(bounds[d][0], part.spec.shape[d] - bounds[d][1]) for d in reversed(kept)]
            terms.append(F.pad(local, [n for pair in missing for n in pair]).reshape(-1))
    return [_owned(t, part, mesh) for t in terms]


def _owned(term: Tensor, part: Part, mesh: Mesh) -> Tensor:
    """Return a term of a sum over the whole mesh: of ranks that hold the same shard the first one's counts."""
    holders = zip(part.placements, mesh.coordinate, strict=True)
    return torch.zeros_like(term) if any(isinstance(p, Replicate) and c for p, c in holders) else term


def _over_mesh(terms: Sequence[Tensor], mesh: Mesh) -> Sequence[Tensor]:
    """Add vectors up over all ranks, in one all-reduce."""
    group = mesh.groups.get(mesh.split_axes())
    if group is None:
        return terms
    return all_reduce(torch.cat(list(terms)), "sum", group).split([t.numel() for t in terms])


def _mine(whole: Tensor, kept: tuple[int, ...], part: Part, mesh: Mesh) -> Tensor:
    """Cut what belongs to this rank's shard out of row or column factors, shaped to multiply it."""
    bounds = bounds_of(part.spec.shape, part.placements, mesh)
    local = whole[tuple(slice(*bounds[d]) for d in kept)]
    return local.reshape([n if d in kept else 1 for d, n in enumerate(part.param.shape)])
