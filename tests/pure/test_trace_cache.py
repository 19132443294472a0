"""Stored programs: what they hold, what is never taken for one, and the descriptions that their keys are made of."""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import dtengine as dt
from dtengine.describe import Undescribable, digest
from dtengine.nodes import root_of
from dtengine.program import collectives_of
from dtengine.program_text import decode, encode
from dtengine.torch_private import FakeTensorMode, fake_process_group, storage_of
from dtengine.trace_cache import MOST_FILES, TraceCache, _head, cache_folder, program_key

KEY = "a" * 64
CPU = torch.device("cpu")


class Traced:
    """A traced step of 2x2 fake ranks, the mesh, and how a stored one is read."""

    def __init__(self) -> None:
        config = dt.configure(
            dt.load_model("llama"), "llama", layers=1, embed=16, heads=4, vocab=67, seq=15, dropout=0.1
        )
        plan = dt.make_plan("fsdp", dt.parse_mesh("2x2"), config.axis_sizes)
        self.mesh = dt.build_mesh(plan.sizes)
        options = dt.StepConfig(2, 15, microbatches=2, dropout=0.1)
        step = dt.make_step(dt.load_model("llama"), config, plan, self.mesh, dt.adamw(), options, lambda _: 0.1)
        step.prepare()
        program = step.programs["step"]
        assert isinstance(program, dt.Program)
        self.module = program.graph

    def load(self, cache: TraceCache, key: str = KEY) -> fx.GraphModule | None:
        return cache.load(key, self.mesh, CPU, FakeTensorMode(allow_non_fake_inputs=True))


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with fake_process_group(4):
        yield Traced()


@pytest.fixture
def cache(tmp_path: Path) -> TraceCache:
    return TraceCache(tmp_path / "cache")


def text_of(module: fx.GraphModule) -> str:
    """The generated code."""
    return module.code


# --- what is stored -----------------------------------------------------------------------------------------------


def test_a_program_comes_back_as_it_was(traced, cache):
    """Code, constants, collectives, forms of all values, who shares memory with whom, and labels are the same."""
    assert cache.save(KEY, traced.module, traced.mesh)
    found = traced.load(cache)
    assert found is not None and text_of(found) == text_of(traced.module)
    assert collectives_of(found.graph, traced.mesh) == collectives_of(traced.module.graph, traced.mesh)
    ours, theirs = dict(traced.module.named_buffers()), dict(found.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    pairs = list(zip(traced.module.graph.nodes, found.graph.nodes, strict=True))
    place = {n: i for side in zip(*pairs, strict=True) for i, n in enumerate(side)}
    storages = set()
    for one, two in pairs:
        a, b = one.meta.get("val"), two.meta.get("val")
        assert type(a) is type(b) and one.meta.get("phase") == two.meta.get("phase")
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.stride(), a.storage_offset(), a.dtype, a.device) == (
                (b.shape, b.stride(), b.storage_offset(), b.dtype, b.device)
            )
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
            storages.add((storage_of(a), storage_of(b)))
            if root_of(one) in place:
                assert place[root_of(one)] == place[root_of(two)]
    assert len(storages) == len({a for a, _ in storages}) == len({b for _, b in storages})


def test_files_are_named_by_digests_and_hold_no_pickle(traced, cache):
    """Two files, named by hex digests, for this user's eyes to write alone; JSON and safetensors."""
    cache.save(KEY, traced.module, traced.mesh)
    names = sorted(p.name for p in cache.folder.iterdir())
    assert len(names) == 2 and all(len(n.partition(".")[0]) == 64 and int(n.partition(".")[0], 16) for n in names)
    assert {n.partition(".")[2] for n in names} == {"json", "safetensors"}
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    head, body = (cache.folder / f"{KEY}.json").read_text().split("\n")
    assert json.loads(head)["key"] == KEY and set(json.loads(body)) == {
        "nodes",
        "storages",
        "constants",
        "names",
        "notes",
    }


