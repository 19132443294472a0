"""Named schedules: legal for any size, in torch's order where torch has one, with the published bubble and memory."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from dtengine.pipeline.actions import Schedule
from dtengine.pipeline.check import check
from dtengine.pipeline.communication import check_transfers, transfers
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make

NAMES = pytest.mark.parametrize("name", SCHEDULES)
RANKS = st.integers(1, 16)
MICROBATCHES = st.integers(1, 20)
EQUAL = {"F": 1, "I": 1, "W": 1}


@st.composite
def costs(draw):
    """Draw times with W at most F and I, as the published formulas of the zero-bubble schedules need it."""
    f, i = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return {"F": f, "I": i, "W": draw(st.integers(1, min(f, i)))}


def run(schedule: Schedule, times: dict[str, int]) -> tuple[list[int], list[int]]:
    """Return for each rank (bubble: last end minus first start, less its work; most stage-microbatches held at once)."""
    times = {**times, "B": times["I"] + times["W"]}
    lists = [list(schedule.actions(r)) for r in range(schedule.num_ranks)]
    reached, clock, ended, events = [0] * len(lists), [0] * len(lists), {}, [[] for _ in lists]
    while any(at < len(row) for at, row in zip(reached, lists, strict=True)):
        before = list(reached)
        for rank, row in enumerate(lists):
            while reached[rank] < len(row):
                stage, kind, microbatch = action = row[reached[rank]]
                back = kind in "BI"
                needs = [("F", stage, microbatch)] if back else [("I", stage, microbatch)] if kind == "W" else []
                if back and stage + 1 < schedule.num_stages:
                    needs.append(("I", stage + 1, microbatch))
                if kind == "F" and stage:
                    needs.append(("F", stage - 1, microbatch))
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = ended["I" if back else kind, stage, microbatch] = start + times[kind]
                events[rank].append((start, action))
                reached[rank] += 1
        assert before != reached, "deadlock"
    bubbles = [clock[r] - row[0][0] - sum(times[a.kind] for _, a in row) for r, row in enumerate(events)]
    peaks = []
    for row in lists:
        held = [0]
        for action in row:
            held.append(held[-1] + {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind])
        peaks.append(max(held))
    return bubbles, peaks


# Legal for any size


@NAMES
@given(num_ranks=RANKS, num_microbatches=MICROBATCHES, chunks=st.integers(1, 4))
@settings(max_examples=20)
def test_every_schedule_is_legal_for_any_size(name, num_ranks, num_microbatches, chunks):
    """Ranks, microbatches and chunks need not divide each other: nothing is missing, out of order or waits for ever, and
    the derived transfers pass without buffers."""
    schedule = make(name, num_ranks, num_microbatches, None if name in FIXED_CHUNKS else chunks)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, num_ranks, num_microbatches)
    assert schedule.num_stages == num_ranks * FIXED_CHUNKS.get(name, chunks)
    assert check(schedule) == []
    assert check_transfers(transfers(schedule), schedule.rank_of) == []


@NAMES
def test_small_schedules_are_all_legal(name):
    """Each of 2 to 8 ranks, 1 to 9 microbatches and 1 to 3 chunks: no order of transfers waits for ever."""
    for num_ranks in range(2, 9):
        for num_microbatches in range(1, 10):
            for chunks in (None,) if name in FIXED_CHUNKS else (1, 2, 3):
                schedule = make(name, num_ranks, num_microbatches, chunks)
                assert check(schedule) == []
                assert check_transfers(transfers(schedule), schedule.rank_of) == []


@NAMES
def test_cells_stand_below_what_they_wait_for(name):
    """The grid shows the pipeline: a result is made in an earlier column than the one that reads it, and no rank starts
    later than it must."""
    schedule = make(name, 4, 8)
    column = {}
    for row in schedule.ranks:
        column |= {("I" if a.kind == "B" else a.kind, a.stage, a.microbatch): k for k, c in enumerate(row) for a in c}
    for (kind, stage, microbatch), at in column.items():
        if kind == "F" and stage:
            assert column["F", stage - 1, microbatch] < at
        if kind == "I" and stage + 1 < schedule.num_stages:
            assert column["I", stage + 1, microbatch] < at
    assert [next(k for k, c in enumerate(row) if c) for row in schedule.ranks] == [column["F", r, 0] for r in range(4)]


# Torch's order


class Stage(SimpleNamespace):
    """What torch's schedules ask of a stage; keeps what it is asked to compute."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: []

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **kwargs):
        self.ran.append(f"{self.stage_index}B{microbatch}")


