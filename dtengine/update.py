"""The end of a step: agree on loss and norm, clip, update the optimizer's shards, store the parameters.

All of it works on local tensors, is traced into the step's program, and runs once for each optimizer step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtengine import loss_scale
from dtengine.optimizer import Leaf, Optimizer, Slots, Update
from dtengine.parameters import Parameters
from dtengine.shard import bounds_of, redistribute, wrap
from dtengine.torch_private import all_reduce, norms, scale_
from dtengine.torch_private import scale as multiply


@dataclass(frozen=True)
class Updater:
    """Bind an optimizer to parameters on a plan.

    Attributes:
        parameters: where each lies.
        optimizer: what changes them.
        clip: largest global gradient norm; 0 clips nothing.
        norm_order: order of that norm: 1, 2 or inf.
        loss_scale_window: good steps in a row after which fp16's loss scale is doubled.
        buckets: positions of parameters that are stored, or fetched from the host, together; in order.
        offload: what lies in host memory: none, optimizer (slots) or parameters (also the shards).
    """

    parameters: Parameters
    optimizer: Optimizer
    clip: float
    norm_order: float
    loss_scale_window: int = 2000
    buckets: tuple[tuple[int, ...], ...] = ()
    offload: str = "none"

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
        self,
        params: list[Tensor],
        slots: list[Slots],
        grads: list[Tensor],
        loss: Tensor,
        lr: Tensor,
        number: Tensor,
        *,
        master: list[Tensor],
        scale: Tensor | None,
    ) -> list[Tensor]:
        """Update parameters and slots in place, unless loss or norm is not finite on some rank.

        Args:
            params: shards in the params layout.
            slots: of each parameter, shards as ``init_slots`` lays them out.
            grads: shards in the optimizer layout, reduced; in fp16 times the loss scale.
            loss: this rank's term of the mean loss of the global batch.
            lr: learning rate, float64.
            number: of this step, from 1, float32.
            master: fp32 shards in the optimizer layout, of which params are a cast; none where params are fp32.
            scale: in fp16 the loss scale, float32 [3] as LossScale; changed in place.

        Returns:
            [loss, norm before clipping, whether all was finite (1.0 or 0.0), for each data-parallel coordinate whether
            its own loss was not, in fp16 the scale that was used]: equal on all ranks.
        """
        # 1. unscale; 2. agree on loss and norm; 3. clip; 4. optimizer, on shards; 5. store; 6. the next loss scale
        parameters, plan, mesh = self.parameters, self.parameters.plan, self.parameters.mesh
        if scale is not None:
            scale_(grads, 1.0 / scale[0])  # a power of two: no rounding
            number = number - scale[2]  # a skipped step does not count for AdamW's bias correction
        loss, norm, bad = self._agree(loss, grads)
        finite = torch.isfinite(loss) & torch.isfinite(norm)

        if self.clip:
            factor = torch.where(finite, self.clip / norm.clamp(min=self.clip), 0.0)
            # In place: each has memory of its own, or is of an accumulation buffer, which is zeroed before its next use.
            scale_(grads, factor)

        skip = 1.0 - finite.to(torch.float32)
        shards = master or redistribute(params, parameters.moves(plan.params, plan.optimizer), mesh)
        self._optimize(shards, grads, slots, Update(lr, number, skip), fetch_shards=self._shards_on_host(bool(master)))

        moves = parameters.moves(plan.optimizer, plan.params)
        for bucket in self.buckets:
            # Cast before the gather: half the bytes.
            device = parameters.device if master else shards[bucket[0]].device
            cast = [shards[i].to(device, parameters.stored_dtype) for i in bucket]
            stored = redistribute(cast, [moves[i] for i in bucket], mesh)
            for i, new in zip(bucket, stored, strict=True):
                if params[i] is not shards[i]:
                    params[i].copy_(new)
        found = [loss, norm, finite.to(torch.float32), bad]
        if scale is None:
            return found
        used = scale[0].clone()
        scale.copy_(loss_scale.advance(scale, finite, self.loss_scale_window))
        return [*found, used]

    def _shards_on_host(self, has_master: bool) -> bool:
        """Whether the shards that the optimizer changes lie in host memory."""
        return self.offload == "parameters" or (self.offload == "optimizer" and has_master)

    def _optimize(
        self, shards: list[Tensor], grads: list[Tensor], slots: list[Slots], now: Update, *, fetch_shards: bool
    ) -> None:
        """Update shards and slots in place; what lies on the host is fetched and brought back bucket by bucket."""
        parameters, plan = self.parameters, self.parameters.plan
        named = list(parameters.specs.items())
        for bucket in [range(len(shards))] if self.offload == "none" else self.buckets:
            if not bucket:  # a stage without layers has no parameters
                continue
            own_shards, own_slots = [shards[i] for i in bucket], [slots[i] for i in bucket]
            if self.offload != "none":
                own_slots = [{name: fetch(x, parameters.device) for name, x in own.items()} for own in own_slots]
            if fetch_shards:
                own_shards = [fetch(x, parameters.device) for x in own_shards]
            leaves = [
                Leaf(named[i][1], parameters.placements(plan.optimizer, named[i][0]), shard, grads[i], own)
                for i, shard, own in zip(bucket, own_shards, own_slots, strict=True)
            ]
            self.optimizer.update(leaves, parameters.mesh, now)
            for i, shard, own in zip(bucket, own_shards, own_slots, strict=True):
                if shard is not shards[i]:
                    shards[i].copy_(shard, non_blocking=True)
                for name, value in own.items():
                    if value is not slots[i][name]:
                        slots[i][name].copy_(value, non_blocking=True)

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
            and name not in self.parameters.borrowed
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
        everyone = mesh.everyone
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


def unscale(grads: list[Tensor], scale: Tensor) -> list[Tensor]:
    """Divide reduced fp32 gradients by the loss scale, a power of two: no rounding."""
    return multiply(grads, 1.0 / scale[0])


def fetch(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device; a copy of its own also where the device is the host."""
    return tensor.to(device, non_blocking=True, copy=True)
