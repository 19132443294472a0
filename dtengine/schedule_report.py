"""What ``python -m dtengine.schedule`` prints: one schedule beside what is published about it, or all in a table."""

import math
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from dtengine.pipeline.actions import Schedule
from dtengine.pipeline.formulas import FORMULAS, Formula, Setting
from dtengine.pipeline.grid import grid
from dtengine.pipeline.orders import Problem
from dtengine.pipeline.simulate import Costs, Simulation


class Row(NamedTuple):
    """A schedule and what the simulator says about it."""

    schedule: Schedule
    costs: Costs
    simulation: Simulation

    @property
    def chunks(self) -> int:
        """Stages a rank."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def published(self) -> Formula | None:
        """Formulas of the schedule."""
        return FORMULAS.get(self.schedule.name)

    @property
    def setting(self) -> Setting | None:
        """What the formulas take; None where stages differ or sends take time, for which there are none."""
        table = self.costs.per_stage(self.schedule.num_stages)
        if any(table["send"]) or any(min(times) != max(times) for times in table.values()):
            return None
        f, i, w = (table[kind][0] for kind in "FIW")
        return Setting(self.schedule.num_ranks, self.schedule.num_microbatches, self.chunks, f, i, w)

    @property
    def published_bubble(self) -> float | None:
        """Bubble by its formula, where that holds."""
        enough = self.schedule.num_microbatches >= 2 * self.schedule.num_ranks
        return self.published.bubble(self.setting) if self.published and self.setting and enough else None

    @property
    def published_live(self) -> float | None:
        """Peak of live stage-microbatches by its formula, which needs no costs."""
        if self.published is None:
            return None
        sizes = Setting(self.schedule.num_ranks, self.schedule.num_microbatches, self.chunks, 1.0, 1.0, 1.0)
        return self.published.memory(sizes)

    @property
    def published_share(self) -> float | None:
        """The same as a share of that rank's time."""
        bubble, setting = self.published_bubble, self.setting
        if bubble is None or setting is None:
            return None
        work = setting.m * setting.v * setting.whole
        return bubble / (bubble + work) if bubble + work else 0.0


def show(row: Row) -> None:
    """Print one schedule: grid, ranks, and what is published about it."""
    schedule, simulation = row.schedule, row.simulation
    console = Console(highlight=False)
    place = "" if row.chunks == 1 else f", {row.chunks} stages a rank (ranks {' '.join(map(str, schedule.rank_of))})"
    print(f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches{place}\n")
    print(cut(grid(schedule)) + "\n")
    table = Table(box=box.SIMPLE)
    for name in ("rank", "busy", "bubble", "share", "peak live", "peak waiting for W"):
        table.add_column(name, justify="right")
    for rank, r in enumerate(simulation.ranks):
        table.add_row(
            str(rank), number(r.busy), number(r.bubble), f"{r.share:.1%}", str(r.peak_live), str(r.peak_waiting)
        )
    console.print(table)
    bound = Problem(schedule.rank_of, schedule.num_microbatches, row.costs).bound
    table = Table(box=box.SIMPLE)
    for name in ("", "simulated", "published", "formula"):
        table.add_column(name, justify="right" if name in ("simulated", "published") else "left")
    formula = row.published
    bubble, live = (formula.bubble_text, formula.memory_text) if formula else ("", "")
    above = simulation.makespan / bound - 1 if bound else 0.0
    table.add_row("time", number(simulation.makespan), "", f"any order: at least {number(bound)}; {above:.1%} above")
    table.add_row("bubble of the rank that waits most", number(simulation.bubble), number(row.published_bubble), bubble)
    table.add_row("as a share of its time", percent(simulation.bubble_share), percent(row.published_share), "")
    table.add_row("live activations", str(max(simulation.peak_live)), number(row.published_live), live)
    console.print(table)
    if formula:
        console.print(f"p ranks, m microbatches (at least 2p), v stages a rank; f, i, w of one stage. {formula.source}")
    else:
        console.print("Nothing is published for this schedule.")
    if formula and row.setting is None:
        console.print("The bubble's formula is for stages of equal costs and sends that take no time.")


def cut(text: str) -> str:
    """Cut a grid to the width of the terminal; whole where it goes into a file."""
    width = shutil.get_terminal_size().columns
    lines = text.split("\n")
    if not sys.stdout.isatty() or max(map(len, lines)) <= width:
        return text
    return "\n".join(
        [*(line[: width - 4] + " ..." * (len(line) > width - 4) for line in lines), "(--picture shows all)"]
    )


def show_all(rows: Sequence[Row], memory_limit: int | None) -> None:
    """Print schedules side by side; they share a model, so that their times compare."""
    first = rows[0].schedule
    title = f"{first.num_ranks} ranks, {first.num_microbatches} microbatches, one model cut evenly into the stages"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for name in ("stages", "time", "bubble", "paper", "live", "paper", "per rank"):
        table.add_column(name, justify="right", no_wrap=True)
    fits = [max(row.simulation.peak_live) <= (memory_limit or math.inf) * row.chunks for row in rows]
    best = min((row.simulation.makespan for row, fit in zip(rows, fits, strict=True) if fit), default=0.0)
    for row, fit in zip(rows, fits, strict=True):
        simulation, most = row.simulation, max(row.simulation.peak_live)
        table.add_row(
            row.schedule.name,
            str(row.chunks),
            number(simulation.makespan) + (" *" if fit and simulation.makespan <= best * (1 + 1e-9) else "  "),
            percent(simulation.bubble_share),
            percent(row.published_share),
            str(most),
            number(row.published_live),
            number(most / row.chunks) + ("" if fit else " >"),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "time: * is the least. bubble: of the rank that waits most, from its first start to its last end: schedules that "
        "take the same time may wait differently; paper: where stages are alike, sends free, and the formula holds. live: "
        "stage-microbatches of activations of the fullest rank; per rank: the same in microbatches of a rank's whole part"
        + (f"; > is above --memory-limit {memory_limit}." if memory_limit else ".")
    )
    console.print("Sources: --name NAME names each.")


def number(value: float | None) -> str:
    """Return a number as text, empty for none."""
    return "" if value is None else f"{value:.6g}"


def percent(value: float | None) -> str:
    """Return a share as text, empty for none."""
    return "" if value is None else f"{value:.1%}"
