"""The cache of programs on real ranks: a second start traces nothing and computes the same bits; any change traces."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from commands import run

import dtengine as dt
from dtengine import trace_cache
from dtengine.passes import PASSES, drop_dead
from dtengine.shard import gather
from dtengine.trace_cache import TraceCache

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

ALL = {"accumulate", "step", "evaluate 2x15"}
MODEL = """
from dataclasses import replace
from dtengine.models import llama
from helper_of_a_model import scaled

SCALE = 2.0

def head(params, x, ops):
    x = ops.local(lambda x: scaled(x) * SCALE, "batch res_seq embed -> batch res_seq embed", x)
    return llama.MODEL.head(params, x, ops)

MINE = replace(llama.MODEL, head=head)
"""
HELPER = "FACTOR = 0.5\ndef scaled(x): return x * FACTOR\n"


class Case(NamedTuple):
    """A start: what shapes its programs, and which of the engine's values a test has changed."""

    cache: Path
    model: str = "llama"
    mesh: str = "2"
    plan: str = "fsdp"
    seq: int = 15
    microbatches: int = 2
    beta2: float = 0.95
    disable_pass: tuple[str, ...] = ()
    patch: str = ""


def drop_dead_otherwise(graph: Any) -> None:
    """A pass that was rewritten."""
    drop_dead(graph)


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda patch: None,
    "sources": lambda patch: patch.setattr(trace_cache, "SOURCES", "0" * 64),
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.13.1"),
    "a pass": lambda patch: patch.setitem(PASSES, "drop-dead", PASSES["drop-dead"]._replace(run=drop_dead_otherwise)),
}


def train(rank: int, case: Case) -> tuple[set[str], str]:
    """Two steps and an evaluation: (programs that came from the cache, digest of every number)."""
    sys.modules.pop("helper_of_a_model", None)
    sizes, model = dt.parse_mesh(case.mesh), dt.load_model(case.model)
    config = dt.configure(model, case.model, layers=1, embed=16, heads=2, vocab=67, seq=case.seq)
    plan, mesh = dt.make_plan(case.plan, sizes, config.axis_sizes), dt.build_mesh(sizes)
    options = dt.StepConfig(2, case.seq, microbatches=case.microbatches, disable_pass=case.disable_pass)
    with pytest.MonkeyPatch.context() as patch:
        PATCHES[case.patch](patch)
        optimizer, cache = dt.adamw(beta2=case.beta2), TraceCache(case.cache)
        step = dt.make_step(model, config, plan, mesh, optimizer, options, lambda _: 0.01, cache=cache)
        state, found = dt.init_state(step), hashlib.sha256()
        draw = torch.Generator().manual_seed(mesh.data_coordinate(plan.data_axes))
        batches: list[dt.Batch] = []
        for _ in range(2):
            batches = []
            for _ in range(case.microbatches):
                tokens = torch.randint(0, 67, (2, case.seq), generator=draw)
                batches.append(dt.Batch(tokens, tokens.roll(-1, 1), torch.ones(2, case.seq), torch.arange(2)))
            state, metrics = step(state, batches)
            found.update(f"{metrics.loss.item()!r} {metrics.norm.item()!r}".encode())
        found.update(repr(step.evaluate(state, batches)).encode())
        for param in gather(list(state.params.values()), mesh):
            found.update(param.numpy().tobytes())
    return step.recalled, found.hexdigest()


def start(pool: Pool, case: Case) -> tuple[set[str], str]:
    """Start on all ranks; they agree on what came from the cache, and on every number."""
    ranks = 1
    for size in dt.parse_mesh(case.mesh).values():
        ranks *= size
    results = pool.run(ranks, train, case)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("mesh, plan", [("2", "fsdp"), ("2x2", "fsdp"), ("1", "ddp"), ("3", "zero2")])
def test_a_second_start_traces_nothing_and_computes_the_same_bits(pool, tmp_path, mesh, plan):
    """Every program of the second start comes from the cache; losses, norms and parameters are the same bits."""
    case = Case(tmp_path / "cache", mesh=mesh, plan=plan)
    recalled, first = start(pool, case)
    assert recalled == set()
    recalled, second = start(pool, case)
    assert recalled == ALL and second == first


def write_model(folder: Path, model: str = MODEL, helper: str = HELPER) -> str:
    """Write a person's model and the module that it imports; returns what --model takes."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(model)
    (folder / "helper_of_a_model.py").write_text(helper)
    return f"{folder / 'mine.py'}:MINE"


@pytest.fixture(scope="module")
def filled(pool, tmp_path_factory) -> Case:
    """A cache that holds the programs of a built-in model's start."""
    case = Case(tmp_path_factory.mktemp("filled") / "cache")
    start(pool, case)
    return case


