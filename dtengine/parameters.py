"""Parameters on a plan: where each lies in each layout, and how it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtengine import random
from dtengine.layout import Layout, Placements, Plan
from dtengine.mesh import Mesh
from dtengine.model import Buffer, Param
from dtengine.shard import Move, bounds_of, wrap

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def has_master(plan: Plan, precision: str) -> bool:
    """Whether parameters are stored in the compute dtype, and their fp32 master is part of the optimizer state.

    So it is in bf16 and fp16 where dp does not split the parameters (ddp, zero1, zero2). Where it does (fsdp), the fp32
    shards are the master.
    """
    return precision in ("bf16", "fp16") and not any(rule.mesh_axis == "dp" for rule in plan.params.rules)


@dataclass(frozen=True)
class Parameters:
    """A model's parameters on a mesh, as one rank sees them.

    Attributes:
        specs: {name: Param}.
        plan: gives the four layouts.
        mesh: where they lie.
        precision: a key of COMPUTE_DTYPES.
        device: of this rank.
        buffers: {name: Buffer}; they lie in the compute layout.
        borrowed: those that another stage of a pipeline has as well, and counts as its own.
    """

    specs: dict[str, Param]
    plan: Plan
    mesh: Mesh
    precision: str
    device: torch.device
    buffers: dict[str, Buffer] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()

    @property
    def dtype(self) -> torch.dtype:
        """dtype of gradients and optimizer state, and of the parameters that an update changes."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype that parameters have where they are used."""
        return COMPUTE_DTYPES[self.precision]

    @property
    def has_master(self) -> bool:
        """Whether an fp32 master lies beside the stored parameters."""
        return has_master(self.plan, self.precision)

    @property
    def stored_dtype(self) -> torch.dtype:
        """dtype of the parameters in the params layout."""
        return self.compute_dtype if self.has_master else self.dtype

    def placements(self, layout: Layout, name: str) -> Placements:
        """Return where a layout puts a parameter."""
        return layout.placements(self.specs[name].names, self.mesh.sizes)

    def moves(self, source: Layout, target: Layout, names: Sequence[str] | None = None) -> list[Move]:
        """Return how parameters (all by default) go from one layout to another."""
        return [
            Move(self.placements(source, n), self.placements(target, n), self.specs[n].shape)
            for n in (self.specs if names is None else names)
        ]

    def empty(self, name: str, placements: Placements, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's uninitialised shard, by default in ``dtype`` of this class."""
        bounds = bounds_of(self.specs[name].shape, placements, self.mesh)
        return torch.empty([stop - start for start, stop in bounds], dtype=dtype or self.dtype, device=self.device)

    def wrap(self, name: str, local: Tensor, placements: Placements) -> DTensor:
        """Return the DTensor of this rank's shard."""
        return wrap(local, self.mesh, placements, self.specs[name].shape)

    def initial(self, name: str, seed: int, layout: Layout) -> DTensor:
        """Draw this rank's shard of a parameter in a layout."""
        placements = self.placements(layout, name)
        spec = self.specs[name]
        local = init_param(spec, name, seed, bounds_of(spec.shape, placements, self.mesh), self.device)
        return self.wrap(name, local.to(self.dtype), placements)

    def buffer_placements(self, name: str) -> Placements:
        """Return where a buffer lies."""
        return self.plan.compute.placements(self.buffers[name].names, self.mesh.sizes)

    def initial_buffer(self, name: str) -> Tensor:
        """Return this rank's shard of a buffer's first value."""
        spec = self.buffers[name]
        bounds = bounds_of(spec.shape, self.buffer_placements(name), self.mesh)
        sizes = [stop - start for start, stop in bounds]
        return torch.full(sizes, spec.value, dtype=self.dtype, device=self.device)

    def wrap_buffer(self, name: str, local: Tensor) -> DTensor:
        """Return the DTensor of this rank's shard of a buffer."""
        return wrap(local, self.mesh, self.buffer_placements(name), self.buffers[name].shape)


def init_param(
    param: Param, name: str, seed: int, bounds: Sequence[tuple[int, int]], device: torch.device | str
) -> Tensor:
    """Return the initial values, in float64, of the part of a parameter within ``bounds``.

    A value depends on (seed, name, global index) alone, so any mesh starts from the same bits.
    """
    if param.std == 0:
        return torch.full([stop - start for start, stop in bounds], param.mean, dtype=torch.float64, device=device)
    index = random.global_index(param.shape, bounds, device)
    return random.normal(random.key(seed, name), index) * param.std + param.mean
