"""Print, simulate, compare and search pipeline schedules, without a model or a device.

python -m dtengine.schedule --name zbv --pp 4 --microbatches 8
python -m dtengine.schedule --compare --pp 4 --microbatches 8 --cost-i 1.2 --cost-w 0.8
python -m dtengine.schedule --name auto --pp 4 --microbatches 8 --cost-f 1,1,1,1.6 --csv mine.csv
python -m dtengine.schedule --file mine.csv --picture mine.svg --trace mine.json
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtengine.options import fail, parse
from dtengine.pipeline.actions import COMPUTE, Cell, Schedule, parse_csv
from dtengine.pipeline.check import MOST_ACTIONS, read_schedule, read_table
from dtengine.pipeline.grid import ScheduleError
from dtengine.pipeline.picture import chrome_trace, png, svg
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make
from dtengine.pipeline.search import auto
from dtengine.pipeline.simulate import Cost, Costs, Simulation, simulate
from dtengine.schedule_report import Row, show, show_all

MOST_COST = 1e9


@dataclass(frozen=True)
class ScheduleOptions:
    """Print and simulate a pipeline schedule, beside what is published about it; --compare shows all of them.

    Costs are of one stage, in any one unit: a number for all stages, or one for each, such as 1,1,1,1.6. With --compare
    they are of the model cut into one stage a rank (or into as many as there are numbers), and a schedule with more stages
    splits them evenly.
    """

    name: str | None = None
    """gpipe, 1f1b, interleaved, loopedbfs, zb-h1, zb-h2, interleaved-zb, zbv, v-half, v-min, dualpipev, or auto, which
    searches for one that suits the costs; 1f1b by default."""
    file: str | None = None
    """A table of your own instead: CSV, a line for each rank, in the form that torch.distributed.pipelining uses."""
    pp: int | None = None
    """Pipeline ranks; 4 by default, or as many as the file has lines."""
    microbatches: int | None = None
    """Microbatches of a step; 8 by default, or those of the file."""
    chunks: int | None = None
    """Stages a rank, where the schedule leaves it free; else 2, with auto as many as the costs have numbers, else 1."""
    cost_f: str = "1"
    """Time of a forward: one number, or one for each stage, or for each of fewer equal parts of the model: 1,1,1,1.6."""
    cost_i: str = "1"
    """Time of an input gradient."""
    cost_w: str = "1"
    """Time of the weight gradients; a whole backward takes cost-i + cost-w."""
    cost_send: str = "0"
    """Time of a transfer to another rank, for what each stage computes."""
    memory_limit: int | None = None
    """Most live activations of a rank, in stage-microbatches; with --compare in microbatches of a rank's whole part."""
    compare: bool = False
    """Put all schedules side by side."""
    json: bool = False
    """Print one line of JSON: makespan, bubble (largest share of a rank), peak_live for each rank, deadlock; with
    --compare one such for each schedule."""
    csv: str | None = None
    """Write the schedule as CSV, which --file reads."""
    trace: str | None = None
    """Write a Chrome trace (JSON), which Perfetto opens; a unit of cost is a second."""
    picture: str | None = None
    """Write a picture: a name that ends in .svg or .png."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parse(ScheduleOptions, "schedule", sys.argv[1:] if arguments is None else arguments)
    try:
        check_options(options)
        costs = Costs(*(parse_cost(options, kind) for kind in ("f", "i", "w", "send")))
        if options.compare:
            return compare(options, costs)
        schedule = make_or_read(options, costs)
        costs = fitted(costs, schedule.num_stages)
        simulation = simulate(schedule, costs)
        check_memory(options, schedule, simulation)
        outputs: list[tuple[str | None, Callable[[], str | bytes]]] = [
            (options.csv, schedule.to_csv),
            (options.trace, lambda: chrome_trace(schedule, simulation)),
            (options.picture, lambda: (png if str(options.picture).endswith(".png") else svg)(schedule, simulation)),
        ]
        for path, content in outputs:
            if path:
                write(path, content())
    except ScheduleError as error:
        if options.json and all("deadlock" in fault.text for fault in error.faults):
            waits = [str(fault).replace("deadlock: ", "").rstrip(".") for fault in error.faults]
            print(json.dumps(deadlocked(str(options.file), "; ".join(waits))))
            return 1
        fail(str(error))
    except (ValueError, OSError) as error:
        fail(str(error))
    if options.json:
        print(json.dumps(to_json(simulation)))
    else:
        show(Row(schedule, costs, simulation))
        written = [path for path, _ in outputs if path]
        if written:
            print(f"wrote {', '.join(written)}")
    return 0


def check_options(options: ScheduleOptions) -> None:
    """Refuse options that do not go together, and files that exist.

    Raises:
        ValueError: says which.
    """
    names, file = [*SCHEDULES, "auto"], options.file
    if file and (options.chunks or options.microbatches):
        raise ValueError(f"--file {file}: --chunks and --microbatches follow from the table. Leave them out.")
    if options.name and file:
        raise ValueError(f"--name {options.name} --file {file}: two schedules. Give one of them.")
    if options.name not in (None, *names):
        raise ValueError(f"--name {options.name}: no such schedule. Use one of {', '.join(names)}.")
    outputs = [(name, value) for name in ("csv", "trace", "picture") if (value := getattr(options, name)) is not None]
    one = [(name, value) for name in ("name", "file") if (value := getattr(options, name)) is not None] + outputs
    if options.compare and one:
        given = ", ".join(f"--{name} {value}" for name, value in one)
        raise ValueError(f"--compare with {given}: it is about all schedules. Leave one of them out.")
    for option, value in (("pp", options.pp), ("microbatches", options.microbatches), ("chunks", options.chunks)):
        if value is not None and value < 1:
            raise ValueError(f"--{option} {value}: must be at least 1.")
    if options.memory_limit is not None and options.memory_limit < 1:
        raise ValueError(f"--memory-limit {options.memory_limit}: must be at least 1 stage-microbatch.")
    count = 3 * (options.pp or 4) * (options.chunks or 2) * (options.microbatches or 8)
    if count > MOST_ACTIONS:
        raise ValueError(
            f"--pp {options.pp or 4} --microbatches {options.microbatches or 8}: {count:,} actions. At most "
            f"{MOST_ACTIONS:,} are simulated. Take fewer microbatches: all rounds of a schedule are alike."
        )
    for name, value in outputs:
        path = Path(value)
        if not value.strip():
            raise ValueError(f"--{name} '': no name. Give a file to write.")
        if path.exists() or path.is_symlink():
            raise ValueError(f"--{name} {value}: exists. Files are not overwritten. Delete it, or name another.")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(
                f"--{name} {value}: there is no folder {path.parent} to write to. Make it, or name another."
            )
        if name == "picture" and path.suffix not in (".svg", ".png"):
            raise ValueError(f"--picture {value}: a picture is SVG or PNG. End its name in .svg or .png.")
    if len({os.path.abspath(value) for _, value in outputs}) < len(outputs):
        raise ValueError(f"--{' --'.join(name for name, _ in outputs)}: one file for two outputs. Name them apart.")


def parse_cost(options: ScheduleOptions, kind: str) -> Cost:
    """Read a cost: "1", or "1,1,1,1.6"."""
    text = getattr(options, f"cost_{kind}")
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--cost-{kind} {text}: not a number, or numbers by comma. Write 1, or one for each stage: 1,1,1,1.6."
        ) from None
    if any(math.isfinite(value) and value > MOST_COST for value in values):
        raise ValueError(f"--cost-{kind} {text}: at most {MOST_COST:g}. Count in a larger unit.")
    Costs(**{kind: tuple(values)}).per_stage(len(values))
    return tuple(values) if len(values) > 1 else values[0]


def make_or_read(options: ScheduleOptions, costs: Costs) -> Schedule:
    """Return the schedule that was asked for."""
    ranks, microbatches = options.pp or 4, options.microbatches or 8
    if options.file:
        text = read(options.file)
        try:
            return read_schedule(text, options.file, options.pp or len(lines_of(text, options.file)))
        except ScheduleError:
            raise
        except ValueError as error:
            raise ValueError(f"--file {error}") from None
    if options.name != "auto":
        return make(options.name or "1f1b", ranks, microbatches, options.chunks)
    lengths = [len(cost) for cost in (costs.f, costs.i, costs.w, costs.send) if isinstance(cost, tuple)]
    chunks = options.chunks or max([1, *(n // ranks for n in lengths)])
    return auto(ranks, microbatches, fitted(costs, ranks * chunks), options.memory_limit, chunks)


def fitted(costs: Costs, num_stages: int) -> Costs:
    """Return costs of so many stages: numbers for fewer equal parts of the model are split evenly."""

    def fit(name: str, cost: Cost) -> Cost:
        if not isinstance(cost, tuple) or num_stages % len(cost):
            return cost
        each = num_stages // len(cost)
        return tuple(value if name == "send" else value / each for value in cost for _ in range(each))

    return Costs(**{name: fit(name, getattr(costs, name)) for name in ("f", "i", "w", "send")})


def read(path: str) -> str:
    """Read a table."""
    try:
        return read_table(path)
    except ValueError as error:
        raise ValueError(f"--file {error}") from None


def lines_of(text: str, name: str) -> list[list[Cell]]:
    """Return the compute actions of a table, a line for each rank, without empty lines at its end."""
    table = [[Cell(a for a in cell if a.kind in COMPUTE) for cell in row] for row in parse_csv(text, name)]
    while table and not any(table[-1]):
        table.pop()
    return table


def write(path: str, content: str | bytes) -> None:
    """Write a file that is not there yet."""
    try:
        with open(path, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}). Name another file.") from None


def check_memory(options: ScheduleOptions, schedule: Schedule, simulation: Simulation) -> None:
    """Refuse a schedule above the memory limit.

    Raises:
        ValueError: names the fullest rank.
    """
    most = max(simulation.peak_live)
    if options.memory_limit is not None and most > options.memory_limit:
        raise ValueError(
            f"--memory-limit {options.memory_limit}: schedule {schedule.name} holds {most} stage-microbatches on rank "
            f"{simulation.peak_live.index(most)}. Allow {most}, or let --name auto keep to the limit."
        )


def to_json(simulation: Simulation) -> dict[str, Any]:
    """Return the figures of a schedule that ends."""
    return {
        "makespan": simulation.makespan,
        "bubble": simulation.bubble_share,
        "peak_live": list(simulation.peak_live),
        "deadlock": None,
    }


def deadlocked(path: str, text: str) -> dict[str, Any]:
    """Return the figures of a table whose ranks wait for each other, up to where they stop."""
    table = tuple(map(tuple, lines_of(read(path), path)))
    owners = {action.stage: rank for rank, row in enumerate(table) for cell in row for action in cell}
    microbatches = 1 + max(action.microbatch for row in table for cell in row for action in cell)
    stopped = Schedule(path, table, tuple(owners[stage] for stage in sorted(owners)), microbatches)
    return {"makespan": None, "bubble": None, "peak_live": list(simulate(stopped, Costs()).peak_live), "deadlock": text}


def compare(options: ScheduleOptions, costs: Costs) -> int:
    """Simulate all schedules on the same model and print them."""
    ranks, microbatches, rows = options.pp or 4, options.microbatches or 8, []
    parts = max([ranks, *(len(c) for c in (costs.f, costs.i, costs.w, costs.send) if isinstance(c, tuple))])
    if parts % ranks:
        raise ValueError(
            f"costs: {parts} numbers for {ranks} ranks. Give one number, or one for each of {ranks} equal parts of the "
            f"model (or of {2 * ranks}, and so on)."
        )
    costs.per_stage(parts)
    names = [(name, FIXED_CHUNKS.get(name, options.chunks or 2)) for name in SCHEDULES]
    for name, chunks in [*names, *(("auto", n) for n in ([options.chunks] if options.chunks else (1, 2)))]:
        own = costs.split(parts, ranks * chunks)
        if name != "auto":
            schedule = make(name, ranks, microbatches, chunks)
        else:
            limit = None if options.memory_limit is None else options.memory_limit * chunks
            schedule = auto(ranks, microbatches, own, limit, chunks)
        rows.append(Row(schedule, own, simulate(schedule, own)))
    if options.json:
        print(json.dumps({key(row.schedule): to_json(row.simulation) for row in rows}))
    else:
        show_all(rows, options.memory_limit)
    return 0


def key(schedule: Schedule) -> str:
    """Return the name of a schedule in --compare, where auto is there more than once."""
    return (
        f"auto, {schedule.num_stages // schedule.num_ranks} stages a rank" if schedule.name == "auto" else schedule.name
    )


if __name__ == "__main__":
    raise SystemExit(main())