@pytest.mark.parametrize(
    "change",
    [
        *({"mesh": "1x2"}, {"plan": "ddp"}, {"seq": 14}, {"microbatches": 3}, {"beta2": 0.9}, {"model": "gpt"}),
        *({"disable_pass": ("drop-dead",)}, {"patch": "sources"}, {"patch": "torch"}, {"patch": "a pass"}),
    ],
    ids=str,
)
def test_another_start_traces(pool, filled, change):
    """Mesh, plan, sequence, microbatches, optimizer, passes, engine, torch: where one differs, nothing comes from the cache
    that was traced for the other."""
    recalled, _ = start(pool, filled._replace(**change))
    assert recalled <= {"evaluate 2x15"} and not (recalled and "patch" in change)
    assert start(pool, filled)[0] == ALL


def test_a_change_in_a_model_file_traces(pool, tmp_path, monkeypatch):
    """A constant of a person's model, or of a module beside it: another program; changed back: the stored one."""
    monkeypatch.syspath_prepend(str(tmp_path / "model"))
    found = []
    for model, helper in [
        (MODEL, HELPER),
        (MODEL.replace("2.0", "3.0"), HELPER),
        (MODEL, HELPER.replace("0.5", "0.25")),
    ]:
        case = Case(tmp_path / "cache", model=write_model(tmp_path / "model", model, helper))
        recalled, first = start(pool, case)
        assert recalled == set()
        assert start(pool, case) == (ALL, first)
        found.append(first)
    assert len(set(found)) == 3
    write_model(tmp_path / "model")
    assert start(pool, case) == (ALL, found[0])


def test_where_one_rank_has_no_entry_all_trace(pool, tmp_path):
    """To trace takes collectives of all ranks: one that lacks its entry makes all of them trace, and writes it anew."""
    case = Case(tmp_path / "cache")
    _, first = start(pool, case)
    for path in sorted(case.cache.glob("*.json"))[::2]:
        content = path.read_bytes()
        for bad in (None, content[:-1], b"", content.replace(b"aten.", b"atem.")):
            path.unlink() if bad is None else path.write_bytes(bad)
            recalled, again = start(pool, case)
            assert len(recalled) == 2 and again == first
            assert path.read_bytes() == content
    assert start(pool, case)[0] == ALL


def save_often(folder: Path, name: str, source: str, count: int) -> None:
    """Write one entry many times."""
    cache = TraceCache(folder)
    head, body = Path(source).read_bytes().split(b"\n")
    for _ in range(count):
        cache._write(name, head + b"\n" + body)


def test_two_processes_that_write_at_once_leave_a_valid_entry(pool, filled, tmp_path):
    """Each publishes by renaming a whole file: at every moment there is a whole entry, and no part stays behind."""
    path = min(filled.cache.glob("*.json"))
    content = path.read_bytes()
    source = tmp_path / "source"
    source.write_bytes(content)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=save_often, args=(filled.cache, path.name, str(source), 200)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() == content
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert not list(filled.cache.glob("*.tmp"))
    assert start(pool, filled)[0] == ALL


def test_the_command_says_where_its_programs_come_from(tmp_path):
    """First "traced in", then "from the cache in", with the same losses; --no-trace-cache traces and writes nothing."""
    sizes = "--mesh 2 --layers 1 --embed 16 --heads 2 --seq 15 --global-batch 4 --eval-sequences 7 --sample 0 --steps 2"
    environ = {"DTENGINE_CACHE": str(tmp_path / "cache")}
    said, losses, stored = [], [], set[str]()
    for number, more in enumerate(["", "", "--no-trace-cache"]):
        done = run("dtengine.train", f"{sizes} {more} --run-dir run{number}", tmp_path, environ=environ)
        assert (done.code, done.err) == (0, "")
        said.append([way for way in ("traced in", "program from the cache in") if way in done.out])
        losses.append([line for line in done.out.splitlines() if line.startswith("step 2/2")][0].split()[3])
        stored = {p.name for p in (tmp_path / "cache").iterdir()}
        assert all(json.loads(p.read_bytes().partition(b"\n")[0]) for p in (tmp_path / "cache").glob("*.json"))
    assert said == [["traced in"], ["program from the cache in"], ["traced in"]]
    assert len(set(losses)) == 1 and len([n for n in stored if n.endswith(".json")]) == 2 * 2
