"""Descriptions of values, functions included: equal descriptions mean that the same will be computed.

A function is described by what it is in memory: its code, defaults, the values it closes over, and the globals that its code
names, each described in turn. What cannot be described soundly, such as a function that reads a file, raises
``Undescribable``: whoever asked must do without.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Modules of the standard library whose functions give the same for the same arguments, in any process.
PURE = {
    *("abc", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "decimal", "enum"),
    *("fractions", "functools", "heapq", "itertools", "logging", "math", "numbers", "operator", "re", "statistics"),
    *("string", "types", "typing", "typing_extensions", "warnings"),
}
IMPURE_BUILTINS = {"open", "input", "eval", "exec", "compile", "__import__", "globals", "id", "hash"}
TORCH_READS = {"load", "from_file", "hub", "os", "environ"}
ENGINE = __name__.partition(".")[0]
FROM_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
OPERATORS = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)


class Undescribable(TypeError):
    """A value that no text describes soundly."""


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's description, in hex.

    Raises:
        Undescribable: the value, or what it refers to, cannot be described.
    """
    try:
        text = json.dumps(_Describer({}).describe(value))
    except RecursionError:
        raise Undescribable("nested too deeply") from None
    return hashlib.sha256(text.encode()).hexdigest()


def sources_digest(folder: Path) -> str:
    """Return the SHA-256 over names and content of the Python files of a package and its subpackages, in hex."""
    found = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):  # rglob would not follow links
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return found.hexdigest()


