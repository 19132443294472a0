"""Prove that a plan computes what one device computes, before anyone pays for a run.

    python -m dtengine.verify --mesh 2x4 --plan fsdp --model llama --vocab 67 --seq 15 --global-batch 7 --microbatches 2

One side is the plan's traced program on gloo ranks. The other is untraced torch on one device: one backward over the
whole batch, no mesh, and no microbatches but for a model with buffers, whose statistics are a microbatch's. Both train a
few steps of SGD (AdamW would hide constant factors) on the same random tokens. Exit code 1 where they differ by more than
the tolerance.
"""

import hashlib
import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tyro.conf import OmitArgPrefixes

from dtengine import launch, optim, random, ranks
from dtengine.checkpoint import replicas_equal
from dtengine.config import Setup, resolve
from dtengine.data import IGNORE, Batch, rows_of
from dtengine.mesh import Mesh, build_mesh
from dtengine.model import buffers, forward_with_buffers, parameters
from dtengine.ops import Ops
from dtengine.options import MeshOptions, OptimizerOptions, ProgramOptions, StepOptions, fail, parse
from dtengine.parameters import COMPUTE_DTYPES, init_param
from dtengine.shard import gather_named
from dtengine.step import init_state
from dtengine.torch_private import preload

TOLERANCES = {"fp64": 1e-9, "fp32": 2e-4}
# Sizes where none are given: odd, so that nothing divides.
DEFAULTS = {"layers": 2, "embed": 30, "heads": 6, "kv_heads": 3, "head_dim": 6, "mlp": 26, "vocab": 67, "seq": 15}


@dataclass(frozen=True)
class CheckOptions:
    """What is compared, and how it is said."""

    ignore_fraction: float = 0.2
    """Share of labels that are ignored, unequal over rows."""
    weights: bool = False
    """Give every token a random weight."""
    tolerance: float | None = None
    """Largest difference allowed; by default 1e-9 in fp64, 2e-4 in fp32; in bf16 and fp16 by dtype and depth, with two
    layers 0.054 and 0.0068."""
    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True)
class VerifyOptions(StepOptions):
    """Prove that a plan computes what one device computes: loss, raw gradients, norm, parameters.

    Starts gloo ranks on this machine. Exit code 0: equal; 1: beyond tolerance; 2: options that do not fit.
    """

    mesh: Annotated[MeshOptions, OmitArgPrefixes] = field(default_factory=lambda: MeshOptions(backend="gloo"))
    optimizer: Annotated[OptimizerOptions, OmitArgPrefixes] = field(
        default_factory=lambda: OptimizerOptions(
            steps=3, optimizer="sgd", lr=1.0, warmup=0, lr_decay="none", weight_decay=0.0, clip=0.1
        )
    )
    program: Annotated[ProgramOptions, OmitArgPrefixes] = field(
        # A small loss scale, that nothing overflows in a few steps: it is the same in all of them.
        default_factory=lambda: ProgramOptions(precision="fp64", loss_scale=1024.0)
    )
    check: Annotated[CheckOptions, OmitArgPrefixes] = field(default_factory=CheckOptions)


class Trained(NamedTuple):
    """What a few steps gave: losses, raw gradients and norm of step 1, parameters and buffers at the end; whole tensors."""

    losses: list[float]
    grads: dict[str, Tensor]
    norm: float
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Report(NamedTuple):
    """Differences of a plan from one device, each max|a - b| / max(max|b|, 1e-3 of the model's largest)."""

    ok: bool
    loss: float
    grads: float
    worst_parameter: str
    norm: float
    params: float
    buffers: float
    replicas_equal: bool
    collectives: dict[str, dict[str, int]]
    command: str


def tolerance_of(setup: Setup) -> float:
    """Return the largest difference allowed from one device in fp32 (in fp64 where the plan computes so).

    In 16 bits every stored value is rounded: an error between -eps/2 and eps/2 of it, 0.29 eps standard deviation. On
    its way a gradient is rounded about 16 times in each block, forward and backward together, and as often in embedding
    and head. The errors are independent, so they grow with the root of their number: 0.29 sqrt(16 (layers + 1)) eps =
    1.2 sqrt(layers + 1) eps. The bound is 3.4 standard deviations of that, and never more than 7.5 eps. (Measured on some
    200 random gpt and llama models without a mesh: half of them below 1.7 eps, the largest 3.9 eps with one layer, 5.0
    with five.)
    """
    if setup.step.precision in TOLERANCES:
        return TOLERANCES[setup.step.precision]
    eps = torch.finfo(COMPUTE_DTYPES[setup.step.precision]).eps
    return min(4 * math.sqrt(setup.model_config.layers + 1), 7.5) * eps


