"""One microbatch through the parts of a model: in which order parts run, parameters are gathered and gradients reduced.

    forward    gather the next group of parts while this one computes, drop what was gathered
    backward   the same in reverse; a group's gradients are reduced while the next one computes
    last       the last microbatch of a step brings the sums to the optimizer's layout

The order is a plain function of the plan and of sizes that all ranks know, so all ranks issue the same collectives in the
same order. Values are nodes of a graph or tensors, as the executor says.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from dtengine import random
from dtengine.executors import Executor, Value
from dtengine.layout import Placements
from dtengine.parameters import Parameters
from dtengine.parts import Part, PartFunctions
from dtengine.shard import Move, redistribute
from dtengine.update import fetch

MB = 1 << 20


@dataclass(frozen=True)
class Order:
    """What runs in which order.

    Attributes:
        parts: of the model, in forward order.
        gathers: groups of consecutive parts whose parameters are gathered by one call, in forward order.
        reduces: groups of consecutive parts whose gradients are reduced by one call, in backward order.
        prefetch: groups that are gathered ahead of the one that computes.
        reshard: whether what was gathered is dropped behind its forward.
    """

    parts: tuple[Part, ...]
    gathers: tuple[tuple[int, ...], ...]
    reduces: tuple[tuple[int, ...], ...]
    prefetch: int
    reshard: bool

    def buckets(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the positions in ``names`` of the parameters that are gathered together."""
        groups = [[n for i in group for n in self.parts[i].own] for group in self.gathers]
        return tuple(tuple(names.index(n) for n in group) for group in groups if group)


