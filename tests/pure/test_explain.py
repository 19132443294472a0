"""--explain: every parameter once, every rule with what became of it, on a mesh of any size."""

import io
import math
import re
import time
from functools import cache
from typing import NamedTuple

import pytest
from rich.console import Console
from torch.distributed.tensor import Replicate, Shard

from dtengine.config import Setup, resolve
from dtengine.explain import explain
from dtengine.layout import Layout
from dtengine.model import parameters
from dtengine.options import MeshOptions, ModelOptions, ProgramOptions, StepOptions
from dtengine.screens import bytes_text

SMALL = {"layers": 2, "embed": 24, "heads": 6, "vocab": 67, "seq": 15, "global_batch": 7}
CASES = [
    ("1", "fsdp", "llama"),
    ("rep=2,dp=2,tp=2", "fsdp", "gpt"),
    ("3x4", "zero2", "llama"),
    ("4", "zero1", "gpt"),
    ("2x2", "ddp", "llama"),
    ("rep=8,dp=64,tp=8", "fsdp", "llama"),
]
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=" ".join)


class Line(NamedTuple):
    """One line of layouts under a heading, and the line of skipped rules behind it."""

    layouts: tuple[str, ...]
    fired: set[str]
    placements: dict[str, str]
    size: str
    skipped: dict[str, str]


class Heading(NamedTuple):
    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    size: str
    lines: list[Line]


def read(text: str) -> list[Heading]:
    """Read what explain printed back, or fail on a line that is neither heading, layout nor skipped rules."""
    headings: list[Heading] = []
    for line in text.splitlines():
        if found := re.fullmatch(r"(\S+)  ([\w ]+)  \[([\d, ]*)\]  (\S+ \w+) whole", line):
            name, axes, shape, size = found.groups()
            dims = tuple(int(s) for s in shape.split(",") if s)
            named = () if axes == "scalar" else tuple(axes.split())
            headings.append(Heading(name, named, dims, size, []))
        elif found := re.fullmatch(r"  ([a-z, ]+): (.+?)  \|  (.+?)  \|  (\S+ \w+) a rank", line):
            layouts, fired, where, size = found.groups()
            placements = dict(part.split(" ", 1) for part in where.split("  "))
            rules = set() if fired == "whole" else set(fired.split(", "))
            headings[-1].lines.append(Line(tuple(layouts.split(", ")), rules, placements, size, {}))
        elif found := re.fullmatch(r"    skipped, (.+)", line):
            for group in found[1].split("; "):
                reason, rules = group.rsplit(": ", 1)
                for rule in rules.split(", "):
                    assert rule not in headings[-1].lines[-1].skipped
                    headings[-1].lines[-1].skipped[rule] = reason
        else:
            raise AssertionError(f"what is this? {line!r}")
    return headings


def show(setup: Setup) -> tuple[str, list[Heading], list[Heading]]:
    """Return the first line, the parameters and the activations that explain prints."""
    console = Console(record=True, width=1000, file=io.StringIO())
    explain(setup, console)
    first, params, activations = console.export_text().rstrip("\n").split("\n\n")
    lines = (params.partition("\n"), activations.partition("\n"))
    assert lines[0][0] == "Parameters, in each layout: placement over the mesh axes, bytes per rank (largest)"
    assert lines[1][0] == "Activations of one microbatch; Partial is a sum that the next step completes"
    return first, read(lines[0][2]), read(lines[1][2])


def make(mesh: str, plan: str, model: str, precision: str = "fp32", **sizes) -> Setup:
    program = ProgramOptions(precision=precision)  # type: ignore[arg-type]
    where = MeshOptions(mesh, plan)  # type: ignore[arg-type]
    return resolve(StepOptions(where, ModelOptions(model), program=program), **SMALL | sizes)


@cache
def shown(mesh: str, plan: str, model: str) -> tuple[Setup, str, list[Heading], list[Heading]]:
    setup = make(mesh, plan, model)
    return setup, *show(setup)


def layouts_of(setup: Setup) -> dict[str, Layout]:
    plan = setup.plan
    return {"params": plan.params, "grads": plan.grads, "optimizer": plan.optimizer, "compute": plan.compute}


