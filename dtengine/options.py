"""Options of the commands: names, defaults, and how they are read and written.

Every option has one name everywhere. The groups below are only how ``--help`` shows them.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes


@dataclass(frozen=True)
class MeshOptions:
    """Which devices, and how the model lies on them."""

    mesh: str = "1"
    """Mesh sizes: 8 is dp=8, 2x4 is dp=2,tp=4, 2x2x2 is pp=2,dp=2,tp=2; or named axes, rep=2,dp=2,tp=2. pp cuts the model
    into pipeline stages."""
    plan: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    """What dp splits: nothing (ddp), optimizer state (zero1), also gradients (zero2), also parameters (fsdp, which is
    ZeRO-3). A rep axis makes fsdp HSDP; tp above 1 adds tensor parallelism."""
    sp: bool = True
    """Sequence parallelism: split the residual stream's sequence over tp."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives; auto is nccl where each local rank has a GPU, else gloo."""


@dataclass(frozen=True)
class ModelOptions:
    """The model. What is not given comes from --size, then from the model's defaults."""

    model: str = "llama"
    """gpt, llama, mlp, or a model of your own as path/to/file.py:name."""
    size: str | None = None
    """A published size, such as gpt2 or llama3-8b."""
    layers: int | None = None
    """Number of blocks. Training takes 2 where nothing else says."""
    embed: int | None = None
    """Width of the residual stream; else 128."""
    heads: int | None = None
    """Query heads; else 4."""
    kv_heads: int | None = None
    """Key and value heads; divides heads, and is heads by default."""
    head_dim: int | None = None
    """Width of a head; embed / heads by default."""
    mlp: int | None = None
    """Hidden width of the MLP; 4 embed by default."""
    vocab: int | None = None
    """Token ids; by default as many as the data has."""
    seq: int | None = None
    """Tokens in a sequence; else 128."""
    dropout: float | None = None
    """Probability of dropping an activation; else 0."""
    tied: bool | None = None
    """Whether the output matrix is the embedding table: --tied or --no-tied."""


@dataclass(frozen=True)
class BatchOptions:
    """Sequences of a step: global batch = rep x dp x microbatches x microbatch. Give any two, or fewer."""

    global_batch: int | None = None
    """Sequences of one optimizer step, 32 where none of the three is given; padded with zero-weight rows where it does
    not divide."""
    microbatch: int | None = None
    """Sequences that one data-parallel coordinate takes in one pass."""
    microbatches: int | None = None
    """Passes that make a step (gradient accumulation); else 1, or what the other two ask for."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and learning rate."""

    steps: int = 300
    """Optimizer steps of the whole run. The learning rate decays to the last one: more steps stretch the decay."""
    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """adamw: betas 0.9 and 0.95. sgd: without momentum unless --momentum is given. lion: signs of a mean gradient; half of
    adamw's state. adafactor: nearly no state. muon: orthogonal momentum for hidden matrices, adamw for the rest."""
    lr: float = 4e-3
    """Peak learning rate, at --base-batch where that is given. muon takes adamw's, lion a third to a tenth of it;
    adafactor's is relative to the size of each parameter, so it wants more: 1e-2 to 5e-2."""
    warmup: int = 20
    """Steps of linear warm-up."""
    lr_decay: Literal["cosine", "linear", "wsd", "rsqrt", "none"] = "cosine"
    """From the peak to --lr-floor: cosine and linear over all steps after warm-up; wsd linearly over the last
    --decay-steps; rsqrt as 1 / sqrt(step), whatever the number of steps."""
    decay_steps: int | None = None
    """Steps of the decay of wsd; a tenth of all by default."""
    lr_floor: float = 0.1
    """Share of the peak that is left at the end."""
    base_batch: int | None = None
    """Global batch at which --lr was found, in sequences; the rate is scaled to the batch in use."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "sqrt"
    """How the rate grows with the batch, where --base-batch is given."""
    lr_scale_max: float = 8.0
    """Largest factor of that scaling."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to norms and biases."""
    momentum: float = 0.0
    """Momentum of sgd; the others have their own."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over the vocabulary; in training only."""
    z_loss: float = 0.0
    """Coefficient on log(Z)^2, which keeps logits from drifting (PaLM: 1e-4); in training only."""
    clip: float = 1.0
    """Largest global gradient norm; 0 clips nothing."""
    clip_order: Literal["1", "2", "inf"] = "2"
    """Order of that norm."""
    seed: int = 0
    """Of initial parameters, dropout, the order of sequences and the held-out split."""


