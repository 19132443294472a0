"""Programs: a function from local tensors to local tensors, traced once into a flat graph, then run.

The trace happens on fake tensors, so it costs no memory and no communication. What comes out is a torch.fx graph of
aten calls and functional collectives: nothing of DTensor, autograd or Python is left to pay for in a step.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dtengine.mesh import Mesh
from dtengine.torch_private import COLLECTIVES, WAIT, FakeTensorMode, all_gather_flat, make_fx, schema_of

Function = Callable[..., list[Tensor]]

_OPERATIONS = {
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_reduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "reduce_scatter",  # the form that a reduce-scatter takes on gloo
}


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        operation: all_gather, reduce_scatter or all_reduce.
        axes: the mesh axes whose ranks take part.
        bytes: size of the operand that a rank hands in.
        signature: operator and operand shapes, equal on all ranks of a group.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    signature: str


@dataclass(frozen=True)
class Program:
    """A traced function. Call it with local tensors, in the order of the trace's examples.

    Attributes:
        name: what it does, for reports.
        graph: the torch.fx module; ``print(program.graph.code)`` shows it.
        collectives: in the order in which they are issued.
    """

    name: str
    graph: fx.GraphModule
    collectives: tuple[Collective, ...] = field(repr=False)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run on local tensors; inputs that the program updates are updated in place."""
        with torch.inference_mode():
            return list(self.graph(*tensors))


def trace(name: str, function: Function, examples: Sequence[Tensor], mesh: Mesh) -> Program:
    """Trace a function into a program.

    Args:
        name: what it does.
        function: from local tensors to a list of local tensors. Numbers that change from step to step must be among
            its tensors: a Python number becomes part of the program.
        examples: tensors of the shapes and dtypes it will be called with; their values are not read.
        mesh: where its collectives run.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t.detach(), static_shapes=True) for t in examples]
        graph = make_fx(function)(*fakes)
    for one_pass in PASSES:
        one_pass(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return Program(name, graph, tuple(_collectives(graph.graph, mesh)))


# --- passes -----------------------------------------------------------------------------------------------------


def drop_identities(graph: fx.Graph) -> None:
    """Remove nodes that give their input back: detach, alias, and views of the same shape and strides.

    A program has no autograd, and wrapping a shard as a DTensor leaves a view behind each time.
    """
    same = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
    views = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in same or (node.target in views and _form(node) == _form(node.args[0])):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _form(node: fx.Node) -> tuple:
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, collectives aside: all ranks must issue the same ones."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        # A collective that is dead here may be alive on a rank whose shards are not empty.
        if _is_mutable(node) or _is_collective(node) or node.target is WAIT:
            continue
        graph.erase_node(node)


def fold_constants(graph: fx.Graph) -> None:
    """Compute once, when the program is made, what depends on no input: positions, rotary tables.

    What is updated in place or handed out is made anew each time: the next step would find it changed.
    """
    constant: dict[fx.Node, Any] = {}
    module = graph.owning_module
    assert module is not None
    fresh = _feeds_a_change(graph)
    with torch.no_grad():
        for node in list(graph.nodes):
            if node.op != "call_function" or node in fresh or _is_collective(node) or node.target is WAIT:
                continue
            if _is_mutable(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            if all(n in constant for n in node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: constant[n])
                constant[node] = node.target(*args, **kwargs)
    number = 0
    for node, value in constant.items():
        if not isinstance(value, Tensor) or all(user in constant for user in node.users):
            continue
        name = f"constant_{number}"
        number += 1
        module.register_buffer(name, value, persistent=False)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))


def _feeds_a_change(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose value may share memory with one that is changed in place or is an output."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or _is_mutable(node) or (node in found and _is_view(node)):
            found.update(node.all_input_nodes)
    return found


def _is_view(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _is_mutable(node: fx.Node) -> bool:
    schema = schema_of(node)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def prefetch_gathers(graph: fx.Graph) -> None:
    """Issue each gather of parameters before the wait for the one ahead of it, so that it runs while a block computes.

    Only gathers that depend on inputs alone move, in their own order, which is the same on all ranks.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    known, gathers = set(inputs), []
    for node in graph.nodes:
        if _is_mutable(node) and not _is_collective(node):  # what it changes is no longer what was handed in
            for changed in node.all_input_nodes:
                while changed.op == "call_function" and _is_view(changed) and changed.all_input_nodes:
                    changed = changed.all_input_nodes[0]
                known.discard(changed)
        elif node.op == "call_function" and all(n in known for n in node.all_input_nodes):
            known.add(node)
            if _is_collective(node) and _OPERATIONS[_name(node)] == "all_gather":
                gathers.append(node)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for this, following in pairwise(gathers):
        waits = [n for out in this.users for n in (out, *out.users) if n.target is WAIT]
        first = min(waits, key=lambda n: place[n])
        for node in sorted(_ancestors(following), key=lambda n: place[n]):
            if place[node] > place[first]:
                first.prepend(node)
                place[node] = place[first]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Return a node and all it depends on, inputs aside."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one.op != "placeholder" and one not in found:
            found.add(one)
            todo += one.all_input_nodes
    return found


