"""The parts of a model on a plan: embed, each block, head; forward and backward of each on local tensors.

A step is composed of parts. Parts that are alike (the same function over parameters of the same axes and shapes) have one
``kind``, so they are traced once however many layers there are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtengine import trees
from dtengine.data import Batch
from dtengine.layout import Placements, axes_of
from dtengine.model import Buffer, Model, Param, Tied, split_result
from dtengine.ops import Ops, Recorded
from dtengine.parameters import Parameters
from dtengine.shard import Move, redistribute, wrap
from dtengine.torch_private import storage_of


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        name: "embed", "blocks.3" or "head".
        role: "embed", "block" or "head".
        names: its parameters, as the model names them, in the order of its tree; a tied one by the name of its owner.
        own: those that no earlier part uses: they are gathered here, and their gradient is complete behind this part's
            backward.
        buffers: its buffers, as the model names them.
        tree: the part of the model's specs.
        kind: equal for parts that are alike.
    """

    name: str
    role: str
    names: tuple[str, ...]
    own: tuple[str, ...]
    buffers: tuple[str, ...]
    tree: Any = field(repr=False, compare=False)
    kind: tuple = field(repr=False)

    @property
    def num_outputs(self) -> int:
        """Outputs of its forward, to train: x, or loss and count; then the new value of each buffer."""
        return (2 if self.role == "head" else 1) + len(self.buffers)


def parts_of(specs: Mapping[str, Any], params: Mapping[str, Param]) -> list[Part]:
    """List the parts of a model in forward order."""
    trees_ = [("embed", "embed", specs["embed"])]
    trees_ += [(f"blocks.{i}", "block", tree) for i, tree in enumerate(specs["blocks"])]
    trees_ += [("head", "head", specs["head"])]
    seen: set[str] = set()
    parts = []
    for name, role, tree in trees_:
        flat = trees.flatten(tree)
        buffers = {n: leaf for n, leaf in flat.items() if isinstance(leaf, Buffer)}
        leaves = {
            n: leaf.name if isinstance(leaf, Tied) else f"{name}.{n}" for n, leaf in flat.items() if n not in buffers
        }
        names = tuple(dict.fromkeys(leaves.values()))
        own = tuple(n for n in names if n not in seen)
        seen.update(names)
        kind = (role, tuple((n, names.index(full), params[full]) for n, full in leaves.items()), tuple(buffers.items()))
        parts.append(Part(name, role, names, own, tuple(f"{name}.{n}" for n in buffers), tree, kind))
    return parts


class Live(NamedTuple):
    """A part's forward that ran with autograd.

    Attributes:
        outputs: local tensors: x of embed and blocks, loss and count of the head; then, to train, new values
            of the buffers.
        result: what the backward starts from: x, or the summed loss.
        leaves: x where the part takes one, then the parameters.
    """

    outputs: list[Tensor]
    result: DTensor
    leaves: list[DTensor]


