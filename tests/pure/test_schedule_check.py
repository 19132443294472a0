"""The check of schedules agrees with a run of them, names the cell that is wrong, and knows a deadlock of transfers."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from dtengine.pipeline.actions import Action, Cell, Schedule
from dtengine.pipeline.check import check, read_schedule, require_valid
from dtengine.pipeline.communication import check_transfers, rendezvous, transfers
from dtengine.pipeline.grid import Fault, ScheduleError, grid
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make

TABLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@st.composite
def schedules(draw):
    """Draw a small named schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = None if name in FIXED_CHUNKS else draw(st.integers(1, 2))
    return make(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)), chunks)


def filled(schedule: Schedule) -> list[tuple[int, int]]:
    """Return (rank, step) of the cells that are not empty."""
    return [(r, k) for r, row in enumerate(schedule.ranks) for k, cell in enumerate(row) if cell]


def edit(schedule: Schedule, rank: int, step: int, cells: list[Cell], width: int = 1) -> Schedule:
    """Put cells in the place of some."""
    rows = [list(row) for row in schedule.ranks]
    rows[rank][step : step + width] = cells
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def can_run(schedule: Schedule) -> bool:
    """Whether each stage and microbatch has its parts once, where they belong, and a plain run comes to the end."""
    parts: dict[tuple[int, int], list[str]] = {}
    for rank in range(schedule.num_ranks):
        for stage, kind, microbatch in schedule.actions(rank):
            if stage >= schedule.num_stages or schedule.rank_of[stage] != rank:
                return False
            parts.setdefault((stage, microbatch), []).append(kind)
    wanted = {(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)}
    if set(parts) != wanted or any(sorted(kinds) not in (["B", "F"], ["F", "I", "W"]) for kinds in parts.values()):
        return False
    todo, done = [list(row) for row in schedule.ranks], set()

    def ready(stage: int, kind: str, microbatch: int) -> bool:
        if kind == "W":
            return (stage, "back", microbatch) in done
        if kind == "F":
            return stage == 0 or (stage - 1, "F", microbatch) in done
        last = stage + 1 == schedule.num_stages
        return (stage, "F", microbatch) in done and (last or (stage + 1, "back", microbatch) in done)

    moved = True
    while moved:
        moved = False
        for row in todo:
            while row and all(ready(*action) for action in row[0]):
                done |= {(a.stage, "back" if a.kind in "BI" else a.kind, a.microbatch) for a in row.pop(0)}
                moved = True
    return not any(todo)


# Mutations


@given(schedules(), st.data())
@settings(max_examples=150)
def test_a_dropped_cell_is_named(schedule, data):
    """What is missing is named at its rank."""
    rank, step = data.draw(st.sampled_from(filled(schedule)))
    cell = schedule.ranks[rank][step]
    faults = check(edit(schedule, rank, step, [Cell()]))
    assert {f.rank for f in faults} == {rank}
    for action in cell:
        assert any(str(action) in f.text and "missing" in f.text for f in faults)


@given(schedules(), st.data())
@settings(max_examples=150)
def test_a_repeated_cell_is_marked(schedule, data):
    """Of two equal cells the later one is marked, and says where the earlier one is."""
    rank, step = data.draw(st.sampled_from(filled(schedule)))
    after = data.draw(st.integers(step + 1, len(schedule.ranks[rank])))
    cell = schedule.ranks[rank][step]
    faults = check(edit(schedule, rank, after, [cell], 0))
    wanted = {Fault(rank, after, f"{a} is a second time, after rank {rank}, step {step}.") for a in cell}
    assert set(faults) == wanted


@given(schedules(), st.data())
@settings(max_examples=150)
def test_a_cell_of_another_rank_is_marked(schedule, data):
    """It is marked where it stands, and says where it belongs."""
    assume(schedule.num_ranks > 1)
    rank, step = data.draw(st.sampled_from(filled(schedule)))
    other = data.draw(st.integers(0, schedule.num_ranks - 1).filter(lambda r: r != rank))
    at = data.draw(st.integers(0, len(schedule.ranks[other])))
    cell = schedule.ranks[rank][step]
    faults = check(edit(edit(schedule, rank, step, [Cell()]), other, at, [cell], 0))
    assert set(faults) == {Fault(other, at, f"{a}: stage {a.stage} is on rank {rank}.") for a in cell}


