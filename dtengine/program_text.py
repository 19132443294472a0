"""Programs as text: nodes whose targets are looked up in a list, and back.

Nothing of a stored program is evaluated: names are checked, operators and functions are those of this module's list, and
what else may stand in an argument has a form of its own.
"""

import keyword
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dtengine.mesh import Mesh
from dtengine.passes import BINDINGS
from dtengine.torch_private import FakeTensorMode, OpOverload, fake_tensor, schema_of, storage_of

NAMESPACES = ("aten", "prims", "_c10d_functional", "mkldnn")
FORBIDDEN = {"aten.from_file.default", "aten.from_file.out"}  # they reach beyond their arguments
KINDS = (torch.dtype, torch.memory_format, torch.layout)


class Unusable(ValueError):
    """A program that cannot be stored, or text that is no program."""


def _operator(name: str) -> Any:
    """Return the operator "aten.mm.default", or raise Unusable."""
    if name in FORBIDDEN or not re.fullmatch(r"\w+\.\w+\.\w+", name):
        raise Unusable(f"operator {name[:80]!r}")
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise Unusable(f"operator {name[:80]!r}")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload) or str(found) != name:
        raise Unusable(f"operator {name[:80]!r}")
    return found


_FUNCTIONS = {f"torch.{f.__name__}": f for kind, f in BINDINGS.values() if kind == "call_function"}
_FUNCTIONS["operator.getitem"] = operator.getitem
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_METHODS = {name for kind, name in BINDINGS.values() if kind == "call_method"}
_TORCH: dict[str, Any] = {str(v): v for v in vars(torch).values() if isinstance(v, KINDS)}


def _target(op: str, name: str) -> Any:
    """Return what a node calls, from the list of what a program may call."""
    if op == "call_function":
        return _FUNCTIONS[name] if name in _FUNCTIONS else _operator(name)
    if op == "call_method" and name in _METHODS:
        return name
    if (
        op in ("placeholder", "get_attr")
        and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        and not keyword.iskeyword(name)
    ):
        return name
    raise Unusable(f"{op} {name[:80]!r}")


