"""A run before any rank starts: options read, everything resolved and checked, its folder opened."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtengine import checkpoint, config, monitor
from dtengine.config import Setup, TrainOptions
from dtengine.corpus import Corpus, load_corpus
from dtengine.optim import LearningRate, scale_peak

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