def true_claim(schedule: Schedule, fault: Fault) -> bool:
    """Whether what a fault says of the order is so: read off the table, not off the check."""
    at = {str(a): (r, k) for r, row in enumerate(schedule.ranks) for k, cell in enumerate(row) for a in cell}
    first, second = re.findall(r"\b\d+[FBIW]\d+\b", fault.text)
    assert fault.step is not None and at[first] == (fault.rank, fault.step)
    if "deadlock" in fault.text:
        rank, step = map(int, re.findall(r"rank (\d+), step (\d+)", fault.text)[0])
        return at[second] == (rank, step)
    if "overlap" in fault.text:
        return at[second] == at[first]
    return "runs before" in fault.text and at[second][0] == fault.rank and at[second][1] > fault.step


@given(schedules(), st.data())
@settings(max_examples=300)
def test_swapped_cells_are_refused_where_they_cannot_run(schedule, data):
    """The check agrees with a run. It names cells that run before what they read, or a ring of cells that wait for each
    other; one of the swapped cells is among those of the first kind."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    steps = st.sampled_from([k for r, k in filled(schedule) if r == rank])
    one, two = sorted((data.draw(steps), data.draw(steps)))
    row = schedule.ranks[rank]
    swapped = edit(edit(schedule, rank, one, [row[two]]), rank, two, [row[one]])
    faults = check(swapped)
    assert (not faults) == can_run(swapped)
    assert all(true_claim(swapped, f) for f in faults)
    if faults and "deadlock" not in faults[0].text:
        names = {str(a) for a in (*row[one], *row[two])}
        assert all(names & set(re.findall(r"\d+[FBIW]\d+", f.text)) for f in faults)
    elif faults:  # each waits for something of the next one's rank, behind that one's cell
        for fault, following in zip(faults, [*faults[1:], faults[0]], strict=True):
            other, step = map(int, re.findall(r"at rank (\d+), step (\d+)", fault.text)[0])
            assert following.step is not None and other == following.rank and step >= following.step


@given(schedules(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_any_order_is_judged_as_it_runs(schedule, random):
    """Lists in a drawn order, each rank's own actions in an order of their own."""
    rows = []
    for row in schedule.ranks:
        cells = [cell for cell in row if cell]
        for _ in range(random.randrange(4)):
            k = random.randrange(len(cells))
            cells.insert(max(0, k - random.randrange(4)), cells.pop(k))
        rows.append(tuple(cells))
    drawn = replace(schedule, ranks=tuple(rows))
    assert (not check(drawn)) == can_run(drawn)


@given(schedules(), st.data())
@settings(max_examples=150)
def test_a_backward_may_be_split(schedule, data):
    """A whole backward stands for both parts, one after the other or with others between; not for a part and itself."""
    whole = [(r, k) for r, k in filled(schedule) if len(c := schedule.ranks[r][k]) == 1 and c[0].kind == "B"]
    assume(whole)
    rank, step = data.draw(st.sampled_from(whole))
    action = schedule.ranks[rank][step][0]
    parts = [Cell([action._replace(kind=kind)]) for kind in "IW"]
    split = edit(schedule, rank, step, parts)
    assert check(split) == [] and can_run(split)
    later = edit(edit(schedule, rank, step, parts[:1]), rank, len(schedule.ranks[rank]), parts[1:], 0)
    assert check(later) == [] and can_run(later)
    early = edit(schedule, rank, step, parts[::-1])
    assert check(early) == [Fault(rank, step, f"{parts[1]} runs before {parts[0]}.")]
    twice = edit(schedule, rank, step, [Cell([action]), parts[1]])
    assert check(twice) == [Fault(rank, step + 1, f"{parts[1]} is part of {action}, which is there too.")]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rank_of": (0, 2)}, Fault(0, None, "stage 1 is on rank 2, but there are 2 ranks.")),
        ({"rank_of": (0, 0)}, Fault(1, None, "it has no stage. Each rank needs one.")),
        ({"num_microbatches": 0}, Fault(0, None, "0 microbatches. It needs at least 1.")),
        ({"num_microbatches": 1}, Fault(0, 1, "0F1: there are microbatches 0 to 0.")),
        ({"num_microbatches": 3}, Fault(0, None, "0F2 is missing.")),
        ({"rank_of": (0, 1, 1)}, Fault(1, None, "2F0 is missing.")),
    ],
)
def test_sizes_that_do_not_fit(change, fault):
    """Placement and microbatches have to be those of the table."""
    assert fault in check(replace(read_schedule(TABLE, "table.csv", 2), **change))


