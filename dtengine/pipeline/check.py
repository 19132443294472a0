"""Whether a schedule can run: each stage and microbatch once forward and once back, in an order that no rank waits out."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from dtengine.pipeline.actions import COMPUTE, Action, Cell, Schedule, inputs, parse_csv, result
from dtengine.pipeline.communication import check_transfers
from dtengine.pipeline.grid import Fault, ScheduleError
from dtengine.pipeline.steps import start_times

Places = dict[Action, tuple[int, int]]  # action -> (rank, step)


def check(schedule: Schedule) -> list[Fault]:
    """Return what is wrong with a schedule; nothing where it can run.

    Each stage is on one rank; for each microbatch it has one F and then one B, or one I and then one W; all ranks
    together come to the end of their lists, each in its order, a cell starting when the inputs of all its actions are
    there. Transfers that were written by hand are for ``communication.check_transfers``.

    Args:
        schedule: of any size.

    Returns:
        Faults by rank and step. A deadlock is looked for where nothing else is wrong: a fault for each cell of one ring
        of cells that wait for each other.
    """
    faults = list(_placement(schedule))
    if faults:
        return faults
    places, faults = _places(schedule)
    faults += _missing(schedule, places)
    faults += _local_order(schedule, places)
    return sorted(faults, key=lambda f: (f.rank, -1 if f.step is None else f.step)) or _deadlock(schedule, places)


def require_valid(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run.

    Raises:
        ScheduleError: with what is wrong, and the grid with the faulty cells marked.
    """
    faults = check(schedule)
    if faults:
        raise ScheduleError(schedule.name, schedule.ranks, faults)


MOST_ACTIONS = 300_000  # of a schedule; a simulation of so many takes 2 s
MOST_BYTES = 1 << 24  # of a table; one of so many actions has 3 MB


