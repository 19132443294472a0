"""The tree: imports go down only, private torch names are in one module, nothing unpickles, everything is described."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = sorted([*(ROOT / "dtengine").glob("*.py"), *(ROOT / "dtengine" / "pipeline").glob("*.py")])
MODELS = sorted((ROOT / "models").glob("*.py"))


def name_of(path: Path) -> str:
    """The module's name within its package: "mesh", "pipeline.check"."""
    parts = path.relative_to(ROOT / "dtengine" if path in ENGINE else ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = pytest.mark.parametrize("path", [*ENGINE, *MODELS], ids=lambda p: f"{p.parent.name}.{p.stem}")

# A module imports modules of lower levels only. A new module needs a level.
LEVELS = {
    # names, numbers and what stands between us and torch or the machine
    "describe": 0,
    "layout": 0,
    "loss_scale": 0,
    "logs": 0,
    "random": 0,
    "ranks": 0,
    "torch_private": 0,
    "trees": 0,
    # pipeline schedules, without torch
    "pipeline": 0,
    "pipeline.actions": 0,
    "pipeline.formulas": 0,
    "pipeline.steps": 1,
    "pipeline.grid": 1,
    "pipeline.v_schedules": 2,
    "pipeline.communication": 2,
    "pipeline.check": 3,
    "pipeline.schedules": 3,
    "pipeline.simulate": 3,
    "pipeline.orders": 4,
    "pipeline.picture": 4,
    "pipeline.search": 5,
    "pipeline.partition": 0,
    "pipeline.split": 2,
    "pipeline.messages": 3,
    "pipeline.stream": 3,
    "pipeline.timeline": 4,
    "pipeline.sums": 10,
    "pipeline.stage": 11,
    "pipeline.holdings": 12,
    "pipeline.step": 13,
    "schedule_report": 15,
    "schedule": 16,
    # one subject each
    "corpus": 1,
    "kernels": 1,
    "launch": 1,
    "mesh": 1,
    "rates": 1,
    "screens": 1,
    "step_trace": 1,
    # tensors on a mesh, and what a run shows
    "data": 2,
    "monitor": 2,
    "nodes": 1,
    "options": 0,
    "passes": 2,
    "state": 1,
    "shard": 2,
    "ops": 3,
    "program": 3,
    "program_text": 3,
    # a model, a step of it, and its state
    "memory": 4,
    "model": 4,
    "optimizer": 5,
    "trace_cache": 4,
    "parameters": 5,
    "adafactor": 6,
    "elementwise": 6,
    "parts": 6,
    "update": 6,
    "muon": 7,
    "recompute": 7,
    "traces": 3,
    "executors": 8,
    "optim": 8,
    "microbatch": 9,
    "step": 10,
    "checkpoint": 11,
    "config": 14,
    # what is done with a resolved run
    "explain": 15,
    "job": 15,
    "sample": 15,
    "passes_report": 16,
    "watch": 16,
    # commands
    "train": 17,
    "verify": 17,
    # the public interface
    "__init__": 18,
}

# Calls that unpickle what comes from a file or from another rank.
UNPICKLING = {
    "pickle",
    "cloudpickle",
    "dill",
    "shelve",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) of every import at any depth; name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def engine_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module of dtengine) of every import of the engine."""
    for line, module, name in imports(tree):
        package, _, rest = module.partition(".")
        if package == "dtengine":
            known = [n for n in (f"{rest}.{name}".strip("."), rest, name) if n in LEVELS]
            yield line, known[0] if known else rest or "__init__"


# Levels


def test_every_module_has_a_level():
    """The table names every module of the engine and no other."""
    assert set(LEVELS) == {name_of(path) for path in ENGINE}


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_imports_go_down_only(path):
    """A module imports only modules of a lower level; so there is no circle, and each can be read without those above."""
    mine = LEVELS.get(name_of(path), 0)
    up = [f"line {line}: {other}" for line, other in engine_imports(parse(path)) if LEVELS.get(other, 99) >= mine]
    assert not up, f"{name_of(path)} is on level {mine} and imports {', '.join(up)}"


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_models_import_torch_and_what_models_need(path):
    """A model file imports torch, the standard library and dtengine.data, .model and .ops: a person's own can too."""
    for line, module, name in imports(parse(path)):
        package = module.split(".")[0]
        assert package in {"torch", "dtengine"} | sys.stdlib_module_names, f"line {line}: {module}"
        if package == "dtengine":
            assert module in ("dtengine.data", "dtengine.model", "dtengine.ops"), f"line {line}: {module} {name}"


