"""Local computations that torch has no short form of: a named product, norms, the loss over a split vocabulary."""

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


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, dims: list[int], eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias; the four have the dims of x but for ``dims``."""
    weight, bias, mean, variance = (_beside(v, x, dims) for v in (weight, bias, mean, variance))
    return ((wide(x) - mean) * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    token_weights: Tensor | None = None,
    *,
    dims: list[int],
    momentum: float,
    eps: float,
    group: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by statistics over ``dims``, and over a group of ranks that hold other parts of them.

    Args:
        x: [batch, ...].
        weight: dims of x but for ``dims``; bias, mean and variance as well.
        bias: likewise.
        mean: running mean.
        variance: running variance.
        token_weights: [batch, seq]; a row of zeros is normalised, but is in no statistics.
        dims: of x, batch included.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance.
        group: process-group name; None where this rank holds all.

    Returns:
        (x normalised, new running mean, new running variance); the last two are not differentiated.

    Collectives:
        With a group one all-reduce each way.
    """
    return _BatchNorm.apply(x, weight, bias, mean, variance, token_weights, dims, momentum, eps, group)  # type: ignore[return-value]


def _beside(v: Tensor, x: Tensor, dims: list[int]) -> Tensor:
    """View a value of each channel so that it broadcasts against x."""
    return v.view([1 if i in dims else size for i, size in enumerate(x.shape)])


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
        toward, gain = wide(grad), weight.to(unit.dtype)
        of_weight = (toward * unit).flatten(0, -2).sum(0)
        toward = toward * gain
        of_x = torch.addcmul(toward, unit, (toward * unit).mean(-1, keepdim=True), value=-1) * scale
        return of_x.to(grad.dtype), of_weight.to(weight.dtype), None


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        token_weights: Tensor | None,
        dims: list[int],
        momentum: float,
        eps: float,
        group: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # 1. this rank's mean and squares about it; 2. added up over the ranks about the running mean, which all share,
        # in fp64: a difference of large squares would lose the variance; 3. normalise; 4. running statistics
        x_wide = wide(x)
        real = x_wide.new_ones(x.shape[0]) if token_weights is None else (token_weights != 0).any(1).to(x_wide.dtype)
        real = real.view(-1, *[1] * (x.dim() - 1))
        count = real.sum() * math.prod(x.shape[d] for d in dims if d)
        centre = (x_wide * real).sum(dims) / count.clamp(min=1)
        squares = ((x_wide - _beside(centre, x, dims)) * real).square().sum(dims)

        shift, n = mean.double(), count.double()
        lag = centre.double() - shift
        sums = torch.cat([n.view(1), (lag * n).flatten(), (squares.double() + lag.square() * n).flatten()])
        if group is not None:
            sums = all_reduce(sums, "sum", group)
        n, first, second = sums.split([1, mean.numel(), mean.numel()])
        first, second = first.view(mean.shape) / n.clamp(min=1), second.view(mean.shape) / n.clamp(min=1)
        spread = (second - first.square()).clamp(min=0)

        scale = torch.rsqrt(spread + eps).to(x_wide.dtype)
        unit = (x_wide - _beside((shift + first).to(x_wide.dtype), x, dims)) * _beside(scale, x, dims)
        out = (unit * _beside(weight, x, dims) + _beside(bias, x, dims)).to(x.dtype)
        ctx.save_for_backward(unit, scale, weight, real, n.clamp(min=1).to(x_wide.dtype))
        ctx.dims, ctx.group = dims, group

        unbiased = spread * n / (n - 1).clamp(min=1)
        new_mean = torch.where(n > 0, (1 - momentum) * shift + momentum * (shift + first), shift).to(mean.dtype)
        old = variance.double()
        new_variance = torch.where(n > 0, (1 - momentum) * old + momentum * unbiased, old).to(variance.dtype)
        ctx.mark_non_differentiable(new_mean, new_variance)
        return out, new_mean, new_variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        unit, scale, weight, real, n = ctx.saved_tensors
        toward = wide(grad)
        of_bias, of_weight = toward.sum(ctx.dims), (toward * unit).sum(ctx.dims)
        sums = torch.stack([of_bias, of_weight])
        if ctx.group is not None:
            sums = all_reduce(sums, "sum", ctx.group)
        of_mean, of_scale = (_beside(s, unit, ctx.dims) for s in (sums / n).unbind(0))
        of_x = (toward - real * (of_mean + unit * of_scale)) * _beside(scale * weight, unit, ctx.dims)
        return of_x.to(grad.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), *[None] * 7


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
