"""What a node of a traced graph is: a collective, a change in place, a view; whose memory its value lies in."""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor, fx

from dtengine.torch_private import COLLECTIVES, WAIT, schema_of, storage_of

FORWARD, BACKWARD = "forward", "backward"  # meta["phase"] of a part's nodes


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return getattr(node.target, "namespace", "") == COLLECTIVES and node.target is not WAIT


def is_mutable(node: fx.Node) -> bool:
    """Whether a node changes one of its arguments in place."""
    schema = schema_of(node)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def alias_of(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory a node's value shares, or None where it has memory of its own."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return None
    mine = storage_of(value)
    for argument in node.all_input_nodes:
        theirs = argument.meta.get("val")
        if isinstance(theirs, Tensor) and storage_of(theirs) == mine:
            return argument
        if node.target is operator.getitem and alias_of_tuple(argument) is not None:  # a piece of a split
            return alias_of_tuple(argument)
    return None


def alias_of_tuple(node: fx.Node) -> fx.Node | None:
    """Return the argument that all results of a node are views of (split, unbind), or None."""
    values = node.meta.get("val")
    if not isinstance(values, list | tuple) or not values or not isinstance(values[0], Tensor):
        return None
    for argument in node.all_input_nodes:
        theirs = argument.meta.get("val")
        if isinstance(theirs, Tensor) and storage_of(theirs) == storage_of(values[0]):
            return argument
    return None


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of a node's value."""
    if "root" in node.meta:  # of a program's node, noted when it was put there
        return node.meta["root"]
    while (base := alias_of(node)) is not None:
        node = base
    return node


def form_of(node: fx.Node) -> tuple:
    """Return shape, strides, offset and dtype of a node's value."""
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def phase_of(node: fx.Node) -> str:
    """Return whether a node of a part is of its forward or its backward."""
    return node.meta.get("phase", FORWARD)


def ancestors(
    ends: Iterable[fx.Node], known: Collection[fx.Node], also: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Return nodes and all that must have run before them, as far as it is not known; inputs aside.

    Args:
        ends: where to begin.
        known: nodes that are there.
        also: gives what a node needs beside its operands: changes in place of what it reads.
    """
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in known and node not in found:
            found.add(node)
            todo += [*node.all_input_nodes, *also(node)]
    return found


def with_siblings(nodes: set[fx.Node]) -> set[fx.Node]:
    """Add the other results of operations that have several: what is kept for later are tensors."""
    return nodes | {user for node in nodes for user in node.users if user.target is operator.getitem}


def order_of_changes(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the earlier ones that it must stay behind though it does not read them: around changes in
    place, whoever touches the same memory keeps its order.
    """
    touching: dict[fx.Node, list[fx.Node]] = {}
    changed: set[fx.Node] = set()
    for node in nodes:
        roots = {root_of(a) for a in node.all_input_nodes} | {root_of(node)}
        for root in roots:
            touching.setdefault(root, []).append(node)
        if is_mutable(node):
            changed.update(root_of(a) for a in node.all_input_nodes)
    behind: dict[fx.Node, list[fx.Node]] = {}
    for root in changed:
        for i, node in enumerate(touching.get(root, ())):
            earlier = touching[root][:i]
            behind.setdefault(node, []).extend(earlier if is_mutable(node) else filter(is_mutable, earlier))
    return behind
