"""Passes: functions that make a traced graph do the same with less.

Each takes a torch.fx graph and changes it in place. ``PASSES`` lists them in the order in which they run; each can be
switched off by its name. Those of level "part" see one part's forward and backward, once for all parts that are alike;
those of level "program" see the whole step. A pass decides from facts that are equal on all ranks where it moves a
collective, and from its own graph alone where it does not.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# (torch.fx types an argument of a node as anything that an argument may be; here they are nodes)

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dtengine.nodes import (
    BACKWARD,
    FORWARD,
    form_of,
    is_collective,
    is_mutable,
    order_of_changes,
    phase_of,
    root_of,
)
from dtengine.torch_private import UNSAFE_VIEW, WAIT, onednn_matmul, schema_of

aten = torch.ops.aten


# --- passes over a part -----------------------------------------------------------------------------------------


def drop_identities(graph: fx.Graph) -> None:
    """Remove nodes that give their input back: detach, alias, and views of the same shape and strides.

    A program has no autograd, and wrapping a shard as a DTensor leaves a view behind each time.
    """
    same = (aten.detach.default, aten.alias.default)
    views = (aten.view.default, aten.expand.default)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in same or (node.target in views and form_of(node) == form_of(node.args[0])):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def merge_views(graph: fx.Graph) -> None:
    """Take a view of a view from the first tensor, and nothing where two transposes cancel each other."""
    for node in list(graph.nodes):
        inner: Any = node.args[0] if node.args else None
        if not isinstance(inner, fx.Node) or node.target is not inner.target or inner.op != "call_function":
            continue
        source: Any = inner.args[0]
        if node.target is aten.t.default:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is aten.view.default and source.meta["val"].is_contiguous():  # it has views of all shapes
            node.args = (source, node.args[1])
            if form_of(node) == form_of(source):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def fold_constants(graph: fx.Graph) -> None:
    """Compute once, when the program is made, what depends on no input: positions, rotary tables.

    What is updated in place or handed out is made anew each time: the next step would find it changed. Large constants
    that one operation makes (zeros) are not worth their memory.
    """
    constant: dict[fx.Node, Any] = {}
    module = graph.owning_module
    assert module is not None
    fresh = _feeds_a_change(graph)
    with torch.no_grad():
        for node in list(graph.nodes):
            if node.op != "call_function" or node in fresh or is_collective(node) or node.target is WAIT:
                continue
            if is_mutable(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
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
            got = graph.get_attr(name)
        got.meta.update(node.meta)
        node.replace_all_uses_with(got)


def _feeds_a_change(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose value may share memory with one that is changed in place or is an output."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or is_mutable(node) or (node in found and _is_view(node)):
            found.update(node.all_input_nodes)
    return found


def _is_view(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def merge_duplicates(graph: fx.Graph) -> None:
    """Compute what is asked for twice once, within a part's forward and within its backward.

    Never across the two: that would keep a value of the forward alive. What is changed in place, or was made in order to
    be changed, is left alone.
    """
    changed = {root_of(a) for n in graph.nodes if is_mutable(n) for a in n.all_input_nodes}
    seen: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_mutable(node) or is_collective(node) or node.target is WAIT:
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or root_of(node) in changed:
            continue
        try:
            key = (node.target, _frozen(node.args), _frozen(node.kwargs), phase_of(node))
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value), value)  # 1, 1.0 and True are three arguments


def drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, collectives aside: all ranks must issue the same ones."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        # A collective that is dead here may be alive on a rank whose shards are not empty.
        if is_mutable(node) or is_collective(node) or node.target is WAIT:
            continue
        graph.erase_node(node)


def overlap_collectives(graph: fx.Graph) -> None:
    """Start each collective of a part as soon as its operand is there, and wait for it as late as its result is read.

    The order of collectives stays. What the next collective does not need is computed behind its start: the gradients of
    weights, above all, while the gradient of the input travels. Work moves by one collective at most, so little more
    memory is held, and results that nobody needs yet are read once two more collectives have started.
    """
    for phase in (FORWARD, BACKWARD):
        _start_early([n for n in graph.nodes if n.op not in ("placeholder", "output") and phase_of(n) == phase])
    graph.lint()


def _start_early(nodes: list[fx.Node]) -> None:
    """Reorder one phase: up to each collective only what it needs; then what was left over, waits as late as they can."""
    place = {n: i for i, n in enumerate(nodes)}
    if not any(is_collective(n) for n in nodes):
        return
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    changes = order_of_changes(nodes)

    def emit(node: fx.Node) -> None:
        """Append a node behind all it needs, in their old order."""
        todo = [node]
        needed: set[fx.Node] = set()
        while todo:
            one = todo.pop()
            if one in place and one not in done and one not in needed:
                needed.add(one)
                todo += [*one.all_input_nodes, *changes.get(one, ())]
        for one in sorted(needed, key=place.__getitem__):
            done.add(one)
            order.append(one)

    left: list[fx.Node] = []
    older: list[fx.Node] = []  # what was left when the collective before was started
    for node in nodes:
        if not is_collective(node):
            left.append(node)
            continue
        emit(node)
        for one in older:
            if one not in done:
                emit(one)
        # What was to come before this collective runs while it travels, except what waits for a collective.
        for one in left:
            if one not in done and one.target is not WAIT and not _reads_wait(one, done, place):
                emit(one)
        older, left = [one for one in left if one not in done], []
    for node in nodes:
        if node not in done and node.target is not WAIT:
            emit(node)
    for node in nodes:
        if node not in done:
            emit(node)
    _reorder(nodes, order)


def _reads_wait(node: fx.Node, done: set[fx.Node], place: dict[fx.Node, int]) -> bool:
    """Whether a node needs a wait that was not put yet."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if one not in place or one in done or one in seen:
            continue
        seen.add(one)
        if one.target is WAIT:
            return True
        todo += one.all_input_nodes
    return False