@dataclass
class _Writer:
    """Turns nodes into JSON values."""

    mesh: Mesh
    places: dict[fx.Node, int]
    storages: dict[int, int]  # of values: number of each storage
    sizes: list[int]  # of each storage, in bytes

    def node(self, node: fx.Node) -> list[Any]:
        """Encode a node: [op, target, name, args, kwargs, meta]."""
        target = _NAMES.get(node.target, str(node.target)) if node.op == "call_function" else str(node.target)
        if _target(node.op, target) is not node.target and node.op == "call_function":
            raise Unusable(f"{node.target} cannot be looked up")
        meta = {k: self.value(v) for k, v in node.meta.items() if k == "val"}
        for key, value in node.meta.items():  # labels, and the node that owns the memory
            owner = key == "root" and self.places.get(value, len(self.places)) <= self.places[node]
            if owner or type(value) in (str, bool, int, float):
                meta[key] = self.value(value)
        args = self._with_group(node)
        return [node.op, target, node.name, self.value(args), self.value(dict(node.kwargs)), meta]

    def _with_group(self, node: fx.Node) -> tuple[Any, ...]:
        """Return a node's arguments, its process group by mesh axes: names of groups differ from start to start."""
        args: list[Any] = list(node.args)
        schema = schema_of(node)
        for i, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.name == "group_name":
                axes = self.mesh.axes_of_groups.get(args[i] if i < len(args) else "")
                if axes is None:
                    raise Unusable(f"{node.target}: a group that the mesh does not have")
                args[i] = _Group(axes)
        return tuple(args)

    def value(self, value: Any) -> Any:
        """Encode an argument or a value's description."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, fx.Node):
            return {"node": self.places[value]}
        if isinstance(value, Tensor):
            return {"tensor": self._form(value)}
        if isinstance(value, _Group):
            return {"group": list(value.axes)}
        if isinstance(value, KINDS) and str(value) in _TORCH:
            return {"torch": str(value)}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(one) for one in value]}
        if isinstance(value, dict) and all(type(k) is str for k in value):
            return {"dict": [[k, self.value(v)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self.value(one) for one in (value.start, value.stop, value.step)]}
        raise Unusable(f"a {type(value).__name__} in a program")

    def _form(self, tensor: Tensor) -> list[Any]:
        number = self.storages.setdefault(storage_of(tensor), len(self.storages))
        if number == len(self.sizes):
            self.sizes.append(tensor.untyped_storage().nbytes())
        offset, dtype = tensor.storage_offset(), str(tensor.dtype)
        return [number, list(tensor.shape), list(tensor.stride()), offset, dtype, tensor.device.type]


@dataclass(frozen=True)
class _Group:
    axes: tuple[str, ...]


@dataclass
class _Reader:
    """Turns JSON values into nodes; raises whatever it meets where they are none."""

    mesh: Mesh
    device: torch.device
    mode: FakeTensorMode
    storages: list[torch.UntypedStorage]
    nodes: list[fx.Node]

    def node(self, graph: fx.Graph, stored: list[Any]) -> None:
        """Append a node, or the output."""
        op, name, label, args, kwargs, meta = stored
        args, kwargs = self.value(args), self.value(kwargs)
        if type(args) is not tuple or type(kwargs) is not dict:
            raise Unusable("arguments")
        if op == "output":
            new = graph.output(*args)
        else:
            _target("placeholder", label)  # names become Python in the generated code
            new = graph.create_node(op, _target(op, name), args, kwargs, label)
        self.nodes.append(new)  # before its meta: a node may own its memory
        new.meta.update((k, self.value(v)) for k, v in meta.items())

    def value(self, stored: Any) -> Any:
        """Decode what ``_Writer.value`` encoded."""
        if isinstance(stored, list):
            return [self.value(one) for one in stored]
        if not isinstance(stored, dict):
            return stored
        ((kind, of),) = stored.items()
        if kind == "node":
            return self._node(of)
        if kind == "tensor":
            return self._tensor(*of)
        if kind == "group":
            return {axes: group for group, axes in self.mesh.axes_of_groups.items()}[tuple(of)]
        if kind == "torch":
            return _TORCH[of]
        if kind == "device":
            return self._device(of)
        if kind == "tuple":
            return tuple(self.value(one) for one in of)
        if kind == "dict":
            if not all(type(k) is str and k.isidentifier() and not keyword.iskeyword(k) for k, _ in of):
                raise Unusable("names of arguments")
            return {k: self.value(v) for k, v in of}
        if kind == "slice":
            return slice(*(self.value(one) for one in of))
        raise Unusable(f"a {kind}")

    def _node(self, number: Any) -> fx.Node:
        if type(number) is not int or number < 0:
            raise Unusable("a node's number")
        return self.nodes[number]

    def _device(self, name: str) -> torch.device:
        if name not in ("cpu", self.device.type):
            raise Unusable(f"device {name}")
        return self.device if name == self.device.type else torch.device("cpu")

    def _tensor(self, number: int, shape: list[int], stride: list[int], offset: int, dtype: str, device: str) -> Tensor:
        meta = torch.empty(0, dtype=_TORCH[dtype], device="meta")
        meta.set_(self.storages[number], offset, shape, stride)
        return fake_tensor(self.mode, meta, self._device(device))


def encode(module: fx.GraphModule, mesh: Mesh) -> dict[str, Any]:
    """Return a program, its constants aside, as something that JSON can hold; ``module.meta["notes"]`` is kept with it.

    Raises:
        Unusable: it calls or holds something that is not on the list.
    """
    writer = _Writer(mesh, {n: i for i, n in enumerate(module.graph.nodes)}, {}, [])
    nodes = [writer.node(node) if node.op != "output" else _output(writer, node) for node in module.graph.nodes]
    return {"nodes": nodes, "storages": writer.sizes, "notes": module.meta.get("notes", {})}


def _output(writer: _Writer, node: fx.Node) -> list[Any]:
    return ["output", "output", "output", writer.value(node.args), {"dict": []}, {}]


def decode(
    stored: Mapping[str, Any],
    constants: Mapping[str, Tensor],
    mesh: Mesh,
    device: torch.device,
    mode: FakeTensorMode,
) -> fx.GraphModule:
    """Return the program that ``encode`` stored; where it is none, raises whatever comes of it."""
    storages = [torch.UntypedStorage(size, device="meta") for size in stored["storages"]]
    reader, graph, root = _Reader(mesh, device, mode, storages, []), fx.Graph(), torch.nn.Module()
    for name, value in constants.items():
        root.register_buffer(_target("get_attr", name), value, persistent=False)
    for one in stored["nodes"]:
        reader.node(graph, one)
    if not reader.nodes or reader.nodes[-1].op != "output":
        raise Unusable("no output")
    module = fx.GraphModule(root, graph, "program")
    module.meta["notes"] = stored["notes"]
    graph.lint()
    return module