def torch_order(cls: Any, num_ranks: int, num_microbatches: int, chunks: int) -> list[list[str]]:
    """Return the order of torch's schedule: of those with one stage a rank what they run, not the table they print."""
    rows = []
    for rank in range(num_ranks):
        schedule: Any = object.__new__(cls)
        schedule._n_microbatches, schedule._num_stages = num_microbatches, num_ranks * chunks
        if issubclass(cls, torch_schedules.PipelineScheduleSingle):
            ran = []
            schedule._stage = Stage(stage_index=rank, is_last=rank == num_ranks - 1, ran=ran)
            schedule._loss_fn, schedule._internal_losses, schedule.scale_grads = None, [], False
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule._initialize_stage = lambda *args: None
            schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
            rows.append(ran)
            continue
        schedule.pp_group_size = num_ranks
        schedule.n_local_stages, schedule._stages, schedule.num_stages = chunks, [None] * chunks, num_ranks * chunks
        schedule.number_of_rounds = max(1, num_microbatches // num_ranks)
        schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
        rows.append([str(a) for a in schedule._calculate_single_rank_operations(rank) if a is not None])
    return rows


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [
        ("gpipe", "ScheduleGPipe"),
        ("1f1b", "Schedule1F1B"),
        ("interleaved", "ScheduleInterleaved1F1B"),
        ("loopedbfs", "ScheduleLoopedBFS"),
        ("interleaved-zb", "ScheduleInterleavedZeroBubble"),
        ("zb-h1", "ScheduleInterleavedZeroBubble"),
        ("zbv", "ScheduleZBVZeroBubble"),
        ("dualpipev", "ScheduleDualPipeV"),
    ],
)
@given(num_ranks=st.integers(1, 9), num_microbatches=MICROBATCHES, chunks=st.integers(1, 4))
@settings(max_examples=40)
def test_the_order_is_torchs(name, torch_name, num_ranks, num_microbatches, chunks):
    """Action for action, wherever torch takes the numbers; zb-h1 is torch's interleaved zero-bubble with one stage."""
    if name in FIXED_CHUNKS:
        chunks = FIXED_CHUNKS[name]
    if name == "dualpipev":  # torch refuses fewer microbatches than stages
        num_microbatches += 2 * num_ranks
    if name == "1f1b":  # and here than ranks
        num_microbatches += num_ranks
    if "Interleaved" in torch_name:  # and here rounds of unequal size
        number = max(1, num_microbatches // num_ranks)
        num_microbatches = num_microbatches // number * number
    schedule = make(name, num_ranks, num_microbatches, chunks)
    ours = [[str(cell) for cell in row if cell] for row in schedule.ranks]
    assert ours == torch_order(getattr(torch_schedules, torch_name), num_ranks, num_microbatches, chunks)


@NAMES
def test_torch_reads_the_table(name):
    """Every cell of a table is an action of torch's, and prints the same there."""
    for line in make(name, 3, 7).to_csv().splitlines():
        for cell in line.split(","):
            action = torch_schedules._Action.from_str(cell)
            assert ("" if action is None else str(action)) == cell


# Published figures, p ranks and at least 2p microbatches


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", lambda f, i, w: f + i + w),
        ("1f1b", lambda f, i, w: f + i + w),
        ("zb-h1", lambda f, i, w: f + i - w),
        ("zb-h2", lambda f, i, w: f + i - 2 * w),
    ],
)
@given(num_ranks=st.integers(1, 8), more=st.integers(0, 9), times=costs())
@settings(max_examples=40)
def test_bubble_by_formula(name, bubble, num_ranks, more, times):
    """The rank that waits longest waits (p-1)(F+I+W) with gpipe and 1f1b, (p-1)(F+I-W) with zb-h1, (p-1)(F+I-2W) with
    zb-h2."""
    bubbles, _ = run(make(name, num_ranks, 2 * num_ranks + more), times)
    assert max(bubbles) == (num_ranks - 1) * bubble(times["F"], times["I"], times["W"])


