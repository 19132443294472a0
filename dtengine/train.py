"""Train a language model on a mesh: python -m dtengine.train --mesh 2x4

Reads top to bottom: what can be known before any rank starts (``main``), then what each rank does (``run_rank``).
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dtengine import checkpoint, config, launch, monitor, random, ranks
from dtengine.config import Setup, TrainOptions, fail
from dtengine.corpus import Corpus, load_corpus
from dtengine.data import BatchShape, Loader, bigram_loss, heldout_batches, pin, token_checksum, train_batches
from dtengine.explain import explain
from dtengine.layout import Layout, Plan, local_bounds
from dtengine.logs import start_logging
from dtengine.mesh import Mesh, build_mesh, check_world, num_ranks, parse_mesh
from dtengine.model import parameters
from dtengine.optim import LearningRate, scale_peak
from dtengine.sample import sample_text
from dtengine.step import Metrics, State, Step, init_state, make_step
from dtengine.torch_private import all_gather_flat, preload

# The default run: what two cores learn in about two minutes.
DEFAULTS = {"layers": 2, "embed": 128, "heads": 4, "seq": 128, "global_batch": 32}


@dataclass(frozen=True)
class Job:
    """A run, resolved: what every rank is given.

    Attributes:
        options: as typed, or as the resumed run was started.
        setup: model, plan and batch.
        corpus: what to train on.
        rate: learning rate by step.
        rate_note: how the rate was scaled, in words.
        folder: of the run.
        changed: options that differ from the resumed run's, in words.
    """

    options: TrainOptions
    setup: Setup
    corpus: Corpus
    rate: LearningRate
    rate_note: str
    folder: Path
    changed: str


# --- before any rank starts -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        options, changed = read_options(sys.argv[1:] if arguments is None else list(arguments))
        environment = ranks.launcher_environment()
        sizes = parse_mesh(options.mesh.mesh)
        if environment is not None:
            check_world(options.mesh.mesh, sizes, environment.world_size, environment.launcher)
        local_ranks = num_ranks(sizes) if environment is None else environment.local_world_size
        backend = ranks.choose_backend(None if options.mesh.backend == "auto" else options.mesh.backend, local_ranks)
        owner = environment is None or environment.rank == 0  # the one process that looks after the folder
        job = prepare(options, changed, owner)
        if options.run.explain:
            explain(job.setup, Console())
            return 0
        if is_finished(job):
            return 0
        if owner:
            open_folder(job)
    except ValueError as error:
        fail(str(error))
    if environment is not None:
        run_rank(job, backend)
        return 0
    preload()
    try:
        launch.start_ranks(run_rank, (job, backend), num_ranks(sizes), log_dir=job.folder / "logs")
    except launch.RunInterrupted as stop:
        mark_failed(job.folder, f"interrupted by {stop.signal.name}")
        return stop.exit_code
    except launch.RankFailed as failure:
        return report_failure(failure, job.folder)
    return 0


def read_options(arguments: Sequence[str]) -> tuple[TrainOptions, str]:
    """Read the command line; with --resume, options that are not typed are those the run was started with.

    Returns:
        (options, what differs from the resumed run in words).
    """
    options = config.parse(TrainOptions, "train", arguments)
    if not options.run.resume:
        return options, ""
    if options.run.run_dir is None:
        raise ValueError("--resume: which run? Give its folder with --run-dir.")
    stored_path = Path(options.run.run_dir) / "config.json"
    if not stored_path.exists():
        return options, ""
    try:
        stored = config.from_json(stored_path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--run-dir {options.run.run_dir}: {stored_path} cannot be read: {error}") from error
    options = config.parse(TrainOptions, "train", arguments, default=stored)
    before, now = asdict(stored), asdict(options)
    changed = [
        f"--{key.replace('_', '-')} {before[group][key]} to {value}"
        for group in before
        for key, value in now[group].items()
        if group != "run" and before[group][key] != value
    ]
    return options, ", ".join(changed)


def prepare(options: TrainOptions, changed: str, owner: bool) -> Job:
    """Resolve everything that needs no rank, or raise ValueError in one short message."""
    # 1. the model's sizes, for the length of a sequence; 2. the data; 3. all again, with the vocabulary of the data
    first = config.resolve(options.mesh, options.model, options.batch, options.optimizer, **DEFAULTS)
    data = options.data
    for name in ("eval_every", "eval_sequences"):
        if getattr(data, name) < (name == "eval_sequences"):
            raise ValueError(f"--{name.replace('_', '-')} {getattr(data, name)}: too small; use a whole number.")
    corpus = load_corpus(
        data.data, first.model_config.seq, data.heldout_fraction, options.optimizer.seed, options.model.vocab
    )
    setup = config.resolve(
        options.mesh, options.model, options.batch, options.optimizer, **DEFAULTS, vocab=corpus.vocab
    )
    if setup.model_config.vocab < corpus.vocab:
        raise ValueError(
            f"--vocab {setup.model_config.vocab}: the data has token ids up to {corpus.vocab - 1}; the vocabulary must "
            f"hold them all. Use --vocab {corpus.vocab}."
        )
    for name in ("save_every", "log_every"):
        if getattr(options.run, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options.run, name)}: must be at least 1 step.")
    o = options.optimizer
    peak, note = scale_peak(o.lr, setup.global_batch, o.base_batch, o.lr_scaling, o.lr_scale_max)
    rate = LearningRate(peak, o.steps, o.warmup, o.lr_decay, o.lr_floor)
    if options.run.run_dir is None:
        folder = config.new_run_dir(options, time.strftime("%Y%m%d-%H%M%S"))
    else:
        folder = Path(options.run.run_dir)
    if owner:
        check_folder(folder, options, corpus)
    return Job(options, setup, corpus, rate, note, folder, changed)


def check_folder(folder: Path, options: TrainOptions, corpus: Corpus) -> None:
    """Refuse a folder that holds something, cannot be written, or whose checkpoint read other data."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run-dir {folder}: is a file. Name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not options.run.resume:
        kind = "holds a run" if (folder / "config.json").exists() else "is not empty"
        raise ValueError(
            f"--run-dir {folder}: {kind}; nothing is overwritten. Continue it with --resume, or name another folder."
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise ValueError(f"--run-dir {folder}: is not empty and holds no run of dtengine. Name another folder.")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    try:
        probe = parent / f".dtengine-{time.time_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--run-dir {folder}: cannot write to {parent} ({error.strerror}). Name another folder."
        ) from None
    latest = checkpoint.newest(folder / "checkpoints")
    if latest is not None:
        known = checkpoint.read_manifest(latest).facts.get("data")
        if known != corpus.fingerprint:
            raise ValueError(
                f"--data: not the data that {latest} was trained on ({corpus.source}); sequences would be skipped or read "
                "twice. Give the same --data, --seq, --seed and --heldout-fraction."
            )


