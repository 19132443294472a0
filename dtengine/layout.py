"""Layouts: logical axis -> mesh axes, and the table of plans.

A tensor names each of its dims by a logical axis. A layout is an ordered list of rules "logical axis -> mesh axis".
For each tensor the first rule fires whose logical axis is present and whose mesh axis is still free; every rule that
does not fire says why (``Layout.decide``). An axis that no layout knows is an error: silence would be replication.

Everything here is pure arithmetic on names and sizes; nothing needs a process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

MESH_AXES = ("pp", "rep", "dp", "cp", "ep", "tp")
LOGICAL_AXES = [
    "batch",
    "seq",
    "res_seq",
    "embed",
    "kv_heads",
    "q_per_kv",
    "head_dim",
    "mlp",
    "vocab",
    "experts",
    "positions",
]  # positions: rows of a learned position table

Axes = tuple[str, ...]
Placements = tuple[Placement, ...]


class Rule(NamedTuple):
    """One entry of a layout: split ``logical`` over ``mesh_axis``."""

    logical: str
    mesh_axis: str


class Decision(NamedTuple):
    """What became of one rule for one tensor; ``reason`` is empty where it fired."""

    rule: Rule
    reason: str


def axes_of(text: str) -> Axes:
    """Split "batch seq embed" into its axis names."""
    return tuple(text.split())


@dataclass(frozen=True)
class Layout:
    """An ordered list of rules, and the logical axes it knows."""

    name: str
    rules: tuple[Rule, ...]
    known: frozenset[str] = frozenset(LOGICAL_AXES)

    def decide(self, axes: Axes, mesh: Mapping[str, int]) -> tuple[dict[str, str], list[Decision]]:
        """Assign mesh axes to the dims of one tensor.

        Args:
            axes: the tensor's logical axes, one for each dim.
            mesh: size of each mesh axis, in mesh order.

        Returns:
            ({mesh axis: logical axis it splits}, one decision for each rule).

        Raises:
            ValueError: an axis that the layout does not know, or one axis twice in a tensor.
        """
        self.check(axes)
        order = list(mesh)
        taken: dict[str, str] = {}
        decisions = []
        for rule in self.rules:
            splits = [m for m, logical in taken.items() if logical == rule.logical]
            if mesh.get(rule.mesh_axis, 1) == 1:
                reason = f"{rule.mesh_axis} has size 1"
            elif rule.logical not in axes:
                reason = f"no {rule.logical} dim"
            elif rule.mesh_axis in taken:
                reason = f"{rule.mesh_axis} taken by {taken[rule.mesh_axis]}"
            elif any(order.index(m) > order.index(rule.mesh_axis) for m in splits):
                # Outer mesh axes must split first, else the pieces of a dim interleave and gathering permutes rows.
                reason = f"{rule.logical} taken by {', '.join(splits)}"
            else:
                reason = ""
                taken[rule.mesh_axis] = rule.logical
            decisions.append(Decision(rule, reason))
        return taken, decisions

    def check(self, axes: Axes) -> None:
        """Raise ValueError for axes that are unknown or repeated."""
        unknown = [a for a in axes if a not in self.known]
        if unknown:
            raise ValueError(
                f"axes '{' '.join(axes)}': {', '.join(unknown)} is in no rule of layout {self.name}; every logical axis "
                f"must be known, else it would be replicated silently. Use one of {', '.join(sorted(self.known))}, or "
                "list it in the model's `whole_axes`."
            )
        if len(set(axes)) != len(axes):
            raise ValueError(f"axes '{' '.join(axes)}': an axis occurs twice; each dim needs an axis of its own.")

    def placements(self, axes: Axes, mesh: Mapping[str, int]) -> Placements:
        """Return the DTensor placements of a tensor with these axes, one for each mesh axis in mesh order."""
        taken, _ = self.decide(axes, mesh)
        return tuple(Shard(axes.index(taken[m])) if m in taken else Replicate() for m in mesh)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of chunk ``index`` when ``size`` is cut into ``parts``, as torch.chunk and DTensor cut.

    Chunks have ceil(size / parts) elements; the last ones may be shorter or empty.
    """
    chunk = -(-size // parts)
    return min(size, chunk * index), min(size, chunk * (index + 1))


def local_bounds(
    shape: Sequence[int], placements: Placements, sizes: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, int]]:
    """Return, for each dim, the [start, stop) of the global tensor that one rank holds.

    The one definition of (global index) <-> (rank, offset): initialisation, distribution, gathering, saving and
    loading all use it. A dim that several mesh axes split is cut by the outer one first.
    """
    bounds = [(0, s) for s in shape]
    for placement, parts, index in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            lo, hi = chunk_bounds(stop - start, parts, index)
            bounds[placement.dim] = (start + lo, start + hi)
    return bounds


