"""A pipeline schedule as data: for each rank the list of what it computes, in order.

    2F0                       stage 2, forward, microbatch 0
    2B0                       its backward: 2I0 (gradient of the stage's input), then 2W0 (gradients of its parameters)
    (0F3;3B1)OVERLAP_F_B      two actions, of which neither waits for the other
    2SEND_F0, 3RECV_F0        the output of 2F0 on its way to stage 3; SEND_B, RECV_B: a gradient on its way back

A schedule holds compute actions only; transfers are derived from it (``pipeline.communication``). The text form is the
one that ``torch.distributed.pipelining`` reads and writes: one line a rank, cells by comma, an empty cell for a step of
waiting. What torch adds for parameters (``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``) is read as an empty cell: the engine
does that by itself. Nothing here needs torch.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
FORM = re.compile(r"(\d{1,6})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,6})")
PARAMETERS = re.compile(r"\d{1,6}(UNSHARD|RESHARD|REDUCE_GRAD)")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that a rank does: for a stage, of a kind, for a microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one action.

        Raises:
            ValueError: not of the form that the module's text gives.
        """
        found = FORM.fullmatch(text.strip())
        if not found:
            raise ValueError(
                f"{text.strip()[:40]!r}: no action. Write stage, kind, microbatch: 2F0, 2B0, 2I0, 2W0, numbers of at most 6 "
                "digits."
            )
        return cls(int(found[1]), found[2], int(found[3]))


def result(action: Action) -> Action:
    """Return what others read of an action: of a full backward its input gradient, of any other the action itself."""
    return action._replace(kind="I") if action.kind == "B" else action


def inputs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the results that a compute action reads.

    A forward reads the output of the stage before; an input gradient the stage's own forward and the input gradient of
    the stage after; a weight gradient the stage's own input gradient.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return (Action(stage - 1, "F", microbatch),) if stage else ()
    if kind == "W":
        return (Action(stage, "I", microbatch),)
    after = (Action(stage + 1, "I", microbatch),) if stage + 1 < num_stages else ()
    return (Action(stage, "F", microbatch), *after)


class Cell(tuple[Action, ...]):
    """What a rank does in one step of the grid: nothing, one action, or several that may overlap."""

    __slots__ = ()

    def __str__(self) -> str:
        if len(self) <= 1:
            return "".join(map(str, self))
        return f"({';'.join(map(str, self))})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a cell of a table."""
        text = text.strip()
        if not text or PARAMETERS.fullmatch(text):
            return cls()
        overlap = OVERLAP.fullmatch(text)
        return cls(Action.parse(part) for part in (overlap[1].split(";") if overlap else [text]))


@dataclass(frozen=True)
class Schedule:
    """What each rank computes.

    Attributes:
        name: "1f1b", or the name of a file.
        ranks: for each pipeline rank its cells, in order; empty cells are kept for the grid and mean nothing else.
        rank_of: the pipeline rank of each stage.
        num_microbatches: of a step.
        communication: for each rank what it computes, sends and receives, in order, where that was written by hand; empty
            where it is to be derived.
    """

    name: str
    ranks: tuple[tuple[Cell, ...], ...]
    rank_of: tuple[int, ...]
    num_microbatches: int
    communication: tuple[tuple[Action, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.rank_of)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank, in order; of an overlapped cell in the order in which it lists them."""
        for cell in self.ranks[rank]:
            yield from cell

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return tuple(stage for stage, r in enumerate(self.rank_of) if r == rank)

    def to_csv(self) -> str:
        """Return the table: one line a rank; with its transfers where these were written by hand."""
        text, rows = io.StringIO(), self.communication or self.ranks
        csv.writer(text, lineterminator="\n").writerows([str(cell) for cell in row] for row in rows)
        return text.getvalue()


def make_schedule(
    name: str,
    ranks: Iterable[Iterable[Action | Sequence[Action] | None]],
    rank_of: Sequence[int],
    num_microbatches: int,
) -> Schedule:
    """Make a schedule from an action, several that overlap, or None for each cell."""

    def cell(one: Action | Sequence[Action] | None) -> Cell:
        if one is None:
            return Cell()
        return Cell((one,)) if isinstance(one, Action) else Cell(one)

    return Schedule(name, tuple(tuple(map(cell, row)) for row in ranks), tuple(rank_of), num_microbatches)


def parse_csv(text: str, name: str) -> list[list[Cell]]:
    """Read a table as cells, with transfers where it has them; whether it is right is for ``pipeline.check`` to say.

    Raises:
        ValueError: a cell that is no action; the message names the file, its line and its cell.
    """
    table: list[list[Cell]] = []
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"{name}: no table of cells by comma ({error}).") from None
    for number, row in enumerate(rows, start=1):
        cells = []
        for column, one in enumerate(row, start=1):
            try:
                cells.append(Cell.parse(one))
            except ValueError as error:
                raise ValueError(f"{name}: line {number}, cell {column}: {error}") from None
        table.append(cells)
    return table


def loop_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round the ranks: 0 1 2 3 0 1 2 3."""
    return tuple(range(num_ranks)) * chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each of two stages a rank that go there and back: 0 1 2 3 3 2 1 0."""
    there = tuple(range(num_ranks))
    return (*there, *reversed(there))