def is_finished(job: Job) -> bool:
    """Say so where the resumed run has nothing left to do."""
    latest = checkpoint.newest(job.folder / "checkpoints")
    if latest is None or checkpoint.read_manifest(latest).step < job.options.optimizer.steps:
        return False
    print(f"{job.folder}: finished, all {job.options.optimizer.steps} steps are done. Give more --steps to go on.")
    return True


def open_folder(job: Job) -> None:
    """Make the run's folder and write the resolved options."""
    job.folder.mkdir(parents=True, exist_ok=True)
    stored = replace(job.options, run=replace(job.options.run, run_dir=str(job.folder), resume=False))
    path = job.folder / "config.json"
    try:
        path.open("x").close()  # of two new runs that start at once, one takes the folder
    except FileExistsError:
        if not job.options.run.resume:
            raise ValueError(f"--run-dir {job.folder}: another run has just taken it. Name another folder.") from None
    monitor.write_atomically(path, config.to_json(stored))


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
    return f"{random.key(config.to_json(options)) & 0xFFFFFFFF:08x}"


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
            job = replace(job, folder=Path(broadcast_text(str(job.folder), device)))
            start_logging(environment.rank, job.folder / "logs")
        mesh = build_mesh(setup.plan.sizes, device)
        optimizer = setup.optimizer(options.optimizer)
        step = make_step(setup.model, setup.model_config, setup.plan, mesh, optimizer, setup.step, job.rate, device)
        state, start = init_state(step), 0
        latest = checkpoint.newest(job.folder / "checkpoints")
        if latest is not None:
            state = checkpoint.load(latest, state, mesh)
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


