"""How much memory a step needs on this rank: read off its programs' graphs before, and measured while it runs.

A value lives from the node that allocates it to the last use of anything that shares its memory, as torch.fx's generated
code drops each value after its last use. Sizes are the bytes that are asked for: exact for the CPU, whose allocator rounds
up to 64 only where it starts a block. CUDA's rounds each block up to 512, which ``alignment`` models, and may leave up to
1 MB at the end of a large one unused, which nothing models.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from dtengine.nodes import alias_of_tuple, is_collective, root_of
from dtengine.torch_private import WAIT, profiled_allocations, storage_of

HELD = {  # by name of an input
    "params": "parameters",
    "buffers": "parameters",
    "master": "optimizer",
    "slots": "optimizer",
    "buffer": "buffers",
    "batch": "batch",
}
MADE: tuple[str, ...] = ("activations", "gathered", "gradients", "temporaries")
CUDA_ALIGNMENT = 512
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a rank holds, at the moment when it holds most.

    Attributes:
        parameters: shards as they are stored.
        optimizer: slots.
        buffers: flat gradient buffers that live from step to step.
        batch: all microbatches of a step, and scalars.
        constants: tensors that the program holds.
        activations: values of the forward (as it ran, or ran again) that a backward still reads.
        gathered: parameters as they are used, and what gathering them takes.
        gradients: of parameters, from the backward to the optimizer, and what reducing them takes.
        temporaries: all else.
        host: bytes of parameters and slots that lie in host memory; not in ``total``.
        where: the moment: part of the step and operation.
    """

    parameters: int = 0
    optimizer: int = 0
    buffers: int = 0
    batch: int = 0
    constants: int = 0
    activations: int = 0
    gathered: int = 0
    gradients: int = 0
    temporaries: int = 0
    host: int = 0
    where: str = ""

    @property
    def resident(self) -> int:
        """What is there also between steps."""
        return self.parameters + self.optimizer + self.buffers + self.batch + self.constants

    @property
    def total(self) -> int:
        """All of it, on the device."""
        return self.resident + self.activations + self.gathered + self.gradients + self.temporaries

    @property
    def numbers(self) -> dict[str, int]:
        """{kind: bytes}, ``host`` and ``total`` included."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "where"} | {"total": self.total}


def estimate(
    graphs: Sequence[fx.Graph],
    *,
    alignment: int = 1,
    microbatches: int = 1,
    on_host: Collection[str] = (),
    other: "Moment | None" = None,
    others: Sequence[fx.Graph] = (),
) -> MemoryEstimate:
    """Estimate the memory of a step.

    Args:
        graphs: the programs that run in it; the last one takes all that is held from step to step as inputs.
        alignment: bytes that an allocation is rounded up to.
        microbatches: batches that the caller holds at once.
        on_host: kinds of inputs (keys of HELD) that lie in host memory.
        other: the peak of what else runs in it, and ``others`` the graphs of that, for their constants.

    Returns:
        What is held, with the peak of the program that needs most.
    """
    held = _held(graphs[-1], alignment, on_host)
    peaks = [max(moments(g, alignment), key=lambda m: sum(m.bytes.values()), default=None) for g in graphs]
    known = [p for p in (*peaks, other) if p is not None]
    constants = sum({one: size for g in (*graphs, *others) for one, size in _constants(g, alignment)}.values())
    found = replace(held, batch=held.batch * microbatches, constants=constants)
    if not known:
        return found
    peak = max(known, key=lambda m: sum(m.bytes.values()))
    return replace(found, **peak.bytes, where=f"{peak.node.meta.get('of', '?')}: {peak.node.name}")


def gathered_bytes(graph: fx.Graph, alignment: int = 1) -> int:
    """Return the bytes of what a program gives that it allocated itself, such as gathered parameters."""
    (output,) = graph.find_nodes(op="output")
    keys = {key_of(n): n for n in output.args[0]}
    return sum(rounded(n.meta["val"], alignment) for key, n in keys.items() if key[0].op != "placeholder")


class Moment(NamedTuple):
    """What a program has allocated while one of its nodes runs: {kind: bytes}, the kinds of MADE."""

    node: fx.Node
    bytes: dict[str, int]


def moments(graph: fx.Graph, alignment: int = 1, owned: Mapping[str, str] = NOTHING) -> Iterator[Moment]:
    """Yield what is allocated while each node runs, inputs and constants aside.

    Args:
        graph: of a program.
        alignment: bytes that an allocation is rounded up to.
        owned: {input that the program alone holds: its kind}; it counts, up to its last use.
    """
    # 1. what each node allocates; 2. until when it lives; 3. of which kind it is; 4. walk
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    made = {n: _allocated(n, alignment) for n in nodes}
    given = [n for n in nodes if n.op == "placeholder" and n.name in owned]
    made.update((n, {(n, 0): rounded(n.meta["val"], alignment)}) for n in given)
    ends, last = _ends(nodes, place, made)
    kinds = {key: owned.get(key[0].name) or _kind(key[0], nodes[last[key]]) for n in nodes for key in made[n]}
    for node in nodes:
        if size := _workspace(node):
            key = node, WORKSPACE
            made[node][key], kinds[key] = size, "temporaries"
            ends[key] = min((place[w] for w in _waits(node)), default=place[node])
    dying: dict[int, list[tuple[str, int]]] = {}
    for node in nodes:
        for key, size in made[node].items():
            dying.setdefault(ends[key], []).append((kinds[key], size))
    now = dict.fromkeys(MADE, 0)
    for i, node in enumerate(nodes):
        for key, size in made[node].items():
            now[kinds[key]] += size
        yield Moment(node, dict(now))
        for kind, size in dying.get(i, ()):
            now[kind] -= size


Key = tuple[fx.Node, int]  # the node that allocates, and which of its results
WORKSPACE = -1


def _allocated(node: fx.Node, alignment: int) -> dict[Key, int]:
    """Return the bytes of each piece of memory that a node allocates."""
    value = node.meta.get("val")
    if node.op not in ("call_function", "call_method", "call_module") or node.target in (operator.getitem, WAIT):
        return {}
    if isinstance(value, Tensor):
        return {(node, 0): rounded(value, alignment)} if root_of(node) is node else {}
    if not isinstance(value, list | tuple) or alias_of_tuple(node) is not None:
        return {}
    known = {storage_of(v) for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor)}
    found = {}
    for i, one in enumerate(value):
        if isinstance(one, Tensor) and storage_of(one) not in known:
            known.add(storage_of(one))
            found[node, i] = rounded(one, alignment)
    return found


def key_of(node: fx.Node) -> Key:
    """Return the piece of memory that a node's value lies in."""
    root = root_of(node)
    while root.target is WAIT:  # gives its operand back
        root = root_of(root.all_input_nodes[0])
    if root.target is operator.getitem:
        source: Any = root.args[0]
        values = [storage_of(v) if isinstance(v, Tensor) else None for v in source.meta["val"]]
        return source, values.index(values[int(root.args[1])])  # type: ignore[arg-type]
    return root, 0