def random_batch(setup: Setup, check: CheckOptions) -> Batch:
    """Draw the whole global batch, the same on every rank: random tokens, ignored labels, weights."""
    generator = torch.Generator().manual_seed(setup.step.seed)
    shape = (setup.global_batch, setup.model_config.seq)
    vocab = setup.model_config.vocab
    tokens = torch.randint(0, vocab, shape, generator=generator)
    targets = torch.randint(0, vocab, shape, generator=generator)
    share = check.ignore_fraction * 2 * torch.rand(shape[0], 1, generator=generator)
    targets[torch.rand(shape, generator=generator) < share] = IGNORE
    if (targets < 0).all():
        targets[0, 0] = 0
    weights = torch.rand(shape, generator=generator) if check.weights else torch.ones(shape)
    return Batch(tokens, targets, weights, torch.arange(shape[0]))


def train_one_device(setup: Setup, options: OptimizerOptions, batch: Batch) -> Trained:
    """Train on one device: untraced torch, one backward over the whole batch.

    The statistics of batch normalisation are those of a microbatch, so a model with buffers takes one after another: the
    rows that all coordinates take in the same pass, without the padding.
    """
    model, config = setup.model, setup.step
    wide = torch.float64 if config.precision == "fp64" else torch.float32
    specs = model.specs(setup.model_config)
    params = {
        name: init_param(p, name, config.seed, [(0, s) for s in p.shape], "cpu").to(wide).requires_grad_()
        for name, p in parameters(specs).items()
    }
    held = {name: torch.full(b.shape, b.value, dtype=wide) for name, b in buffers(specs).items()}
    shape = setup.batch_shape
    rows = shape.coordinates * shape.microbatch if held else len(batch.rows)
    passes = [Batch(*some) for some in zip(*(x.split(rows) for x in batch), strict=True)]
    count = torch.where(batch.targets >= 0, batch.weights, 0).sum(dtype=torch.float64).item()
    decays = [options.weight_decay * p.decayed for p in parameters(specs).values()]
    velocities = [torch.zeros_like(p) for p in params.values()]
    losses, first_grads, first_norm = [], {}, 0.0
    for step in range(options.steps):
        key = random.fold(random.key(config.seed, "dropout"), torch.tensor(step))
        loss = torch.zeros((), dtype=wide)
        for some in passes:
            ops = Ops(
                dropout_key=key,
                rows=some.rows,
                dropout_rate=config.dropout,
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
                train=True,
            )
            logits, new = forward_with_buffers(model, specs, params | held, some, ops)
            held |= {name: one.detach() for name, one in new.items()}
            loss = loss + model.loss(logits, some, ops.at("head"))[0] / count
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        losses.append(loss.item())
        order = config.norm_order
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order).item()
        if step == 0:
            first_grads, first_norm = dict(zip(params, grads, strict=True)), norm
        factor = min(1.0, config.clip / norm) if config.clip and norm else 1.0
        with torch.no_grad():
            for p, g, v, decay in zip(params.values(), grads, velocities, decays, strict=True):
                v.mul_(options.momentum).add_(factor * g)
                p -= options.lr * (v + decay * p)
    return Trained(losses, first_grads, first_norm, {n: p.detach() for n, p in params.items()}, held)