PASSES = (drop_identities, fold_constants, drop_dead, prefetch_gathers)


def _name(node: fx.Node) -> str:
    """The operator's own name: "all_reduce_"."""
    schema = schema_of(node)
    assert schema is not None
    return schema.name.rpartition("::")[2]


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == COLLECTIVES and node.target is not WAIT


# --- collectives ------------------------------------------------------------------------------------------------


def _collectives(graph: fx.Graph, mesh: Mesh) -> list[Collective]:
    axes_of_group = {group: axes for axes, group in mesh.groups.items()}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or not _is_collective(node):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes]
        operator = _name(node)
        group = next(a for a in reversed(node.args) if isinstance(a, str) and a in axes_of_group)
        size = sum(t.numel() * t.element_size() for t in operands)
        shapes = [f"{tuple(t.shape)}{t.dtype}" for t in operands]
        found.append(Collective(_OPERATIONS[operator], axes_of_group[group], size, f"{operator} {' '.join(shapes)}"))
    return found


def count_collectives(programs: Sequence[tuple[Program, int]]) -> dict[str, dict[str, int]]:
    """Return {mesh axes: {operation: count}} of programs that run so many times each; axes are joined by "+"."""
    counts: dict[str, dict[str, int]] = {}
    for program, times in programs:
        for collective in program.collectives:
            operations = counts.setdefault("+".join(collective.axes), {})
            operations[collective.operation] = operations.get(collective.operation, 0) + times
    return counts


def check_collectives(programs: Sequence[Program], mesh: Mesh) -> None:
    """Compare the order of collectives over all ranks before the first one runs: a difference would be a hang.

    Ranks with uneven shards trace different graphs. All ranks must issue the same operations over the same axes in
    the same order, and within a group the same operand shapes.

    Raises:
        RuntimeError: on all ranks alike, naming the ranks that differ from the first of their group.
    """
    if mesh.num_ranks == 1:
        return
    sequence = [c for program in programs for c in program.collectives]
    whole = _digest([f"{c.operation} {c.axes}" for c in sequence])
    by_axes = [_digest([c.signature for c in sequence if c.axes == axes]) for axes in mesh.groups]
    mine = torch.tensor([whole, *by_axes], dtype=torch.int64, device=mesh.device_mesh.device_type)
    everywhere = all_gather_flat(mine, mesh.num_ranks, mesh.groups[mesh.split_axes()]).view(mesh.num_ranks, -1)
    table = everywhere.cpu().view(*(mesh.sizes[a] for a in mesh.split_axes()), -1)
    wrong = []
    if (table[..., 0] != table.flatten(0, -2)[0, 0]).any():
        wrong.append("the order of operations differs between ranks")
    for column, axes in enumerate(mesh.groups, start=1):
        hashes = table[..., column]
        for axis in axes:
            dim = mesh.split_axes().index(axis)
            if (hashes != hashes.narrow(dim, 0, 1)).any():
                wrong.append(f"operand shapes over {'+'.join(axes)} differ within a group")
                break
    if wrong:
        raise RuntimeError(
            f"collectives: {'; '.join(wrong)}. All ranks of a group must issue the same collectives in the same order; "
            "the step would hang. A model function must not decide by rank or by a local size."
        )


def _digest(lines: Sequence[str]) -> int:
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
