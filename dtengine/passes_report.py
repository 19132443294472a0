"""What each pass over the step's graph does to a run's own step: ``python -m dtengine.train --passes``.

The step is made once with all passes and once without each; all are run in turn on the run's own ranks and data, and their
times are compared by median. What a pass saves depends on model, mesh and machine: look before you believe it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from dtengine import ranks
from dtengine.data import train_batches
from dtengine.job import Job
from dtengine.mesh import build_mesh
from dtengine.passes import PASSES
from dtengine.screens import bytes_text
from dtengine.state import State
from dtengine.step import Step, init_state

ROUNDS = 9


def report_passes(job: Job, backend: str) -> None:
    """Measure on one rank what each pass does; all ranks run this together, the first one prints the table."""
    # 1. a step with all passes and one without each; 2. run them in turn; 3. print
    environment = ranks.launcher_environment()
    assert environment is not None
    setup, corpus = job.setup, job.corpus
    with ranks.process_group(environment, backend, job.options.run.start_timeout) as device:
        mesh = build_mesh(setup.plan.sizes, device)
        optimizer = setup.optimizer(job.options.optimizer)
        coordinate = mesh.data_coordinate(setup.plan.data_axes)
        shape, seed = setup.batch_shape, job.options.optimizer.seed
        batches = train_batches(corpus.train, seed, 0, setup.global_batch, shape, coordinate)
        batches = [type(batch)(*(t.to(device) for t in batch)) for batch in batches]
        steps: dict[str, Step] = {}
        states: dict[str, State] = {}
        for name in ("", *PASSES):
            disabled = (*setup.step.disable_pass, *([name] if name else []))
            one = replace(setup, step=replace(setup.step, disable_pass=disabled, eager=False))
            steps[name] = one.bind(mesh, optimizer, job.rate, device)
            states[name] = init_state(steps[name])
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(ROUNDS + 2):
            for name, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                states[name], metrics = step(states[name], batches, float(job.tokens))
                metrics.loss.item()
                if turn > 1:  # the first two make the programs and warm up
                    seconds[name].append(time.perf_counter() - began)
        if environment.rank == 0:
            print_report(Console(), steps, seconds, disabled=setup.step.disable_pass)


def print_report(
    console: Console, steps: dict[str, Step], seconds: dict[str, list[float]], disabled: Sequence[str]
) -> None:
    """Print a table of passes: what each does to the graphs, and what the step is without it.

    Args:
        console: where to.
        steps: {pass that the step is without, "" for none: step}.
        seconds: time of each step's runs, in turn.
        disabled: passes that the run is without anyway.
    """
    table = Table(title="Passes over the step's graph, in order", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pass", "nodes", "fewer", "sent", "peak", "ms saved", "exact"):
        table.add_column(heading, justify="left" if heading in ("pass", "exact") else "right", no_wrap=True)
    base = steps[""]
    whole = base.memory()
    for name, one in PASSES.items():
        if name in disabled:
            table.add_row(name, *["-"] * 5, "disabled")
            continue
        mine = [effect for effect in base.effects if effect.name == name]
        saved = [b - a for a, b in zip(seconds[""], seconds[name], strict=True)]
        without = steps[name].memory()
        assert whole is not None and without is not None
        table.add_row(
            name,
            str(sum(effect.before for effect in mine)),
            str(sum(effect.before - effect.after for effect in mine)),
            _difference(_count(base) - _count(steps[name])),
            _difference(whole.total - without.total, bytes_text),
            f"{1e3 * statistics.median(saved):.2f}",
            "yes" if one.exact else "no",
        )
    console.print(table)
    middle = 1e3 * statistics.median(seconds[""])
    spread = 1e3 * (max(seconds[""]) - min(seconds[""]))
    console.print(
        f"A step with all of them takes {middle:.2f} ms (rank 0, median of {len(seconds[''])}, range {spread:.2f} ms); "
        f"sent (collectives), peak (memory): with the pass less without it; exact: outputs stay the same bits.",
        highlight=False,
    )


def _count(step: Step) -> int:
    return sum(n for operations in step.collectives().values() for n in operations.values())


def _difference(value: int, text: Callable[[float], str] = str) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{text(abs(value))}"
