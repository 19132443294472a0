"""Named-axis operations: torch calls on local shards, with the layout checked and gradients laid out by rule.

Model code names the axes of every operand ("batch seq embed, embed mlp -> batch seq mlp"). With a mesh the operands are
DTensors; each operation checks their placements against the compute layout, calls torch on the local shards and wraps
the result. Without a mesh the same functions are plain torch on one device, which is the oracle of every test.

The whole rule, for each mesh axis m:
    output:                 split where its logical axis is on m; Partial where a split axis was summed away
    gradient of an operand: split where its logical axis is on m; else Partial where another operand is split on m;
                            else as the output's gradient is (a vector-Jacobian product is linear in that gradient)

Only ``constrain``, the vocabulary-parallel loss and batch normalisation communicate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtengine import random
from dtengine.kernels import (
    batch_norm,
    contract,
    layer_norm,
    look_up_rows,
    normalise,
    rms_norm,
    split_cross_entropy,
    wide,
)
from dtengine.layout import Axes, Layout, Placements, axes_of
from dtengine.mesh import Mesh
from dtengine.shard import Move, bounds_of, redistribute, wrap


class Recorded(NamedTuple):
    """One value that an operation made: where, with which axes, shape and placements (for ``--explain``)."""

    site: str
    axes: Axes
    shape: tuple[int, ...]
    placements: Placements


@dataclass(frozen=True)
class Ops:
    """Named-axis operations bound to a mesh and a compute layout, or to one device.

    Attributes:
        mesh: None for plain torch on one device.
        layout: the compute layout.
        dropout_key: int64 tensor, the random key of this step and place, or None where dropout is off (evaluation).
        rows: [batch] int64, each row's index in the step's global batch; dropout is keyed by it.
        dropout_rate: probability that an element is zeroed.
        label_smoothing: share of each label that ``cross_entropy`` spreads evenly over the vocabulary.
        z_loss: coefficient that ``cross_entropy`` puts on log(Z)^2.
        site: name of the place in the model, part of each dropout's key.
        record: called with each value made, where given.
        weights: [batch, seq], weights of the tokens; a row of zeros only pads, and is in no statistics. None: all count.
        train: whether statistics are of this microbatch, and buffers change; else they are used as they are.
    """

    mesh: Mesh | None = None
    layout: Layout | None = None
    dropout_key: Tensor | None = None
    rows: Tensor | None = None
    dropout_rate: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    site: str = ""
    record: Callable[[Recorded], None] | None = None
    weights: Tensor | None = None
    train: bool = False

    def at(self, site: str) -> "Ops":
        """Return the same operations for a named place inside this one."""
        key = self.dropout_key if self.dropout_key is None else random.fold(random.key(site), self.dropout_key)
        return replace(self, dropout_key=key, site=f"{self.site}.{site}" if self.site else site)

    def for_part(
        self,
        site: str,
        key: Tensor | None,
        rows: Tensor,
        record: Callable[[Recorded], None] | None = None,
        weights: Tensor | None = None,
        train: bool = False,
    ) -> "Ops":
        """Return the same operations for a part of the model whose dropout key is known.

        Where it does not train they are those of an evaluation: running statistics, no dropout, and the plain loss.
        """
        ops = replace(self, dropout_key=key, rows=rows, site=site, record=record, weights=weights, train=train)
        return ops if train else replace(ops, label_smoothing=0.0, z_loss=0.0)

    # --- operations on shards -----------------------------------------------------------------------------------

    def einsum(self, equation: str, *operands: Tensor) -> Tensor:
        """Multiply and sum over named axes, as torch.einsum.

        Args:
            equation: "batch seq embed, embed mlp -> batch seq mlp".
            operands: laid out as the compute layout says for their axes.

        Returns:
            The result; Partial over a mesh axis that split a summed axis, to be ``constrain``-ed next.

        Raises:
            ValueError: an operand whose placements or sizes do not match its axes.
        """
        inputs, output = _parse(equation)
        return self._call(
            f"einsum '{equation}'", lambda *x: contract(inputs, output, *x), inputs, output, operands, True
        )

    def local(self, function: Callable[..., Tensor], equation: str, *operands: Tensor, whole: str = "") -> Tensor:
        """Apply a function to each rank's shards.

        Args:
            function: from local tensors to one local tensor.
            equation: the axes of the operands and of the result, as in ``einsum``.
            operands: laid out as the compute layout says for their axes.
            whole: axes along which the function mixes elements; they, and axes that vanish, must not be split.

        Returns:
            The result, laid out as the compute layout says for its axes.

        Raises:
            ValueError: as einsum, or an axis that must be whole is split.
        """
        inputs, output = _parse(equation)
        vanish = {a for axes in inputs for a in axes if a not in output}
        return self._call(
            f"local '{equation}'", function, inputs, output, operands, False, vanish | set(axes_of(whole))
        )

    def add(self, x: Tensor, y: Tensor, axes: str = "batch res_seq embed") -> Tensor:
        """Add two values of the same axes, by default to the residual stream."""
        return self.local(torch.add, f"{axes}, {axes} -> {axes}", x, y)

    def constrain(self, x: Tensor, axes: str) -> Tensor:
        """Bring a value to the layout of its axes; the one place where activations communicate.

        The gradient goes to the placements of the input, with Partial read as Replicate: under sequence parallel that
        is one all-gather and one reduce-scatter each way.

        Args:
            x: any placements, Partial included.
            axes: logical axes of x; ``seq`` where it is next used whole, ``res_seq`` in the residual stream.
        """
        if self.mesh is None:
            return x
        assert isinstance(x, DTensor)
        if len(axes_of(axes)) != x.dim():
            raise ValueError(f"ops.constrain: axes '{axes}' for shape {tuple(x.shape)}; name each dim.")
        target = self._placements(axes_of(axes))
        self._note(axes_of(axes), x.shape, target)
        return _Constrain.apply(x, target, self.mesh)  # type: ignore[return-value]

    def index(self, axis: str, size: int, device: torch.device | None = None) -> Tensor:
        """Return the global positions [size] (int64) along an axis, laid out as the axis is."""
        if self.mesh is None:
            return torch.arange(size, device=device)
        placements = self._placements((axis,))
        ((start, stop),) = bounds_of((size,), placements, self.mesh)
        return wrap(torch.arange(start, stop, device=device), self.mesh, placements, (size,))

    # --- operations that models share -----------------------------------------------------------------------------

    def embedding(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Look tokens up in a table whose rows may be split (vocabulary parallel).

        Args:
            table: [vocab, embed].
            tokens: [batch, seq] int64.

        Returns:
            [batch, res_seq, embed], laid out as the residual stream.

        Collectives:
            Where vocab is split: one all-reduce over tp forward; with sequence parallel one reduce-scatter forward and
            one all-gather backward.
        """
        start, stop = self._bounds(table, 0)

        def look_up(rows: Tensor, ids: Tensor) -> Tensor:
            if (start, stop) == (0, table.shape[0]):
                return look_up_rows(rows, ids)
            mine = (ids >= start) & (ids < stop)
            if stop == start:  # this rank has no row
                return rows.sum() + ids.unsqueeze(-1) * rows.new_zeros(rows.shape[1])
            return look_up_rows(rows, torch.where(mine, ids - start, 0)) * mine.unsqueeze(-1)

        inputs = (("vocab", "embed"), ("batch", "seq"))
        x = self._call("embedding", look_up, inputs, ("batch", "seq", "embed"), (table, tokens), True)
        return self.constrain(x, "batch res_seq embed")

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        """Normalise [batch, res_seq, embed] over embed to mean 0 and variance 1; then scale and shift."""
        equation = "batch res_seq embed, embed, embed -> batch res_seq embed"
        return self.local(lambda x, w, b: layer_norm(x, w, b, eps), equation, x, weight, bias, whole="embed")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """Divide [batch, res_seq, embed] by its root mean square over embed; then scale."""
        equation = "batch res_seq embed, embed -> batch res_seq embed"
        return self.local(lambda x, w: rms_norm(x, w, eps), equation, x, weight, whole="embed")

    def batch_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        axes: str = "batch res_seq embed",
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Normalise each channel over batch and sequence to mean 0 and variance 1; then scale and shift.

        In training by the statistics of the global microbatch, wherever its rows and positions lie; rows that only pad
        do not count. In evaluation by the running statistics. As torch.nn.BatchNorm1d and SyncBatchNorm, but that one
        value alone has variance 0 and is no error, and that a microbatch without a row changes nothing.
        Source: Ioffe & Szegedy, "Batch Normalization", 2015.

        Args:
            x: axes[0] must be batch.
            weight: one number for each channel: the axes of x but for batch, seq and res_seq.
            bias: as weight.
            mean: buffer, running mean, as weight.
            variance: buffer, running variance (of n values by n - 1), as weight.
            axes: logical axes of x.
            momentum: share of the new statistics in the running ones.
            eps: added to the variance.

        Returns:
            (the result, laid out as x; {"mean": new, "variance": new}).

        Collectives:
            Where batch or sequence is split: to train one all-reduce each way; in evaluation none.
        """
        names = axes_of(axes)
        pooled = {"batch", "seq", "res_seq"} & set(names)
        channel = tuple(a for a in names if a not in pooled)
        dims = [i for i, a in enumerate(names) if a in pooled]
        group = None
        if self.mesh is not None:
            group = self.mesh.groups.get(tuple(m for m in self.mesh.axes if self._axis_on(m, names) in pooled))
        new: list[Tensor] = []

        def by_own(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
            out, *found = batch_norm(x, weight, bias, *rest, dims=dims, momentum=momentum, eps=eps, group=group)
            new.extend(found)
            return out

        def by_running(*operands: Tensor) -> Tensor:
            return normalise(*operands, dims=dims, eps=eps)

        operands, inputs = [x, weight, bias, mean, variance], [names, *[channel] * 4]
        if not self.train:
            return self._call("batch_norm", by_running, inputs, names, operands, False), {
                "mean": mean,
                "variance": variance,
            }
        if self.weights is not None:
            operands, inputs = [*operands, self.weights], [*inputs, axes_of("batch seq")]
        out = self._call("batch_norm", by_own, inputs, names, operands, False, {"seq"})  # a row is judged as a whole
        if self.mesh is not None:  # nothing differentiates them: they come out beside the result
            assert isinstance(mean, DTensor)
            new = [wrap(one, self.mesh, tuple(mean.placements), mean.shape) for one in new]
        return out, {"mean": new[0], "variance": new[1]}

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply causal scaled-dot-product attention to grouped query heads.

        Args:
            q: [batch, kv_heads, q_per_kv, seq, head_dim].
            k: [batch, kv_heads, seq, head_dim].
            v: [batch, kv_heads, seq, head_dim].

        Returns:
            [batch, kv_heads, q_per_kv, seq, head_dim], laid out as q.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.numel() == 0:  # a rank without a head, or without a row
                return q + (k.sum() + v.sum()).to(q.dtype) * 0
            groups = q.shape[1:3]
            heads = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=q.shape[2] != 1)
            return heads.unflatten(1, groups)

        equation = (
            "batch kv_heads q_per_kv seq head_dim, batch kv_heads seq head_dim, batch kv_heads seq head_dim "
            "-> batch kv_heads q_per_kv seq head_dim"
        )
        return self.local(attend, equation, q, k, v, whole="seq head_dim")

    def dropout(self, x: Tensor, axes: str, site: str) -> Tensor:
        """Zero elements with probability ``dropout_rate`` and scale the others by 1 / (1 - dropout_rate).

        An element's fate depends on the run's seed, the step, the site, its row in the global batch and its index, so
        every mesh and every number of microbatches draws the same mask.

        Args:
            x: axes[0] must be batch.
            axes: logical axes of x.
            site: a name, unique within the block.
        """
        rate = self.dropout_rate
        if self.dropout_key is None or rate == 0.0:
            return x
        assert self.rows is not None
        names = axes_of(axes)
        site_key = random.fold(random.key(site), self.dropout_key)
        sizes = x.shape[1:]

        def drop(x: Tensor, rows: Tensor, *indices: Tensor) -> Tensor:
            element = rows
            for size, index in zip(sizes, indices, strict=True):
                element = element.unsqueeze(-1) * size + index
            keep = random.keep_mask(site_key, element, rate)
            return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)

        indices = [self.index(a, s, x.device) for a, s in zip(names[1:], sizes, strict=True)]
        equation = ", ".join([axes, "batch", *names[1:]]) + f" -> {axes}"
        return self.local(drop, equation, x, self.rows, *indices)

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of token losses, and the sum of the weights, without gathering the logits.

        A token's loss is its cross-entropy; with ``label_smoothing`` e against (1 - e) of its label and e / vocab of every
        id (Szegedy et al., "Rethinking the Inception Architecture", 2016), with ``z_loss`` plus that times log(Z)^2, Z
        the sum of exp(logits) (Chowdhery et al., "PaLM", 2022).

        Args:
            logits: [batch, seq, vocab]; vocab may be split.
            targets: [batch, seq] int64; negative where the token is not counted.
            weights: [batch, seq].

        Returns:
            (loss, count), scalars in nats and tokens, Partial over the axes that split the batch.

        Collectives:
            Where vocab is split: forward one all-reduce (max) and one all-reduce (sum) over tp; backward none.
        """
        start, stop = self._bounds(logits, 2)
        vocab = logits.shape[2]
        group = None
        if self.mesh is not None:
            assert isinstance(logits, DTensor)
            split = tuple(m for m, p in zip(self.mesh.axes, logits.placements, strict=True) if p == Shard(2))
            group = self.mesh.groups.get(split)

        def loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            counted = torch.where(targets >= 0, weights, 0)
            ids = targets.clamp(min=0)
            if group is not None:
                losses = split_cross_entropy(
                    wide(logits), ids, start, stop, group, vocab, self.label_smoothing, self.z_loss
                )
            else:
                flat = wide(logits).flatten(0, 1)
                losses = F.cross_entropy(flat, ids.flatten(), reduction="none", label_smoothing=self.label_smoothing)
                if self.z_loss:
                    losses = losses + self.z_loss * flat.logsumexp(-1).square()
            return (losses.view(targets.shape) * counted).sum()

        def count(targets: Tensor, weights: Tensor) -> Tensor:
            return torch.where(targets >= 0, weights, 0).sum()

        inputs = (("batch", "seq", "vocab"), ("batch", "seq"), ("batch", "seq"))
        # The loss of a token is whole on every tp rank (the sum over vocab is done inside), so vocab counts as kept.
        total = self._call(
            "cross_entropy", loss, inputs, (), (logits, targets, weights), True, frozenset(), frozenset({"vocab"})
        )
        return total, self._call("count", count, inputs[1:], (), (targets, weights), True)

    # --- the mechanism --------------------------------------------------------------------------------------------

    def _placements(self, axes: Axes) -> Placements:
        assert self.layout is not None and self.mesh is not None
        return self.layout.placements(axes, self.mesh.sizes)

    def _bounds(self, x: Tensor, dim: int) -> tuple[int, int]:
        """[start, stop) of this rank's part of a dim."""
        if self.mesh is None:
            return 0, x.shape[dim]
        assert isinstance(x, DTensor)
        return bounds_of(x.shape, tuple(x.placements), self.mesh)[dim]

    def _note(self, axes: Axes, shape: Sequence[int], placements: Placements) -> None:
        if self.record is not None:
            self.record(Recorded(self.site, axes, tuple(shape), placements))

    def _call(
        self,
        what: str,
        function: Callable[..., Tensor],
        inputs: Sequence[Axes],
        output: Axes,
        operands: Sequence[Tensor],
        sums: bool,
        whole: frozenset[str] | set[str] = frozenset(),
        reduced: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Check the operands, call the function on their shards and wrap the result.

        Args:
            sums: whether an axis missing from the output was summed, so that the output is Partial where it is split.
            whole: axes that must not be split.
            reduced: split axes that the function has summed over the group by itself.
        """
        if len(inputs) != len(operands):
            raise ValueError(f"ops.{what}: {len(operands)} operands for {len(inputs)} terms; give one for each.")
        sizes: dict[str, int] = {}
        for axes, x in zip(inputs, operands, strict=True):
            if len(axes) != x.dim():
                raise ValueError(f"ops.{what}: axes '{' '.join(axes)}' for shape {tuple(x.shape)}; name each dim.")
            for axis, size in zip(axes, x.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"ops.{what}: {axis} is {sizes[axis]} and {size}; an axis has one size.")
        new = [a for a in output if a not in sizes]
        if new:
            raise ValueError(f"ops.{what}: {', '.join(new)} is on no operand; a result has axes of its operands.")
        shape = tuple(sizes[a] for a in output)
        if self.mesh is None:
            result = function(*operands)
            _check_shape(what, result, shape)
            return result
        for axes, x in zip(inputs, operands, strict=True):
            want = self._placements(axes)
            if not isinstance(x, DTensor) or tuple(x.placements) != want:
                have = tuple(x.placements) if isinstance(x, DTensor) else "a plain tensor"
                raise ValueError(
                    f"ops.{what} at {self.site}: '{' '.join(axes)}' is laid out as {have}; the compute layout says "
                    f"{want}. Use ops.constrain(x, axes) first."
                )
        on = {m: {a for axes in inputs for a in axes if self._axis_on(m, axes) == a} for m in self.mesh.axes}
        placements: list[Any] = []
        for m in self.mesh.axes:
            split = on[m] - reduced
            if len(split) > 1:
                raise ValueError(f"ops.{what}: {m} splits {', '.join(sorted(split))}; it may split one axis.")
            if split & set(whole):
                raise ValueError(f"ops.{what}: {m} splits {', '.join(split)}, which must be whole here.")
            axis = next(iter(split), None)
            if axis is None:
                placements.append(Replicate())
            elif axis in output:
                placements.append(Shard(output.index(axis)))
            else:
                assert sums, "an axis that vanishes is either summed or whole"
                placements.append(Partial())
        split_axes = tuple(bool(on[m]) for m in self.mesh.axes)
        call = _Call(function, self.mesh, tuple(placements), shape, split_axes, f"{what} at {self.site}")
        self._note(output, shape, call.placements)
        return _OnShards.apply(call, *operands)  # type: ignore[return-value]

    def _axis_on(self, mesh_axis: str, axes: Axes) -> str | None:
        assert self.layout is not None and self.mesh is not None
        return self.layout.decide(axes, self.mesh.sizes)[0].get(mesh_axis)


class _Call(NamedTuple):
    function: Callable[..., Tensor]
    mesh: Mesh
    placements: Placements
    shape: tuple[int, ...]
    split: tuple[bool, ...]  # for each mesh axis: is some operand split on it?
    what: str


class _OnShards(torch.autograd.Function):
    """Call a function on local shards; lay gradients out by the rule at the top of this module."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: DTensor) -> DTensor:
        leaves = []
        with torch.enable_grad():
            for x, wanted in zip(operands, ctx.needs_input_grad[1:], strict=True):
                leaves.append(x.to_local().detach().requires_grad_(wanted))
            out = call.function(*leaves)
        held = tuple(stop - start for start, stop in bounds_of(call.shape, call.placements, call.mesh))
        _check_shape(call.what, out, held)
        ctx.call, ctx.leaves, ctx.out = call, leaves, out
        ctx.operands = [(tuple(x.placements), tuple(x.shape)) for x in operands]
        return wrap(out.detach(), call.mesh, call.placements, call.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        for made, given in zip(call.placements, grad.placements, strict=True):
            if (isinstance(made, Shard) and given != made) or (isinstance(made, Partial) and not given.is_replicate()):
                raise RuntimeError(
                    f"ops.{call.what}: made {call.placements}, its gradient came as {tuple(grad.placements)}"
                )
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        if ctx.out.requires_grad:
            found = torch.autograd.grad(ctx.out, wanted, grad.to_local(), allow_unused=True, materialize_grads=True)
        else:  # the function cut the gradient off, as a comparison or detach does
            found = [torch.zeros_like(leaf) for leaf in wanted]
        local = iter(found)
        grads: list[Any] = [None]
        for leaf, (placements, shape) in zip(ctx.leaves, ctx.operands, strict=True):
            if not leaf.requires_grad:
                grads.append(None)
                continue
            laid = tuple(
                p if isinstance(p, Shard) else Partial() if split else given
                for p, split, given in zip(placements, call.split, grad.placements, strict=True)
            )
            grads.append(wrap(next(local), call.mesh, laid, shape))
        return tuple(grads)


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Placements, mesh: Mesh) -> DTensor:
        ctx.source = tuple(Replicate() if isinstance(p, Partial) else p for p in x.placements)
        ctx.mesh = mesh
        return _move(x, target, mesh)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _move(grad, ctx.source, ctx.mesh), None, None


def _move(x: DTensor, target: Placements, mesh: Mesh) -> DTensor:
    (local,) = redistribute([x.to_local()], [Move(tuple(x.placements), target, tuple(x.shape))], mesh)
    return wrap(local, mesh, target, x.shape)


def _check_shape(what: str, result: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(result.shape) != shape:
        raise ValueError(
            f"ops.{what}: the function returned shape {tuple(result.shape)}, its axes say {shape} on this rank. The result "
            "must have the axes that stand behind '->', with their sizes."
        )


def _parse(equation: str) -> tuple[tuple[Axes, ...], Axes]:
    left, arrow, right = equation.partition("->")
    if not arrow:
        raise ValueError(f"ops '{equation}': no '->'; write the result's axes behind it.")
    return tuple(axes_of(term) for term in left.split(",")), axes_of(right)
