"""Muon: momentum whose matrices are made orthogonal; AdamW for all that is no hidden matrix."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from dtengine.elementwise import adamw
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.optimizer import Leaf, Matrix, Optimizer, Slot, Update, commit, held, matrix, rate, with_decay
from dtengine.shard import Move, redistribute
from dtengine.torch_private import add, scale, subtract

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: steepest at 0, so that small singular values grow fast
TABLES = ("vocab", "positions")  # axes of embeddings and of what they are tied to
AT_ONCE = 1 << 24  # elements that one batch of products works on: 64 MB in fp32


def muon(momentum: float = 0.95, steps: int = 5, weight_decay: float = 0.1) -> Optimizer:
    """Take momentum (Nesterov's), and of each hidden matrix only the directions of it: U V^T for U S V^T.

    A hidden matrix is embed by all other dims (``optimizer.matrix``), without embeddings and output matrices; these,
    norms and biases take AdamW at the same rate. For that to suit both, an update of an m x n matrix is scaled by
    0.2 sqrt(max(m, n)), which gives it AdamW's usual root mean square (Liu et al., "Muon is Scalable for LLM Training",
    2025); the first form's sqrt(rows / columns) would need to know which side of a matrix is its input.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; as torch.optim.Muon with
    match_rms_adamw, but in the parameters' dtype where that computes in bf16.

    Matrices of one shape are stacked, and the stack is divided over all ranks of the mesh: each rank gets whole matrices,
    every matrix is made orthogonal on one rank, and the shards go back. All of them on all ranks would be the simpler
    way, and cost 20 m n min(m, n) operations a matrix on every rank: more than forward and backward do where a rank has
    fewer than 3 min(m, n) tokens. With fewer matrices of a shape than ranks, the last ranks have none of it.

    Collectives:
        Whatever the number of matrices, over each mesh axis that splits them one all-to-all before and one after; over
        one that replicates them one all-gather after; over one that splits some, both.
    """
    others = adamw(weight_decay=weight_decay)

    def slots(param: Param) -> dict[str, Slot]:
        return others.slots(param) if hidden(param) is None else {"momentum": Slot(param.shape)}

    def update(leaves: Sequence[Leaf], mesh: Mesh, now: Update) -> None:
        # 1. AdamW; 2. momentum, on shards; 3. whole matrices, each on one rank, and back; 4. store
        others.update([p for p in leaves if hidden(p.spec) is None], mesh, now)
        leaves = [p for p in leaves if hidden(p.spec) is not None]
        if not leaves:
            return
        old, grads = [p.slots["momentum"] for p in leaves], [p.grad for p in leaves]
        fresh = scale(grads, 1 - momentum)
        new = add(scale(old, momentum), fresh)
        changes = _divided(leaves, add(scale(new, momentum), fresh), mesh, steps)
        commit(old, new, now)
        mine = held(leaves)
        if mine:
            params = [p.param for p in mine]
            changes = with_decay([c for c in changes if c.numel()], mine, weight_decay)
            commit(params, subtract(params, scale(changes, rate(now, params[0]))), now)

    return Optimizer(slots, update, weight_decay)


def hidden(param: Param) -> Matrix | None:
    """Read a parameter as a hidden matrix; None where it is none."""
    return None if set(TABLES) & set(param.names) else matrix(param)


def _divided(leaves: Sequence[Leaf], tensors: list[Tensor], mesh: Mesh, steps: int) -> list[Tensor]:
    """Make matrices orthogonal that lie in shards: bring each whole to one rank, and the result back."""
    kinds: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        kinds.setdefault((leaf.spec.axes, leaf.spec.shape), []).append(i)
    stacks, moves, forms = [], [], []
    for chosen in kinds.values():
        spec, placements = leaves[chosen[0]].spec, leaves[chosen[0]].placements
        form = hidden(spec)
        assert form is not None
        forms.append(form)
        stacks.append(torch.stack([tensors[i] for i in chosen]))
        source = tuple(Shard(p.dim + 1) if isinstance(p, Shard) else Replicate() for p in placements)
        moves.append(Move(source, tuple(Shard(0) for _ in mesh.axes), (len(chosen), *spec.shape)))
    whole = redistribute(stacks, moves, mesh)
    done = [_orthogonal_stack(x, form, steps) for x, form in zip(whole, forms, strict=True)]
    back = redistribute(done, [Move(m.target, m.source, m.shape) for m in moves], mesh)
    found = list(tensors)
    for chosen, stack in zip(kinds.values(), back, strict=True):
        for i, tensor in zip(chosen, stack.unbind(0), strict=True):
            found[i] = tensor
    return found


def _orthogonal_stack(stack: Tensor, form: Matrix, steps: int) -> Tensor:
    """Make each parameter of a stack orthogonal, scaled for AdamW's rate: [count, *shape] -> the same."""
    if not stack.numel():
        return stack
    order = [0, *(d + 1 for d in (*form.batch, form.row, *form.columns))]
    ordered = stack.permute(order)
    matrices = ordered.reshape(-1, stack.shape[form.row + 1], math.prod(stack.shape[d + 1] for d in form.columns))
    few = max(1, AT_ONCE // matrices[0].numel())
    done = torch.cat([orthogonal(some, steps) for some in matrices.split(few)])
    done = done * (0.2 * math.sqrt(max(matrices.shape[1:])))
    return done.view(ordered.shape).permute([order.index(d) for d in range(len(order))]).contiguous()


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """Bring the singular values of matrices near 1 (0.7 to 1.2), keeping their directions, by Newton-Schulz iteration.

    Args:
        matrices: [count, rows, columns].
        steps: of the iteration x -> a x + (b x x^T + c (x x^T)^2) x.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7).view(-1, 1, 1)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