def test_actions_that_are_none():
    """A transfer among the compute actions, a stage that is not there."""
    schedule = read_schedule(TABLE, "table.csv", 2)
    added = edit(schedule, 0, 4, [Cell([Action(0, "SEND_F", 0)]), Cell([Action(7, "F", 0)])], 0)
    assert check(added) == [
        Fault(0, 4, "0SEND_F0 is a transfer. A schedule holds F, B, I and W."),
        Fault(0, 5, "7F0: there are stages 0 to 1."),
    ]


# Transfers


def can_meet(lists: list[list[Action]]) -> bool:
    """Whether lists come to the end where a rank computes what it has the inputs of, and transfers meet."""
    lists = [list(row) for row in lists]
    stages = max(a.stage for row in lists for a in row)
    home = {a.stage: r for r, row in enumerate(lists) for a in row}
    have: list[set[tuple[str, int, int]]] = [set() for _ in lists]

    def step(rank: int) -> bool:
        stage, kind, microbatch = lists[rank][0]
        if kind in "FBIW":
            inner = kind in "BI"
            needs = [("F", stage - 1, microbatch)] if kind == "F" and stage else []
            needs += [("I", stage, microbatch)] if kind == "W" else [("F", stage, microbatch)] if inner else []
            needs += [("I", stage + 1, microbatch)] if inner and stage < stages else []
            if not have[rank].issuperset(needs):
                return False
            have[rank].add(("I" if inner else kind, stage, microbatch))
        elif kind.startswith("SEND"):
            result = ("F" if kind == "SEND_F" else "I", stage, microbatch)
            to = stage + (1 if kind == "SEND_F" else -1)
            other = home[to]
            meets = lists[other][:1] == [Action(to, kind.replace("SEND", "RECV"), microbatch)]
            if result not in have[rank] or not meets:
                return False
            have[other].add(result)
            del lists[other][0]
        else:
            return False
        del lists[rank][0]
        return True

    moved = True
    while moved:
        moved = any(step(rank) for rank, row in enumerate(lists) if row)
    return not any(lists)


@given(schedules(), st.data())
@settings(max_examples=300)
def test_moved_transfers_are_refused_where_they_do_not_meet(schedule, data):
    """The check of hand-written transfers agrees with a plain run of them."""
    lists = [list(row) for row in transfers(schedule)]
    rank = data.draw(st.integers(0, len(lists) - 1))
    source = data.draw(st.integers(0, len(lists[rank]) - 1))
    action = lists[rank].pop(source)
    target = data.draw(st.integers(max(0, source - 6), min(len(lists[rank]), source + 6)))
    lists[rank].insert(target, action)
    moved = replace(schedule, ranks=tuple(tuple(Cell([a]) for a in row if a.kind in "FBIW") for row in lists))
    assert (not check(moved) and not check_transfers(lists, schedule.rank_of)) == can_meet(lists)


@given(schedules(), st.data())
@settings(max_examples=100)
def test_wrong_transfers_are_named(schedule, data):
    """One that is missing, there twice, or on the wrong rank."""
    lists = [list(row) for row in transfers(schedule)]
    places = [(r, k) for r, row in enumerate(lists) for k, a in enumerate(row) if a.kind not in "FBIW"]
    assume(places)
    rank, step = data.draw(st.sampled_from(places))
    action = lists[rank][step]
    other = data.draw(st.integers(0, len(lists) - 1).filter(lambda r: r != rank))

    def faults(change) -> list[Fault]:
        changed = [list(row) for row in lists]
        change(changed)
        return check_transfers(changed, schedule.rank_of)

    assert faults(lambda rows: rows[rank].pop(step)) == [Fault(rank, None, f"{action} is missing.")]
    twice = faults(lambda rows: rows[rank].append(action))
    assert twice == [Fault(rank, len(lists[rank]), f"{action} is a second time.")]
    wrong = faults(lambda rows: rows[other].append(rows[rank].pop(step)))
    assert Fault(other, len(lists[other]), f"{action}: stage {action.stage} is on rank {rank}.") in wrong


@given(schedules())
@settings(max_examples=100)
def test_transfers_of_a_schedule(schedule):
    """The compute order is kept; each pair of neighbours on two ranks exchanges once a microbatch and direction, and
    stages of one rank nothing; each edge between two ranks is received in the order in which it is sent."""
    lists = transfers(schedule)
    for rank, row in enumerate(lists):
        assert [a for a in row if a.kind in "FBIW"] == list(schedule.actions(rank))
    rank_of = schedule.rank_of
    pairs = sum(a != b for a, b in zip(rank_of, rank_of[1:], strict=False))
    kinds = Counter(a.kind for row in lists for a in row if a.kind not in "FBIW")
    assert set(kinds.values()) <= {pairs * schedule.num_microbatches} and len(kinds) == (4 if pairs else 0)
    for kind, to in (("F", 1), ("B", -1)):
        for one in range(schedule.num_ranks):
            for two in range(schedule.num_ranks):
                sent = [(a.stage + to, a.microbatch) for a in lists[one] if a.kind == f"SEND_{kind}"]
                got = [(a.stage, a.microbatch) for a in lists[two] if a.kind == f"RECV_{kind}"]
                edge = [x for x in sent if rank_of[x[0]] == two]
                assert edge == [x for x in got if rank_of[x[0] - to] == one]