@dataclasses.dataclass
class _Describer:
    seen: dict[Any, tuple[int, Any]]  # by id, with the object, which so stays alive

    def describe(self, value: Any) -> Any:
        """Return something that JSON can hold."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes) and not _own_class(value):
            return [type(value).__name__, repr(value)]
        if isinstance(value, FROM_TORCH + OPERATORS):
            return [type(value).__name__, str(value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)][0]]
        self.seen[id(value)] = (len(self.seen), value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, enum.Enum):
            return [self._class(type(value)), value.name]
        if isinstance(value, Path):
            return ["path", str(value)]
        if isinstance(value, list | tuple):
            return [self._class(type(value)), [self.describe(one) for one in value]]
        if isinstance(value, set | frozenset):
            return ["set", sorted(json.dumps(_Describer({}).describe(one)) for one in value)]
        if isinstance(value, Mapping) and not _own_class(value):
            return ["mapping", [[self.describe(k), self.describe(v)] for k, v in value.items()]]
        if isinstance(value, functools.partial):
            return ["partial", self.describe(value.func), self.describe(value.args), self.describe(value.keywords)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ["method", self.describe(value.__self__), self.describe(value.__func__)]
        if isinstance(value, types.ModuleType):
            return self._module(value, ())
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.BuiltinFunctionType):
            if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType | type):
                raise Undescribable(f"{value!r} belongs to an object")
            return ["built-in", _library(value.__module__ or "torch"), value.__qualname__]
        if isinstance(value, types.GenericAlias | types.UnionType) or type(value).__module__ == "typing":
            return ["type", repr(value)]
        if dataclasses.is_dataclass(value):
            fields = [[f.name, self.describe(getattr(value, f.name))] for f in dataclasses.fields(value)]
            return [self._class(type(value)), fields]
        raise Undescribable(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _tensor(self, value: Tensor) -> Any:
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise Undescribable(f"a {type(value).__name__}")
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        content = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
        return ["tensor", str(value.dtype), str(value.device), list(value.shape), list(value.stride()), content]

    def _class(self, cls: type) -> Any:
        """A class by its name; one of a person by all that it defines."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        if _is_library(cls.__module__):
            return ["class", _library(cls.__module__), name]
        if ("class", id(cls)) in self.seen:
            return ["class", name]
        self.seen[("class", id(cls))] = (len(self.seen), cls)
        skipped = ("__dict__", "__weakref__", "__doc__", "__firstlineno__", "__module__", "__annotations_cache__")
        members = [[k, self._member(v)] for k, v in sorted(vars(cls).items()) if k not in skipped]
        return ["class", name, _file(cls.__module__), [self._class(base) for base in cls.__bases__], members]

    def _member(self, value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.describe(value.__func__)]
        if isinstance(value, property):
            return ["property", *(self.describe(one) for one in (value.fget, value.fset, value.fdel))]
        if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
            return "slot"
        if type(value).__module__ == "dataclasses":
            return "dataclass"
        return self.describe(value)

    def _function(self, function: types.FunctionType) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        module = function.__module__ or ""
        if _is_library(module) and not _is_engine(module):
            if function.__closure__ or "<lambda>" in function.__qualname__:
                raise Undescribable(f"{name} closes over what a library made")
            return ["function", _library(module), name]
        deep = not _is_engine(module) or module.startswith(f"{ENGINE}.models") or bool(function.__closure__)
        try:
            cells = [self.describe(cell.cell_contents) for cell in function.__closure__ or ()]
        except ValueError:
            raise Undescribable(f"{name} refers to a name that has no value yet") from None
        defaults = [self.describe(function.__defaults__), self.describe(function.__kwdefaults__)]
        code = self._code(function.__code__, function.__globals__ if deep else None)
        return ["function", name, "" if _is_engine(module) else _file(module), code, cells, defaults]

    def _code(self, code: types.CodeType, names: dict[str, Any] | None) -> Any:
        """Describe code and, with ``names``, the globals that it refers to."""
        constants = [
            self._code(c, names) if isinstance(c, types.CodeType) else _Describer({}).describe(c)
            for c in code.co_consts
        ]
        told = [code.co_code.hex(), list(code.co_names), list(code.co_varnames), list(code.co_freevars), code.co_flags]
        return [told, constants, [] if names is None else self._globals(code, names)]

    def _globals(self, code: types.CodeType, names: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname == "IMPORT_NAME":
                try:
                    found.append([name, self._module(importlib.import_module(name), code.co_names)])
                except (ImportError, ValueError) as error:
                    raise Undescribable(f"import {name}: {error}") from None
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name in names:
                    value = names[name]
                    module = isinstance(value, types.ModuleType)
                    found.append([name, self._module(value, code.co_names) if module else self.describe(value)])
                elif name in IMPURE_BUILTINS:
                    raise Undescribable(f"{code.co_name} calls {name}")
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Undescribable(f"{code.co_name} changes the global {name}")
        return found

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> Any:
        """Describe a module by name and version; a person's by its file and by those of its values that code may read."""
        if _is_library(module.__name__):
            if found := TORCH_READS & set(names):
                raise Undescribable(
                    f"code that names {', '.join(sorted(found))} beside {module.__name__} may read files"
                )
            return ["module", module.__name__, _library(module.__name__)]
        values = [[n, self.describe(vars(module)[n])] for n in sorted(set(names) & set(vars(module)))]
        return ["module", module.__name__, _file(module.__name__), values]


def _own_class(value: Any) -> bool:
    return not _is_library(type(value).__module__)


def _is_engine(module: str) -> bool:
    return module.partition(".")[0] == ENGINE


def _is_library(module: str) -> bool:
    """Whether a module is installed: of Python, of torch, of this engine, or a package with a version."""
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    installed = "site-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")
    return top in sys.stdlib_module_names or top in ("torch", ENGINE) or installed


def _library(module: str) -> str:
    """Return name and version of an installed module's package; the engine's sources have a digest of their own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top.startswith("_"):
        if top.lstrip("_") not in PURE:
            raise Undescribable(f"module {module} may give something else each time")
        return top
    if top not in ("torch", ENGINE):  # numpy has random numbers and files, and so may others
        raise Undescribable(f"module {module} may give something else each time")
    return ENGINE if top == ENGINE else f"torch {torch.__version__}"


def _file(module: str) -> str:
    """Return the digest of a person's source file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:
        raise Undescribable(f"module {module} has no source file") from None