def test_groups_are_stored_by_their_axes(traced):
    """Names of groups, which differ from start to start, are not in the text; another start's names come out of it."""
    stored = encode(traced.module, traced.mesh)
    renamed = dataclasses.replace(traced.mesh, groups={axes: f"other {g}" for axes, g in traced.mesh.groups.items()})
    found = decode(stored, dict(traced.module.named_buffers()), renamed, CPU, FakeTensorMode())
    axes = [c.axes for c in collectives_of(traced.module.graph, traced.mesh)]
    assert [c.axes for c in collectives_of(found.graph, renamed)] == axes and set(axes) == set(traced.mesh.groups)


# --- what is no entry ---------------------------------------------------------------------------------------------


def test_mutated_entries_are_misses(traced, cache):
    """600 entries with bytes changed, cut, added, swapped or emptied: none is used, none is an error."""
    cache.save(KEY, traced.module, traced.mesh)
    files = sorted(cache.folder.iterdir())
    draw = random.Random(0)
    for number in range(600):
        path = files[number % 2]
        good = path.read_bytes()
        at = draw.randrange(min(len(good), draw.choice([200, len(good)])))
        bad = {
            0: good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :],
            1: good[:at],
            2: good + draw.randbytes(draw.randrange(1, 50)),
            3: good[:at] + draw.randbytes(draw.randrange(1, 9)) + good[at:],
            4: draw.randbytes(at),
            5: good[at:] + good[:at] if at else b"",
        }[number // 2 % 6]
        if bad == good:
            continue
        path.write_bytes(bad)
        assert traced.load(cache) is None, number
        path.write_bytes(good)
    assert traced.load(cache) is not None


def resigned(cache: TraceCache, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an entry and give it a checksum that fits: what somebody would do who may write there."""
    path = cache.folder / f"{KEY}.json"
    stored = json.loads(path.read_bytes().partition(b"\n")[2])
    change(stored)
    body = json.dumps(stored).encode()
    path.write_bytes(_head(KEY, body) + b"\n" + body)


EVIL = {
    "a module's function": lambda n: n.__setitem__(1, "os.system"),
    "Python's own": lambda n: n.__setitem__(1, "builtins.eval"),
    "an unlisted function of torch": lambda n: n.__setitem__(1, "torch.load"),
    "an unlisted namespace": lambda n: n.__setitem__(1, "inductor.resize_storage_bytes_.default"),
    "a file": lambda n: n.__setitem__(1, "aten.from_file.default"),
    "a dunder": lambda n: n.__setitem__(1, "aten.__class__.default"),
    "an attribute of the namespace": lambda n: n.__setitem__(1, "aten._dir.append"),
    "another kind of node": lambda n: n.__setitem__(0, "call_module"),
    "an unlisted method": lambda n: (n.__setitem__(0, "call_method"), n.__setitem__(1, "__reduce__")),
    "a name that is code": lambda n: n.__setitem__(2, "x = __import__('os').system('true')"),
    "a name with a line end": lambda n: n.__setitem__(2, "x\n"),
    "a keyword": lambda n: n.__setitem__(2, "import"),
    "an argument's name that is code": lambda n: n.__setitem__(4, {"dict": [["a=1, b", 1]]}),
    "a node that comes later": lambda n: n.__setitem__(3, {"tuple": [{"node": 99999}]}),
    "a node from the end": lambda n: n.__setitem__(3, {"tuple": [{"node": -1}]}),
    "an unknown value": lambda n: n.__setitem__(3, {"tuple": [{"eval": "1"}]}),
    "two values in one": lambda n: n.__setitem__(3, {"tuple": [{"node": 0, "torch": "torch.float32"}]}),
    "an unknown dtype": lambda n: n.__setitem__(3, {"tuple": [{"torch": "torch.load"}]}),
    "an unknown group": lambda n: n.__setitem__(3, {"tuple": [{"group": ["pp"]}]}),
    "another device": lambda n: n.__setitem__(3, {"tuple": [{"device": "cuda"}]}),
    "arguments that are none": lambda n: n.__setitem__(3, [1]),
}  # fmt: skip


@pytest.mark.parametrize("change", EVIL.values(), ids=list(EVIL))
def test_a_signed_entry_reaches_nothing_beyond_the_list(traced, cache, change):
    """With a checksum that fits, text can still name listed operators only; names cannot be code."""
    cache.save(KEY, traced.module, traced.mesh)

    def evil(stored: dict[str, Any]) -> None:
        change(next(n for n in stored["nodes"] if n[0] == "call_function"))

    resigned(cache, evil)
    assert traced.load(cache) is None


def test_signed_entries_that_are_broken_are_misses_and_never_errors(traced, cache):
    """100 entries with random values put anywhere in their JSON, checksums fitting: a program or a miss, no exception."""
    cache.save(KEY, traced.module, traced.mesh)
    good = (cache.folder / f"{KEY}.json").read_bytes()
    draw = random.Random(1)
    values = [
        None,
        True,
        -1,
        0,
        1 << 70,
        1.5,
        "",
        "x",
        "a.b.c",
        [],
        [[]],
        {},
        {"tuple": []},
        {"node": 0},
        {"tensor": [0]},
    ]

    def damage(value: Any) -> None:
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = draw.choice(keys)
            below = value[key]
            if isinstance(below, list | dict) and below and draw.random() < 0.8:
                value = below
                continue
            value[key] = draw.choice(values)
            return

    found = []
    for _ in range(100):
        (cache.folder / f"{KEY}.json").write_bytes(good)
        resigned(cache, damage)
        found.append(traced.load(cache) is not None)
    assert 0 < sum(found) < 75  # labels and shapes may change without notice; most damage may not


def test_foreign_entries_are_misses(traced, cache, tmp_path):
    """Another key's entry under this name, a folder, a pipe, a link to nowhere, no constants: overwritten misses."""
    cache.save("b" * 64, traced.module, traced.mesh)
    entry = cache.folder / f"{KEY}.json"
    entry.write_bytes((cache.folder / f"{'b' * 64}.json").read_bytes())
    assert traced.load(cache) is None and traced.load(cache, "b" * 64) is not None
    entry.unlink()
    os.mkfifo(entry)
    assert traced.load(cache) is None
    entry.unlink()
    entry.symlink_to(tmp_path / "nowhere")
    assert traced.load(cache) is None
    assert cache.save(KEY, traced.module, traced.mesh) and traced.load(cache) is not None
    for path in cache.folder.glob("*.safetensors"):
        path.unlink()
    assert traced.load(cache) is None
    entry.unlink()
    entry.mkdir()
    assert traced.load(cache) is None and not cache.save(KEY, traced.module, traced.mesh)


def test_a_folder_that_others_may_write_is_not_used(traced, cache):
    """Neither read nor written: whoever may write there could choose what is computed."""
    cache.save(KEY, traced.module, traced.mesh)
    cache.folder.chmod(0o777)
    assert traced.load(cache) is None and not cache.save(KEY, traced.module, traced.mesh)


def test_a_folder_that_cannot_be_made_is_a_miss(traced, tmp_path):
    """A file where the folder should be: nothing is stored, nothing fails."""
    (tmp_path / "file").touch()
    cache = TraceCache(tmp_path / "file" / "cache")
    assert traced.load(cache) is None and not cache.save(KEY, traced.module, traced.mesh)


def test_a_program_with_something_unknown_is_not_stored(traced, cache):
    """A Python function in the graph has no text: no entry."""
    graph = fx.Graph()
    graph.output([graph.call_function(len, (graph.placeholder("x"),))])
    assert not cache.save(KEY, fx.GraphModule(torch.nn.Module(), graph), traced.mesh)
    assert not cache.folder.exists() or not list(cache.folder.glob("*.json"))


def test_what_was_used_longest_ago_is_pruned_and_nothing_else(traced, cache):
    """Beyond the limit the oldest entries go; files with other names stay."""
    cache.folder.mkdir(mode=0o700)
    (cache.folder / "mine.json").touch()
    old = [cache.folder / f"{hashlib.sha256(str(i).encode()).hexdigest()}.json" for i in range(MOST_FILES)]
    for i, path in enumerate(old):
        path.touch()
        os.utime(path, (i + 1, i + 1))
    assert cache.save(KEY, traced.module, traced.mesh)
    assert [p.exists() for p in old[:3]] == [False, False, True]
    assert (cache.folder / "mine.json").exists() and traced.load(cache) is not None


def test_where_the_cache_is(monkeypatch):
    """$DTENGINE_CACHE, else in $XDG_CACHE_HOME, else in ~/.cache; nothing where the first is set to nothing."""
    assert cache_folder({"DTENGINE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"DTENGINE_CACHE": "", "XDG_CACHE_HOME": "/b"}) is None
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/dtengine")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_folder({}) == Path("/home/x/.cache/dtengine")


# --- descriptions -------------------------------------------------------------------------------------------------


def function_of(source: str, name: str = "f", **more: Any) -> Any:
    """Run source as a module of a person's and return one of its values."""
    module = types.ModuleType("of_a_person")
    module.__file__ = __file__
    sys.modules["of_a_person"] = module
    vars(module).update(more)
    exec(source, vars(module))
    return vars(module)[name]


BASE = "import torch, math\nSCALE = 2.0\ndef g(x): return x * SCALE\ndef f(x, k=1): return torch.relu(g(x)) + k"


@pytest.mark.parametrize(
    "source",
    [
        BASE.replace("2.0", "2.5"),
        BASE.replace("2.0", "2"),
        BASE.replace("k=1", "k=2"),
        BASE.replace("relu", "tanh"),
        BASE.replace("x * SCALE", "x + SCALE"),
        BASE.replace("def g(x): return x", "def g(x): return -x"),
    ],
)
def test_whatever_a_function_computes_with_is_described(source):
    """A global's value, a default, a called function's code, two levels down: each changes the digest."""
    assert digest(function_of(BASE)) == digest(function_of(BASE)) != digest(function_of(source))


def test_closures_are_described():
    """Optimizers differ by the constants that they close over, and by nothing else."""
    same = [digest(dt.adamw()), digest(dt.adamw(0.9, 0.95, 1e-8, 0.1))]
    others = [
        dt.adamw(beta1=0.8),
        dt.adamw(beta2=0.9),
        dt.adamw(eps=1e-6),
        dt.adamw(weight_decay=0.0),
        dt.sgd(),
        dt.sgd(0.9),
    ]
    assert len({*same, *map(digest, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return x * float(open('scale').read())",
        "import os\ndef f(x): return x * float(os.environ['SCALE'])",
        "import time\ndef f(x): return x * time.time()",
        "from random import random\ndef f(x): return x * random()",
        "def f(x):\n    import random\n    return x * random.random()",
        "count = 0\ndef f(x):\n    global count\n    count += 1\n    return x * count",
        "class Odd:\n    __slots__ = ()\nodd = Odd()\ndef f(x): return x * odd",
        "def f(x): return eval('x')",
        "import numpy as np\ndef f(x): return x * np.random.rand()",
        "import numpy\ndef f(x):\n    return x * numpy.load('scale.npy')[0]",
        "import torch\ndef f(x): return x * torch.load('scale.pt')",
    ],
)
def test_what_depends_on_more_than_itself_is_not_described(source):
    """Files, environment, time, random numbers, own counters and unknown objects: no digest, so no cache."""
    with pytest.raises(Undescribable):
        digest(function_of(source))
    assert program_key({"model": function_of(source)}) is None


def test_tensors_and_containers_are_described_by_value():
    """Equal values give equal digests, others do not; the order of a set does not matter, that of a dict does."""
    values: list[Any] = [
        *(torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0]), torch.zeros(2, 1)),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, (1, 2), [1, 2], 1, 1.0, True, "1", None, torch.float32, Path("1")),
    ]
    assert len({digest(v) for v in values}) == len(values)
    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"}) and digest(torch.zeros(2)) == digest(torch.zeros(2))


def test_digests_are_the_same_in_another_process():
    """Hashes of strings differ between processes; digests of models and optimizers do not."""
    code = (
        "import dtengine as dt; from dtengine.describe import digest; from dtengine.trace_cache import program_key\n"
        "print(digest((dt.load_model('llama'), dt.load_model('gpt'), dt.adamw())), program_key({'a': {'x', 'y', 'z'}}))"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and b"None" not in found.pop()
