"""Optimizers that look at one element at a time: they need no communication, and a shard is updated like the whole.

sgd and lion give the same bits on every mesh; torch's fused AdamW may differ in the last bit with where a shard is cut.
"""

from collections.abc import Sequence

from dtengine.mesh import Mesh
from dtengine.optimizer import Leaf, Optimizer, Update, commit, held, like_parameter, rate, with_decay
from dtengine.torch_private import add, fused_adamw_, scale, signs, subtract


def adamw(beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1) -> Optimizer:
    """Adam with decoupled weight decay, in one pass over memory.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def update(leaves: Sequence[Leaf], mesh: Mesh, now: Update) -> None:
        for decayed in (True, False):  # the kernel takes one decay
            same = [p for p in held(leaves) if p.spec.decayed == decayed]
            if not same:
                continue
            fused_adamw_(
                [p.param for p in same],
                [p.grad for p in same],
                [p.slots["mean"] for p in same],
                [p.slots["square"] for p in same],
                now.step,
                lr=now.lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay if decayed else 0.0,
                eps=eps,
                found_inf=now.skip,
            )

    return Optimizer(like_parameter("mean", "square"), update, weight_decay)


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent with (heavy-ball) momentum: v = momentum v + g; p = p - lr (v + decay p)."""

    def update(leaves: Sequence[Leaf], mesh: Mesh, now: Update) -> None:
        leaves = held(leaves)
        if not leaves:
            return
        params, changes = [p.param for p in leaves], [p.grad for p in leaves]
        if momentum:
            velocities = [p.slots["momentum"] for p in leaves]
            changes = add(scale(velocities, momentum), changes)
            commit(velocities, changes, now)
        changes = with_decay(changes, leaves, weight_decay)
        commit(params, subtract(params, scale(changes, rate(now, params[0]))), now)

    return Optimizer(like_parameter("momentum") if momentum else like_parameter(), update, weight_decay)


def lion(beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.1) -> Optimizer:
    """Take the sign of a mean of gradients: p = p - lr (sign(beta1 m + (1 - beta1) g) + decay p).

    Every element moves by the whole rate, so the rate wants to be 3 to 10 times below AdamW's, and the decay as much
    above. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """

    def update(leaves: Sequence[Leaf], mesh: Mesh, now: Update) -> None:
        leaves = held(leaves)
        if not leaves:
            return
        params, grads = [p.param for p in leaves], [p.grad for p in leaves]
        means = [p.slots["mean"] for p in leaves]
        changes = signs(add(scale(means, beta1), scale(grads, 1 - beta1)))
        changes = with_decay(changes, leaves, weight_decay)
        commit(params, subtract(params, scale(changes, rate(now, params[0]))), now)
        commit(means, add(scale(means, beta2), scale(grads, 1 - beta2)), now)

    return Optimizer(like_parameter("mean"), update, weight_decay)