def train_plan(
    setup: Setup, options: OptimizerOptions, batch: Batch, mesh: Mesh
) -> tuple[Trained, bool, dict[str, dict[str, int]]]:
    """Train with the plan's program on this process group's ranks.

    Returns:
        (whole tensors on every rank, whether replicas are bit-equal, collectives of one step).
    """
    shape, plan = setup.batch_shape, setup.plan
    padded = pad_rows(batch, shape.coordinates * shape.microbatches * shape.microbatch)
    rows = torch.from_numpy(rows_of(shape, mesh.data_coordinate(plan.data_axes)))
    batches = [Batch(*(t[r] for t in padded)) for r in rows]
    count = torch.where(batch.targets >= 0, batch.weights, 0).sum(dtype=torch.float64).item()
    optimizer = optim.sgd(options.momentum, options.weight_decay)
    step = setup.bind(mesh, optimizer, lambda step: options.lr)
    state = init_state(step)
    raw = step.gradients(state, batches, count)
    specs = setup.model.specs(setup.model_config)
    shapes = {name: leaf.shape for name, leaf in (*parameters(specs).items(), *buffers(specs).items())}
    grads = gather_named(raw, shapes, mesh)
    losses, norm = [], 0.0
    for number in range(options.steps):
        state, metrics = step(state, batches, count)
        losses.append(metrics.loss.item())
        if number == 0:
            norm = metrics.norm.item()
    params, held = gather_named(state.weights, shapes, mesh), gather_named(state.buffers, shapes, mesh)
    return Trained(losses, grads, norm, params, held), replicas_equal(state, mesh), step.collectives()


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Pad a whole batch with rows of zero weight."""
    missing = rows - batch.tokens.shape[0]

    def pad(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])

    return Batch(pad(batch.tokens, 0), pad(batch.targets, IGNORE), pad(batch.weights, 0), torch.arange(rows))


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference, relative to each tensor of b and 1e-3 of the largest of them, and its name.

    It is infinite where a number on either side is not finite: two broken runs prove nothing.
    """
    scale = 1e-3 * max((x.abs().max().item() for x in b.values() if x.numel()), default=0.0)
    worst, name = 0.0, ""
    for key, x in b.items():
        if x.numel():
            off = (a[key].double() - x.double()).abs().max().item()
            value = off / max(x.abs().max().item(), scale, 1e-300)
            if not math.isfinite(value):
                return math.inf, key
            if value > worst:
                worst, name = value, key
    return worst, name or next(iter(b))


def compare(setup: Setup, options: OptimizerOptions, check: CheckOptions, mesh: Mesh, command: str) -> Report:
    """Train both sides and compare; every rank returns the same report.

    The first rank trains the one device's side; all ranks first compare what the plan gave them, bit by bit.
    """
    batch = random_batch(setup, check)
    ours, equal, collectives = train_plan(setup, options, batch, mesh)
    mine = torch.tensor([_digest(ours)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    equal &= all(torch.equal(mine, theirs) for theirs in everyone)
    names = list(parameters(setup.model.specs(setup.model_config)))
    found = torch.zeros(6, dtype=torch.float64)
    if dist.get_rank() == 0:
        theirs = train_one_device(setup, options, batch)
        losses = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours.losses, theirs.losses, strict=True)]
        loss = max(losses) if all(map(math.isfinite, losses)) else math.inf
        grads, worst = difference(ours.grads, theirs.grads)
        params, _ = difference(ours.params, theirs.params)
        held = difference(ours.buffers, theirs.buffers)[0] if theirs.buffers else 0.0
        norm = abs(ours.norm - theirs.norm) / max(abs(theirs.norm), 1e-300)
        found = torch.tensor([loss, grads, norm, params, held, names.index(worst)], dtype=torch.float64)
    dist.broadcast(found, 0)
    loss, grads, norm, params, held, worst = found.tolist()
    bound = tolerance_of(setup) if check.tolerance is None else check.tolerance
    ok = equal and all(value <= bound for value in (loss, grads, norm, params, held))
    return Report(ok, loss, grads, names[int(worst)], norm, params, held, equal, collectives, command)