def just_in_time(schedule: Schedule) -> list[list[Action]]:
    """Return lists with each send right after what makes it, each receive right before what reads it."""
    lists = []
    last = schedule.num_stages - 1
    for rank in range(schedule.num_ranks):
        row = []
        for stage, kind, microbatch in schedule.actions(rank):
            receives, sends = (stage > 0, stage < last) if kind == "F" else (stage < last, stage > 0)
            row += [Action(stage, f"RECV_{kind}", microbatch)] * receives
            row.append(Action(stage, kind, microbatch))
            row += [Action(stage, f"SEND_{kind}", microbatch)] * sends
        lists.append(row)
    return lists


def test_receives_just_before_their_use_wait_for_ever():
    """Of 1f1b: one rank sends forward while the next sends back. With a single rank or microbatch nothing crosses."""
    for num_ranks in range(1, 7):
        for num_microbatches in range(1, 7):
            lists = just_in_time(make("1f1b", num_ranks, num_microbatches))
            crosses = num_ranks > 1 and num_microbatches > 1
            assert bool(rendezvous(lists)) == crosses == (not can_meet(lists))


def test_a_ring_of_transfers_is_named():
    """The two that wait for each other, and what each rank is at."""
    assert rendezvous(just_in_time(make("1f1b", 2, 3))) == [
        Fault(0, 3, "deadlock: 0SEND_F1 waits for 1RECV_F1, but rank 1 is at 1SEND_B0."),
        Fault(1, 3, "deadlock: 1SEND_B0 waits for 0RECV_B0, but rank 0 is at 0SEND_F1."),
    ]
    alone = rendezvous([[Action(0, "F", 0), Action(0, "SEND_F", 0)], []])
    assert alone == [Fault(0, 1, "deadlock: 0SEND_F0 waits for 1RECV_F0, which is missing.")]


# Tables


def table_of(lists) -> str:
    """Write lists as a table."""
    return "".join(",".join(map(str, row)) + "\n" for row in lists)


