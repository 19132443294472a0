"""When the cells of a schedule run: step by step, for grids, checks and the order of transfers."""

from collections.abc import Callable, Iterable, Sequence

from dtengine.pipeline.actions import Action, Cell, Schedule, inputs, make_schedule, result

UNIT_COSTS = {"F": 1, "I": 1, "W": 1, "B": 2}


def unit_time(cell: Cell) -> int:
    """Return the time of a cell where a forward, an input gradient and a weight gradient take one unit each."""
    return sum(UNIT_COSTS[action.kind] for action in cell)


def start_times(
    ranks: Sequence[Sequence[Cell]], num_stages: int, time: Callable[[Cell], int] = unit_time
) -> list[list[int]]:
    """Run the lists with free transfers, each cell as soon as its rank and its inputs allow.

    Args:
        ranks: for each rank its cells. A cell starts when the inputs of all its actions are there.
        num_stages: of the whole model.
        time: what a cell takes, in any unit.

    Returns:
        For each rank the start of its cells; shorter than its list where a cell waits for ever.
    """
    starts: list[list[int]] = [[] for _ in ranks]
    free = [0] * len(ranks)
    ended: dict[Action, int] = {}
    progress = True
    while progress:
        progress = False
        for rank, cells in enumerate(ranks):
            for cell in cells[len(starts[rank]) :]:
                reads = [need for action in cell for need in inputs(action, num_stages)]
                if any(need not in ended for need in reads):
                    break
                start = max([free[rank], *(ended[need] for need in reads)])
                free[rank] = start + time(cell)
                starts[rank].append(start)
                ended.update((result(action), free[rank]) for action in cell)
                progress = True
    return starts


def aligned(
    name: str, rows: Iterable[Iterable[Action | Sequence[Action]]], rank_of: Sequence[int], num_microbatches: int
) -> Schedule:
    """Make a schedule with empty cells where a rank would wait if each cell took one step.

    Args:
        name: of the schedule.
        rows: for each rank an action, or several that overlap, for each cell.
        rank_of: the rank of each stage.
        num_microbatches: of a step.
    """
    tight = make_schedule(name, rows, rank_of, num_microbatches)
    starts = start_times(tight.ranks, tight.num_stages, lambda cell: 1)
    spread = []
    for cells, columns in zip(tight.ranks, starts, strict=True):
        at = dict(zip(columns, cells, strict=True))
        spread.append([at.get(column) for column in range(columns[-1] + 1)] if columns else [])
    return make_schedule(name, spread, rank_of, num_microbatches)
