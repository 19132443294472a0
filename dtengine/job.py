"""A run before any rank starts: options read, everything resolved and checked, its folder opened."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtengine import checkpoint, config, monitor
from dtengine.config import Setup
from dtengine.corpus import Corpus, load_corpus
from dtengine.mesh import parse_mesh
from dtengine.model import buffers, parameters
from dtengine.options import TrainOptions, from_json, parse, to_json
from dtengine.rates import LearningRate, scale_peak

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
        resumed: the checkpoint that it goes on from.
        damaged: newer checkpoints that do not verify.
    """

    options: TrainOptions
    setup: Setup
    corpus: Corpus
    rate: LearningRate
    rate_note: str
    folder: Path
    changed: str
    resumed: Path | None
    damaged: tuple[Path, ...]

    @property
    def heldout_limit(self) -> int:
        """Number of held-out sequences that an evaluation reads."""
        return min(self.options.data.eval_sequences, self.corpus.heldout.count)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.setup.global_batch * self.setup.model_config.seq


def read_options(arguments: Sequence[str]) -> tuple[TrainOptions, str]:
    """Read the command line; with --resume, options that are not typed are those the run was started with.

    Returns:
        (options, what differs from the resumed run in words).
    """
    options = parse(TrainOptions, "train", arguments)
    if not options.run.resume:
        return options, ""
    if options.run.run_dir is None:
        raise ValueError("--resume: which run? Give its folder with --run-dir.")
    stored_path = Path(options.run.run_dir) / "config.json"
    if not stored_path.exists():
        return options, ""
    try:
        stored = from_json(stored_path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--run-dir {options.run.run_dir}: {stored_path} cannot be read: {error}") from error
    options = parse(TrainOptions, "train", arguments, default=stored)
    cut = [(one.pipeline.schedule, parse_mesh(one.mesh.mesh).get("pp", 1)) for one in (stored, options)]
    if cut[0] != cut[1]:  # stages of the resumed run's schedule and ranks fit no others
        typed = {word.partition("=")[0].replace("-", "_") for word in arguments}
        own = {name: None for name in ("chunks", "stage_layers") if f"__{name}" not in typed}
        options = replace(options, pipeline=replace(options.pipeline, **own))
    before, now = asdict(stored), asdict(_absolute(options))
    changed = [
        f"--{key.replace('_', '-')} {before[group][key]} to {value}"
        for group in before
        for key, value in now[group].items()
        if group != "run" and before[group][key] != value
    ]
    return options, ", ".join(changed)


def _absolute(options: TrainOptions) -> TrainOptions:
    """Name files by their full paths: a run may be resumed from another folder."""
    path, colon, value = options.model.model.rpartition(":") if ":" in options.model.model else ("", "", "")
    model = replace(options.model, model=f"{Path(path).resolve()}{colon}{value}") if colon else options.model
    data = replace(options.data, data=tuple(str(Path(one).resolve()) for one in options.data.data))
    own = options.pipeline.schedule.endswith(".csv")
    schedule = str(Path(options.pipeline.schedule).resolve()) if own else options.pipeline.schedule
    return replace(options, model=model, data=data, pipeline=replace(options.pipeline, schedule=schedule))


def prepare(options: TrainOptions, changed: str, owner: bool) -> Job:
    """Resolve everything that needs no rank, or raise ValueError in one short message."""
    # 1. the model's sizes, for the length of a sequence; 2. the data; 3. all again, with the vocabulary of the data
    first = config.resolve(options, **DEFAULTS)
    data = options.data
    for name, low in (("eval_every", 0), ("eval_sequences", 1)):
        if getattr(data, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(data, name)}: must be at least {low}.")
    if options.run.trace_step is not None and not 1 <= options.run.trace_step <= options.optimizer.steps:
        raise ValueError(
            f"--trace-step {options.run.trace_step}: the run has steps 1 to {options.optimizer.steps}. Name one of them."
        )
    if not 0 < data.heldout_fraction <= 0.5:
        raise ValueError(f"--heldout-fraction {data.heldout_fraction}: a share above 0, at most 0.5. Use 0.05.")
    corpus = load_corpus(
        data.data, first.model_config.seq, data.heldout_fraction, options.optimizer.seed, options.model.vocab
    )
    setup = config.resolve(options, **DEFAULTS, vocab=corpus.vocab)
    if setup.model_config.vocab < corpus.vocab:
        raise ValueError(
            f"--vocab {setup.model_config.vocab}: the data has token ids up to {corpus.vocab - 1}; the vocabulary must "
            f"hold them all. Use --vocab {corpus.vocab}."
        )
    for name, low in (("save_every", 1), ("log_every", 1), ("sample", 0)):
        if getattr(options.run, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options.run, name)}: must be at least {low}.")
    o = options.optimizer
    peak, note = scale_peak(o.lr, setup.global_batch, o.base_batch, o.lr_scaling, o.lr_scale_max)
    rate = LearningRate(peak, o.steps, o.warmup, o.lr_decay, o.lr_floor, o.decay_steps)
    if options.run.run_dir is None:
        folder = config.new_run_dir(options, time.strftime("%Y%m%d-%H%M%S"))
    else:
        folder = Path(options.run.run_dir)
    job = Job(options, setup, corpus, rate, note, folder, changed, None, ())
    return find_checkpoint(job) if owner else job