# Private names


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, says Python; the underscore keeps them apart


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in NAMED_TUPLE


def private_torch_names(tree: ast.Module) -> Iterator[str]:
    """Yield "line N: name" of private names of torch: imported, reached from a module, or read off an object of it."""
    torch_names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(a.asname or a.name.split(".")[0], a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        for bound, full in found:
            if full.split(".")[0] == "torch":
                torch_names.add(bound)
                if any(map(is_private, full.split("."))):
                    yield f"line {node.lineno}: {full}"
    # what the module defines by itself may be private and used: self._x, an own class's _x
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base: ast.expr = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if (isinstance(base, ast.Name) and base.id in torch_names) or node.attr not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@FILES
def test_private_torch_names_are_in_one_module(path):
    """What torch may change without notice is in dtengine/torch_private.py, each with its reason, and nowhere else."""
    if path.stem != "torch_private":
        assert list(private_torch_names(parse(path))) == []


def test_the_search_for_private_names_finds_them():
    """The search finds each way to a private name, and passes what is public or a module's own."""
    found = """
import torch._dynamo
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.testing._internal.x import y
from torch.distributed.tensor import _utils
torch.ops._c10d_functional.all_reduce
dist._functional
getattr(target, "_schema", None)
mesh._flatten()
"""
    passed = """
import torch
from torch.distributed.tensor import DTensor
class Own:
    def _mine(self):
        self._x = torch.__version__
        return self._mine, self._x, other._x
"""
    lines = [text.partition(":")[0] for text in private_torch_names(ast.parse(found))]
    assert sorted(lines) == sorted(f"line {n}" for n in (2, 4, 5, 6, 7, 8, 9, 10))
    assert list(private_torch_names(ast.parse(passed))) == []


# Unpickling


@FILES
def test_nothing_unpickles(path):
    """No pickle, no torch.load, no object collective, no allow_pickle: no file and no peer can run code in a rank."""
    found = []
    for node in ast.walk(parse(path)):
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [part for a in node.names for part in a.name.split(".")] + [
                p for m in modules for p in m.split(".")
            ]
            names += ["torch.load"] if modules == ["torch"] and "load" in names else []
        elif isinstance(node, ast.Attribute):
            names = [node.attr, ast.unparse(node)]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            allowed = not (isinstance(node.value, ast.Constant) and node.value.value is False)
            names = ["pickle"] if allowed else []
        found += [f"line {getattr(node, 'lineno', '?')}: {n}" for n in names if n in UNPICKLING | {"torch.load"}]
    assert found == []


# Docstrings


def public_without_docstring(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """Yield the module, public classes, public functions and public methods that say nothing about themselves.

    A method that overrides one of a base class is described there (``inspect.getdoc`` looks it up).
    """
    if ast.get_docstring(tree) is None and tree.body:
        yield "the module"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.name
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
                continue
            if inspect.getdoc(getattr(getattr(module, node.name), member.name)) is None:
                yield f"{node.name}.{member.name}"


@FILES
def test_whatever_is_public_has_a_docstring(path):
    """Modules, classes, functions and methods without a leading underscore say what they are for."""
    module = importlib.import_module(f"dtengine.{name_of(path)}".removesuffix(".__init__"))
    assert list(public_without_docstring(parse(path), module)) == []