def _ends(
    nodes: Sequence[fx.Node], place: dict[fx.Node, int], made: dict[fx.Node, dict[Key, int]]
) -> tuple[dict[Key, int], dict[Key, int]]:
    """Return for each piece of memory the place of the node after which it is free, and that of its last use.

    A collective holds its operands until it was waited for.
    """
    ends: dict[Key, int] = {}
    for node in nodes:
        for key in made[node]:
            ends[key] = place[node]
    for node in nodes:
        for argument in node.all_input_nodes:
            touched = (
                [key_of(argument)] if isinstance(argument.meta.get("val"), Tensor) else list(made.get(argument, ()))
            )
            for key in touched:
                ends[key] = max(ends.get(key, 0), place[node])
    last = dict(ends)
    for node in nodes:
        if node.op == "call_function" and is_collective(node):
            results = list(made[node]) or [key_of(node)]
            waits = [place[u] for u in _waits(node) if key_of(u) in results]
            for argument in node.all_input_nodes:
                key = key_of(argument)
                ends[key] = max([ends.get(key, 0), *waits])
    return ends, last


def _workspace(node: fx.Node) -> int:
    """Return the bytes that a collective allocates for itself until it is done, beside its results.

    gloo's coalesced all-gather packs its operands into one flat tensor, gathers into another one and copies the results
    out of it. Its other collectives that the engine uses, and NCCL's, work on operands and results as they are.
    """
    if (
        node.op != "call_function"
        or not is_collective(node)
        or "all_gather_into_tensor_coalesced" not in str(node.target)
    ):
        return 0
    tensors = [*(n.meta["val"] for n in node.all_input_nodes), *node.meta["val"]]
    return sum(t.numel() * t.element_size() for t in tensors) if tensors[0].device.type == "cpu" else 0


