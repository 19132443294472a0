"""The end of a step: agree on loss and norm, clip, update the optimizer's shards, store the parameters.

All of it works on local tensors, is traced into the step's program, and runs once for each optimizer step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from dtengine.optim import Optimizer, Slots, Update, global_norm_terms
from dtengine.parameters import Parameters
from dtengine.shard import redistribute
from dtengine.torch_private import all_reduce, scale_


@dataclass(frozen=True)
class Updater:
    """Bind an optimizer to parameters on a plan.

    Attributes:
        parameters: where each lies.
        optimizer: what changes them.
        clip: largest global gradient norm; 0 clips nothing.
        norm_order: order of that norm: 1, 2 or inf.
        bucket_bytes: size that parameters have which are stored, or fetched from the host, together.
        offload: what lies in host memory: none, optimizer (slots) or parameters (also the shards).
    """

    parameters: Parameters
    optimizer: Optimizer
    clip: float
    norm_order: float
    bucket_bytes: float = 25 * 2**20
    offload: str = "none"

    @property
    def slot_names(self) -> list[str]:
        """Names of the optimizer's slots, in order."""
        return list(self.optimizer.init(torch.zeros(0)))

    def __call__(
        self, params: list[Tensor], slots: list[Slots], grads: list[Tensor], loss: Tensor, lr: Tensor, number: Tensor
    ) -> list[Tensor]:
        """Update parameters and slots in place, unless loss or norm is not finite on some rank.

        Args:
            params: shards in the params layout.
            slots: shards in the optimizer layout.
            grads: shards in the optimizer layout, reduced.
            loss: this rank's term of the mean loss of the global batch.
            lr: learning rate, float64.
            number: of this update, from 1, float32.

        Returns:
            [loss, norm before clipping, whether all was finite (1.0 or 0.0), for each data-parallel coordinate whether
            its own loss was not]: equal on all ranks.
        """
        # 1. agree on loss and norm; 2. clip; 3. optimizer on shards; 4. store
        parameters, plan, mesh = self.parameters, self.parameters.plan, self.parameters.mesh
        loss, norm, bad = self._agree(loss, grads)
        finite = torch.isfinite(loss) & torch.isfinite(norm)

        if self.clip:
            factor = torch.where(finite, self.clip / norm.clamp(min=self.clip), 0.0)
            scale_(
                grads, factor
            )  # each has memory of its own; accumulation buffers are zeroed before they are used again

        skip = 1.0 - finite.to(torch.float32)
        shards = redistribute(params, parameters.moves(plan.params, plan.optimizer), mesh)
        now = Update(lr, number, skip)
        for bucket in [list(range(len(shards)))] if self.offload == "none" else self._buckets():
            own_shards, own_slots = [shards[i] for i in bucket], [slots[i] for i in bucket]
            if self.offload != "none":
                own_slots = [{name: fetch(x, parameters.device) for name, x in own.items()} for own in own_slots]
            if self.offload == "parameters":
                own_shards = [fetch(x, parameters.device) for x in own_shards]
            self._update(bucket, own_shards, [grads[i] for i in bucket], own_slots, now)
            for i, shard, own in zip(bucket, own_shards, own_slots, strict=True):
                if shard is not shards[i]:
                    shards[i].copy_(shard, non_blocking=True)
                for name, value in own.items():
                    if value is not slots[i][name]:
                        slots[i][name].copy_(value, non_blocking=True)

        moves = parameters.moves(plan.optimizer, plan.params)
        for bucket in self._buckets():
            stored = redistribute([shards[i] for i in bucket], [moves[i] for i in bucket], mesh)
            for i, new in zip(bucket, stored, strict=True):
                if params[i] is not shards[i]:
                    params[i].copy_(new)
        return [loss, norm, finite.to(torch.float32), bad]

    def _update(
        self, bucket: list[int], shards: list[Tensor], grads: list[Tensor], slots: list[Slots], now: Update
    ) -> None:
        """Update the shards of a bucket of parameters and their slots in place."""
        specs = list(self.parameters.specs.values())
        for decayed in (True, False):
            chosen = [k for k, i in enumerate(bucket) if specs[i].decayed == decayed and shards[k].numel()]
            if chosen:
                self.optimizer.update(
                    [shards[k] for k in chosen],
                    [grads[k] for k in chosen],
                    [slots[k] for k in chosen],
                    self.optimizer.weight_decay if decayed else 0.0,
                    now,
                )

    def _buckets(self) -> list[list[int]]:
        """Group parameters by whole size, which all ranks know."""
        buckets: list[list[int]] = [[]]
        filled = 0.0
        for i, spec in enumerate(self.parameters.specs.values()):
            buckets[-1].append(i)
            filled += math.prod(spec.shape) * self.parameters.dtype.itemsize
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0.0
        return [bucket for bucket in buckets if bucket]

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


def fetch(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device; a copy of its own also where the device is the host."""
    return tensor.to(device, non_blocking=True, copy=True)