def steps(job: Job, step: Step, state: State, mesh: Mesh, device: torch.device, watch: "Watch | None") -> None:
    """Take the steps of a run, from the state's to the last."""
    options, setup, corpus = job.options, job.setup, job.corpus
    shape, start, last = setup.batch_shape, state.step, options.optimizer.steps
    coordinate = mesh.data_coordinate(setup.plan.data_axes)
    count = float(setup.global_batch * setup.model_config.seq)

    def read(number: int) -> list:
        consumed = number * setup.global_batch
        batches = train_batches(corpus.train, options.optimizer.seed, consumed, setup.global_batch, shape, coordinate)
        return [pin(batch, device) for batch in batches]

    began = time.perf_counter()
    step.prepare()
    if watch is not None:
        watch.traced(time.perf_counter() - began, step)
    with Loader(read, start) as loader:
        for number in range(start, last):
            began = time.perf_counter()
            batches, waited = loader.next()
            if number == start:
                check_same_tokens(token_checksum(batches), mesh, setup.plan)
            state, metrics = step(state, batches, count)
            loss, norm = stop_if_not_finite(metrics, number, mesh, setup.plan)
            if watch is not None:
                watch.stepped(number + 1, loss, norm, metrics.lr, time.perf_counter() - began, waited)
            done = number + 1
            if done == last or (options.data.eval_every and done % options.data.eval_every == 0):
                heldout = evaluate(job, step, state, coordinate, device)
                if watch is not None:
                    watch.evaluated(done, heldout)
            if done == last or done % options.run.save_every == 0:
                if watch is not None:
                    watch.status.update(status="saving")
                checkpoint.save(job.folder / "checkpoints", state, mesh, facts(job, done))
                if watch is not None:
                    watch.saved()
    text = sample_text(job.setup, state, mesh, options.run.sample, corpus.byte_level, options.optimizer.seed)
    if watch is not None:
        watch.finished(text)
    dist.barrier()  # the other ranks wait for the sample: a rank that leaves early looks like a failure


def evaluate(job: Job, step: Step, state: State, coordinate: int, device: torch.device) -> float:
    """Return the loss on the held-out sequences, in nats per token."""
    batches = heldout_batches(job.corpus.heldout, heldout_limit(job), job.setup.batch_shape, coordinate)
    return step.evaluate(state.params, [pin(batch, device) for batch in batches])[0]


def heldout_limit(job: Job) -> int:
    """Number of held-out sequences that an evaluation reads."""
    return min(job.options.data.eval_sequences, job.corpus.heldout.count)


def facts(job: Job, step: int) -> dict[str, Any]:
    """Return what a checkpoint says of its run beside the tensors."""
    return {
        "plan": job.setup.plan.name,
        "mesh": job.setup.plan.mesh_text(),
        "consumed": step * job.setup.global_batch,
        "tokens": step * job.setup.global_batch * job.setup.model_config.seq,
        "learning_rate": job.rate(step - 1),
        "data": job.corpus.fingerprint,
        "model": asdict(job.setup.model_config),
        "torch": torch.__version__,
    }


def stop_if_not_finite(metrics: Metrics, number: int, mesh: Mesh, plan: Plan) -> tuple[float, float]:
    """Read loss and norm; raise NonFinite on all ranks alike where one of them is not finite."""
    loss, norm = metrics.loss.item(), metrics.norm.item()
    if math.isfinite(loss) and math.isfinite(norm):
        return loss, norm
    bad = [c for c, flag in enumerate(metrics.bad_data.tolist()) if flag]
    theirs = [r for r, c in enumerate(data_coordinates(mesh, plan)) if c in bad]
    whose = (
        f"on the data of ranks {', '.join(map(str, theirs))}" if theirs else "though every rank's own loss was finite"
    )
    raise NonFinite(
        f"step {number + 1}: loss {loss}, gradient norm {norm}, {whose}; nothing was updated. Resume from the last "
        "checkpoint with a lower --lr, more --warmup or a smaller --clip, or look at that data."
    )


