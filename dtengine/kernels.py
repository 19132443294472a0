"""Local computations that torch has no short form of: a named product, RMSNorm, the loss over a split vocabulary."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtengine.layout import Axes
from dtengine.torch_private import all_reduce


def contract(inputs: Sequence[Axes], output: Axes, *operands: Tensor) -> Tensor:
    """Multiply and sum local tensors: one matrix product where two operands share summed axes only.

    torch.einsum makes a batched product of it, with four times as many nodes in a trace.
    """
    summed = [a for a in inputs[0] if a not in output]
    shared = set(inputs[0]) & set(inputs[-1])
    if len(inputs) != 2 or not summed or shared != set(summed):
        letters = {a: chr(97 + i) for i, a in enumerate(dict.fromkeys(a for axes in inputs for a in axes))}
        terms = ",".join("".join(letters[a] for a in axes) for axes in inputs)
        return torch.einsum(f"{terms}->{''.join(letters[a] for a in output)}", *operands)
    left, right = operands
    rows, columns = ([a for a in axes if a not in shared] for axes in inputs)
    size = {a: s for axes, x in zip(inputs, operands, strict=True) for a, s in zip(axes, x.shape, strict=True)}
    inner = math.prod(size[a] for a in summed)
    x = _permute(left, inputs[0], [*rows, *summed]).reshape(math.prod(size[a] for a in rows), inner)
    if inputs[1] == (*columns, *summed):  # a stored transpose stays one
        y = right.reshape(math.prod(size[a] for a in columns), inner).t()
    else:
        y = _permute(right, inputs[1], [*summed, *columns]).reshape(inner, math.prod(size[a] for a in columns))
    made = (x @ y).view([size[a] for a in (*rows, *columns)])
    return _permute(made, (*rows, *columns), output)


def _permute(x: Tensor, have: Sequence[str], want: Sequence[str]) -> Tensor:
    return x if list(have) == list(want) else x.permute([have.index(a) for a in want])


def wide(x: Tensor) -> Tensor:
    """Norms and losses are computed in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def look_up_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Return rows[ids]; the gradient of a row is summed in at least fp32.

    torch sums it in the rows' dtype on CPUs: 4,096 uses of one row in bf16 gave 256 instead of 2,033 (measured).
    """
    return _LookUp.apply(rows, ids)  # type: ignore[return-value]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dim to mean 0 and variance 1; then scale and shift.

    Computed in at least fp32: torch's own sums the gradients of weight and bias in bf16 on CPUs, and was off by all of
    them over 4,096 rows (measured).
    """
    return F.layer_norm(wide(x), weight.shape, wide(weight), wide(bias), eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dim.

    torch's own decomposes in a trace, and its derived backward makes twice as many passes over x.
    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]


def split_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    start: int,
    stop: int,
    group: str,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return token losses from logits whose vocabulary is split over a group, without gathering them.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Args:
        logits: [batch, seq, vocab of this rank].
        targets: [batch, seq] int64, global ids.
        start: first id of this rank.
        stop: behind its last id.
        group: process-group name.
        vocab: ids of all ranks.
        label_smoothing: share of each label that is spread evenly over them.
        z_loss: coefficient on log(Z)^2.

    Collectives:
        Forward one all-reduce (max) and one all-reduce (sum); backward none.
    """
    options = (vocab, label_smoothing, z_loss)
    return _SplitCrossEntropy.apply(logits, targets, start, stop, group, options)  # type: ignore[return-value]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.number = rows.shape[0]
        return F.embedding(ids, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(wide(grad), ids, ctx.number, -1, False)
        return summed.to(grad.dtype), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_wide = wide(x)
        scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
        unit = x_wide * scale
        ctx.save_for_backward(unit, scale, weight)
        return (unit * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        unit, scale, weight = ctx.saved_tensors
        toward = wide(grad)
        of_weight = (toward * unit).flatten(0, -2).sum(0)
        toward = toward * weight
        of_x = (toward - unit * (toward * unit).mean(-1, keepdim=True)) * scale
        return of_x.to(grad.dtype), of_weight.to(weight.dtype), None


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        stop: int,
        group: str,
        options: tuple[int, float, float],
    ) -> Tensor:
        vocab, smoothing, z_loss = options
        largest = logits.amax(-1) if stop > start else logits.new_full(logits.shape[:-1], -torch.inf)
        largest = all_reduce(largest, "max", group)
        shifted = logits - largest.unsqueeze(-1)
        mine = (targets >= start) & (targets < stop)
        inside = torch.where(mine, targets - start, 0).unsqueeze(-1)
        exponents = shifted.exp()
        if stop > start:
            chosen = torch.where(mine, shifted.gather(-1, inside).squeeze(-1), 0.0)
        else:
            chosen = torch.zeros_like(largest)
        if smoothing:  # what the labels weigh, summed: (1 - smoothing) of one id, smoothing / vocab of each
            chosen = chosen * (1 - smoothing) + shifted.sum(-1) * (smoothing / vocab)
        total, chosen = all_reduce(torch.stack([exponents.sum(-1), chosen]), "sum", group).unbind(0)
        losses, log_z = total.log() - chosen, total.log() + largest
        ctx.save_for_backward(exponents, total, mine, inside, *([log_z] if z_loss else []))
        ctx.options = options
        return losses + z_loss * log_z.square() if z_loss else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        exponents, total, mine, inside, *log_z = ctx.saved_tensors
        vocab, smoothing, z_loss = ctx.options
        of_log_z = grad * (1 + 2 * z_loss * log_z[0]) if z_loss else grad
        out = exponents * (of_log_z / total).unsqueeze(-1)
        if smoothing:
            out = out - (grad * (smoothing / vocab)).unsqueeze(-1)
        if out.shape[-1]:
            chosen = -grad * (1 - smoothing) if smoothing else -grad
            out = out.scatter_add(-1, inside, torch.where(mine, chosen, 0.0).unsqueeze(-1))
        return out, None, None, None, None, None