# --- the table of plans -----------------------------------------------------------------------------------------

# Where a parameter has no embed dim, dp takes the next of these that is there and that tp left free.
_DP = tuple(Rule(a, "dp") for a in ("embed", "head_dim", "mlp", "vocab", "positions", "kv_heads"))

# Each data-parallel family is a row: does dp split the parameters, the gradient buffers, the optimizer state?
PLANS: dict[str, tuple[bool, bool, bool]] = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}


@dataclass(frozen=True)
class Plan:
    """One mesh and four layouts: all there is to say about how a step is laid out."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    params: Layout
    grads: Layout
    optimizer: Layout
    compute: Layout

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis, in mesh order."""
        return dict(self.mesh)

    @property
    def num_ranks(self) -> int:
        """Product of the mesh sizes."""
        total = 1
        for _, size in self.mesh:
            total *= size
        return total

    @property
    def data_axes(self) -> Axes:
        """The mesh axes that split the batch."""
        return tuple(m for m, _ in self.mesh if m in ("rep", "dp"))

    @property
    def coordinates(self) -> int:
        """Number of data-parallel coordinates: rep x dp."""
        return self.sizes.get("rep", 1) * self.sizes.get("dp", 1)

    def mesh_text(self) -> str:
        """The mesh as a person may type it: "dp=2,tp=4"."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)


def head_axis(kv_heads: int, q_per_kv: int, tp: int) -> str:
    """Return the axis of query heads that tp splits; splitting both would misalign the groups.

    kv_heads where there are at least tp of them; else whichever leaves the busiest rank with fewer query heads. With
    q_per_kv every rank computes all keys and values.
    """
    by_kv, by_q = -(-kv_heads // tp) * q_per_kv, kv_heads * -(-q_per_kv // tp)
    return "kv_heads" if kv_heads >= tp or by_kv <= by_q else "q_per_kv"


def make_plan(
    name: str,
    mesh: Mapping[str, int],
    axis_sizes: Mapping[str, int],
    *,
    sequence_parallel: bool = True,
    whole_axes: Sequence[str] = (),
) -> Plan:
    """Build a plan from a row of the table.

    Args:
        name: a row of PLANS.
        mesh: size of each mesh axis (see ``dtengine.mesh.parse_mesh``).
        axis_sizes: sizes of the model's kv_heads and q_per_kv, for ``head_axis``.
        sequence_parallel: split the residual stream's sequence over tp.
        whole_axes: further logical axes of a person's own model; they are never split.

    Raises:
        ValueError: no such plan.
    """
    if name not in PLANS:
        raise ValueError(f"--plan {name}: no such plan. A plan is one of {', '.join(PLANS)}.")
    tp = mesh.get("tp", 1)
    heads = head_axis(axis_sizes.get("kv_heads", tp), axis_sizes.get("q_per_kv", 1), tp)
    tensor = (Rule(heads, "tp"), Rule("mlp", "tp"), Rule("vocab", "tp"))
    params, grads, optimizer = (tensor + (_DP if split else ()) for split in PLANS[name])
    compute = (Rule("batch", "rep"), Rule("batch", "dp"), *tensor)
    if sequence_parallel:
        compute += (Rule("res_seq", "tp"),)
    known = frozenset(LOGICAL_AXES) | frozenset(whole_axes)
    return Plan(
        name=name,
        mesh=tuple(mesh.items()),
        params=Layout("params", params, known),
        grads=Layout("grads", grads, known),
        optimizer=Layout("optimizer", optimizer, known),
        compute=Layout("compute", compute, known),
    )
