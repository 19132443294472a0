"""Cut the graph of a stage's step into forward, input gradient and weight gradients, by what depends on what.

    F   all that the output needs
    I   all that the gradient of the stage's input needs besides
    W   the rest: gradients of parameters, added to their buffers
    B   I and W in one

The values that go from one piece to a later one are what the stage saves for a microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dtengine.nodes import ancestors, is_mutable, order_of_changes, root_of, with_siblings
from dtengine.torch_private import schema_of


@dataclass(frozen=True)
class Piece:
    """A part of a stage's step as a graph of its own.

    Attributes:
        graph: its placeholders are ``inputs``, its results ``outputs``.
        inputs: names in the joint graph of what it takes: inputs of that graph, and what earlier pieces made.
        outputs: names in the joint graph of what it gives.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def split(graph: fx.Graph, forward: Sequence[fx.Node], input_grad: fx.Node | None) -> dict[str, Piece]:
    """Cut a joint graph of forward and backward.

    Args:
        graph: its outputs are ``forward`` and then ``input_grad``; what else it does is to change inputs in place.
        forward: results of the forward.
        input_grad: gradient of the stage's input; None where nobody wants one.

    Returns:
        {"F", "I", "W", "B": piece}. I holds nothing but its output where all else is in F.
    """
    # 1. ancestors; 2. pieces from the last to the first, each giving what later ones take
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    behind = order_of_changes(nodes)
    effects = [n for n in nodes if is_mutable(n) and root_of(n).op == "placeholder"]
    ends = [] if input_grad is None else [input_grad]

    def needed(some: Sequence[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
        return with_siblings(ancestors(some, known, lambda node: behind.get(node, ())))

    in_f = needed(forward, set())
    in_i = needed(ends, in_f)
    in_w = needed(effects, in_f | in_i)
    weight = _cut([n for n in nodes if n in in_w], [])
    inner = _cut([n for n in nodes if n in in_i], [*ends, *(n for n in weight.takes if n in in_i)])
    both = _cut([n for n in nodes if n in in_i or n in in_w], ends)
    later = [n for cut in (inner, weight, both) for n in cut.takes]
    first = _cut([n for n in nodes if n in in_f], [*forward, *(n for n in later if n in in_f)])
    return {kind: cut.piece() for kind, cut in zip("FIWB", (first, inner, weight, both), strict=True)}


@dataclass(frozen=True)
class _Cut:
    """What becomes a piece: ``again`` are views of what it takes, made once more so that they are not saved."""

    nodes: list[fx.Node]
    again: dict[fx.Node, None]
    takes: dict[fx.Node, None]
    gives: list[fx.Node]

    def piece(self) -> Piece:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.takes:
            env[node] = graph.placeholder(node.name)
            env[node].meta["val"] = node.meta["val"]
        for node in (*self.again, *self.nodes):
            if node in env:
                continue
            if node in self.again and is_mutable(node):  # was changed in place; the memory holds it
                env[node] = env[next(a for a in node.all_input_nodes if root_of(a) is root_of(node))]
                continue
            new = graph.node_copy(node, env.__getitem__)
            root = root_of(node)
            new.meta["root"] = new if root is node else env[root].meta.get("root", env[root]) if root in env else new
            env[node] = new
        graph.output([env[n] for n in self.gives])
        return Piece(graph, tuple(n.name for n in self.takes), tuple(n.name for n in self.gives))


def _cut(nodes: list[fx.Node], gives: Sequence[fx.Node]) -> _Cut:
    """Find what nodes take from outside."""
    inside = set(nodes)
    takes: dict[fx.Node, None] = {}
    again: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in inside or node in takes or node in again:
            return
        if node.op == "get_attr" or root_of(node) is not node or _gives_views(node):
            for argument in node.all_input_nodes:
                need(argument)
            again[node] = None
        else:
            takes[node] = None

    for node in nodes:
        for argument in node.all_input_nodes:
            need(argument)
    wanted = list(dict.fromkeys(gives))
    for node in wanted:  # an input that is handed on
        need(node)
    return _Cut(nodes, again, takes, wanted)


def _gives_views(node: fx.Node) -> bool:
    """Whether a node gives several views of its operand: split, unbind."""
    schema = schema_of(node)
    several = isinstance(node.meta.get("val"), list | tuple)
    return several and schema is not None and schema.returns[0].alias_info is not None