def _reorder(nodes: list[fx.Node], order: list[fx.Node]) -> None:
    """Put nodes of a graph, all at the places of ``nodes`` together, into another order."""
    if nodes == order:
        return
    following = nodes[-1].next
    while following in set(nodes):
        following = following.next
    for node in order:
        following.prepend(node)


def join_pieces(graph: fx.Graph) -> None:
    """Read pieces of one buffer that stand side by side as one piece, instead of concatenating copies of them."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or len(node.args) > 1:
            continue
        pieces = [p for p in node.args[0] if p.meta["val"].numel()]
        if not pieces or any(p.meta["val"].dim() != 1 or not p.meta["val"].is_contiguous() for p in pieces):
            continue
        base, start = root_of(pieces[0]), pieces[0].meta["val"].storage_offset()
        ends = [p.meta["val"].storage_offset() + p.meta["val"].numel() for p in pieces]
        starts = [p.meta["val"].storage_offset() for p in pieces]
        flat = base.op == "placeholder" and base.meta["val"].dim() == 1 and base.meta["val"].is_contiguous()
        if not flat or any(root_of(p) is not base for p in pieces) or starts[1:] != ends[:-1]:
            continue
        with graph.inserting_before(node):
            joined = graph.call_function(aten.slice.Tensor, (base, 0, start, ends[-1]))
        joined.meta.update(node.meta, val=base.meta["val"][start : ends[-1]])
        node.replace_all_uses_with(joined)
        graph.erase_node(node)


def fast_matmul(graph: fx.Graph) -> None:
    """On CPUs, multiply large fp32 matrices by oneDNN instead of the BLAS that torch was built with.

    Equal up to the order of sums. Measured on an AMD EPYC core: 230 to 250 GFLOP/s against 108 with MKL. By shapes and
    dtype alone; below 2^20 multiplications the longer way to it costs more than it saves.
    """
    for node in list(graph.nodes):
        if node.target is not aten.mm.default or onednn_matmul is None:
            continue
        a, b = (n.meta["val"] for n in node.args)
        if a.device.type != "cpu" or a.dtype != torch.float32 or a.shape[0] * a.shape[1] * b.shape[1] < 1 << 20:
            continue
        with graph.inserting_before(node):
            transposed = graph.call_function(aten.t.default, (node.args[1],))
            transposed.meta.update(node.meta, val=b.t())
            made = graph.call_function(onednn_matmul, (node.args[0], transposed, None, "none", [], ""))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


# --- passes over a program --------------------------------------------------------------------------------------


def fill_buckets(graph: fx.Graph) -> None:
    """Write what is concatenated straight into its place, so that gradients come about in their bucket.

    ``cat([a.view(-1), b.view(-1)])`` of products becomes one empty bucket, products written into its parts, and no copy.
    What cannot be written in place is copied into its part as soon as it is there, which frees it.
    """
    changed = {root_of(a) for n in graph.nodes if is_mutable(n) for a in n.all_input_nodes}
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or len(node.args) > 1:
            continue
        pieces = [p for p in node.args[0] if p.meta["val"].numel()]
        made = [_product(p) for p in pieces]
        if (
            not pieces
            or any(p.meta["val"].dim() != 1 or root_of(p) in changed for p in pieces)
            or len({root_of(p) for p in pieces}) < len(pieces)
            or 2 * sum(m is not None for m in made) < len(made)
            or not _travels(node)
        ):
            continue
        place = {n: i for i, n in enumerate(graph.nodes)}
        value = node.meta["val"]
        with graph.inserting_before(min((m or p for m, p in zip(made, pieces, strict=True)), key=place.__getitem__)):
            options = {"dtype": value.dtype, "device": value.device}
            bucket = graph.call_function(aten.empty.memory_format, ([value.numel()],), options)
        bucket.meta.update(node.meta, root=bucket)
        offset = 0
        for piece, product in zip(pieces, made, strict=True):
            _write(graph, bucket, offset, piece, product)
            offset += piece.meta["val"].numel()
        node.replace_all_uses_with(bucket)
        graph.erase_node(node)


def _travels(node: fx.Node) -> bool:
    """Whether a value, or a view of it, is handed to a collective."""
    return any(is_collective(user) or (user.target is aten.view.default and _travels(user)) for user in node.users)


def _product(piece: fx.Node) -> fx.Node | None:
    """Return the product that a flat piece is a view of and that nobody else reads, or None."""
    node: Any = piece
    while len(node.users) == 1 and node.target in (aten.view.default, UNSAFE_VIEW):
        node = node.args[0]
    contiguous = isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_contiguous()
    return node if node.target is aten.mm.default and len(node.users) == 1 and contiguous else None


def _write(graph: fx.Graph, bucket: fx.Node, offset: int, piece: fx.Node, product: fx.Node | None) -> None:
    """Bring one piece to its place in a bucket: write the product there, or copy the piece as soon as it is made."""
    size = piece.meta["val"].numel()
    flat = bucket.meta["val"][offset : offset + size]
    at = piece.next if product is None else product
    with graph.inserting_before(at):
        part = graph.call_function(aten.slice.Tensor, (bucket, 0, offset, offset + size))
        part.meta.update(bucket.meta, val=flat)
        if product is None:
            graph.call_function(aten.copy_.default, (part, piece)).meta.update(bucket.meta, val=flat)
            return
        shape = list(product.meta["val"].shape)
        view = graph.call_function(aten.view.default, (part, shape))
        view.meta.update(bucket.meta, val=flat.view(shape))
        made = graph.call_function(aten.mm.out, product.args, {"out": view})
        made.meta.update(view.meta)
    product.replace_all_uses_with(made)
    graph.erase_node(product)


BINDINGS: dict[Any, tuple[str, Any]] = {
    aten.mm.default: ("call_function", torch.mm),
    aten.bmm.default: ("call_function", torch.bmm),
    aten.add.Tensor: ("call_function", torch.add),
    aten.sub.Tensor: ("call_function", torch.sub),
    aten.mul.Tensor: ("call_function", torch.mul),
    aten.div.Tensor: ("call_function", torch.div),
    aten.rsqrt.default: ("call_function", torch.rsqrt),
    aten.exp.default: ("call_function", torch.exp),
    aten.t.default: ("call_method", "t"),
    aten.view.default: ("call_method", "view"),
    aten.permute.default: ("call_method", "permute"),
    aten.unsqueeze.default: ("call_method", "unsqueeze"),
    aten.transpose.int: ("call_method", "transpose"),
}


def call_bindings(graph: fx.Graph) -> None:
    """Call torch's own bindings, as ``torch.mm``, where they exist: they parse arguments faster than operator objects.

    Measured on an AMD EPYC core: 1.4 microseconds a call against 2.2.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in BINDINGS and not node.kwargs:
            node.op, node.target = BINDINGS[node.target]


