"""The screens at the start and the end of a run, and the small texts on them."""

import html
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dtengine.layout import LOGICAL_AXES, Layout, Plan

Facts = Sequence[tuple[str, str]]

SAMPLE_LINES = 16


def count_text(number: float) -> str:
    """Write a number for people, to three digits: 950, 12.3k, 4.56M, 7.00B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{_three(number / size)}{unit}"
    return f"{number:.0f}"


def bytes_text(number: float) -> str:
    """Write a number of bytes for people, in powers of 1000: 950 B, 12.3 kB, 4.56 MB, 7.00 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{_three(number / size)} {unit}"
    return f"{number:.0f} B"


def _three(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"


def batch_text(plan: Plan, microbatches: int, microbatch: int) -> str:
    """Write the global batch as its factors: "32 = 1 rep x 2 dp x 1 microbatches x 16"."""
    rep, dp = plan.sizes.get("rep", 1), plan.sizes.get("dp", 1)
    return f"{rep * dp * microbatches * microbatch} = {rep} rep x {dp} dp x {microbatches} microbatches x {microbatch}"


def clean(text: str, encoding: str = "utf-8") -> str:
    """Make text safe to print: control characters become visible, tabs spaces, and all of it fits the encoding.

    Generated text holds anything: an escape code would repaint the terminal, a carriage return hide a line.
    """

    def visible(char: str) -> str:
        if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
            return char
        return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"  # U+2400: control pictures

    shown = "".join(map(visible, text.replace("\r\n", "\n").replace("\t", "    ")))
    return shown.encode(encoding, "replace").decode(encoding)


# --- status.json and TensorBoard ----------------------------------------------------------------------------------


def layout_rows(plan: Plan, axes: Collection[str] | None = None) -> tuple[list[tuple[str, ...]], list[str]]:
    """Tabulate what splits what.

    Args:
        plan: the plan; mesh axes of size 1 split nothing.
        axes: logical axes that the model has; None for all.

    Returns:
        (one row for each split logical axis: its name and the mesh axes that split it in params, grads, optimizer and
        compute, "" for none; notes to read with it). "(dp)" is a fallback: dp splits this axis only in a parameter
        without the axis that it takes first, and only one axis of it.
    """
    layouts = (plan.params, plan.grads, plan.optimizer, plan.compute)
    names = dict.fromkeys([*LOGICAL_AXES, *(rule.logical for layout in layouts for rule in layout.rules)])
    shown = [name for name in names if axes is None or name in axes]
    rows = [(name, *(_cell(layout, name, plan) for layout in layouts)) for name in shown]
    rows = [row for row in rows if any(row[1:])]
    staged = plan.sizes.get("pp", 1) > 1
    if not rows:
        within = "A rank holds the layers of its stages; within a stage nothing is split"
        return [], [f"{within}." if staged else "Nothing is split: every rank holds and computes all of it."]
    first, *rest = [rule.logical for rule in plan.optimizer.rules if rule.mesh_axis == "dp"] or [""]
    fallbacks = [name for name in rest if any(row[0] == name and "(dp)" in row for row in rows)]
    notes = (
        [f"(dp): a parameter with no {first} is split over dp on the first that it has of {', '.join(fallbacks)}."]
        if fallbacks
        else []
    )
    return rows, [*notes, f"Every other axis is whole on each rank{' of a stage' * staged}."]


def _cell(layout: Layout, logical: str, plan: Plan) -> str:
    """Name the mesh axes that split a tensor of this one axis; dp rules after the first are its fallbacks."""
    taken, _ = layout.decide((logical,), plan.sizes)
    first = next((rule.logical for rule in layout.rules if rule.mesh_axis == "dp"), None)
    return ", ".join("(dp)" if m == "dp" and logical != first else m for m in plan.sizes if m in taken)


def start_screen(
    console: Console,
    plan: Plan,
    facts: Facts,
    *,
    title: str = "dtengine",
    warnings: Sequence[str] = (),
    axes: Collection[str] | None = None,
) -> None:
    """Print one screen of what is about to run.

    Args:
        console: where to.
        plan: gives mesh, plan and the table of layouts.
        facts: further (label, value) lines, in this order.
        title: of the screen.
        warnings: one paragraph each.
        axes: logical axes that the model has; None for all.
    """
    rows, notes = layout_rows(plan, axes)
    dash = "-" if console.options.ascii_only else "–"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", pad_edge=False)
    for heading in ("split over", "params", "grads", "optimizer", "compute"):
        table.add_column(heading)
    for name, *cells in rows:
        table.add_row(Text(name), *(Text(cell or dash, "green" if cell else "dim") for cell in cells))
    parts: list[RenderableType] = [_grid(_plan_facts(plan, facts), console), *([table] if rows else [Text()])]
    parts += [Text(note, "dim") for note in notes]
    if warnings:
        parts += [Text(), *(Text(clean(f"warning: {text}", console.encoding), "yellow") for text in warnings)]
    console.print(_panel(Group(*parts), title, console))


def plan_text(plan: Plan, facts: Facts, axes: Collection[str] | None = None) -> str:
    """Return what the start screen says as Markdown, for TensorBoard's text tab."""
    rows, notes = layout_rows(plan, axes)
    lines = ["| | |", "|---|---|", *(_markdown_row(fact) for fact in _plan_facts(plan, facts)), ""]
    if rows:
        lines += ["| split over | params | grads | optimizer | compute |", "|---|---|---|---|---|"]
        lines += [*(_markdown_row([cell or "–" for cell in row]) for row in rows), ""]
    return "\n".join(lines + notes) + "\n"


def end_screen(console: Console, facts: Facts, sample: str | None, commands: Facts) -> None:
    """Print how the run ended.

    Args:
        console: where to.
        facts: (label, value) lines: final losses beside the bigram's, files.
        sample: generated text, any characters; None for none.
        commands: (what for, command) to type next; printed so that they can be copied, never wrapped.
    """
    console.print(_panel(_grid(facts, console), "finished", console))
    if sample is not None:
        lines = Text(clean(sample, console.encoding)).wrap(console, _width(console) - 4)
        more = [Text(f"... {len(lines) - SAMPLE_LINES} more lines", "dim")] if len(lines) > SAMPLE_LINES else []
        console.print(_panel(Group(*lines[:SAMPLE_LINES], *more), "sample", console))
    for what, command in commands:
        console.print(Text(clean(f"# {what}", console.encoding), "dim"), soft_wrap=True)
        console.print(Text(clean(command, console.encoding), "bold"), soft_wrap=True)


MEMORY = {  # rows of the table, and the kinds that each adds up
    "parameters": ("parameters",),
    "optimizer state": ("optimizer",),
    "gradients": ("buffers", "gradients"),
    "activations": ("activations",),
    "gathered parameters": ("gathered",),
    "other": ("batch", "constants", "temporaries"),
    "total at the peak": ("total",),
    "on the host": ("host",),
}


def memory_rows(ranks: Sequence[Mapping[str, int]], stages: int = 1) -> list[tuple[str, ...]]:
    """Tabulate what ranks hold: a heading, then (what, on the first rank of each stage, the largest over the mean).

    Args:
        ranks: {kind: bytes} of each rank, as MemoryEstimate.numbers; what no rank holds has no row.
        stages: pipeline ranks; of many the first ones and the last are shown.
    """
    each = len(ranks) // stages
    shown = list(range(stages)) if stages <= 6 else [*range(5), stages - 1]
    names = [f"rank {stage * each}" for stage in shown]
    rows = [("memory of a step", *names, "largest / mean")]
    for name, kinds in MEMORY.items():
        sizes = [sum(rank[kind] for kind in kinds) for rank in ranks]
        if any(sizes):
            cells = (bytes_text(sizes[stage * each]) for stage in shown)
            rows.append((name, *cells, f"{max(sizes) * len(sizes) / sum(sizes):.2f}"))
    return rows


def memory_table(console: Console, ranks: Sequence[Mapping[str, int]], stages: int = 1) -> None:
    """Print what ranks will hold, as ``memory_rows`` says."""
    heading, *rows = memory_rows(ranks, stages)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", pad_edge=False)
    for name in heading:
        table.add_column(name, justify="left" if name == heading[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def memory_text(ranks: Sequence[Mapping[str, int]], stages: int = 1) -> str:
    """Return ``memory_rows`` as Markdown, for TensorBoard's text tab."""
    heading, *rows = memory_rows(ranks, stages)
    lines = [_markdown_row(heading), "|---" * len(heading) + "|", *map(_markdown_row, rows)]
    return "\n".join(lines) + "\n"


def _plan_facts(plan: Plan, facts: Facts) -> Facts:
    ranks = f"{plan.num_ranks} rank" + "s" * (plan.num_ranks > 1)
    return [("mesh", f"{plan.mesh_text()} ({ranks})"), ("plan", plan.name), *facts]


def _grid(facts: Facts, console: Console) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(Text(clean(label, console.encoding)), Text(clean(value, console.encoding)))
    return grid


def _panel(content: RenderableType, title: str, console: Console) -> Panel:
    heading = Text(clean(title, console.encoding), "bold")
    return Panel(content, title=heading, title_align="left", border_style="dim", width=_width(console))


def _width(console: Console) -> int:
    return min(console.width, 100)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(clean(cell), quote=False)) for cell in cells)
    return f"| {' | '.join(cell.replace(chr(10), ' ') for cell in escaped)} |"
