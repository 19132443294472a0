"""Train a language model on a mesh: python -m dtengine.train --mesh 2x4

Reads top to bottom: what can be known before any rank starts (``main``), then what each rank does (``run_rank``).
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from dtengine import checkpoint, launch, loss_scale, monitor, random, ranks
from dtengine.data import Loader, heldout_batches, pin, token_checksum, train_batches
from dtengine.explain import explain
from dtengine.job import Job, consumed, facts, is_finished, open_folder, prepare, read_options
from dtengine.layout import Plan
from dtengine.logs import start_logging
from dtengine.mesh import Mesh, build_mesh, check_world, num_ranks, parse_mesh
from dtengine.options import TrainOptions, fail, to_json
from dtengine.passes_report import report_passes
from dtengine.pipeline.simulate import Simulation
from dtengine.pipeline.step import PipelineStep
from dtengine.sample import sample_text
from dtengine.state import Metrics, State
from dtengine.step import Step, init_state
from dtengine.step_trace import traced_step
from dtengine.torch_private import all_gather_flat, preload
from dtengine.trace_cache import TraceCache, cache_folder
from dtengine.watch import Watch

MOST_SECONDS = 86_400  # a day
MOST_RANKS_A_CORE = 32  # each takes some 300 MB; more is a slip of the pen


# --- before any rank starts -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        options, changed = read_options(sys.argv[1:] if arguments is None else list(arguments))
        environment = ranks.launcher_environment()
        sizes = parse_mesh(options.mesh.mesh)
        if environment is not None:
            check_world(options.mesh.mesh, sizes, environment.world_size, environment.launcher)
        elif num_ranks(sizes) > MOST_RANKS_A_CORE * ranks.usable_cores():
            raise ValueError(
                f"--mesh {options.mesh.mesh}: {num_ranks(sizes)} ranks, but this machine has {ranks.usable_cores()} usable "
                f"cores; at most {MOST_RANKS_A_CORE} ranks a core start here. Use a smaller mesh, or torchrun on more "
                "machines."
            )
        local_ranks = num_ranks(sizes) if environment is None else environment.local_world_size
        backend = ranks.choose_backend(None if options.mesh.backend == "auto" else options.mesh.backend, local_ranks)
        if not 0 < options.run.start_timeout <= MOST_SECONDS:
            raise ValueError(
                f"--start-timeout {options.run.start_timeout}: seconds, above 0 and at most {MOST_SECONDS}."
            )
        if options.program.cuda_graphs and backend != "nccl":
            raise ValueError("--cuda-graphs: ranks run on CPUs. Leave it out, or run on GPUs.")
        owner = environment is None or environment.rank == 0  # the one process that looks after the folder
        job = prepare(options, changed, owner)
        if options.run.explain:
            explain(job.setup, Console())
            return 0
        if is_finished(job):
            return 0
        if owner and not options.program.passes:
            open_folder(job)
    except ValueError as error:
        fail(str(error))
    if options.program.passes:
        return run_report(job, backend, num_ranks(sizes), environment)
    if environment is not None:
        try:
            run_rank(job, backend)
        except ValueError as error:
            fail(str(error))
        return 0
    preload()
    try:
        launch.start_ranks(run_rank, (job, backend), num_ranks(sizes), log_dir=job.folder / "logs")
    except launch.RunInterrupted as stop:
        mark_failed(job.folder, f"interrupted by {stop.signal.name}")
        newest = checkpoint.newest(job.folder / "checkpoints")[0]
        kept = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
        again = f"python -m dtengine.train --run-dir {shlex.quote(str(job.folder))} --resume"
        print(f"dtengine: stopped by {stop.signal.name}; {kept}. Continue from it: {again}", file=sys.stderr)
        return stop.exit_code
    except launch.RankFailed as failure:
        return report_failure(failure, job.folder)
    return 0


def run_report(job: Job, backend: str, ranks_wanted: int, environment: ranks.RankEnvironment | None) -> int:
    """Print what each pass does to this run's step; nothing is trained or written."""
    if environment is not None:
        report_passes(job, backend)
        return 0
    preload()
    try:
        launch.start_ranks(report_passes, (job, backend), ranks_wanted, log_dir=None)
    except launch.RunInterrupted as stop:
        return stop.exit_code
    except launch.RankFailed as failure:
        print(f"{failure.traceback or ''}dtengine: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0


def report_failure(failure: launch.RankFailed, folder: Path) -> int:
    """Print what the first failing rank said, and leave it in status.json."""
    if failure.user_error is None and failure.traceback:
        print(failure.traceback, file=sys.stderr)
    print(f"dtengine: {failure}", file=sys.stderr)
    print(f"dtengine: the log of each rank is in {folder / 'logs'}", file=sys.stderr)
    mark_failed(folder, str(failure))
    return failure.exit_code


def mark_failed(folder: Path, error: str) -> None:
    """Say in status.json, for a rank 0 that could not, how the run ended."""
    path = folder / "status.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    known = {name: value for name, value in stored.items() if name in monitor.STATUS_FIELDS}
    monitor.Status(path, **known | {"status": "failed", "error": error})


# --- on each rank -----------------------------------------------------------------------------------------------


def digest(options: TrainOptions) -> str:
    """Return a short hash of options, to see whether ranks have the same."""
    return f"{random.key(to_json(options)) & 0xFFFFFFFF:08x}"


class NonFinite(RuntimeError):
    """Loss or gradient norm is not finite; no rank updated anything."""


def run_rank(job: Job, backend: str) -> None:
    """Train on one rank, from start to the last checkpoint; all ranks run this together."""
    # 1. group, mesh, step; 2. state; 3. programs; 4. steps; 5. last evaluation, checkpoint and sample
    environment = ranks.launcher_environment()
    assert environment is not None
    options, setup = job.options, job.setup
    agreed = f"--mesh {options.mesh.mesh} --plan {setup.plan.name}, options {digest(options)}"
    with ranks.process_group(environment, backend, options.run.start_timeout, agreed=agreed) as device:
        if environment.launcher != "dtengine":  # each rank was started by itself: the first one says where the run is
            folder, _, resumed = broadcast_text(f"{job.folder}\n{job.resumed or ''}", device).partition("\n")
            job = replace(job, folder=Path(folder), resumed=Path(resumed) if resumed else None)
            start_logging(environment.rank, job.folder / "logs")
        mesh = build_mesh(setup.plan.sizes, device)
        optimizer = setup.optimizer(options.optimizer)
        cache = TraceCache(folder) if options.run.trace_cache and (folder := cache_folder()) else None
        step = setup.bind(mesh, optimizer, job.rate, device, cache)
        state, start = init_state(step), 0
        if job.resumed is not None:
            state = checkpoint.load(job.resumed, state, mesh)
            start = state.step
        watch = Watch(job, environment, backend, device, start) if environment.rank == 0 else None
        try:
            steps(job, step, state, mesh, device, watch)
        except Exception as error:
            if watch is not None:
                watch.failed(error)
            raise


def broadcast_text(text: str, device: torch.device) -> str:
    """Return rank 0's text, of up to 4,096 bytes, on every rank."""
    data = torch.zeros(4096, dtype=torch.uint8, device=device)
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    data[: len(encoded)] = encoded
    dist.broadcast(data, 0)
    return bytes(data.tolist()).rstrip(b"\0").decode()


def steps(job: Job, step: Step, state: State, mesh: Mesh, device: torch.device, watch: Watch | None) -> None:
    """Take the steps of a run, from the state's to the last."""
    options, setup, corpus = job.options, job.setup, job.corpus
    shape, start, last = setup.batch_shape, state.step, options.optimizer.steps
    coordinate = mesh.data_coordinate(setup.plan.data_axes)
    count = float(job.tokens)

    base = consumed(job, start)

    def read(number: int) -> list:
        position = base + (number - start) * setup.global_batch
        batches = train_batches(corpus.train, options.optimizer.seed, position, setup.global_batch, shape, coordinate)
        return [pin(batch, device) for batch in batches]

    began = time.perf_counter()
    step.prepare()
    seconds = time.perf_counter() - began
    memory = memory_of_ranks(step, mesh) if options.run.memory_report else []
    if watch is not None:
        watch.traced(seconds, step, memory)
    looks = CloserLooks(job, step, watch, start, memory[0]["total"] if memory else None)
    with Loader(read, start) as loader:
        for number in range(start, last):
            began = time.perf_counter()
            batches, waited = loader.next()
            if number == start:
                check_same_tokens(token_checksum(batches), mesh, setup.plan)
            state, metrics = looks.take(number, state, batches, count)
            loss, norm = stop_if_not_finite(metrics, number, mesh, setup.plan)
            if watch is not None:
                scale = None if metrics.scale is None else metrics.scale.item()
                watch.stepped(number + 1, loss, norm, metrics.lr, time.perf_counter() - began, waited, scale)
            done = number + 1
            if done == last or (options.data.eval_every and done % options.data.eval_every == 0):
                heldout = evaluate(job, step, state, coordinate, device)
                if watch is not None:
                    watch.evaluated(done, heldout)
            if done == last or done % options.run.save_every == 0:
                if watch is not None:
                    watch.status.update(status="saving")
                checkpoint.save(job.folder / "checkpoints", state, mesh, facts(job, done), step.parameters.borrowed)
                if watch is not None:
                    watch.saved()
    if watch is not None:
        watch.sampling()
    text = sample_text(job.setup, state, mesh, options.run.sample, corpus.byte_level, options.optimizer.seed)
    if watch is not None:
        watch.finished(text)
    dist.barrier()  # the other ranks wait for the sample: a rank that leaves early looks like a failure


class CloserLooks:
    """Takes steps, and looks at some of them, each at one of its own: memory at the third, times of a pipeline at the three
    that follow, and a trace of the one that was asked for.

    Args:
        job: of the run.
        step: takes the steps.
        watch: shows what is seen; None where the rank is not the first.
        start: the first step, from 0.
        estimate: bytes that the first rank holds; None where nothing is to be measured.
    """

    def __init__(self, job: Job, step: Step, watch: Watch | None, start: int, estimate: int | None) -> None:
        self.job, self.step, self.watch, self.estimate = job, step, watch, estimate
        self.traced, last = job.options.run.trace_step, job.options.optimizer.steps
        usual = (number for number in range(start + 2, last) if number + 1 != self.traced)  # programs have run
        found = list(islice(usual, 4))
        self.weighed = found.pop(0) if found and estimate is not None else None
        self.timed = found[:3]
        self.runs: list[Simulation] = []

    def take(self, number: int, state: State, batches: list, count: float) -> tuple[State, Metrics]:
        """Take a step, numbered from 0; all ranks look at the same one."""
        step, watch = self.step, self.watch
        if number + 1 == self.traced:
            with traced_step(self.job.folder, number + 1, dist.get_rank(), step.device), step.marked():
                return step(state, batches, count)
        if watch is not None and self.estimate is not None and number == self.weighed:
            state, metrics, measured = step.measured(state, batches, count)
            watch.measured(number + 1, measured, self.estimate)
            return state, metrics
        if isinstance(step, PipelineStep) and number in self.timed:
            state, metrics, seen = step.timed(state, batches, count)
            self.runs.append(seen)
            if watch is not None and number == self.timed[-1]:
                watch.timed(number + 1, step.schedule, self.runs)
            return state, metrics
        return step(state, batches, count)


def memory_of_ranks(step: Step, mesh: Mesh) -> list[dict[str, int]]:
    """Return what each rank will hold at the peak of a step, {kind: bytes}; nothing where a step is not traced.

    Collectives:
        One small all-gather over the mesh.
    """
    estimate = step.memory()
    if estimate is None:
        return []
    numbers = estimate.numbers
    mine = torch.tensor(list(numbers.values()), dtype=torch.int64, device=step.device)
    table = mine if mesh.everyone is None else all_gather_flat(mine, mesh.world, mesh.everyone)
    return [dict(zip(numbers, row, strict=True)) for row in table.view(-1, len(numbers)).tolist()]


def evaluate(job: Job, step: Step, state: State, coordinate: int, device: torch.device) -> float:
    """Return the loss on the held-out sequences, in nats per token."""
    batches = heldout_batches(job.corpus.heldout, job.heldout_limit, job.setup.batch_shape, coordinate)
    return step.evaluate(state, [pin(batch, device) for batch in batches])[0]


def stop_if_not_finite(metrics: Metrics, number: int, mesh: Mesh, plan: Plan) -> tuple[float, float]:
    """Read loss and norm; raise NonFinite on all ranks alike where one of them is not finite.

    In fp16 a step whose gradients alone are not finite is skipped and the loss scale halved, unless it is the smallest one
    already; no scale mends a loss that is not finite.
    """
    loss, norm = metrics.loss.item(), metrics.norm.item()
    if math.isfinite(loss) and math.isfinite(norm):
        return loss, norm
    if metrics.scale is not None and metrics.scale.item() > loss_scale.SMALLEST and math.isfinite(loss):
        return loss, norm
    bad = [c for c, flag in enumerate(metrics.bad_data.tolist()) if flag]
    theirs = [r for r, c in enumerate(data_coordinates(mesh, plan)) if c in bad]
    whose = (
        f"on the data of ranks {', '.join(map(str, theirs))}" if theirs else "though every rank's own loss was finite"
    )
    smallest = metrics.scale is not None and metrics.scale.item() <= loss_scale.SMALLEST
    scaled = f" at loss scale {metrics.scale.item():g}, the smallest" if metrics.scale is not None and smallest else ""
    cure = "" if metrics.scale is None else ", with --precision bf16"
    raise NonFinite(
        f"step {number + 1}: loss {loss}, gradient norm {norm}{scaled}, {whose}; nothing was updated. Resume from the last "
        f"checkpoint with a lower --lr, more --warmup or a smaller --clip{cure}, or look at that data."
    )


def data_coordinates(mesh: Mesh, plan: Plan) -> list[int]:
    """Return the data-parallel coordinate of every rank."""
    found = []
    for index in product(*(range(size) for size in mesh.sizes.values())):
        found.append(replace(mesh, coordinate=index).data_coordinate(plan.data_axes))
    return found * (mesh.pipe.size if mesh.pipe else 1)  # pp is the outermost axis


def check_same_tokens(checksum: int, mesh: Mesh, plan: Plan) -> None:
    """Compare the first step's tokens between the ranks that must read the same ones.

    Raises:
        RuntimeError: on all ranks alike, naming those that differ.
    """
    if mesh.everyone is None:
        return
    mine = torch.tensor([checksum], dtype=torch.int64, device=mesh.device_mesh.device_type)
    sums = all_gather_flat(mine, mesh.world, mesh.everyone).tolist()
    first: dict[int, int] = {}
    wrong = []
    for rank, coordinate in enumerate(data_coordinates(mesh, plan)):
        if sums[rank] != sums[first.setdefault(coordinate, rank)]:
            wrong.append(f"rank {rank} differs from rank {first[coordinate]}")
    if wrong:
        raise RuntimeError(
            f"data: ranks of one data-parallel coordinate read different tokens: {', '.join(wrong)}. They must see the "
            "same files; check that --data is the same on every machine."
        )


if __name__ == "__main__":
    raise SystemExit(main())