def read_table(path: str) -> str:
    """Read the text of a table.

    Raises:
        ValueError: no such file, no regular one, too large, or no text.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file. python -m dtengine.schedule --name 1f1b --csv {path} writes one.")
    if not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
        raise ValueError(f"{path}: a table is a regular file of at most {MOST_BYTES >> 20} MiB.")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error}).") from None


def read_schedule(text: str, name: str, num_ranks: int) -> Schedule:
    """Read a schedule from a table, and check it.

    A stage belongs to the rank that has most of its actions. Transfers are all in the table, and are kept, or none is.

    Args:
        text: CSV as ``Schedule.to_csv`` and ``torch.distributed.pipelining`` write it.
        name: of the file, for messages.
        num_ranks: pipeline ranks.

    Raises:
        ValueError: not such a table, or not of that many ranks.
        ScheduleError: a schedule that cannot run.
    """
    table = parse_csv(text, name)
    while table and not any(table[-1]):
        table.pop()
    count = sum(action.kind in COMPUTE for row in table for cell in row for action in cell)
    if not count:
        raise ValueError(
            f"{name}: no F, B, I or W. A table has one line for each rank, cells by comma: 0F0,0F1,0B0,0B1."
        )
    if count > MOST_ACTIONS:
        raise ValueError(f"{name}: {count:,} actions. A table has at most {MOST_ACTIONS:,}.")
    if len(table) != num_ranks:
        raise ValueError(
            f"{name}: {len(table)} lines, but {num_ranks} pipeline ranks. A table has one line for each rank. "
            f"Run it with {len(table)} pipeline ranks."
        )
    flat = [[(step, action) for step, cell in enumerate(row) for action in cell] for row in table]
    votes: dict[int, Counter[int]] = {}
    for rank, row in enumerate(flat):
        for _, action in row:
            if action.kind in COMPUTE:
                votes.setdefault(action.stage, Counter())[rank] += 1
    microbatches = {action.microbatch for row in flat for _, action in row}
    for what, found in (("stage", set(votes)), ("microbatch", microbatches)):
        absent = next(n for n in range(len(found) + 1) if n not in found)
        if absent <= max(found, default=0):
            raise ValueError(f"{name}: {what} {absent} has no action. Number them 0, 1, 2 without a gap.")
    rank_of = [votes[stage].most_common(1)[0][0] for stage in range(len(votes))]
    ranks = tuple(tuple(Cell(a for a in cell if a.kind in COMPUTE) for cell in row) for row in table)
    schedule = Schedule(name, ranks, tuple(rank_of), len(microbatches))
    require_valid(schedule)
    if all(action.kind in COMPUTE for row in flat for _, action in row):
        return schedule
    lists = tuple(tuple(action for _, action in row) for row in flat)
    faults = check_transfers(lists, rank_of)
    if faults:
        by_cell = [f if f.step is None else f._replace(step=flat[f.rank][f.step][0]) for f in faults]
        raise ScheduleError(name, table, by_cell)
    return Schedule(name, ranks, tuple(rank_of), len(microbatches), lists)


def _placement(schedule: Schedule) -> Iterator[Fault]:
    """Yield what is wrong with the sizes."""
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            yield Fault(0, None, f"stage {stage} is on rank {rank}, but there are {schedule.num_ranks} ranks.")
    for rank in range(schedule.num_ranks):
        if not schedule.stages(rank):
            yield Fault(rank, None, "it has no stage. Each rank needs one.")
    if schedule.num_microbatches < 1:
        yield Fault(0, None, f"{schedule.num_microbatches} microbatches. It needs at least 1.")


def _places(schedule: Schedule) -> tuple[Places, list[Fault]]:
    """Return where each action is, and the cells that hold what they should not."""
    places: Places = {}
    faults = []
    for rank, cells in enumerate(schedule.ranks):
        for step, action in ((step, action) for step, cell in enumerate(cells) for action in cell):
            stage, kind, microbatch = action
            if kind not in COMPUTE:
                text = f"{action} is a transfer. A schedule holds F, B, I and W."
            elif not 0 <= stage < schedule.num_stages:
                text = f"{action}: there are stages 0 to {schedule.num_stages - 1}."
            elif not 0 <= microbatch < schedule.num_microbatches:
                text = f"{action}: there are microbatches 0 to {schedule.num_microbatches - 1}."
            elif rank != schedule.rank_of[stage]:
                text = f"{action}: stage {stage} is on rank {schedule.rank_of[stage]}."
            elif action in places:
                text = f"{action} is a second time, after {_at(places[action])}."
            else:
                places[action] = rank, step
                continue
            faults.append(Fault(rank, step, text))
            places.setdefault(action, (rank, step))
    return places, faults


def _missing(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """Yield what is not there, and what is there besides another that does the same."""
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, inner, weight = (Action(stage, kind, microbatch) for kind in "FBIW")
            if forward not in places:
                yield Fault(rank, None, f"{forward} is missing.")
            if whole not in places and inner not in places and weight not in places:
                yield Fault(rank, None, f"{whole} is missing, or {inner} and {weight}.")
            elif whole not in places:
                yield from (Fault(rank, None, f"{a} is missing.") for a in (inner, weight) if a not in places)
            else:
                for part in (inner, weight):
                    if part in places:
                        yield Fault(*places[part], f"{part} is part of {whole}, which is there too.")


def _local_order(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """Yield the actions that run before something on their own rank that they read."""
    stages = range(schedule.num_stages)
    own = {a: at for a, at in places.items() if a.stage in stages and at[0] == schedule.rank_of[a.stage]}
    for action, (rank, step) in own.items():
        if action.kind not in COMPUTE:
            continue
        for need in inputs(action, schedule.num_stages):
            whole = [need._replace(kind="B")] if need.kind == "I" and action.kind != "W" else []
            for source in [s for s in (need, *whole) if s in own and own[s][0] == rank]:
                if own[source][1] > step:
                    yield Fault(rank, step, f"{action} runs before {source}.")
                elif own[source][1] == step:
                    yield Fault(rank, step, f"{action} reads {source}, and cannot overlap with it.")


def _deadlock(schedule: Schedule, places: Places) -> list[Fault]:
    """Return a ring of cells that wait for each other, if the lists have one."""
    starts = start_times(schedule.ranks, schedule.num_stages)
    reached = [len(times) for times in starts]
    rank = next((r for r, cells in enumerate(schedule.ranks) if reached[r] < len(cells)), None)
    if rank is None:
        return []
    makers = {result(action): (action, place) for action, place in places.items()}
    seen: dict[int, Fault] = {}
    while rank not in seen:
        step = reached[rank]
        for action, need in ((a, n) for a in schedule.ranks[rank][step] for n in inputs(a, schedule.num_stages)):
            source, (other, at) = makers[need]
            if at >= reached[other]:
                seen[rank] = Fault(
                    rank, step, f"deadlock: {action} waits for {source}, which is at {_at((other, at))}."
                )
                rank = other
                break
    ring = list(seen.values())
    return ring[list(seen).index(rank) :]


def _at(place: Sequence[int]) -> str:
    return f"rank {place[0]}, step {place[1]}"