def _waits(node: fx.Node) -> list[fx.Node]:
    """Return the waits for a collective."""
    direct = [u for u in node.users if u.target is WAIT]
    return direct + [w for u in node.users if u.target is operator.getitem for w in u.users if w.target is WAIT]


def _kind(node: fx.Node, last: fx.Node) -> str:
    """Tell what a value is by the part of the step that made it and the one that uses it last."""
    source, use = (str(n.meta.get("of", "")).partition(" ")[0] for n in (node, last))
    if source == "gather":
        return "gathered"
    if source == "reduce" or (source == "backward" and use in ("reduce", "update")):
        return "gradients"
    if source in ("forward", "again") and use in ("backward", "again"):
        return "activations"
    return "temporaries"


# --- what is there already ----------------------------------------------------------------------------------------


def _held(graph: fx.Graph, alignment: int, on_host: Collection[str]) -> MemoryEstimate:
    """Add up the inputs of a program."""
    found: dict[str, Any] = dict.fromkeys((*HELD.values(), "host"), 0)
    for node in graph.nodes:
        if node.op == "placeholder":
            kind = node.name.partition("_")[0]
            where = "host" if kind in on_host else HELD.get(kind, "batch")
            found[where] += rounded(node.meta["val"], alignment)
    return MemoryEstimate(**found)


def _constants(graph: fx.Graph, alignment: int) -> Iterator[tuple[int, int]]:
    """Yield (memory, bytes) of what a program reads from its module; programs of a step share some."""
    for node in graph.nodes:
        if node.op == "get_attr":
            held = getattr(graph.owning_module, str(node.target))
            yield storage_of(held), rounded(held, alignment)


def rounded(value: Tensor, alignment: int) -> int:
    """Return the bytes that an allocator gives for a tensor's memory."""
    return -(-value.untyped_storage().nbytes() // alignment) * alignment


# --- measured -----------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The bytes that were allocated at most over what was there before; known when ``measure_peak`` is left."""

    bytes: int = 0


@contextmanager
def measure_peak(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of this process's tensors, from the allocator: on CPUs it is profiled, which costs time.

    Only what torch allocates is seen, not what gloo, oneDNN or NCCL allocate for themselves.
    """
    peak = Peak()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        yield peak
        torch.accelerator.synchronize()
        peak.bytes = torch.accelerator.max_memory_allocated() - before
        return
    with profiled_allocations() as events:
        yield peak
    peak.bytes = peak_of(events)


def peak_of(events: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes that were allocated at once.

    Args:
        events: (time, address, bytes) in order, negative bytes where freed. What is allocated where something was,
            shows that it had been freed: by a thread that is not profiled.
    """
    live: dict[int, int] = {}
    total = most = 0
    for _, address, size in events:
        if size > 0:
            for old in [a for a, s in live.items() if a < address + size and address < a + s]:
                total -= live.pop(old)
            live[address] = size
            total += size
            most = max(most, total)
        else:
            total -= live.pop(address, 0)
    return most


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, memory that they share counted once."""
    return sum({storage_of(t): t.untyped_storage().nbytes() for t in tensors}.values())