# --- the table --------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """A pass.

    Attributes:
        run: changes a graph in place.
        level: "part" or "program".
        exact: whether outputs stay the same bits; otherwise sums are taken in another order.
    """

    run: Callable[[fx.Graph], None]
    level: str
    exact: bool = True


PASSES: dict[str, Pass] = {
    "drop-identities": Pass(drop_identities, "part"),
    "fold-constants": Pass(fold_constants, "part"),
    "merge-duplicates": Pass(merge_duplicates, "part"),
    "join-pieces": Pass(join_pieces, "part"),
    "fast-matmul": Pass(fast_matmul, "part", exact=False),
    "merge-views": Pass(merge_views, "part"),
    "drop-dead": Pass(drop_dead, "part"),
    "overlap-collectives": Pass(overlap_collectives, "part"),
    "fill-buckets": Pass(fill_buckets, "program"),
    "call-bindings": Pass(call_bindings, "program"),
}


class Effect(NamedTuple):
    """What a pass did to one graph: nodes before and after, and the time it took in seconds."""

    name: str
    graph: str
    before: int
    after: int
    seconds: float


def run_passes(graph: fx.Graph, name: str, level: str, disabled: Sequence[str] = ()) -> list[Effect]:
    """Run the passes of a level over a graph, in the order of the table, but for those that are disabled."""
    effects = []
    for title, one in PASSES.items():
        if one.level == level and title not in disabled:
            before, began = len(graph.nodes), time.perf_counter()
            one.run(graph)
            effects.append(Effect(title, name, before, len(graph.nodes), time.perf_counter() - began))
    return effects