def local_count(shape: tuple[int, ...], placements: tuple, sizes: dict[str, int]) -> int:
    """Count what the first rank, which has the largest part, holds."""
    dims = list(shape)
    for parts, placement in zip(sizes.values(), placements, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim] = -(-dims[placement.dim] // parts)
    return math.prod(dims)


@EACH_CASE
def test_the_first_line_says_which_plan(case):
    """Plan, mesh and number of ranks come first."""
    setup, first, *_ = shown(*case)
    assert first == f"plan {case[1]} on {setup.plan.mesh_text()}: {setup.plan.num_ranks} ranks"


@EACH_CASE
def test_every_parameter_is_named_once(case):
    """Each parameter has one heading with its axes, shape and bytes; blocks that are alike are shown once."""
    setup, _, params, _ = shown(*case)
    expected = {}
    for name, param in parameters(setup.model.specs(setup.model_config)).items():
        expected[re.sub(r"^blocks\.\d+", "blocks.*", name)] = (param.names, param.shape)
    assert [p.name for p in params] == list(expected)
    for p in params:
        assert (p.axes, p.shape) == expected[p.name]
        assert p.size == bytes_text(4 * math.prod(p.shape))


@EACH_CASE
def test_every_rule_fired_or_was_skipped_for_its_reason(case):
    """For every parameter and layout each rule stands once: among those that fired, or with why it did not."""
    setup, _, params, _ = shown(*case)
    layouts = layouts_of(setup)
    for p in params:
        assert sorted(name for line in p.lines for name in line.layouts) == sorted(layouts)
        for line in p.lines:
            for name in line.layouts:
                _, decisions = layouts[name].decide(p.axes, setup.plan.sizes)
                rules = {f"{d.rule.logical}→{d.rule.mesh_axis}": d.reason for d in decisions}
                assert line.fired == {rule for rule, reason in rules.items() if not reason}
                why = {rule: "no such dim" if r.startswith("no ") else r for rule, r in rules.items() if r}
                assert line.skipped == why


@EACH_CASE
def test_placements_and_bytes_of_parameters_are_those_of_the_layout(case):
    """What is printed is what the layout places, and the bytes of the rank that holds most."""
    setup, _, params, _ = shown(*case)
    for p in params:
        for line in p.lines:
            for name in line.layouts:
                placed = layouts_of(setup)[name].placements(p.axes, setup.plan.sizes)
                text = [f"dim {x.dim}" if isinstance(x, Shard) else "whole" for x in placed]
                assert line.placements == dict(zip(setup.plan.sizes, text, strict=True))
                assert line.size == bytes_text(4 * local_count(p.shape, placed, setup.plan.sizes))


@EACH_CASE
def test_activations_are_laid_out_as_the_compute_layout_says(case):
    """Activations from the embedding to the loss are shown as the compute layout places them, or as a sum to complete
    where it would have them whole."""
    setup, _, _, activations = shown(*case)
    assert activations
    assert {"embed", "blocks.*", "head"} == {a.name for a in activations}
    residual = ("batch", "res_seq", "embed")
    for site in ("embed", "blocks.*", "head"):
        assert any(a.axes == residual for a in activations if a.name == site) or setup.plan.num_ranks == 1
    assert activations[-1].axes == ()  # the loss
    for a in activations:
        (line,) = a.lines
        placed = setup.plan.compute.placements(a.axes, setup.plan.sizes)
        for mesh_axis, expected in zip(setup.plan.sizes, placed, strict=True):
            found = line.placements[mesh_axis]
            if expected == Replicate():
                assert found in ("whole", "Partial")
                assert found == "whole" or setup.plan.sizes[mesh_axis] > 1
            else:
                assert isinstance(expected, Shard)
                assert found == f"dim {expected.dim}"
        assert line.size == bytes_text(4 * local_count(a.shape, placed, setup.plan.sizes))


def test_a_mesh_of_4096_ranks_is_explained_in_seconds():
    """No rank is started: 4,096 ranks of a small model take seconds in one process."""
    start = time.monotonic()
    setup = make("rep=8,dp=64,tp=8", "fsdp", "gpt")
    first, params, activations = show(setup)
    assert time.monotonic() - start < 20
    assert first.endswith("4096 ranks")
    assert params and activations


def test_the_number_of_blocks_changes_nothing():
    """Five blocks that are alike read as two do."""
    assert show(make("2x2", "fsdp", "llama", layers=5)) == show(make("2x2", "fsdp", "llama", layers=2))


MIXED = """
from dtengine.model import Model, Param

def specs(config):
    table = Param("vocab embed", (config.vocab, config.embed), 0.1)
    blocks = [{"scale": Param("embed", (config.embed,), mean=1.0)}, {"scale": Param("mlp embed", (4, config.embed))}]
    return {"embed": {"table": table}, "blocks": blocks, "head": {"out": table}}

MODEL = Model(
    specs,
    lambda params, batch, ops: ops.embedding(params["table"], batch.tokens),
    lambda params, x, ops: x,
    lambda params, x, ops: ops.einsum(
        "batch seq embed, vocab embed -> batch seq vocab", ops.constrain(x, "batch seq embed"), params["out"]
    ),
)
"""


def test_blocks_that_differ_are_both_shown(tmp_path):
    """A block whose parameter has another shape than its namesake in an earlier block is shown too: silence would hide
    how it is laid out."""
    path = tmp_path / "mixed.py"
    path.write_text(MIXED)
    _, params, _ = show(make("2x2", "fsdp", str(path)))
    assert {p.shape for p in params} == {(67, 24), (24,), (4, 24)}


def test_bytes_follow_the_precision():
    """Under bf16 the compute layout and activations take 2 bytes an element, stored layouts 4; under fp64 all take 8."""
    for precision, stored, used in (("bf16", 4, 2), ("fp64", 8, 8)):
        setup = make("2x2", "fsdp", "llama", precision)
        _, params, activations = show(setup)
        for p in params:
            for line in p.lines:
                placed = layouts_of(setup)[line.layouts[0]].placements(p.axes, setup.plan.sizes)
                width = used if line.layouts == ("compute",) else stored
                assert line.size == bytes_text(width * local_count(p.shape, placed, setup.plan.sizes))
        logits = next(a for a in activations if "vocab" in a.axes)
        assert logits.size == bytes_text(used * math.prod(logits.shape))
