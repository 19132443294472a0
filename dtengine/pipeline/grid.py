"""A schedule as text: one line a rank, and under it what is wrong there."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtengine.pipeline.actions import Cell, Schedule

SHOWN_FAULTS = 8  # of an error; the rest are counted
SHOWN_COLUMNS = 6  # of an error's grid on each side of the first faulty cell


class Fault(NamedTuple):
    """What is wrong with a schedule.

    Attributes:
        rank: the pipeline rank where it shows.
        step: number of the cell in the rank's line, from 0 and with empty cells; None where no cell is to blame.
        text: a sentence.
    """

    rank: int
    step: int | None
    text: str

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.step is None else f"rank {self.rank}, step {self.step}"
        return f"{where}: {self.text}"


class ScheduleError(ValueError):
    """A schedule that cannot run.

    Attributes:
        faults: all that is wrong with it.
    """

    def __init__(self, name: str, ranks: Sequence[Sequence[Cell]], faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        shown = self.faults[:SHOWN_FAULTS]
        lines = [f"schedule {name}, {fault}" for fault in shown]
        if len(self.faults) > len(shown):
            lines.append(f"and {len(self.faults) - len(shown)} more")
        middle = next((fault.step for fault in shown if fault.step is not None), 0)
        columns = range(max(0, middle - SHOWN_COLUMNS), middle + SHOWN_COLUMNS + 1)
        super().__init__("\n".join([*lines, "", grid_of(ranks, shown, columns)]))


def grid(schedule: Schedule, faults: Iterable[Fault] = ()) -> str:
    """Return a schedule as text: a line for each rank, columns aligned, faulty cells marked, messages under their line.

    Args:
        schedule: of any kind, right or wrong.
        faults: as ``check`` returns them.
    """
    return grid_of(schedule.ranks, tuple(faults))


def grid_of(ranks: Sequence[Sequence[Cell]], faults: Sequence[Fault] = (), columns: range | None = None) -> str:
    """Return lines of cells as text.

    Args:
        ranks: for each rank its cells, transfers among them or not.
        faults: what is wrong; a rank that has no line gets one.
        columns: the steps to show; all by default.
    """
    length = max((len(row) for row in ranks), default=0)
    shown = range(length) if columns is None else range(min(columns.start, length), min(columns.stop, length))
    marked = {(fault.rank, fault.step) for fault in faults}
    padded = {fault.step for fault in faults}

    def cell(rank: int, step: int) -> str:
        text = str(ranks[rank][step]) if step < len(ranks[rank]) else ""
        return f">{text}<" if (rank, step) in marked else f" {text} " if step in padded else text

    table = [[cell(rank, step) for step in shown] for rank in range(len(ranks))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head = len(f"rank {max(len(ranks) - 1, 0)} ")
    before, after = "... " if shown.start else "", " ..." if shown.stop < length else ""
    lines = []
    for rank, row in enumerate(table):
        cells = " ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{f'rank {rank}':{head}} {before}{cells}{after}".rstrip())
        for fault in (f for f in faults if f.rank == rank):
            if fault.step is None or fault.step not in shown:
                lines.append(" " * (head + 1) + fault.text)
                continue
            place = shown.index(fault.step)
            lines.append(" " * (head + 2 + len(before) + sum(widths[:place]) + place) + f"^ {fault.text}")
    return "\n".join(lines)