@pytest.mark.parametrize(("name", "split"), [("interleaved", 1), ("loopedbfs", 1), ("interleaved-zb", -1)])
@given(num_ranks=st.integers(1, 8), rounds=st.integers(2, 4), chunks=st.integers(1, 4), times=costs())
@settings(max_examples=40)
def test_chunks_divide_the_bubble(name, split, num_ranks, rounds, chunks, times):
    """Stages of a part of the time take that part of the bubble, where microbatches are a multiple of ranks."""
    bubbles, _ = run(make(name, num_ranks, rounds * num_ranks, chunks), times)
    assert max(bubbles) == (num_ranks - 1) * (times["F"] + times["I"] + split * times["W"])


@given(num_ranks=st.integers(1, 16), more=st.integers(0, 9))
@settings(max_examples=40)
def test_bubble_of_v_schedules(num_ranks, more):
    """Where F, I and W take the same time, against 1f1b with the same stages: zbv none, v-half at most a half, v-min at
    most two thirds and one action, dualpipev a sixth."""
    names = ("1f1b", "zbv", "v-half", "v-min", "dualpipev")
    bubble = {n: max(run(make(n, num_ranks, 2 * num_ranks + more), EQUAL)[0]) for n in names}
    assert bubble["1f1b"] == 3 * (num_ranks - 1)
    whole = 2 * bubble["1f1b"]  # a rank of 1f1b computes two of these stages in one action
    assert bubble["zbv"] == 0
    assert whole - 2 <= 2 * bubble["v-half"] <= whole
    assert 2 * whole - 3 <= 3 * bubble["v-min"] <= 2 * whole + 3
    assert 6 * bubble["dualpipev"] == whole


@given(num_ranks=RANKS, num_microbatches=MICROBATCHES, chunks=st.integers(1, 4))
@settings(max_examples=60)
def test_memory_by_formula(num_ranks, num_microbatches, chunks):
    """Stage-microbatches that a rank holds from the start of F to the end of W or B; half a microbatch each in a V."""
    p, m = num_ranks, num_microbatches
    peak = {n: run(make(n, p, m, None if n in FIXED_CHUNKS else chunks), EQUAL)[1] for n in SCHEDULES}
    assert peak["gpipe"] == [m] * p
    assert peak["loopedbfs"] == [m * chunks] * p
    assert peak["1f1b"] == [min(m, p - rank) for rank in range(p)]
    assert peak["zb-h1"] == [min(m, p)] * p
    assert peak["zb-h2"] == [min(m, 2 * p - 1)] * p
    assert max(peak["zbv"]) == min(2 * m, 2 * p)
    assert max(peak["v-half"]) <= min(2 * m, 2 * ((p + 2) // 2))
    assert max(peak["v-min"]) <= min(2 * m, 2 * ((p + 4) // 3))
    assert max(peak["dualpipev"]) <= min(2 * m, 2 * p + 1)
    largest = -(-m // max(1, m // p))  # microbatches of the first round
    ahead = [(chunks - 1) * largest + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    assert peak["interleaved"] == [min(m * chunks, most) for most in ahead]
    assert max(peak["interleaved-zb"]) <= min(m * chunks, (chunks - 1) * largest + p)


def test_memory_does_not_grow_with_microbatches():
    """Only gpipe and loopedbfs hold more with 32 microbatches than with 8."""
    grown = {n for n in SCHEDULES if run(make(n, 4, 8), EQUAL)[1] != run(make(n, 4, 32), EQUAL)[1]}
    assert grown == {"gpipe", "loopedbfs"}


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 4), "schedule '2f2b': unknown. Use one of gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 4), "schedule 1f1b: 0 pipeline ranks. It needs at least 1."),
        (("1f1b", 2, 0), "schedule 1f1b: 0 microbatches. It needs at least 1."),
        (("interleaved", 2, 4, 0), "schedule interleaved: 0 stages a rank. It needs at least 1."),
        (
            ("zbv", 2, 4, 3),
            "schedule zbv: 3 stages a rank. It has 2. Leave it out, or use one of interleaved, loopedbfs, interleaved-zb.",
        ),
    ],
)
def test_what_is_refused(arguments, message):
    """The message says what was given, what is needed, and what to do."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(*arguments)


def test_chunks_by_default():
    """Two stages a rank where the number is free, else what the schedule has."""
    assert {n: make(n, 3, 4).num_stages // 3 for n in SCHEDULES if n not in FIXED_CHUNKS} == {
        "interleaved": 2,
        "loopedbfs": 2,
        "interleaved-zb": 2,
    }
    assert all(make(n, 3, 4) == make(n, 3, 4, chunks) for n, chunks in FIXED_CHUNKS.items())