@dataclass(frozen=True)
class ProgramOptions:
    """How a step is computed: precision, memory, overlap."""

    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Compute dtype. Master parameters, accumulated gradients and optimizer state stay fp32 (fp64 with fp64)."""
    reduce_dtype: Literal["fp32", "compute"] = "fp32"
    """dtype in which gradients are summed over ranks: fp32 (fp64 with fp64), or the compute dtype, half the bytes."""
    loss_scale: float = 65536.0
    """First loss scale of fp16, a power of two; halved where a step overflows, which is then skipped."""
    loss_scale_window: int = 2000
    """Good steps in a row after which the loss scale of fp16 is doubled."""
    recompute: str = "none"
    """What a block's backward computes again instead of keeping: none, full, selective (all but matrix products,
    attention and collectives), or every-N (every N-th block in full)."""
    activation_budget: float | None = None
    """Share of their activations that blocks keep, such as 0.6; what is repeated is chosen by bytes and work."""
    save: Literal["all", "min-cut"] = "all"
    """What parts keep for their backward where neither of these two says: all that it reads, or the fewest bytes from which
    cheap operations compute the rest."""
    prefetch: int = 1
    """Groups of blocks whose parameters are gathered ahead of the one that computes (fsdp); 0 overlaps nothing."""
    bucket_mb: float = 25.0
    """Whole blocks are gathered, and their gradients reduced, together until they have this size in MiB; 0: one by one."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory: the optimizer's state, or with fsdp also the parameters' shards between their uses."""
    disable_pass: tuple[str, ...] = ()
    """Passes over the step's graph that do not run; --passes names them."""
    compile: bool = False
    """Compile each kind of block by Inductor; half a minute more to start, and a C++ compiler is needed on CPUs."""
    reshard: bool = True
    """Drop gathered parameters behind their forward and gather them again for their backward (fsdp)."""
    cuda_graphs: bool = False
    """Replay the step as a CUDA graph, without Python in between."""
    passes: bool = False
    """Print what each pass over the step's graph did; then stop."""
    eager: bool = False
    """Run the step's functions untraced, for debugging; same bits, slower."""


@dataclass(frozen=True)
class PipelineOptions:
    """How a mesh with pp cuts the model into stages, and in which order they run."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, loopedbfs, zb-h1, zb-h2, interleaved-zb, zbv, v-half, v-min, dualpipev, auto (searched, as
    if F, I and W took the same time), or a table of your own as FILE.csv; python -m dtengine.schedule shows them, and
    searches for other costs."""
    chunks: int | None = None
    """Stages a rank, where the schedule leaves it free; else 2."""
    stage_layers: str | None = None
    """Layers of each stage, such as 5,6,6,5. Default: dealt by the work of layers and head."""


@dataclass(frozen=True)
class StepOptions:
    """What shapes a step, of whichever command."""

    mesh: Annotated[MeshOptions, OmitArgPrefixes] = field(default_factory=MeshOptions)
    model: Annotated[ModelOptions, OmitArgPrefixes] = field(default_factory=ModelOptions)
    batch: Annotated[BatchOptions, OmitArgPrefixes] = field(default_factory=BatchOptions)
    optimizer: Annotated[OptimizerOptions, OmitArgPrefixes] = field(default_factory=OptimizerOptions)
    program: Annotated[ProgramOptions, OmitArgPrefixes] = field(default_factory=ProgramOptions)
    pipeline: Annotated[PipelineOptions, OmitArgPrefixes] = field(default_factory=PipelineOptions)


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and what to hold out."""

    data: tuple[str, ...] = ()
    """Text files, folders, or token files (.bin, .npy). Default: the Python standard library's sources, as bytes."""
    heldout_fraction: float = 0.05
    """Share of the tokens held out, by document."""
    eval_every: int = 50
    """Steps between evaluations on held-out sequences; 0 evaluates at the end only."""
    eval_sequences: int = 256
    """Held-out sequences of an evaluation."""