def _digest(trained: Trained) -> int:
    """Return a number that differs where any bit does; 0.0 and -0.0 are one number."""
    digest = hashlib.blake2b(repr((trained.losses, trained.norm)).encode(), digest_size=8)
    for tensors in (trained.grads, trained.params, trained.buffers):
        for name in sorted(tensors):
            digest.update((tensors[name].detach() + 0.0).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _rank_main(setup: Setup, options: VerifyOptions, command: str, result: Path) -> None:
    environment = ranks.launcher_environment()
    assert environment is not None
    with ranks.process_group(environment, "gloo") as _:
        mesh = build_mesh(setup.plan.sizes)
        report = compare(setup, options.optimizer, options.check, mesh, command)
        if environment.rank == 0:
            result.write_text(json.dumps(report._asdict()))


def _run(setup: Setup, options: VerifyOptions, command: str) -> Report:
    """Start the ranks and read their report; logs stay only where a rank died, whose message names them."""
    folder, died = Path(tempfile.mkdtemp(prefix="dtengine-verify-")), False
    result = folder / "report.json"
    try:
        launch.start_ranks(_rank_main, (setup, options, command, result), setup.plan.num_ranks, log_dir=folder / "logs")
        return Report(**json.loads(result.read_text()))
    except launch.RankFailed as failure:
        died = failure.user_error is None
        raise
    finally:
        if not died:
            shutil.rmtree(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(VerifyOptions, "verify", arguments)
    command = shlex.join(["python", "-m", "dtengine.verify", *(a for a in arguments if a != "--json")])
    try:
        note_unused(options)
        setup = resolve(options, global_batch=7, **DEFAULTS)
        tolerance = options.check.tolerance
        if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(f"--tolerance {tolerance}: must be a number of at least 0.")
        if not 0 <= options.check.ignore_fraction <= 1:
            raise ValueError(f"--ignore-fraction {options.check.ignore_fraction}: a share, from 0 to 1.")
        environment = ranks.launcher_environment()
        if environment is not None:
            raise ValueError(
                f"dtengine.verify: started by {environment.launcher}; it starts its own ranks on one machine. Start it "
                "once, without a launcher."
            )
        preload()
        report = _run(setup, options, command)
    except launch.RunInterrupted as stop:
        return stop.exit_code
    except launch.RankFailed as failure:
        if failure.user_error is None:
            print(failure.traceback, file=sys.stderr)
        fail(str(failure), failure.exit_code)
    except ValueError as error:
        fail(str(error))
    if options.check.json:
        print(json.dumps(report._asdict()))
    else:
        _print(report, setup, options)
    return 0 if report.ok else 1


def note_unused(options: VerifyOptions) -> None:
    """Say which options change nothing here."""
    unused, usual = [], VerifyOptions()
    for name in ("optimizer", "warmup", "lr_decay", "decay_steps", "lr_floor", "base_batch"):
        value = getattr(options.optimizer, name)
        if value != getattr(usual.optimizer, name):
            unused.append(f"--{name.replace('_', '-')} {value}")
    if options.mesh.backend != usual.mesh.backend:
        unused.append(f"--backend {options.mesh.backend}")
    if unused:
        print(
            f"dtengine: {', '.join(unused)}: not used; verify trains with SGD at a constant rate, on gloo.",
            file=sys.stderr,
        )


def _print(report: Report, setup: Setup, options: VerifyOptions) -> None:
    console = Console(highlight=False)
    bound = tolerance_of(setup) if options.check.tolerance is None else options.check.tolerance
    table = Table(title=f"{setup.plan.name} on {setup.plan.mesh_text()} against one device, {setup.step.precision}")
    table.add_column("compared")
    table.add_column("largest difference", justify="right")
    table.add_column("")
    rows = [
        (f"loss of {options.optimizer.steps} steps", report.loss, ""),
        ("raw gradients of step 1", report.grads, f"worst: {report.worst_parameter}"),
        ("gradient norm before clipping", report.norm, ""),
        (f"parameters after step {options.optimizer.steps}", report.params, ""),
    ]
    if buffers(setup.model.specs(setup.model_config)):
        rows.append((f"buffers after step {options.optimizer.steps}", report.buffers, ""))
    for what, value, note in rows:
        table.add_row(what, f"{value:.1e}", note if value <= bound else f"above {bound:.0e} {note}")
    table.add_row("replicas bit-equal", "yes" if report.replicas_equal else "NO", "")
    console.print(table)
    for axes, operations in report.collectives.items():
        console.print(f"  {axes}: " + ", ".join(f"{count} {name}" for name, count in operations.items()) + " a step")
    console.print(f"{'equal' if report.ok else 'DIFFERENT'} within {bound:.0e}.  {report.command}", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
