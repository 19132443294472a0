"""Say how every parameter and activation is laid out, which rule did it, and why the others did not."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from dtengine.config import Setup
from dtengine.layout import Axes, Layout, Placements, local_bounds
from dtengine.mesh import build_mesh
from dtengine.model import buffers, parameters
from dtengine.ops import Recorded
from dtengine.optim import sgd
from dtengine.parameters import COMPUTE_DTYPES, has_master
from dtengine.screens import bytes_text
from dtengine.step import make_step
from dtengine.torch_private import fake_process_group


def explain(setup: Setup, console: Console) -> None:
    """Print the layout of every parameter and activation of a step.

    Runs in one process, whatever the size of the mesh: activations come from a forward pass of rank 0 on fake tensors.
    Blocks that are alike are shown once.
    """
    console.print(
        f"[bold]plan {setup.plan.name} on {setup.plan.mesh_text()}[/]: {setup.plan.num_ranks} ranks", highlight=False
    )
    if setup.schedule is not None:
        cut = ", ".join(map(str, setup.layers))
        console.print(f"schedule {setup.schedule.name}; layers of its stages: {cut}; below, the ranks of one stage")
    within = tuple((name, size) for name, size in setup.plan.mesh if name != "pp") or (("dp", 1),)
    plan = replace(setup.plan, mesh=within)
    sizes = plan.sizes
    wide = 8 if setup.step.precision == "fp64" else 4
    master = has_master(plan, setup.step.precision)  # stored in the compute dtype
    specs = setup.model.specs(setup.model_config)
    params = parameters(specs)
    console.print("\n[bold]Parameters[/], in each layout: placement over the mesh axes, bytes per rank (largest)")
    for name, param in _once(params.items(), lambda p: (p.axes, p.shape)):
        _heading(console, name, param.names, param.shape, wide)
        alike: dict[tuple, list[Layout]] = {}
        for layout in (plan.params, plan.grads, plan.optimizer, plan.compute):
            alike.setdefault((layout.rules, layout is plan.params and master), []).append(layout)
        for layouts in alike.values():
            narrow = layouts == [plan.compute] or (master and layouts == [plan.params])
            used = COMPUTE_DTYPES[setup.step.precision].itemsize if narrow else wide
            _line(console, layouts, param.names, param.shape, sizes, used)

    if held := buffers(specs):
        console.print("\n[bold]Buffers[/], carried from pass to pass and not learned")
    for name, buffer in _once(held.items(), lambda b: (b.axes, b.shape)):
        _heading(console, name, buffer.names, buffer.shape, wide)
        _line(console, [plan.compute], buffer.names, buffer.shape, sizes, wide)

    found: dict[str, Recorded] = {}

    def record(value: Recorded) -> None:
        found.setdefault(f"{value.site} {' '.join(value.axes)} {value.shape} {value.placements}", value)

    with fake_process_group(plan.num_ranks):
        mesh = build_mesh(sizes)
        step = make_step(setup.model, setup.model_config, plan, mesh, sgd(), setup.step, lambda step: 0.0)
        step.record(record)
    console.print("\n[bold]Activations[/] of one microbatch; Partial is a sum that the next step completes")
    width = COMPUTE_DTYPES[setup.step.precision].itemsize
    for _, value in _once((key, v) for key, v in found.items()):
        site = re.sub(r"^blocks\.\d+", "blocks.*", value.site)
        _heading(console, site or "batch", value.axes, value.shape, width)
        _line(console, [plan.compute], value.axes, value.shape, sizes, width, value.placements)


def _once(items, what=lambda value: None):  # type: ignore[no-untyped-def]
    """Yield the first of items that differ in the number of their block only."""
    seen = set()
    for name, value in items:
        general = re.sub(r"^blocks\.\d+", "blocks.*", name)
        if (general, what(value)) not in seen:
            seen.add((general, what(value)))
            yield general, value


def _heading(console: Console, name: str, axes: Axes, shape: Sequence[int], width: int) -> None:
    size = bytes_text(math.prod(shape) * width)
    console.print(
        f"[cyan]{escape(name)}[/]  {' '.join(axes) or 'scalar'}  {escape(str(list(shape)))}  {size} whole",
        highlight=False,
    )


def _line(
    console: Console,
    layouts: Sequence[Layout],
    axes: Axes,
    shape: Sequence[int],
    sizes: dict[str, int],
    width: int,
    placements: Placements | None = None,
) -> None:
    taken, decisions = layouts[0].decide(axes, sizes)
    laid = layouts[0].placements(axes, sizes) if placements is None else placements
    names = ", ".join(layout.name for layout in layouts)
    fired = ", ".join(f"{logical}→{mesh_axis}" for mesh_axis, logical in taken.items()) or "whole"
    local = local_bounds(shape, laid, tuple(sizes.values()), (0,) * len(sizes))
    size = bytes_text(math.prod(stop - start for start, stop in local) * width)
    where = "  ".join(f"{m} {_short(p)}" for m, p in zip(sizes, laid, strict=True))
    console.print(f"  [green]{names}[/]: {fired}  |  {where}  |  {size} a rank", highlight=False)
    skipped: dict[str, list[str]] = {}
    for decision in decisions:
        if decision.reason:
            reason = "no such dim" if decision.reason.startswith("no ") else decision.reason
            skipped.setdefault(reason, []).append(f"{decision.rule.logical}→{decision.rule.mesh_axis}")
    if skipped:
        text = "; ".join(f"{reason}: {', '.join(rules)}" for reason, rules in skipped.items())
        console.print(f"    [dim]skipped, {escape(text)}[/]", highlight=False)


def _short(placement: object) -> str:
    text = str(placement)  # S(0), R, P(sum)
    return text.replace("P(sum)", "Partial").replace("R", "whole").replace("S(", "dim ").replace(")", "")