def make_order(parts: Sequence[Part], parameters: Parameters, bucket_mb: float, prefetch: int, reshard: bool) -> Order:
    """Group parts into buckets of at least ``bucket_mb`` megabytes (2^20 bytes), each of whole parts."""

    def size(part: Part) -> float:
        total = 0.0
        for name in part.own:
            placements = parameters.placements(parameters.plan.compute, name)
            pieces = [
                s for s, p in zip(parameters.mesh.sizes.values(), placements, strict=True) if isinstance(p, Shard)
            ]
            whole = list(accumulate(parameters.specs[name].shape, lambda a, b: a * b, initial=1))[-1]
            total += whole / list(accumulate(pieces, lambda a, b: a * b, initial=1))[-1] * parameters.dtype.itemsize
        return total

    def group(indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        groups: list[list[int]] = [[]]
        filled = 0.0
        for i in indices:
            groups[-1].append(i)
            filled += size(parts[i])
            if filled >= bucket_mb * MB:
                groups.append([])
                filled = 0.0
        return tuple(tuple(g) for g in groups if g)

    return Order(tuple(parts), group(range(len(parts))), group(range(len(parts) - 1, -1, -1)), prefetch, reshard)


class Buffer(NamedTuple):
    """How the gradients of one group lie in its flat accumulation buffer: names in order, and local shape of each."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(torch.Size(s).numel() for s in self.shapes)


@dataclass(frozen=True)
class Microbatch:
    """A microbatch on a plan.

    Attributes:
        order: what runs when.
        functions: of the parts.
        dropout: whether a dropout key is needed.
        reduce_dtype: dtype in which gradients are summed over ranks; they are accumulated over microbatches in fp32 (fp64).
        on_host: whether parameters lie in host memory between their uses.
    """

    order: Order
    functions: PartFunctions
    dropout: bool
    reduce_dtype: torch.dtype
    on_host: bool = False

    @property
    def parameters(self) -> Parameters:
        """Of the model, on their plan."""
        return self.functions.parameters

    @property
    def gathers(self) -> bool:
        """Whether some parameter is elsewhere, or split, where it is stored and whole where it is used."""
        return self.on_host or any(m.source != m.target for m in self.moves(list(self.parameters.specs)))

    def moves(self, names: Sequence[str]) -> list[Move]:
        """How parameters go from where they are stored to where they are used."""
        plan = self.parameters.plan
        return self.parameters.moves(plan.params, plan.compute, names)

    # --- passes ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, run: Executor, params: Mapping[str, Value], running: Mapping[str, Value], batch: Sequence[Value]
    ) -> list[Value]:
        """Return [this coordinate's summed loss, its count]."""
        whole: dict[str, Value] = {}
        x, outputs = None, []
        for part in self._gathered(run, params, whole):
            held = [running[n] for n in part.buffers]
            outputs, _ = run.forward(part, [whole[n] for n in part.names], held, x, batch, None, train=False)
            x = outputs[0]
        return outputs

    def train(
        self,
        run: Executor,
        params: Mapping[str, Value],
        running: Mapping[str, Value],
        batch: Sequence[Value],
        key: Value,
        seed: Value,
        buffers: Callable[[int, int], Value] | None,
        *,
        last: bool,
    ) -> tuple[Value, dict[str, Value], dict[str, Value]]:
        """Run forward and backward.

        Args:
            run: how.
            params: {name: shard in the params layout}.
            running: {name: value} of the model's buffers.
            batch: tokens, targets, weights, rows of this coordinate.
            key: int64 scalar, dropout key of the step.
            seed: gradient of the summed loss.
            buffers: gives the flat accumulation buffer of a group of ``order.reduces``, by its number and its number of
                elements; None where the step has one microbatch.
            last: whether this is the step's last microbatch; only then gradients come back.

        Returns:
            (this coordinate's summed loss, {name: reduced gradient in the optimizer layout}, new values of ``running``).
        """
        order = self.order
        keys = self.keys(run, key)
        whole: dict[str, Value] = {}
        saved: list[Any] = []
        latest: dict[str, Value] = {}
        x, outputs = None, []
        for i, part in enumerate(self._gathered(run, params, whole)):
            held = [running[n] for n in part.buffers]
            outputs, kept = run.forward(part, [whole[n] for n in part.names], held, x, batch, keys[i], train=True)
            saved.append(kept)
            latest.update(zip(part.buffers, outputs[part.num_outputs - len(held) :], strict=True))
            x = outputs[0]
        loss, grad = outputs[0], seed

        found: dict[str, list[tuple[Value, Placements]]] = {}
        begun: deque[tuple[tuple[str, ...], Any]] = deque()
        grads: dict[str, Value] = {}
        lag = len(order.reduces) if not self._reduces_each else min(1, order.prefetch)

        def settle(most: int) -> None:
            while len(begun) > most:
                names, one = begun.popleft()
                grads.update(zip(names, run.finish(one), strict=False))

        group_of = {order.parts[i].name: g for g, group in enumerate(order.reduces) for i in group}
        for i, now in self._gathered_again(run, params, whole):
            part = order.parts[i]
            grad, ours = run.backward(part, saved[i], [now[n] for n in part.names], grad)
            saved[i] = None
            for index, (name, one) in enumerate(zip(part.names, ours, strict=True)):
                if one is not None:
                    found.setdefault(name, []).append((one, self.functions.grads[part.kind, index]))
            group = group_of[part.name]
            if i == order.reduces[group][-1]:
                names = tuple(n for j in order.reduces[group] for n in order.parts[j].own)
                begun.append(self._reduce(run, names, found, group, buffers, last=last))
                settle(lag)
        settle(0)
        return loss, grads, latest

    # --- parameters -----------------------------------------------------------------------------------------------

    def start_gather(self, run: Executor, params: Mapping[str, Value], names: Sequence[str]) -> Any:
        """Begin to bring parameters to where they are used; returns what ``finish`` takes."""
        moves, mesh, dtype = self.moves(names), self.parameters.mesh, self.parameters.compute_dtype

        def gather(*shards: Tensor) -> list[Tensor]:
            if self.on_host:
                shards = tuple(fetch(x, self.parameters.device) for x in shards)
            return redistribute([x.to(dtype) for x in shards], moves, mesh)

        return run.start(("gather", tuple(moves)), gather, [params[n] for n in names])

    def _gathered(self, run: Executor, params: Mapping[str, Value], whole: dict[str, Value]) -> Any:
        """Yield parts in forward order, when their parameters are in ``whole``."""
        order = self.order
        names = [[n for i in group for n in order.parts[i].own] for group in order.gathers]
        begun: dict[int, Any] = {}
        for g, group in enumerate(order.gathers):
            for ahead in range(g, min(g + order.prefetch + 1, len(names))):
                if ahead not in begun:
                    begun[ahead] = self.start_gather(run, params, names[ahead])
            whole.update(zip(names[g], run.finish(begun[g]), strict=True))
            for i in group:
                yield order.parts[i]

    def _gathered_again(self, run: Executor, params: Mapping[str, Value], whole: dict[str, Value]) -> Any:
        """Yield (index, parameters) of parts in backward order; what was dropped is gathered again.

        The last group is still there when its backward begins, and with prefetch so are the last blocks: they would be
        gathered while the head computes. Embedding and head keep theirs: the embedding's backward reads none, the head's
        follows at once, and a tied table is gathered once.
        """
        order = self.order
        blocks = [[i for i in group if order.parts[i].role == "block"] for group in order.gathers]
        again = [g for g in range(len(blocks) - 2, -1, -1) if blocks[g]] if self.gathers and order.reshard else []
        if order.prefetch and not blocks[-1]:
            again = again[1:]
        names = {g: [n for i in blocks[g] for n in order.parts[i].own if not self._shared(n)] for g in again}
        begun: dict[int, Any] = {}
        done = 0  # groups of ``again`` whose turn has come
        for g in range(len(blocks) - 1, -1, -1):
            for ahead in again[done : done + order.prefetch + (g in names)]:
                if ahead not in begun:
                    begun[ahead] = self.start_gather(run, params, names[ahead])
            now = dict(whole)
            if g in names:
                done += 1
                now.update(zip(names[g], run.finish(begun[g]), strict=True))
            for i in reversed(order.gathers[g]):
                yield i, now

    def _shared(self, name: str) -> bool:
        """Whether more than one part uses a parameter."""
        return sum(name in part.names for part in self.order.parts) > 1

    def keys(self, run: Executor, key: Value) -> list[Value]:
        """Return the dropout key of each part."""
        parts = self.order.parts
        if not self.dropout or not parts:
            return [key] * len(parts)
        names = tuple(part.name for part in parts)

        def fold(key: Tensor) -> list[Tensor]:
            sites = torch.tensor([random.key(name) for name in names], dtype=torch.int64, device=key.device)
            return [random.fold(site, key) for site in sites.unbind()]

        return run.call(("keys", names), fold, [key])

    # --- gradients ------------------------------------------------------------------------------------------------

    @property
    def _reduces_each(self) -> bool:
        """Whether gradients are reduced in each microbatch: zero2 and fsdp."""
        plan = self.parameters.plan
        return any(
            self.parameters.placements(plan.grads, n) != self.parameters.placements(plan.compute, n)
            for n in self.parameters.specs
        )

    def held(self, name: str, source: Placements) -> Placements:
        """Return the placements in which a gradient is accumulated: split where the grads layout splits, else as it came."""
        split = self.parameters.placements(self.parameters.plan.grads, name)
        return tuple(b if isinstance(b, Shard) else s for s, b in zip(source, split, strict=True))

    def _reduce(
        self,
        run: Executor,
        names: tuple[str, ...],
        found: Mapping[str, Sequence[tuple[Value, Placements]]],
        group: int,
        buffers: Callable[[int, int], Value] | None,
        *,
        last: bool,
    ) -> tuple[tuple[str, ...], Any]:
        """Begin to reduce the gradients of a group; returns the names of what comes, and what ``finish`` takes."""
        sources = tuple(tuple(placements for _, placements in found.get(n, ())) for n in names)
        inputs = [one for n in names for one, _ in found.get(n, ())]

        def reduce(*tensors: Tensor) -> list[Tensor]:
            return self.reduce_local(names, sources, list(tensors), last=last)

        if buffers is not None:
            inputs.append(buffers(group, self.buffer(names, sources).numel))
        key = ("reduce", tuple(self.parameters.specs[n] for n in names), sources, buffers is not None, last)
        return names, run.start(key, reduce, inputs)

    def reduce_local(
        self,
        names: Sequence[str],
        sources: Sequence[Sequence[Placements]],
        tensors: list[Tensor],
        *,
        last: bool,
    ) -> list[Tensor]:
        """Sum what parts found for each parameter, accumulate, and where it is the last microbatch reduce.

        Args:
            names: of parameters.
            sources: for each, the placements of the gradients that its uses gave; none where nothing used it.
            tensors: those gradients, then the flat buffer where there is one.
            last: whether to reduce to the optimizer layout.

        Returns:
            Reduced gradients, or nothing where it is not the last microbatch.
        """
        # 1. one gradient for each parameter; 2. to the grads layout; 3. accumulate; 4. to the optimizer layout
        parameters, mesh = self.parameters, self.parameters.mesh
        plan = parameters.plan
        rest = iter(tensors)
        local, placed = [], []
        for name, placements in zip(names, sources, strict=True):
            one, where = self._sum(name, [(next(rest), p) for p in placements])
            local.append(one)
            placed.append(where)
        buffer = next(rest, None)
        shapes = [parameters.specs[n].shape for n in names]
        if buffer is not None or not last:
            held = [self.held(n, p) for n, p in zip(names, placed, strict=True)]
            local = redistribute(local, [Move(*m) for m in zip(placed, held, shapes, strict=True)], mesh)
            placed = held
        if buffer is not None:
            laid = self.buffer(names, sources)
            views = dict(zip(laid.names, _views(buffer, laid.shapes), strict=True))
            for name, one in zip(names, local, strict=True):
                views[name].add_(one)
            local = [views[n] for n in names]
        if not last:
            return []
        target = [parameters.placements(plan.optimizer, n) for n in names]
        local = [one.to(self.reduce_dtype) for one in local]
        reduced = redistribute(local, [Move(*m) for m in zip(placed, target, shapes, strict=True)], mesh)
        return [one.to(parameters.dtype) for one in reduced]

    def _sum(self, name: str, found: Sequence[tuple[Tensor, Placements]]) -> tuple[Tensor, Placements]:
        """Add the gradients that a parameter's uses gave, in the dtype of reductions."""
        parameters = self.parameters
        source = self._source(name, [placements for _, placements in found])
        if not found:
            return parameters.empty(name, source, self.reduce_dtype).zero_(), source
        shape = parameters.specs[name].shape
        terms = [one.to(self.reduce_dtype) for one, _ in found]
        if len(terms) > 1:
            moves = [Move(placements, source, shape) for _, placements in found]
            terms = redistribute(terms, moves, parameters.mesh)
        return sum(terms[1:], terms[0]), source

    def _source(self, name: str, found: Sequence[Placements]) -> Placements:
        """Return the placements of the sum of a parameter's gradients; a sum is completed where another use has it whole."""
        compute = self.parameters.placements(self.parameters.plan.compute, name)
        if not found:
            return compute
        return tuple(
            first if all(p == first for p in others) else c
            for c, (first, *others) in zip(compute, zip(*found, strict=True), strict=True)
        )

    def buffer(self, names: Sequence[str], sources: Sequence[Sequence[Placements]]) -> Buffer:
        """Lay a group's accumulation buffer out; what is reduced together stands together."""
        laid = [(n, self.held(n, self._source(n, found))) for n, found in zip(names, sources, strict=True)]
        laid.sort(key=lambda pair: [type(p).__name__ for p in pair[1]])
        shapes = tuple(tuple(self.parameters.empty(n, p).shape) for n, p in laid)
        return Buffer(tuple(n for n, _ in laid), shapes)


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Cut a flat tensor into tensors of these shapes."""
    offsets = [0, *accumulate(torch.Size(s).numel() for s in shapes)]
    return [flat[a:b].view(s) for a, b, s in zip(offsets, offsets[1:], shapes, strict=False)]