def data_coordinates(mesh: Mesh, plan: Plan) -> list[int]:
    """Return the data-parallel coordinate of every rank."""
    found = []
    for index in product(*(range(size) for size in mesh.sizes.values())):
        found.append(replace(mesh, coordinate=index).data_coordinate(plan.data_axes))
    return found


def check_same_tokens(checksum: int, mesh: Mesh, plan: Plan) -> None:
    """Compare the first step's tokens between the ranks that must read the same ones.

    Raises:
        RuntimeError: on all ranks alike, naming those that differ.
    """
    if mesh.num_ranks == 1:
        return
    mine = torch.tensor([checksum], dtype=torch.int64, device=mesh.device_mesh.device_type)
    sums = all_gather_flat(mine, mesh.num_ranks, mesh.groups[mesh.split_axes()]).tolist()
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


class Watch:
    """What rank 0 shows and writes of a run: screen, progress, TensorBoard, status."""

    def __init__(
        self, job: Job, environment: ranks.RankEnvironment, backend: str, device: torch.device, start: int
    ) -> None:
        options, setup = job.options, job.setup
        self.job, self.device, self.console = job, device, Console(highlight=False)
        self.tokens = setup.global_batch * setup.model_config.seq
        self.last, self.heldout, self.bigram = (math.nan, math.nan), math.nan, None
        self.status = monitor.Status(
            job.folder / "status.json",
            device,
            rank=environment.rank,
            world_size=environment.world_size,
            backend=backend,
            run=job.folder.name,
            mesh=options.mesh.mesh,
            plan=setup.plan.name,
            steps=options.optimizer.steps,
            status="starting",
            step=start,
        )
        self.status.update()
        self.events = monitor.Events(job.folder / "tensorboard", start if start else None)
        self.bigram = bigram_loss(job.corpus.train, job.corpus.heldout, setup.model_config.vocab, heldout_limit(job))
        facts = start_facts(job, environment, backend, device, start)
        axes = {a for p in parameters(setup.model.specs(setup.model_config)).values() for a in p.names}
        axes |= {"batch", "seq", "res_seq"}
        notes = [*setup.warnings, *([f"changed on resume: {job.changed}"] if job.changed else [])]
        monitor.start_screen(self.console, setup.plan, facts, warnings=notes, axes=axes)
        self.events.text("plan", monitor.plan_text(setup.plan, facts, axes=axes))
        self.progress = monitor.Progress(self.console, options.optimizer.steps, start + 1)

    def traced(self, seconds: float, step: Step) -> None:
        counts = {axes: ", ".join(f"{n} {name}" for name, n in ops.items()) for axes, ops in step.collectives().items()}
        self.console.print(
            f"traced in {seconds:.1f} s; collectives a step: "
            + ("; ".join(f"{axes}: {text}" for axes, text in counts.items()) or "none"),
            style="dim",
        )
        self.progress.__enter__()
        self.status.update(status="running")

    def stepped(self, step: int, loss: float, norm: float, lr: float, seconds: float, waited: float) -> None:
        rate = self.tokens / seconds
        self.last = (loss, norm)
        self.progress.update(step, loss, rate)
        if step % self.job.options.run.log_every == 0:
            used, _, host = monitor.memory_gb(self.device)
            self.events.scalars(
                step,
                loss=loss,
                gradient_norm=norm,
                learning_rate=lr,
                tokens_per_second=rate,
                step_seconds=seconds,
                data_wait_seconds=waited,
                memory_gb=host if used is None else used,
            )
        sequences = self.job.setup.global_batch / seconds
        self.status.update(
            status="running", step=step, loss=loss, tokens_per_sec=rate, throughput_samples_per_sec=sequences
        )

    def evaluated(self, step: int, loss: float) -> None:
        self.heldout = loss
        self.progress.heldout(step, loss)
        self.events.scalars(step, heldout_loss=loss)
        self.status.update(heldout_loss=loss)

    def saved(self) -> None:
        self.events.flush()
        self.status.update(status="running", checkpoint_saved_at=monitor.utc_now())

    def failed(self, error: Exception) -> None:
        self.progress.__exit__(None, None, None)
        self.events.close()
        self.status.update(status="failed", error=f"{type(error).__name__}: {error}")

    def finished(self, text: str | None) -> None:
        self.progress.__exit__(None, None, None)
        self.events.close()
        folder = shlex.quote(str(self.job.folder))
        steps = self.job.options.optimizer.steps
        results = [("training loss", f"{self.last[0]:.4f}"), ("held-out loss", f"{self.heldout:.4f} nats per token")]
        if self.bigram is not None:
            better = self.bigram - self.heldout
            results.append(("bigram model", f"{self.bigram:.4f} on the same sequences: {better:+.4f} to it"))
        options = self.job.options
        commands = [
            ("look", f"tensorboard --logdir {folder}/tensorboard"),
            ("train on", f"python -m dtengine.train --run-dir {folder} --resume --steps {2 * steps}"),
            ("prove", f"python -m dtengine.verify --mesh {options.mesh.mesh} --plan {options.mesh.plan} "
                      f"--model {shlex.quote(options.model.model)}"),
        ]  # fmt: skip
        monitor.end_screen(self.console, results, text, commands)
        self.status.update(status="finished")


