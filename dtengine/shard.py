"""Shards: distribute, redistribute and gather local tensors.

``redistribute`` is the one place that communicates tensors. It takes many tensors at once, since a collective for
each of a block's parameters costs more than the bytes do, and it works on local tensors, so it can be traced as well
as called.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtengine.layout import Placements, chunk_bounds, local_bounds
from dtengine.mesh import Mesh
from dtengine.torch_private import all_gather, all_gather_flat, all_reduce, all_to_all, reduce_scatter


class Move(NamedTuple):
    """One tensor's part of a redistribution: where it is, where it goes, and its global shape."""

    source: Placements
    target: Placements
    shape: tuple[int, ...]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = []
    total = 1
    for size in reversed(shape):
        strides.append(total)
        total *= max(size, 1)
    return tuple(reversed(strides))


def wrap(local: Tensor, mesh: Mesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of a local shard; the global shape is given, never guessed from the local one."""
    shape = torch.Size(shape)
    return DTensor.from_local(
        local, mesh.device_mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
    )


def bounds_of(shape: Sequence[int], placements: Placements, mesh: Mesh) -> list[tuple[int, int]]:
    """Return the [start, stop) that this rank holds of each dim."""
    return local_bounds(shape, placements, tuple(mesh.sizes.values()), mesh.coordinate)


def take(whole: Tensor, placements: Placements, mesh: Mesh) -> Tensor:
    """Return a copy of this rank's shard of a tensor that it holds whole."""
    bounds = bounds_of(whole.shape, placements, mesh)
    return whole[tuple(slice(start, stop) for start, stop in bounds)].clone()


def redistribute(tensors: Sequence[Tensor], moves: Sequence[Move], mesh: Mesh) -> list[Tensor]:
    """Bring local tensors from one layout to another, all of them together.

    Args:
        tensors: local shards, or local terms of a sum where the source is Partial.
        moves: for each tensor its source and target placements and its global shape.
        mesh: the mesh of the placements.

    Returns:
        Local shards in the target layouts. A tensor that needs no move is returned as it is.

    Collectives:
        For each mesh axis at most one reduce-scatter and one all-gather, and for each set of mesh axes to sum over and
        set that splits the tensors one all-reduce, whatever the number of tensors (of one dtype). Where a mesh axis is to
        split another dim than before, an all-to-all over it instead of a gather, at most two.
    """
    # 1. sums that leave a shard; 2. sums that leave the whole; 3. exchanges of one dim for another, outer axes first for
    # splits that are added; 4. gathers, inner axes first, and exchanges that waited for them; 5. local slices
    local = list(tensors)
    now = [list(move.source) for move in moves]
    for axis in range(len(mesh.axes)):
        chosen = [
            i for i, m in enumerate(moves) if isinstance(now[i][axis], Partial) and isinstance(m.target[axis], Shard)
        ]
        _apply(_reduce_scatter, chosen, local, now, moves, mesh, axis)
    # What is whole on some axis is not summed with what is split there: uneven pieces would shift the chunks in which
    # a sum over many ranks is taken, and replicas would differ in the last bit.
    summed: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, move in enumerate(moves):
        axes = tuple(
            a for a, p in enumerate(now[i]) if isinstance(p, Partial) and not isinstance(move.target[a], Partial)
        )
        if axes:
            split = tuple(a for a, p in enumerate(now[i]) if isinstance(p, Shard))
            summed.setdefault((axes, split), []).append(i)
    for (axes, _), chosen in summed.items():
        _all_reduce(chosen, axes, local, mesh)
        for i in chosen:
            for a in axes:
                now[i][a] = Replicate()
    exchanged = [i for i, m in enumerate(moves) if any(_changes(a, now[i], m) for a in range(len(mesh.axes)))]
    for axis in range(len(mesh.axes)):
        for i in exchanged:  # a slice costs nothing, and inner axes wait for it
            if isinstance(now[i][axis], Replicate) and _may_split(axis, now[i], moves[i]):
                step = [*now[i][:axis], moves[i].target[axis], *now[i][axis + 1 :]]
                local[i] = _slice(local[i], now[i], moves[i]._replace(target=tuple(step)), mesh)
                now[i] = step
        _exchange(exchanged, local, now, moves, mesh, axis)
    for axis in reversed(range(len(mesh.axes))):
        _exchange(exchanged, local, now, moves, mesh, axis)
        chosen = [i for i, m in enumerate(moves) if isinstance(now[i][axis], Shard) and not _stays(axis, now[i], m)]
        _apply(_all_gather, chosen, local, now, moves, mesh, axis)
    for i, move in enumerate(moves):
        local[i] = _slice(local[i], now[i], move, mesh)
    return local


def _apply(
    collective: Callable[..., list[Tensor]],
    chosen: list[int],
    local: list[Tensor],
    now: list[list],
    moves: Sequence[Move],
    mesh: Mesh,
    axis: int,
) -> None:
    """Run one collective over one mesh axis for the chosen tensors, by dtype, and note the new placements."""
    for dtype in dict.fromkeys(local[i].dtype for i in chosen):
        same = [i for i in chosen if local[i].dtype == dtype]
        dims = []
        for i in same:
            placement = moves[i].target[axis] if isinstance(now[i][axis], Partial) else now[i][axis]
            assert isinstance(placement, Shard)
            if any(p == placement for p in now[i][axis + 1 :]):
                raise ValueError(
                    f"redistribute {now[i]} to {list(moves[i].target)}: dim {placement.dim} is split by a mesh axis "
                    "inside the one that changes; gather the inner one first."
                )
            dims.append((placement.dim, _extent(moves[i].shape, placement.dim, now[i], mesh, axis)))
        name = mesh.axes[axis]
        if mesh.sizes[name] > 1:
            results = collective([local[i] for i in same], dims, mesh.sizes[name], mesh.groups[(name,)], mesh, axis)
            for i, result in zip(same, results, strict=True):
                local[i] = result
        for i in same:
            now[i][axis] = moves[i].target[axis] if isinstance(now[i][axis], Partial) else Replicate()


def _changes(axis: int, now: list, move: Move) -> bool:
    """Whether a mesh axis splits one dim and is to split another."""
    here, there = now[axis], move.target[axis]
    return isinstance(here, Shard) and isinstance(there, Shard) and here != there


def _stays(axis: int, now: list, move: Move) -> bool:
    """Whether a split can stay: it is wanted, and no axis outside it begins or ceases to split the same dim."""
    here = now[axis]
    return here == move.target[axis] and all((here == now[a]) == (here == move.target[a]) for a in range(axis))


def _may_split(axis: int, now: list, move: Move) -> bool:
    """Whether a mesh axis may begin to split its target's dim: axes outside it have begun and stay, none inside has."""
    there = move.target[axis]
    outside = any((move.target[a] == there) != (now[a] == there) for a in range(axis))
    return isinstance(there, Shard) and not outside and there not in now[axis + 1 :]


def _exchange(
    candidates: list[int], local: list[Tensor], now: list[list], moves: Sequence[Move], mesh: Mesh, axis: int
) -> None:
    """Let a mesh axis split another dim, for tensors where it does and nothing inside splits the dim it leaves."""
    ready = [
        i
        for i in candidates
        if _changes(axis, now[i], moves[i])
        and _may_split(axis, now[i], moves[i])
        and now[i][axis] not in now[i][axis + 1 :]
    ]
    name = mesh.axes[axis]
    if mesh.sizes[name] > 1:
        for dtype in dict.fromkeys(local[i].dtype for i in ready):
            same = [i for i in ready if local[i].dtype == dtype]
            dims = []
            for i in same:
                here, there = now[i][axis].dim, moves[i].target[axis].dim  # type: ignore[union-attr]
                sizes = [_extent(moves[i].shape, dim, now[i], mesh, axis) for dim in (here, there)]
                dims.append((here, sizes[0], there, sizes[1]))
            results = _all_to_all([local[i] for i in same], dims, mesh.sizes[name], mesh.groups[(name,)], mesh, axis)
            for i, result in zip(same, results, strict=True):
                local[i] = result
    for i in ready:
        now[i][axis] = moves[i].target[axis]


def _extent(shape: Sequence[int], dim: int, now: list, mesh: Mesh, axis: int) -> int:
    """Return the size that dim ``dim`` has before mesh axis ``axis`` splits it."""
    outer = [p if a < axis else Replicate() for a, p in enumerate(now)]
    start, stop = bounds_of(shape, tuple(outer), mesh)[dim]
    return stop - start


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Pad dim ``dim`` with zeros at its end up to ``size``."""
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _all_gather(
    tensors: list[Tensor], dims: list[tuple[int, int]], parts: int, group: str, mesh: Mesh, axis: int
) -> list[Tensor]:
    """Gather each tensor along its dim: one call."""
    chunks = [_pad(t, dim, -(-size // parts)).contiguous() for t, (dim, size) in zip(tensors, dims, strict=True)]
    results = []
    for gathered, (dim, size) in zip(all_gather(chunks, group), dims, strict=True):
        whole = gathered.movedim(0, dim).flatten(dim, dim + 1)
        results.append(whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).contiguous())
    return results


def _reduce_scatter(
    tensors: list[Tensor], dims: list[tuple[int, int]], parts: int, group: str, mesh: Mesh, axis: int
) -> list[Tensor]:
    """Sum each tensor over the group and keep this rank's chunk of its dim: one call on a flat buffer."""
    columns, shapes = [], []
    for tensor, (dim, size) in zip(tensors, dims, strict=True):
        padded = _pad(tensor, dim, -(-size // parts) * parts)
        pieces = padded.unflatten(dim, (parts, -1 if padded.numel() else -(-size // parts))).movedim(dim, 0)
        shapes.append(pieces.shape[1:])
        columns.append(pieces.reshape(parts, pieces[0].numel()))
    flat = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    summed = reduce_scatter(flat.contiguous(), group)
    results, offset = [], 0
    for shape, column, (dim, size) in zip(shapes, columns, dims, strict=True):
        piece = summed[offset : offset + column.shape[1]].view(shape)
        offset += column.shape[1]
        start, stop = chunk_bounds(size, parts, mesh.coordinate[axis])
        results.append(piece if stop - start == shape[dim] else piece.narrow(dim, 0, stop - start).contiguous())
    return results


def _all_to_all(
    tensors: list[Tensor],
    dims: list[tuple[int, int, int, int]],
    parts: int,
    group: str,
    mesh: Mesh,
    axis: int,
) -> list[Tensor]:
    """Make each tensor whole along one dim and cut it along another, (dim, size, dim, size): one call on a flat buffer."""
    columns, shapes = [], []
    for tensor, (here, size, there, other) in zip(tensors, dims, strict=True):
        padded = _pad(_pad(tensor, here, -(-size // parts)), there, -(-other // parts) * parts)
        pieces = padded.unflatten(there, (parts, -(-other // parts))).movedim(there, 0)
        shapes.append(pieces.shape[1:])
        columns.append(pieces.reshape(parts, pieces[0].numel()))
    flat = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    received = all_to_all(flat.contiguous(), group)
    results, offset = [], 0
    for shape, column, (here, size, there, other) in zip(shapes, columns, dims, strict=True):
        pieces = received[:, offset : offset + column.shape[1]].reshape(parts, *shape)
        offset += column.shape[1]
        start, stop = chunk_bounds(other, parts, mesh.coordinate[axis])
        whole = pieces.movedim(0, here).flatten(here, here + 1)
        results.append(whole.narrow(here, 0, size).narrow(there, 0, stop - start).contiguous())
    return results


def _all_reduce(chosen: list[int], axes: tuple[int, ...], local: list[Tensor], mesh: Mesh) -> None:
    """Sum the chosen tensors over the flattened group of several mesh axes: one call for each dtype."""
    names = tuple(mesh.axes[a] for a in axes if mesh.sizes[mesh.axes[a]] > 1)
    if not names:
        return
    for dtype in dict.fromkeys(local[i].dtype for i in chosen):
        same = [i for i in chosen if local[i].dtype == dtype]
        flat = torch.cat([local[i].reshape(-1) for i in same])
        summed = all_reduce(flat, "sum", mesh.groups[names])
        pieces = summed.split([local[i].numel() for i in same])
        for i, piece in zip(same, pieces, strict=True):
            local[i] = piece.view(local[i].shape)


def _slice(tensor: Tensor, now: list, move: Move, mesh: Mesh) -> Tensor:
    """Cut the dims that the target splits and the tensor holds whole; no communication."""
    if tuple(now) == move.target:
        return tensor
    have = bounds_of(move.shape, tuple(now), mesh)
    want = bounds_of(move.shape, move.target, mesh)
    cut = tuple(slice(start - offset, stop - offset) for (start, stop), (offset, _) in zip(want, have, strict=True))
    return tensor[cut].contiguous() if any(h != w for h, w in zip(have, want, strict=True)) else tensor


def gather(tensors: Sequence[DTensor], mesh: Mesh) -> list[Tensor]:
    """Return the whole tensors, on every rank; for tests, small models and reports."""
    moves = [Move(tuple(t.placements), tuple(Replicate() for _ in t.placements), tuple(t.shape)) for t in tensors]
    with torch.no_grad():
        return redistribute([t.to_local().to(mesh.device_mesh.device_type) for t in tensors], moves, mesh)


def gather_named(values: Mapping[str, DTensor], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, Tensor]:
    """Return whole tensors on every rank, those of other stages of a pipeline included, in float64 there; as ``gather``.

    Args:
        values: {name: tensor} of this rank's stages.
        shapes: {name: global shape} of the whole model; more than there are values of is no harm.
        mesh: of the tensors.
    """
    mine = dict(zip(values, gather(list(values.values()), mesh), strict=True))
    if mesh.pipe is None:
        return mine
    # The first stage that has a tensor gives it; the others add nothing.
    device, found = mesh.device_mesh.device_type, {}
    has = torch.tensor([float(name in mine) for name in shapes], device=device)
    table = all_gather_flat(has, mesh.pipe.size, mesh.pipe.group).view(mesh.pipe.size, -1)
    for (name, shape), column in zip(shapes.items(), table.unbind(1), strict=True):
        owners = column.nonzero().flatten().tolist()
        if owners:
            own = mine[name].double() if owners[0] == mesh.pipe.rank else torch.zeros(shape, dtype=torch.float64)
            found[name] = all_reduce(own.to(device, copy=True), "sum", mesh.pipe.group)
    return found