@given(schedules())
@settings(max_examples=60)
def test_a_table_is_read_as_it_was_written(schedule):
    """With its empty cells; and with its transfers, which are then those that run."""
    num_ranks = schedule.num_ranks
    assert read_schedule(schedule.to_csv(), schedule.name, num_ranks) == schedule
    lists = transfers(schedule)
    read = read_schedule(table_of(lists), "table.csv", num_ranks)
    assert (read.rank_of, read.num_microbatches) == (schedule.rank_of, schedule.num_microbatches)
    assert transfers(read) == lists
    assert [list(read.actions(r)) for r in range(num_ranks)] == [list(schedule.actions(r)) for r in range(num_ranks)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_a_table_with_torchs_transfers_is_read(name):
    """What torch derives from a table passes the check; what it adds for parameters is skipped."""
    schedule = make(name, 3, 7)
    actions: Any = {
        rank: [torch_schedules._Action.from_str(str(cell)) for cell in row if cell]
        for rank, row in enumerate(schedule.ranks)
    }
    lists = torch_schedules._add_send_recv(actions, lambda stage: schedule.rank_of[stage], schedule.num_stages)
    text = "".join(",".join(["0UNSHARD", *map(str, lists[rank]), "0REDUCE_GRAD"]) + "\n" for rank in range(3))
    read = read_schedule(text, "torch.csv", 3)
    assert [list(read.actions(r)) for r in range(3)] == [list(schedule.actions(r)) for r in range(3)]
    assert sum(map(len, read.communication)) == sum(map(len, transfers(schedule)))


def test_hand_written_transfers_that_cross_are_refused():
    """As a deadlock, with the cells marked."""
    text = table_of(just_in_time(make("1f1b", 2, 2)))
    with pytest.raises(ScheduleError) as error:
        read_schedule(text, "mine.csv", 2)
    assert str(error.value) == (
        "schedule mine.csv, rank 0, step 3: deadlock: 0SEND_F1 waits for 1RECV_F1, but rank 1 is at 1SEND_B0.\n"
        "schedule mine.csv, rank 1, step 3: deadlock: 1SEND_B0 waits for 0RECV_B0, but rank 0 is at 0SEND_F1.\n"
        "\n"
        "rank 0  0F0      0SEND_F0 0F1 >0SEND_F1< 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "                               ^ deadlock: 0SEND_F1 waits for 1RECV_F1, but rank 1 is at 1SEND_B0.\n"
        "rank 1  1RECV_F0 1F0      1B0 >1SEND_B0< 1RECV_F1 1F1 1B1      1SEND_B1\n"
        "                               ^ deadlock: 1SEND_B0 waits for 0RECV_B0, but rank 0 is at 0SEND_F1."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE + "2F0\n", "mine.csv: 3 lines, but 2 pipeline ranks. A table has one line for each rank."),
        ("0F0,0B0\n1F0,1B0,1X0\n", "mine.csv: line 2, cell 3: '1X0': no action."),
        ("0F0,0B0\n2F0,2B0\n", "mine.csv: stage 1 has no action. Number them 0, 1, 2 without a gap."),
        ("0F1,0B1\n1F1,1B1\n", "mine.csv: microbatch 0 has no action."),
        ("0F0,0B0\n999999F0,1F0,1B0\n", "mine.csv: stage 2 has no action."),
        ("0F0,0B0\n1B0,1F0\n", "schedule mine.csv, rank 1, step 0: 1B0 runs before 1F0.\n\nrank 0   0F0  0B0"),
        ("0F0,0B0,1F0\n1F0,1B0\n", "schedule mine.csv, rank 0, step 2: 1F0: stage 1 is on rank 1."),
        ("0F0\n1F0,1B0\n", "schedule mine.csv, rank 0: 0B0 is missing, or 0I0 and 0W0."),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "schedule mine.csv, rank 0, step 1: deadlock: 0B0 waits for 1B0, which is",
        ),
        ("0F0,0B0\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n", "schedule mine.csv, rank 0: 0F1 is missing."),
        (
            "0F0,0B0\n(1F0;1B0)OVERLAP_F_B\n",
            "schedule mine.csv, rank 1, step 0: 1B0 reads 1F0, and cannot overlap with it.",
        ),
        ("0F0,0B0\n1F0,1B0,1SEND_B0\n", "schedule mine.csv, rank 0: 0SEND_F0 is missing.\n"),
        (
            "0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "schedule mine.csv, rank 0, step 2: 0B0 runs before 0RECV_B0.",
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
            "schedule mine.csv, rank 1, step 0: 1F0 runs before 1RECV_F0.",
        ),
        (
            "0F0,1F0,0SEND_F0,1SEND_F0,1RECV_B0,1B0,0B0\n2RECV_F0,2F0,2B0,2SEND_B0\n",
            "schedule mine.csv, rank 0, step 2: 0SEND_F0: no other rank reads or makes that. Leave it out.",
        ),
        ("\n\n", "mine.csv: no F, B, I or W."),
        ("0F0," + "x" * 200_000 + "\n", "mine.csv: no table of cells by comma (field larger"),
    ],
)
def test_tables_that_are_refused(text, message):
    """Before any rank starts, in one message that says where and what."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_schedule(text, "mine.csv", 2)


def test_the_first_faults_are_shown_and_the_rest_counted():
    """A table with nothing right has a message of a screen."""
    schedule = make("1f1b", 4, 20)
    rows = tuple(tuple(reversed(row)) for row in schedule.ranks)
    with pytest.raises(ScheduleError) as error:
        require_valid(replace(schedule, ranks=rows))
    lines = str(error.value).splitlines()
    assert len(error.value.faults) == len(check(replace(schedule, ranks=rows))) == 80
    assert "and 72 more" in lines and len(lines) < 25 and max(map(len, lines)) < 130


def test_grid():
    """One line a rank, columns aligned, and nothing else where nothing is wrong."""
    assert grid(make("1f1b", 2, 10)) == (
        "rank 0  0F0 0F1     0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0F6 0B5 0F7 0B6 0F8 0B7 0F9 0B8     0B9\n"
        "rank 1      1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5 1F6 1B6 1F7 1B7 1F8 1B8 1F9 1B9"
    )


def test_the_grid_marks_a_cell():
    """The message stands under it; one without a cell stands under its rank."""
    schedule = make("gpipe", 2, 1)
    faults = [Fault(0, None, "it is slow."), Fault(1, 2, "it is late.")]
    assert grid(schedule, faults) == (
        "rank 0  0F0           0B0\n        it is slow.\nrank 1      1F0 >1B0<\n                 ^ it is late."
    )