def start_facts(
    job: Job, environment: ranks.RankEnvironment, backend: str, device: torch.device, start: int
) -> list[tuple[str, str]]:
    """Return the lines of the start screen beside the layouts."""
    setup, plan = job.setup, job.setup.plan
    params = parameters(setup.model.specs(setup.model_config))
    whole = sum(math.prod(p.shape) for p in params.values())
    sizes = tuple(plan.sizes.values())

    def held(layout: Layout) -> int:
        placed = [(p.shape, layout.placements(p.names, plan.sizes)) for p in params.values()]
        bounds = [local_bounds(shape, placements, sizes, (0,) * len(sizes)) for shape, placements in placed]
        return sum(math.prod(stop - start for start, stop in one) for one in bounds)

    width = 8 if setup.step.precision == "fp64" else 4
    slots = len(setup.optimizer(job.options.optimizer).init(torch.zeros(0)))
    total = width * (held(plan.params) + held(plan.grads) + slots * held(plan.optimizer))
    shape: BatchShape = setup.batch_shape
    rate = f"{job.rate.peak:.3g}, {job.rate.warmup} steps warm-up, {job.rate.decay} decay"
    facts = [
        ("model", f"{job.options.model.size or job.options.model.model}, {setup.model_config.layers} layers, "
                  f"embed {setup.model_config.embed}, seq {setup.model_config.seq}, vocab {setup.model_config.vocab}"),
        ("parameters", f"{monitor.count_text(whole)} whole, {monitor.count_text(held(plan.params))} a rank; with "
                       f"gradients and optimizer state {monitor.bytes_text(total)} a rank"),
        ("global batch", monitor.batch_text(plan, shape.microbatches, shape.microbatch)),
        ("tokens", f"{monitor.count_text(setup.global_batch * setup.model_config.seq)} a step; {job.corpus.source}"),
        ("learning rate", rate + (f" ({job.rate_note})" if job.rate_note else "")),
        ("ranks", f"{environment.world_size} by {environment.launcher}, {backend} on {device.type}, "
                  f"{torch.get_num_threads()} thread(s) each, {setup.step.precision}"),
        ("folder", str(job.folder)),
    ]  # fmt: skip
    if start:
        facts.append(("resumed", f"at step {start}"))
    if plan.num_ranks > 1:
        one = width * whole * (2 + slots)
        facts.append(("one device", f"would hold {monitor.bytes_text(one)} of state without any of this communication"))
    return facts


if __name__ == "__main__":
    raise SystemExit(main())