def find_checkpoint(job: Job) -> Job:
    """Check the run's folder and find the checkpoint to go on from, or raise ValueError; nothing is changed."""
    folder = job.folder
    check_folder(folder, job.options.run.resume)
    resumed, damaged = checkpoint.newest(folder / "checkpoints")
    if resumed is None:
        return job
    manifest = checkpoint.read_manifest(resumed)
    if (traced := job.options.run.trace_step) is not None and traced <= manifest.step:
        raise ValueError(
            f"--trace-step {traced}: the run goes on at step {manifest.step + 1}. Name that or a later one."
        )
    order = ("data", "seq", "seed")
    if [manifest.facts.get(name) for name in order] != [facts(job, 0)[name] for name in order]:
        raise ValueError(
            f"--data: not the data that {resumed} was trained on ({job.corpus.source}); sequences would be skipped or "
            "read twice. Give the same --data, --seq, --seed and --heldout-fraction."
        )
    setup = job.setup
    specs = setup.model.specs(setup.model_config)
    shapes = checkpoint.tensor_shapes(parameters(specs), setup.optimizer(job.options.optimizer))
    shapes |= {f"buffers.{name}": buffer.shape for name, buffer in buffers(specs).items()}
    dtype = torch.float64 if setup.step.precision == "fp64" else torch.float32
    checkpoint.check_fits(resumed, manifest, {name: (shape, dtype) for name, shape in shapes.items()})
    return replace(job, resumed=resumed, damaged=tuple(damaged))


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, or that cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run-dir {folder}: is a file. Name a folder.")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "config.json").exists():
            raise ValueError(f"--run-dir {folder}: is not empty and holds no run of dtengine. Name another folder.")
        if not resume:
            raise ValueError(
                f"--run-dir {folder}: holds a run; nothing is overwritten. Continue it with --resume, or name another "
                "folder."
            )
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


def consumed(job: Job, step: int) -> int:
    """Return the number of sequences that the run has read before a step: the whole position in the data.

    A resumed run counts on from its checkpoint, also with another global batch.
    """
    if job.resumed is None:
        return step * job.setup.global_batch
    manifest = checkpoint.read_manifest(job.resumed)
    return int(manifest.facts["consumed"]) + (step - manifest.step) * job.setup.global_batch


def facts(job: Job, step: int) -> dict[str, Any]:
    """Return what a checkpoint says of its run beside the tensors."""
    sequences = consumed(job, step)
    return {
        "plan": job.setup.plan.name,
        "mesh": job.setup.plan.mesh_text(),
        "consumed": sequences,
        "tokens": sequences * job.setup.model_config.seq,
        "learning_rate": job.rate(max(step - 1, 0)),
        "data": job.corpus.fingerprint,
        "seq": job.setup.model_config.seq,
        "seed": job.options.optimizer.seed,
        "model": asdict(job.setup.model_config),
        "torch": torch.__version__,
    }


def is_finished(job: Job) -> bool:
    """Say so where the resumed run has nothing left to do."""
    if job.resumed is None or checkpoint.read_manifest(job.resumed).step < job.options.optimizer.steps:
        return False
    print(f"{job.folder}: finished, all {job.options.optimizer.steps} steps are done. Give more --steps to go on.")
    return True


def open_folder(job: Job) -> None:
    """Make the run's folder, write the resolved options, move damaged checkpoints out of the way."""
    job.folder.mkdir(parents=True, exist_ok=True)
    stored = _absolute(job.options)
    stored = replace(stored, run=replace(stored.run, run_dir=str(job.folder), resume=False, trace_step=None))
    path = job.folder / "config.json"
    try:
        path.open("x").close()  # of two new runs that start at once, one takes the folder
    except FileExistsError:
        if not job.options.run.resume:
            raise ValueError(f"--run-dir {job.folder}: another run has just taken it. Name another folder.") from None
    monitor.write_atomically(path, to_json(stored))
    for damaged in job.damaged:
        damaged.rename(damaged.with_name(f"damaged-{damaged.name}-{time.time_ns()}"))