@dataclass(frozen=True)
class RunOptions:
    """Where the run is kept."""

    run_dir: str | None = None
    """Folder of the run. Default: runs/ and the time, model, plan and mesh."""
    resume: bool = False
    """Continue from the newest complete checkpoint of --run-dir; its options hold where none are typed."""
    save_every: int = 100
    """Steps between checkpoints; one is always saved at the end."""
    log_every: int = 1
    """Steps between points in TensorBoard."""
    trace_cache: bool = True
    """Keep finished programs in $DTENGINE_CACHE (else ~/.cache/dtengine), so that the next start need not trace them."""
    explain: bool = False
    """Print how every parameter and activation is laid out, and why; then stop."""
    memory_report: bool = True
    """Print what each rank will hold, and measure step 3, which makes that one step slower."""
    trace_step: int | None = None
    """Record this step on all ranks into trace-step-N.json of the run's folder, which Perfetto opens; it is a slow one."""
    start_timeout: float = 60.0
    """Seconds for all ranks to arrive; then the start fails and names those that are missing."""
    sample: int = 240
    """Tokens of text to sample at the end; 0 samples nothing."""


@dataclass(frozen=True)
class TrainOptions(StepOptions):
    """Train a language model on a mesh of devices, from one declared plan.

    python -m dtengine.train --mesh 2x4 starts 8 ranks on this machine; under torchrun or srun it uses theirs.
    """

    data: Annotated[DataOptions, OmitArgPrefixes] = field(default_factory=DataOptions)
    run: Annotated[RunOptions, OmitArgPrefixes] = field(default_factory=RunOptions)


Options = TypeVar("Options")


def parse(options: type[Options], command: str, arguments: Sequence[str], default: Options | None = None) -> Options:
    """Read a command line; ``--help`` and mistakes end the process as tyro does (exit codes 0 and 2)."""
    given = []
    for i, word in enumerate(arguments):
        if word == "--no-tied":
            given += ["--tied", "False"]
        elif word == "--tied" and (i + 1 == len(arguments) or arguments[i + 1] not in ("True", "False", "None")):
            given += ["--tied", "True"]
        elif re.match(r"-\d", word) and i and arguments[i - 1].startswith("--"):
            given[-1] += f"={word}"  # --mesh -1x2 is a bad mesh, not an unknown option
        else:
            given.append(word)
    if default is None:
        return tyro.cli(options, prog=f"python -m dtengine.{command}", args=given)
    return tyro.cli(options, prog=f"python -m dtengine.{command}", args=given, default=default)


def to_json(options: Any) -> str:
    """Return options as JSON, grouped."""
    return json.dumps(dataclasses.asdict(options), indent=2) + "\n"


def from_json(text: str) -> TrainOptions:
    """Read options that ``to_json`` wrote; options that were added since get their defaults.

    Raises:
        ValueError: not such a file.
    """
    try:
        stored = json.loads(text)
        groups = {}
        for group in dataclasses.fields(TrainOptions):
            kind = type(getattr(TrainOptions(), group.name))
            if (
                group.name in ("program", "pipeline") and group.name not in stored and "mesh" in stored
            ):  # of an earlier version
                groups[group.name] = kind()
                continue
            known = {f.name for f in dataclasses.fields(kind)}
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in stored[group.name].items() if k in known}
            groups[group.name] = kind(**values)
        return TrainOptions(**groups)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the stored options cannot be read ({error}).") from error


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one short message to stderr and leave."""
    print(f"dtengine: {message}", file=sys.stderr)
    raise SystemExit(code)