@dataclass(frozen=True)
class PartFunctions:
    """Forward and backward of parts on local tensors; plain functions, to be traced or called.

    Attributes:
        model: its functions.
        parameters: of the model, on their plan.
        ops: named-axis operations, without dropout key and rows.
        grads: filled by ``backward``: {(kind, name index): placements in which that parameter's gradient came}.
        record: called with each value that an operation makes.
        streams: filled by the embed part: {local shape of tokens: (placements, global shape) of x}.
    """

    model: Model
    parameters: Parameters
    ops: Ops
    grads: dict[tuple[tuple, int], Placements] = field(default_factory=dict)
    streams: dict[tuple[int, ...], tuple[Placements, tuple[int, ...]]] = field(default_factory=dict)
    record: Callable[[Recorded], None] | None = None

    def forward(
        self,
        part: Part,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        x: Tensor | None,
        batch: Sequence[Tensor],
        key: Tensor | None,
        train: bool,
    ) -> Live:
        """Run a part.

        Args:
            part: which.
            params: local tensors in the compute layout, of ``part.names``.
            buffers: local tensors, of ``part.buffers``.
            x: local residual stream; None for embed.
            batch: local tokens, targets, weights, rows.
            key: int64 scalar, dropout key of this part; None without dropout.
            train: whether buffers are to change.
        """
        parameters, mesh = self.parameters, self.parameters.mesh
        compute = parameters.plan.compute
        given = self._wrap_batch(batch)
        named = {}
        for name, local in zip(part.names, params, strict=True):
            laid = parameters.wrap(name, local.detach(), parameters.placements(compute, name))
            named[name] = laid.requires_grad_(torch.is_grad_enabled())
        held = {n: parameters.wrap_buffer(n, local) for n, local in zip(part.buffers, buffers, strict=True)}
        values = named | held
        tree = trees.map_named(
            lambda n, leaf: values[leaf.name if isinstance(leaf, Tied) else f"{part.name}.{n}"], part.tree
        )
        ops = self.ops.for_part(part.name, key, given.rows, self.record, given.weights, train)
        if part.role == "embed":
            result, new = split_result(self.model.embed(tree, given, ops))
            assert isinstance(result, DTensor)
            placements = tuple(Replicate() if isinstance(p, Partial) else p for p in result.placements)
            if placements != tuple(result.placements):
                raise ValueError(
                    f"model embed: its result is laid out as {tuple(result.placements)}; the residual stream may not be a "
                    'Partial sum. Use ops.constrain(x, "batch res_seq embed").'
                )
            self.streams[tuple(batch[0].shape)] = placements, tuple(result.shape)
            return Live(
                [result.to_local().contiguous(), *self._changed(part, held, new, train)], result, list(named.values())
            )
        assert x is not None
        placements, shape = self.streams[tuple(batch[0].shape)]
        stream = wrap(x.detach(), mesh, placements, shape).requires_grad_(torch.is_grad_enabled())
        leaves = [stream, *named.values()]
        if part.role == "head":
            logits, new = split_result(self.model.head(tree, stream, ops))
            loss, count = self.model.loss(logits, given, ops)
            assert isinstance(loss, DTensor) and isinstance(count, DTensor)
            return Live([loss.to_local(), count.to_local(), *self._changed(part, held, new, train)], loss, leaves)
        result, new = split_result(self.model.block(tree, stream, ops))
        if not isinstance(result, DTensor) or tuple(result.placements) != placements or tuple(result.shape) != shape:
            have = (tuple(result.placements), tuple(result.shape)) if isinstance(result, DTensor) else type(result)
            raise ValueError(
                f"model block at {part.name}: its result is {have}; the residual stream it took is {(placements, shape)}. "
                'A block returns the stream as it came: use ops.constrain(x, "batch res_seq embed").'
            )
        return Live([result.to_local().contiguous(), *self._changed(part, held, new, train)], result, leaves)

    def _changed(self, part: Part, held: Mapping[str, DTensor], new: Mapping[str, Any], train: bool) -> list[Tensor]:
        """Return the local new value of each of a part's buffers, the old one where the part gave none; to train."""
        given = {f"{part.name}.{n}": one for n, one in new.items()}
        wrong = []
        for name, one in given.items():
            if name not in held:
                wrong.append(f"{name} is no buffer of it (it has {', '.join(held) or 'none'})")
                continue
            want = (tuple(held[name].placements), tuple(held[name].shape))
            have = (tuple(one.placements), tuple(one.shape)) if isinstance(one, DTensor) else type(one).__name__
            if have != want:
                wrong.append(f"{name} is {have}, the buffer {want}")
        if wrong:
            raise ValueError(
                f"model {part.role} at {part.name}: of the new buffers that it returned, {'; '.join(wrong)}. A part returns "
                "(result, {name: new value}), each laid out as the buffer that it took."
            )
        latest = [given.get(name, old) for name, old in held.items()] if train else []
        return [one.to_local().detach().to(self.parameters.dtype) for one in latest]

    def backward(self, part: Part, live: Live, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run a part's backward.

        Args:
            part: which.
            live: of its forward.
            grad: local gradient of x as x is laid out; for the head the scalar gradient of the summed loss.

        Returns:
            (local gradient of the part's input x, or None for embed; for each of ``part.names`` its local gradient, laid
            out as ``self.grads`` says, or None where the part does not use it).
        """
        mesh = self.parameters.mesh
        if part.role == "head":
            root = wrap(grad.to(live.result.dtype), mesh, tuple(Replicate() for _ in mesh.axes), ())
        else:
            root = wrap(grad, mesh, tuple(live.result.placements), tuple(live.result.shape))
        if live.result.requires_grad:
            found: list[Any] = list(torch.autograd.grad(live.result, live.leaves, root, allow_unused=True))
        else:
            found = [None] * len(live.leaves)
        of_x = None
        if part.role != "embed":
            stream, first = live.leaves[0], found.pop(0)
            if first is None:
                of_x = torch.zeros_like(stream.to_local())
            else:
                move = Move(tuple(first.placements), tuple(stream.placements), tuple(stream.shape))
                of_x = redistribute([first.to_local()], [move], mesh)[0].contiguous()
        grads: list[Tensor | None] = []
        taken = set() if of_x is None else {storage_of(of_x)}
        for index, one in enumerate(found):
            if one is None:
                grads.append(None)
                continue
            self.grads[part.kind, index] = tuple(one.placements)
            mine = one.to_local().contiguous()
            if storage_of(mine) in taken:  # autograd hands one tensor to two parameters that were added
                mine = mine.clone()
            taken.add(storage_of(mine))
            grads.append(mine)
        return of_x, grads

    def _wrap_batch(self, batch: Sequence[Tensor]) -> Batch:
        """Wrap a coordinate's batch as the compute layout says."""
        tokens, targets, weights, rows = batch
        plan, mesh = self.parameters.plan, self.parameters.mesh
        shape = (tokens.shape[0] * plan.coordinates, tokens.shape[1])
        two = plan.compute.placements(axes_of("batch seq"), mesh.sizes)
        one = plan.compute.placements(("batch",), mesh.sizes)
        return Batch(
            wrap(tokens, mesh, two, shape),
            wrap(targets, mesh, two, shape),
            wrap(weights, mesh, two, shape),
            wrap(rows, mesh, one, shape[:1]),
        )
