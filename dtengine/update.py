"""The end of a step: agree on loss and norm, clip, update the optimizer's shards, store the parameters.

All of it works on local tensors, is traced into the step's program, and runs once for each optimizer step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtengine.optimizer import Leaf, Optimizer, Slots, Update
from dtengine.parameters import Parameters
from dtengine.shard import bounds_of, redistribute, wrap
from dtengine.torch_private import all_reduce, norms, scale


@dataclass(frozen=True)
class Updater:
    """Bind an optimizer to parameters on a plan.

    Attributes:
        parameters: where each lies.
        optimizer: what changes them.
        clip: largest global gradient norm; 0 clips nothing.
        norm_order: order of that norm: 1, 2 or inf.
    """

    parameters: Parameters
    optimizer: Optimizer
    clip: float
    norm_order: float

    def init_slots(self, name: str) -> dict[str, DTensor]:
        """Return a parameter's slots as they start: zero, each rank its shard."""
        placements = self.parameters.placements(self.parameters.plan.optimizer, name)
        found = {}
        for slot_name, slot in self.optimizer.slots(self.parameters.specs[name]).items():
            placed = slot.placements(placements)
            bounds = bounds_of(slot.shape, placed, self.parameters.mesh)
            shape = [stop - start for start, stop in bounds]
            local = torch.zeros(shape, dtype=self.parameters.dtype, device=self.parameters.device)
            found[slot_name] = wrap(local, self.parameters.mesh, placed, slot.shape)
        return found

    def slot_names(self, name: str) -> list[str]:
        """Return the names of a parameter's slots, in order."""
        return list(self.optimizer.slots(self.parameters.specs[name]))

    def __call__(
        self, params: list[Tensor], slots: list[Slots], grads: list[Tensor], loss: Tensor, lr: Tensor, number: Tensor
    ) -> list[Tensor]:
        """Update parameters and slots in place, unless loss or norm is not finite on some rank.

        Args:
            params: shards in the params layout.
            slots: of each parameter, shards as ``init_slots`` lays them out.
            grads: shards in the optimizer layout, reduced.
            loss: this rank's term of the mean loss of the global batch.
            lr: learning rate, float64.
            number: of this update, from 1, float32.

        Returns:
            [loss, norm before clipping, whether all was finite (1.0 or 0.0), for each data-parallel coordinate whether
            its own loss was not]: equal on all ranks.
        """
        # 1. agree on loss and norm; 2. clip; 3. optimizer, on shards; 4. store
        parameters, plan, mesh = self.parameters, self.parameters.plan, self.parameters.mesh
        loss, norm, bad = self._agree(loss, grads)
        finite = torch.isfinite(loss) & torch.isfinite(norm)

        if self.clip:
            factor = torch.where(finite, self.clip / norm.clamp(min=self.clip), 0.0)
            grads = scale(grads, factor)

        skip = 1.0 - finite.to(torch.float32)
        shards = redistribute(params, parameters.moves(plan.params, plan.optimizer), mesh)
        leaves = [
            Leaf(spec, parameters.placements(plan.optimizer, name), shard, grad, own)
            for (name, spec), shard, grad, own in zip(parameters.specs.items(), shards, grads, slots, strict=True)
        ]
        self.optimizer.update(leaves, mesh, Update(lr, number, skip))

        stored = redistribute(shards, parameters.moves(plan.optimizer, plan.params), mesh)
        for param, shard, new in zip(params, shards, stored, strict=True):
            if param is not shard:
                param.copy_(new)
        return [loss, norm, finite.to(torch.float32), bad]

    def _agree(self, loss: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, norm and which coordinates had a non-finite loss, summed once over the mesh.

        Collectives:
            One all-reduce over the whole mesh (two where the norm is the largest element).
        """
        mesh, plan, order = self.parameters.mesh, self.parameters.plan, self.norm_order
        at = dict(zip(mesh.axes, mesh.coordinate, strict=True))
        # A gradient that several ranks hold alike counts on the first of them only.
        owned = [
            g
            for name, g in zip(self.parameters.specs, grads, strict=True)
            if g.numel()
            and not any(
                isinstance(p, Replicate) and at[m]
                for m, p in zip(mesh.axes, self.parameters.placements(plan.optimizer, name), strict=True)
            )
        ]
        term = global_norm_terms(owned, order) if owned else torch.zeros((), dtype=loss.dtype, device=loss.device)
        first = all(at[m] == 0 for m in mesh.axes if m not in plan.data_axes)
        bad = torch.zeros(plan.coordinates, dtype=loss.dtype, device=loss.device)
        bad[mesh.data_coordinate(plan.data_axes)] = torch.where(torch.isfinite(loss), 0.0, 1.0) * first
        mine = loss if first else torch.zeros_like(loss)
        # A max over ranks may lose a NaN (gloo's does), a sum does not: 0 where the term is finite, else NaN.
        head = torch.stack([mine, (term * 0 if math.isinf(order) else term).to(loss.dtype)])
        vector = torch.cat([head, bad])
        everyone = mesh.groups.get(mesh.split_axes())
        if everyone is not None:
            vector = all_reduce(vector, "sum", everyone)
            if math.isinf(order):
                term = all_reduce(term.clone(), "max", everyone)
        norm = term + vector[1] if math.isinf(order) else vector[1] if order == 1 else vector[1].pow(1 / order)
        return vector[0], norm, vector[2:]


def global_norm_terms(grads: Sequence[Tensor], order: float) -> Tensor:
    """Return this rank's term of a global norm: sum |g|^order, or max |g| where order is inf; a scalar tensor."""
    present = [g for g in grads if g.numel()]
    found = torch.stack(norms(present, order))
    return found.amax() if math.isinf(order) else found.pow(order).sum()
