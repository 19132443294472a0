"""Optimizers as (init, update) pairs on lists of local tensors, and learning rates as functions of the step.

Optimizer state is fp32 (or fp64 where parameters are) and lies as the optimizer layout says; an update is elementwise,
so it needs no communication. sgd gives the same bits on every mesh; torch's fused AdamW may differ in the last bit with
where a shard is cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dtengine.torch_private import fused_adamw_, norms

Slots = dict[str, Tensor]


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


class Optimizer(NamedTuple):
    """A pair of functions.

    Attributes:
        init: parameter -> its slots, each of the parameter's shape.
        update: (parameters, gradients, slots of each, decay, Update) -> None, in place; one call takes the parameters
            that share a weight decay.
        weight_decay: decoupled decay of the parameters that it applies to.
    """

    init: Callable[[Tensor], Slots]
    update: Callable[[list[Tensor], list[Tensor], list[Slots], float, Update], None]
    weight_decay: float


def adamw(beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1) -> Optimizer:
    """Adam with decoupled weight decay. Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019."""

    def update(params: list[Tensor], grads: list[Tensor], slots: list[Slots], decay: float, now: Update) -> None:
        fused_adamw_(
            params,
            grads,
            [s["mean"] for s in slots],
            [s["square"] for s in slots],
            now.step,
            lr=now.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            found_inf=now.skip,
        )

    return Optimizer(lambda p: {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}, update, weight_decay)


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent with (heavy-ball) momentum: v = momentum v + g; p = p - lr (v + decay p)."""

    def update(params: list[Tensor], grads: list[Tensor], slots: list[Slots], decay: float, now: Update) -> None:
        go = now.skip == 0
        for param, grad, slot in zip(params, grads, slots, strict=True):
            change = grad
            if momentum:
                slot["momentum"].copy_(torch.where(go, slot["momentum"] * momentum + grad, slot["momentum"]))
                change = slot["momentum"]
            if decay:
                change = change + decay * param
            param.sub_(torch.where(go, change * now.lr.to(param.dtype), 0.0))

    return Optimizer(lambda p: {"momentum": torch.zeros_like(p)} if momentum else {}, update, weight_decay)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "sgd": sgd}


# --- learning rates -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that depends on the step alone.

    Attributes:
        peak: rate after warm-up.
        steps: total number of steps; decay ends there.
        warmup: steps of linear warm-up; step 0 has peak / warmup.
        decay: "cosine", "linear" or "none".
        floor: share of the peak that is left at the end.
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: str = "cosine"
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        """Return the rate that the update of step ``step`` (from 0) uses."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        if self.decay == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * done))
        elif self.decay == "linear":
            share = 1 - done
        else:
            return self.peak
        return self.peak * (self.floor + (1 - self.floor) * share)


def scale_peak(peak: float, global_batch: int, base_batch: int | None, rule: str, bound: float) -> tuple[float, str]:
    """Scale a rate that was found at one batch size to another.

    Args:
        peak: the rate at ``base_batch``.
        global_batch: sequences of one step.
        base_batch: batch size at which ``peak`` was found; None scales nothing.
        rule: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014; for Adam, Malladi et al. 2022) or "none".
        bound: largest factor allowed.

    Returns:
        (rate, what was done, in words; empty where nothing was asked for).
    """
    if base_batch is None or rule == "none":
        return peak, ""
    ratio = global_batch / base_batch
    wanted = ratio if rule == "linear" else math.sqrt(ratio)
    factor = min(wanted, bound)
    limited = f", bounded from {wanted:.3g}" if factor < wanted else ""
    return peak * factor, f"{rule} scaling from batch {base_batch} to {global_batch}: x{factor:.3g}{limited}"


def global_norm_terms(grads: Sequence[Tensor], order: float) -> Tensor:
    """Return this rank's term of a global norm: sum |g|^order, or max |g| where order is inf; a scalar tensor."""
    present = [g for g in grads if g.numel()]
    found = torch.stack(norms(present, order))
    return found.amax() if math.isinf(order) else found.pow(order).sum()
