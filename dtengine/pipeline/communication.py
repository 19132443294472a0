"""What ranks send each other: derived from a schedule, or written by hand, and run without any buffer.

A forward's output goes to the next stage, an input gradient to the stage before, where that is on another rank. A send
and its receive meet: both ranks stand at them at the same time, and go on together. Lists that come to their end so do
it with any buffering.
"""

from collections.abc import Iterator, Sequence

from dtengine.pipeline.actions import COMPUTE, Action, Schedule
from dtengine.pipeline.grid import Fault, ScheduleError
from dtengine.pipeline.steps import UNIT_COSTS, start_times

Lists = Sequence[Sequence[Action]]
NEXT = {"F": 1, "B": -1}  # the stage that a transfer goes to, from the stage that sends


def transfers(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return for each rank what it computes, sends and receives, in order.

    All ranks' actions are put in one order in which they can run, by the time at which they do where a forward, an input
    gradient and a weight gradient take one unit each. Each transfer stands in it right after the action that makes it,
    and each rank's list is its part of the order: so the lists pass even where sends have no buffer.

    Args:
        schedule: one that ``check`` finds nothing wrong with. Where its transfers were written by hand, they are
            returned as they are.

    Raises:
        ScheduleError: ranks that wait for ever.
    """
    if schedule.communication:
        return schedule.communication
    starts = start_times(schedule.ranks, schedule.num_stages)
    faults = [Fault(r, len(s), "it waits for ever.") for r, s in enumerate(starts) if len(s) < len(schedule.ranks[r])]
    if faults:
        raise ScheduleError(schedule.name, schedule.ranks, faults)
    events: list[tuple[int, int, int, int, Action]] = []  # (time, 0 end or 1 start, rank, number in its list, action)
    for rank, (cells, times) in enumerate(zip(schedule.ranks, starts, strict=True)):
        for cell, start in zip(cells, times, strict=True):
            for action in cell:
                end = start + UNIT_COSTS[action.kind]
                events += [(start, 1, rank, len(events), action), (end, 0, rank, len(events), action)]
                start = end
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, starting, rank, _, action in sorted(events):
        if starting:
            lists[rank].append(action)
        elif pair := transfer_of(action, schedule.rank_of):
            lists[rank].append(pair[0])
            lists[schedule.rank_of[pair[1].stage]].append(pair[1])
    return tuple(map(tuple, lists))


def transfer_of(action: Action, rank_of: Sequence[int]) -> tuple[Action, Action] | None:
    """Return (send, receive) of what a compute action makes; None where it stays on its rank."""
    if action.kind == "W":
        return None
    kind = "F" if action.kind == "F" else "B"
    to = action.stage + NEXT[kind]
    if not 0 <= to < len(rank_of) or rank_of[to] == rank_of[action.stage]:
        return None
    return Action(action.stage, f"SEND_{kind}", action.microbatch), Action(to, f"RECV_{kind}", action.microbatch)


def receiver(send: Action) -> Action:
    """Return the receive that a send meets."""
    return Action(send.stage + NEXT[send.kind[-1]], f"RECV_{send.kind[-1]}", send.microbatch)


def sender(receive: Action) -> Action:
    """Return the send that a receive meets."""
    return Action(receive.stage - NEXT[receive.kind[-1]], f"SEND_{receive.kind[-1]}", receive.microbatch)


def acknowledged(lists: Lists, rank_of: Sequence[int], rank: int) -> dict[Action, tuple[Action, ...]]:
    """Return what a rank learns from what it receives: {receive: its own sends that the other rank has read by then}.

    A rank that sends after it used a message has received that message; backends do not all say when a send is done.
    """
    found: dict[Action, tuple[Action, ...]] = {}
    for other in set(range(len(lists))) - {rank}:
        read: list[Action] = []
        for action in lists[other]:
            if action.kind.startswith("SEND") and rank_of[receiver(action).stage] == rank:
                found[receiver(action)], read = tuple(read), []
            elif action.kind in COMPUTE and action.kind != "W":
                send = sender(action._replace(kind="RECV_F" if action.kind == "F" else "RECV_B"))
                if 0 <= send.stage < len(rank_of) and rank_of[send.stage] == rank:
                    read.append(send)
    return found


def check_transfers(lists: Lists, rank_of: Sequence[int]) -> list[Fault]:
    """Return what is wrong with the transfers of lists whose compute actions are right.

    Every result that another rank reads is sent once, after it is made, and received once, before it is read; nothing
    else is sent; and the lists come to their end without any buffer.

    Args:
        lists: for each rank what it computes, sends and receives, in order.
        rank_of: the rank of each stage.

    Returns:
        Faults; ``step`` is a place in the list.
    """
    places: dict[Action, tuple[int, int]] = {}
    faults = []
    for rank, row in enumerate(lists):
        for step, action in enumerate(row):
            if action in places:
                faults.append(Fault(rank, step, f"{action} is a second time."))
            places.setdefault(action, (rank, step))
    wanted: set[Action] = set()
    for action, (rank, _) in places.items():
        pair = transfer_of(action, rank_of) if action.kind in COMPUTE else None
        if not pair:
            continue
        wanted.update(pair)
        faults += _late(places, action, pair[0], rank)
        reads = [pair[1]._replace(kind=kind) for kind in (("F",) if action.kind == "F" else ("B", "I"))]
        for read in reads:
            faults += _late(places, pair[1], read, rank_of[pair[1].stage]) if read in places else ()
    for action, (rank, step) in places.items():
        if action.kind not in COMPUTE and action not in wanted:
            faults.append(Fault(rank, step, f"{action}: no other rank reads or makes that. Leave it out."))
    return sorted(dict.fromkeys(faults), key=lambda f: (f.rank, -1 if f.step is None else f.step)) or rendezvous(lists)


def _late(places: dict[Action, tuple[int, int]], first: Action, second: Action, rank: int) -> Iterator[Fault]:
    """Yield what is wrong where a rank does not have one action and then another."""
    for action in (first, second):
        if action not in places:
            yield Fault(rank, None, f"{action} is missing.")
            return
        if places[action][0] != rank:
            yield Fault(*places[action], f"{action}: stage {action.stage} is on rank {rank}.")
            return
    if places[first] > places[second]:
        yield Fault(*places[second], f"{second} runs before {first}.")


def rendezvous(lists: Lists) -> list[Fault]:
    """Run lists where a send and its receive have to meet, and return where they stop; nothing where they end.

    Args:
        lists: for each rank what it computes, sends and receives, in order. Compute takes no time and waits for nothing:
            that receives come before their use is for ``check_transfers``.

    Returns:
        A fault for each transfer of one ring of transfers that wait for each other, or for one that nobody meets.
        ``step`` is a place in the list.
    """
    places = {action: (rank, step) for rank, row in enumerate(lists) for step, action in enumerate(row)}
    reached = [0] * len(lists)

    def meets(rank: int) -> Action | None:
        """Let a rank compute up to its next transfer; return the other side of it."""
        row = lists[rank]
        while reached[rank] < len(row) and row[reached[rank]].kind in COMPUTE:
            reached[rank] += 1
        if reached[rank] == len(row):
            return None
        action = row[reached[rank]]
        return receiver(action) if action.kind.startswith("SEND") else sender(action)

    todo = set(range(len(lists)))
    while todo:
        rank = todo.pop()
        while (partner := meets(rank)) and partner in places:
            other, step = places[partner]
            if other == rank or meets(other) is None or reached[other] != step:
                break
            reached[rank] += 1
            reached[other] += 1
            todo.add(other)
    rank = next((r for r, row in enumerate(lists) if reached[r] < len(row)), None)
    seen: dict[int, Fault] = {}
    while rank is not None and rank not in seen:
        action, partner = lists[rank][reached[rank]], meets(rank)
        other, step = places.get(partner, (None, 0)) if partner else (None, 0)
        if other is None:
            return [Fault(rank, reached[rank], f"deadlock: {action} waits for {partner}, which is missing.")]
        if step < reached[other]:
            return [Fault(rank, reached[rank], f"deadlock: {action} waits for {partner}, which has met another.")]
        blocked = f"rank {other} is at {lists[other][reached[other]]}" if step != reached[other] else "which is here"
        seen[rank] = Fault(rank, reached[rank], f"deadlock: {action} waits for {partner}, but {blocked}.")
        rank = other
    return list(seen.values())[list(seen).index(rank) :] if rank is not None else []
