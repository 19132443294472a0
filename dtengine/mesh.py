"""Meshes: what ``--mesh`` says, and the DeviceMesh it becomes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtengine.layout import MESH_AXES
from dtengine.torch_private import flat_group

_POSITIONAL = {1: ("dp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}
_NOT_YET = {"cp": "context parallelism is", "ep": "expert parallelism is"}


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh: "8" is dp=8, "2x4" is dp=2,tp=4, "2x2x2" is pp=2,dp=2,tp=2; "rep=2,dp=2,tp=2" names its axes.

    Returns:
        {mesh axis: size}, outermost first, in the order of MESH_AXES whatever order was typed.

    Raises:
        ValueError: not a mesh, an unknown or repeated axis, a size below 1, or an axis that is not there yet.
    """
    form = "A mesh is sizes as 8 or 2x4, or named axes as rep=2,dp=2,tp=2"
    text = text.strip()
    if "=" in text:
        pairs = [part.strip().partition("=")[::2] for part in text.split(",")]
    else:
        sizes = text.split("x")
        if len(sizes) not in _POSITIONAL:
            raise ValueError(f"--mesh {text}: {len(sizes)} sizes, but at most 3 go without names. {form}.")
        pairs = list(zip(_POSITIONAL[len(sizes)], sizes, strict=True))
    names = [name.strip() for name, _ in pairs]
    unknown = [n for n in names if n not in MESH_AXES]
    if unknown:
        raise ValueError(f"--mesh {text}: no mesh axis is called {', '.join(unknown)!r}. Use {_names()}.")
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise ValueError(f"--mesh {text}: axis {', '.join(repeated)} is given twice. Name each axis once.")
    mesh = {}
    for name, size in pairs:
        if len(size.strip()) > 9:
            raise ValueError(f"--mesh {text[:40]}...: {size.strip()[:9]}... for {name.strip()} is too large. {form}.")
        if not size.strip().isascii() or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"--mesh {text}: {size.strip() or 'an empty size'!s} for {name.strip()} must be a whole "
                f"number of at least 1. {form}."
            )
        mesh[name.strip()] = int(size)
    for name, what in _NOT_YET.items():
        if mesh.get(name, 1) > 1:
            raise ValueError(f"--mesh {text}: {name}={mesh[name]}, but {what} not there yet. Use {_names()}.")
    return {name: mesh[name] for name in MESH_AXES if name in mesh}


def _names() -> str:
    return ", ".join(name for name in MESH_AXES if name not in _NOT_YET)


def num_ranks(mesh: Mapping[str, int]) -> int:
    """Return the product of the mesh sizes."""
    total = 1
    for size in mesh.values():
        total *= size
    return total


