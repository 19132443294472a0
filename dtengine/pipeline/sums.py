"""The gradients that a rank of a pipeline adds up over microbatches: a flat buffer for each parameter of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dtengine.layout import Placements
from dtengine.microbatch import Microbatch
from dtengine.model import Param
from dtengine.parameters import Parameters
from dtengine.shard import Move, redistribute
from dtengine.torch_private import all_reduce

Term = tuple[Param, Placements, Placements]  # of a gradient: its parameter, where it lies, where it is accumulated


@dataclass(frozen=True)
class Sums:
    """How gradients are accumulated and reduced.

    Attributes:
        own: parameters of this rank's stages.
        microbatch: of the whole model: says in which dtype and layout gradients are accumulated.
        uses: {parameter: number of this rank's parts that use it}.
        shared: parameters that stages of several ranks use.
        held: filled by ``place``: {parameter: placements of its buffer}.
    """

    own: Parameters
    microbatch: Microbatch
    uses: Mapping[str, int]
    shared: tuple[str, ...]
    held: dict[str, Placements] = field(default_factory=dict)

    def place(self, name: str, source: Placements) -> Term:
        """Decide where a gradient that came so is accumulated; what several parts give is summed over ranks each time."""
        if name not in self.held:
            whole = self.own.placements(self.own.plan.compute, name)
            self.held[name] = self.microbatch.held(name, source if self.uses[name] == 1 else whole)
        return self.own.specs[name], source, self.held[name]

    def place_rest(self) -> None:
        """Decide for parameters that nothing used."""
        for name in self.own.specs:
            self.held.setdefault(name, self.own.placements(self.own.plan.compute, name))

    def size(self, name: str) -> int:
        """Return the number of elements of a buffer on this rank."""
        return self.own.empty(name, self.held[name]).numel()

    def add(self, terms: Sequence[Term], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add gradients to their buffers: ``tensors`` are the gradients, then the buffers. Returns nothing."""
        grads, flats = tensors[: len(terms)], tensors[len(terms) :]
        moves = [Move(placed, held, param.shape) for param, placed, held in terms]
        found = redistribute([g.to(self.microbatch.reduce_dtype) for g in grads], moves, self.own.mesh)
        for flat, one in zip(flats, found, strict=True):
            flat.add_(one.reshape(-1))
        return []

    def reduced(self, *flats: Tensor) -> list[Tensor]:
        """Bring accumulated gradients to the optimizer's layout, and sum those that several stages have."""
        own, mesh, dtype = self.own, self.own.mesh, self.microbatch.reduce_dtype
        assert mesh.pipe is not None
        names = list(own.specs)
        sums = [flat.view(own.empty(n, self.held[n]).shape).to(dtype) for n, flat in zip(names, flats, strict=True)]
        moves = [Move(self.held[n], own.placements(own.plan.optimizer, n), own.specs[n].shape) for n in names]
        grads = dict(zip(names, redistribute(sums, moves, mesh), strict=True))
        whole = self.microbatch.parameters
        for name in self.shared:  # ranks without it add nothing
            if name in grads:
                grads[name] = all_reduce(grads[name].clone(), "sum", mesh.pipe.group)
            else:
                none = whole.empty(name, whole.placements(own.plan.optimizer, name), dtype)
                all_reduce(none.zero_(), "sum", mesh.pipe.group)
        return [grads[n].to(own.dtype) for n in names]