def check_world(text: str, mesh: Mapping[str, int], world_size: int, launcher: str) -> None:
    """Raise ValueError where a launcher started another number of ranks than the mesh has."""
    ranks = num_ranks(mesh)
    if ranks == world_size:
        return
    nearest = [f"{d}x{world_size // d}" for d in range(1, world_size + 1) if world_size % d == 0]
    tp = mesh.get("tp", 1)
    fits = f"dp={world_size // tp},tp={tp}" if world_size % tp == 0 else nearest[len(nearest) // 2]
    raise ValueError(
        f"--mesh {text}: {ranks} ranks, but {launcher} started {world_size}. The product of the mesh sizes must be the "
        f"number of ranks. Use --mesh {fits}, or start {ranks}."
    )


class Pipe(NamedTuple):
    """Where a rank is among the stages of a pipeline.

    Attributes:
        rank: its index on the mesh axis pp.
        size: of that axis.
        group: process-group name of the ranks that have its place in other stages.
        everyone: process-group name of all ranks.
        edges: {(from, to): process-group name} of two stages' ranks, where messages of one pair would wait for each other
            whatever their direction (NCCL: a pair has one stream); else empty, and tags tell them apart.
    """

    rank: int
    size: int
    group: str
    everyone: str
    edges: Mapping[tuple[int, int], str] = MappingProxyType({})


@dataclass(frozen=True)
class Mesh:
    """A DeviceMesh as one rank sees it, with the name of every group that a step may communicate in.

    Under pipelines it is the mesh of the ranks of one stage: tensors are laid out within a stage.

    Attributes:
        device_mesh: named torch DeviceMesh over all ranks.
        sizes: {mesh axis: size} in mesh order.
        coordinate: this rank's index on each mesh axis, in mesh order.
        groups: {mesh axes: process-group name} for each axis and each set of axes with more than one rank.
        pipe: its place in the pipeline; None without one.
    """

    device_mesh: DeviceMesh
    sizes: dict[str, int]
    coordinate: tuple[int, ...]
    groups: dict[tuple[str, ...], str]
    pipe: Pipe | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, outermost first."""
        return tuple(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Product of the mesh sizes."""
        return num_ranks(self.sizes)

    @property
    def world(self) -> int:
        """Number of all ranks, those of other stages included."""
        return self.num_ranks * (self.pipe.size if self.pipe else 1)

    @property
    def everyone(self) -> str | None:
        """Process-group name of all ranks, those of other stages included; None where there is one rank."""
        return self.pipe.everyone if self.pipe else self.groups.get(self.split_axes())

    @property
    def axes_of_groups(self) -> dict[str, tuple[str, ...]]:
        """{process-group name: mesh axes}, pp among them."""
        found = {group: axes for axes, group in self.groups.items()}
        if self.pipe is not None:
            found |= {self.pipe.everyone: ("pp", *self.split_axes()), self.pipe.group: ("pp",)}
        return found

    def split_axes(self) -> tuple[str, ...]:
        """The mesh axes with more than one rank."""
        return tuple(name for name, size in self.sizes.items() if size > 1)

    def data_coordinate(self, data_axes: Sequence[str]) -> int:
        """Return this rank's data-parallel coordinate: which rows of a batch it reads."""
        coordinate = 0
        for axis, at in zip(self.axes, self.coordinate, strict=True):
            coordinate = coordinate * self.sizes[axis] + at if axis in data_axes else coordinate
        return coordinate


def build_mesh(sizes: Mapping[str, int], device: torch.device | str = "cpu", edges: bool | None = None) -> Mesh:
    """Build the DeviceMesh over the default process group.

    Args:
        sizes: of the mesh axes.
        device: of this rank.
        edges: whether stages get a group for each direction of each pair; by default where the backend is not gloo.

    A sum over several axes is one collective over their flattened group; all groups are made here, in one order on
    all ranks, which keeps group creation out of the step.
    """
    stage = {name: size for name, size in sizes.items() if name != "pp"} or {"dp": 1}
    stages = sizes.get("pp", 1)
    whole = {"pp": stages, **stage} if stages > 1 else stage
    root = init_device_mesh(torch.device(device).type, tuple(whole.values()), mesh_dim_names=tuple(whole))
    device_mesh = root[tuple(stage)] if stages > 1 else root
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None, "the mesh covers every rank"
    split = [name for name, size in stage.items() if size > 1]
    groups: dict[tuple[str, ...], str] = {(name,): root.get_group(name).group_name for name in split}
    for count in range(2, len(split) + 1):
        for names in itertools.combinations(split, count):
            groups[names] = flat_group(root, names).group_name
    pipe = None
    if stages > 1:
        own = root.get_group("pp").group_name
        everyone = flat_group(root, ("pp", *split)).group_name if split else own
        wanted = dist.get_backend() != "gloo" if edges is None else edges
        pipe = Pipe(root.get_local_rank("pp"), stages, own, everyone, _edges(stages) if wanted else {})
    return Mesh(device_mesh, stage, tuple(coordinate), groups, pipe)


def _edges(stages: int) -> dict[tuple[int, int], str]:
    """Make a group for each ordered pair of stages at each place of their meshes; pp is the outermost axis."""
    each, rank, found = dist.get_world_size() // stages, dist.get_rank(), {}
    for pair in itertools.permutations(range(stages), 2):
        for place in range(each):
            members = [stage * each + place for stage in pair]
            group = dist.new_group(members)
            if rank in members:
                assert isinstance(group, ProcessGroup)
                found[pair] = group.group_name
    return found
