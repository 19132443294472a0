"""What options resolve to before any rank starts.

``resolve`` checks all that can be known on one machine without a rank: a person's mistake is one short message, not eight
tracebacks.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtengine import loss_scale, optim, trees
from dtengine.data import BatchShape
from dtengine.layout import Plan, head_axis, make_plan
from dtengine.mesh import Mesh, parse_mesh
from dtengine.model import Model, ModelConfig, Param, Tied, buffers, configure, load_model, parameters
from dtengine.options import OptimizerOptions, PipelineOptions, StepOptions, TrainOptions
from dtengine.parts import parts_of
from dtengine.passes import PASSES
from dtengine.pipeline.actions import Schedule
from dtengine.pipeline.check import MOST_ACTIONS, read_schedule, read_table
from dtengine.pipeline.grid import ScheduleError
from dtengine.pipeline.partition import cut, deal, parse_layers
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make
from dtengine.pipeline.search import auto
from dtengine.pipeline.simulate import Costs
from dtengine.pipeline.step import cut_into_stages
from dtengine.recompute import parse_saving
from dtengine.state import StepConfig
from dtengine.step import Step, make_step
from dtengine.trace_cache import TraceCache


@dataclass(frozen=True)
class Setup:
    """A model on a plan: all that shapes a step, resolved and checked.

    Attributes:
        warnings: what is legal but wasteful, in words.
        schedule: of a pipeline; None without one.
        layers: blocks of each of its stages.
    """

    model: Model
    model_config: ModelConfig
    plan: Plan
    global_batch: int
    batch_shape: BatchShape
    step: StepConfig
    warnings: tuple[str, ...]
    schedule: Schedule | None = None
    layers: tuple[int, ...] = ()

    def bind(
        self,
        mesh: Mesh,
        optimizer: optim.Optimizer,
        rate: Callable[[int], float],
        device: torch.device | str = "cpu",
        cache: TraceCache | None = None,
    ) -> Step:
        """Return the step on a mesh; see ``make_step``."""
        step = make_step(self.model, self.model_config, self.plan, mesh, optimizer, self.step, rate, device, cache)
        return step if self.schedule is None else cut_into_stages(step, self.schedule, self.layers)

    def parameters_of(self, rank: int) -> dict[str, Param]:
        """Return the parameters that a pipeline rank holds; all where there is no pipeline."""
        specs = self.model.specs(self.model_config)
        whole = parameters(specs)
        if self.schedule is None:
            return whole
        pieces = cut(parts_of(specs, whole), self.layers)
        used = {n for stage in self.schedule.stages(rank) for part in pieces[stage] for n in part.names}
        return {name: param for name, param in whole.items() if name in used}

    def optimizer(self, options: OptimizerOptions) -> optim.Optimizer:
        """Return the optimizer that the options name."""
        beside = {"momentum": options.momentum} if options.optimizer == "sgd" else {}
        return optim.OPTIMIZERS[options.optimizer](weight_decay=options.weight_decay, **beside)


def resolve(options: StepOptions, **defaults: Any) -> Setup:
    """Resolve options, or raise ValueError in one short message.

    Args:
        options: of a command.
        defaults: model sizes and ``global_batch`` where neither an option nor the model says otherwise.
    """
    mesh, model, batch, optimizer, program = (
        options.mesh, options.model, options.batch, options.optimizer, options.program
    )  # fmt: skip
    sizes = parse_mesh(mesh.mesh)
    chosen = load_model(model.model)
    given = {k: v for k, v in dataclasses.asdict(model).items() if k not in ("model", "size")}
    stated = set(chosen.defaults or {}) | set((chosen.sizes or {}).get(model.size or "", {}))
    if model.heads is not None and model.kv_heads is None:
        defaults.pop("kv_heads", None)  # of other heads
    given |= {k: v for k, v in defaults.items() if k in given and given[k] is None and k not in stated}
    config = configure(chosen, model.model, model.size, **given)
    specs = chosen.specs(config)
    leaves = [*parameters(specs).values(), *buffers(specs).values()]
    plan = make_plan(mesh.plan, sizes, config.axis_sizes, sequence_parallel=mesh.sp, whole_axes=chosen.whole_axes)
    for leaf in leaves:
        plan.params.check(leaf.names)
    passes, stages = batch.microbatches, sizes.get("pp", 1)
    usual = defaults.get("global_batch", 32)
    if stages > 1 and options.pipeline.schedule.endswith(".csv") and options.pipeline.chunks is not None:
        raise ValueError(
            f"--chunks {options.pipeline.chunks}: the table of --schedule {options.pipeline.schedule} says it. Leave it out."
        )
    if stages > 1 and passes is None and batch.microbatch is None:
        passes = _passes(options.pipeline, stages, (batch.global_batch or usual) // plan.coordinates)
    global_batch, shape = solve_batch(plan.coordinates, batch.global_batch, batch.microbatch, passes, usual)
    bounds = {"steps": (1, math.inf), "lr": (0, math.inf), "warmup": (0, math.inf), "lr_floor": (0, 1)}
    bounds |= {"weight_decay": (0, math.inf), "momentum": (0, 1), "clip": (0, math.inf), "lr_scale_max": (0, math.inf)}
    bounds |= {"label_smoothing": (0, 1), "z_loss": (0, math.inf)}
    for name, (low, high) in bounds.items():
        value = getattr(optimizer, name)
        if not (math.isfinite(value) and low <= value <= high):
            rule = f"must be at least {low}" if high == math.inf else f"must be from {low} to {high}"
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: {rule}{'' if math.isfinite(value) else ', and finite'}."
            )
    if optimizer.base_batch is not None and optimizer.base_batch < 1:
        raise ValueError(f"--base-batch {optimizer.base_batch}: a number of sequences, at least 1.")
    loss_scale.check(program.loss_scale, program.loss_scale_window)
    parse_saving(program.recompute, program.activation_budget, program.save)
    for name in ("prefetch", "bucket_mb"):
        if not 0 <= getattr(program, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(program, name)}: must be at least 0, and finite.")
    unknown = [name for name in program.disable_pass if name not in PASSES]
    if unknown:
        raise ValueError(f"--disable-pass {' '.join(unknown)}: no such pass. Use some of {', '.join(PASSES)}.")
    _check_optimizer(optimizer)
    if program.offload == "parameters" and mesh.plan != "fsdp":
        raise ValueError(
            f"--offload parameters --plan {mesh.plan}: its ranks hold parameters whole while the optimizer holds shards. "
            "Parameters are fetched from the host as shards. Use --offload optimizer, or --plan fsdp."
        )
    step = StepConfig(
        microbatch=shape.microbatch,
        seq=config.seq,
        microbatches=shape.microbatches,
        precision=program.precision,
        reduce_dtype=program.reduce_dtype,
        loss_scale=program.loss_scale,
        loss_scale_window=program.loss_scale_window,
        clip=optimizer.clip,
        norm_order=float(optimizer.clip_order),
        dropout=config.dropout,
        label_smoothing=optimizer.label_smoothing,
        z_loss=optimizer.z_loss,
        seed=optimizer.seed,
        eager=program.eager,
        recompute=program.recompute,
        activation_budget=program.activation_budget,
        save=program.save,
        prefetch=program.prefetch,
        bucket_mb=program.bucket_mb,
        offload=program.offload,
        disable_pass=program.disable_pass,
        compile=program.compile,
        reshard=program.reshard,
        cuda_graphs=program.cuda_graphs,
    )
    heads = any("kv_heads" in leaf.names for leaf in leaves)
    wasteful = _wasteful(plan, config if heads else None, global_batch, shape)
    if optimizer.warmup >= optimizer.steps > 1:
        wasteful.append(
            f"--warmup {optimizer.warmup} is as long as the run of {optimizer.steps} steps: the learning rate never reaches "
            "--lr."
        )
    if stages > 1 and program.cuda_graphs:
        raise ValueError(
            f"--cuda-graphs --mesh {mesh.mesh}: messages between stages are not captured. Leave it out, or use a mesh "
            "without pp."
        )
    schedule, layers = _stages(options.pipeline, stages, shape.microbatches, specs)
    if schedule is None and options.pipeline != PipelineOptions():
        wasteful.append("--schedule, --chunks and --stage-layers have no effect: the mesh has no pp.")
    if 0 in layers[1:-1] or (layers and options.pipeline.stage_layers is None and 0 in layers):
        wasteful.append(
            f"{len(layers)} stages for {config.layers} layers: {', '.join(map(str, layers))}. Stages without a layer only "
            f"pass on what they get. Use --layers {len(layers)} or more, or a schedule with fewer stages a rank."
        )
    return Setup(chosen, config, plan, global_batch, shape, step, tuple(wasteful), schedule, layers)


def _passes(options: PipelineOptions, num_ranks: int, rows: int) -> int:
    """Return the microbatches of a step where none are given: those of a table, else two for each pipeline rank, as far as
    there are rows."""
    if options.schedule.endswith(".csv"):
        return _table(options.schedule, num_ranks).num_microbatches
    return max(1, min(2 * num_ranks, rows))


def _table(path: str, num_ranks: int) -> Schedule:
    """Read a person's own schedule."""
    try:
        text = read_table(path)
    except ValueError as error:
        raise ValueError(f"--schedule {error}") from None
    try:
        return read_schedule(text, path, num_ranks)
    except ScheduleError:
        raise
    except ValueError as error:
        raise ValueError(f"--schedule {error}") from None


def _stages(
    options: PipelineOptions, num_ranks: int, microbatches: int, specs: dict[str, Any]
) -> tuple[Schedule | None, tuple[int, ...]]:
    """Return the schedule of a pipeline and the layers of its stages.

    Work is counted by the elements of matrices: a matrix takes part in one product for each token, an embedding in none.
    """
    if num_ranks == 1:
        return None, ()
    chunks = FIXED_CHUNKS.get(options.schedule, options.chunks or 2)
    if (count := 3 * num_ranks * chunks * microbatches) > MOST_ACTIONS:
        raise ValueError(
            f"--mesh pp={num_ranks}, --microbatches {microbatches}, --chunks {chunks}: {count:,} actions of a schedule. At "
            f"most {MOST_ACTIONS:,} are planned. Take fewer microbatches, or fewer stages a rank."
        )
    if options.schedule.endswith(".csv"):
        schedule = _table(options.schedule, num_ranks)
        if schedule.num_microbatches != microbatches:
            raise ValueError(
                f"--schedule {options.schedule}: a table of {schedule.num_microbatches} microbatches, the step has "
                f"{microbatches}. Use --microbatches {schedule.num_microbatches}."
            )
    elif options.schedule == "auto":
        schedule = auto(num_ranks, microbatches, Costs(), None, options.chunks or 1)
    elif options.schedule not in SCHEDULES:
        raise ValueError(
            f"--schedule {options.schedule}: no such schedule. Use one of {', '.join(SCHEDULES)}, auto, or a FILE.csv."
        )
    else:
        try:
            schedule = make(options.schedule, num_ranks, microbatches, options.chunks)
        except ValueError as error:
            raise ValueError(f"--chunks {options.chunks}: {error}") from None
    blocks = [_work(tree) for tree in specs["blocks"]]
    if options.stage_layers is not None:
        return schedule, parse_layers(options.stage_layers, len(blocks), schedule.num_stages)
    return schedule, deal(blocks, schedule.num_stages, 0.0, _work(specs["head"], specs))


def _work(tree: Any, specs: dict[str, Any] | None = None) -> float:
    """Count the elements of the matrices of a part; those of a tied one with ``specs`` of the whole model."""
    owners = parameters(specs) if specs else {}
    leaves = [owners.get(leaf.name, leaf) if isinstance(leaf, Tied) else leaf for leaf in trees.flatten(tree).values()]
    return float(sum(math.prod(p.shape) for p in leaves if isinstance(p, Param) and len(p.shape) > 1))


def _check_optimizer(options: OptimizerOptions) -> None:
    """Raise ValueError for options that the optimizer or the decay in use does not have, or cannot keep."""
    if options.momentum and options.optimizer != "sgd":
        raise ValueError(
            f"--momentum {options.momentum}: --optimizer {options.optimizer} does not take it; only sgd does. Leave it out, "
            "or use --optimizer sgd."
        )
    if options.decay_steps is None:
        return
    if options.lr_decay != "wsd":
        raise ValueError(
            f"--decay-steps {options.decay_steps}: --lr-decay {options.lr_decay} does not take it; only wsd does. Leave it "
            "out, or use --lr-decay wsd."
        )
    most = options.steps - options.warmup
    if not 1 <= options.decay_steps <= most:
        cure = f"Use at most {most}" if most > 0 else "Use more --steps, or less --warmup"
        raise ValueError(
            f"--decay-steps {options.decay_steps}: --steps {options.steps} less --warmup {options.warmup} leaves {most}; "
            f"the decay is at least 1 step, and one of these. {cure}."
        )


def solve_batch(
    coordinates: int,
    global_batch: int | None,
    microbatch: int | None,
    microbatches: int | None,
    default: int = 32,
) -> tuple[int, BatchShape]:
    """Solve global batch = coordinates x microbatches x microbatch from whichever are given.

    The global batch may be less than the product: the rest is padding of weight zero, less than one pass of it.

    Returns:
        (global batch, shape of the padded batch).

    Raises:
        ValueError: a number below 1, or three that contradict each other; it names the nearest that agree.
    """
    options = {"--global-batch": global_batch, "--microbatch": microbatch, "--microbatches": microbatches}
    wrong = [f"{name} {value}" for name, value in options.items() if value is not None and value < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: must be a whole number of at least 1.")
    passes = microbatches or 1
    if global_batch is None and microbatch is None:
        global_batch = default
    if global_batch is None:
        assert microbatch is not None
        return coordinates * passes * microbatch, BatchShape(coordinates, passes, microbatch)
    if microbatch is None:
        return global_batch, BatchShape(coordinates, passes, -(-global_batch // (coordinates * passes)))
    if microbatches is None:
        return global_batch, BatchShape(coordinates, -(-global_batch // (coordinates * microbatch)), microbatch)
    fits = -(-global_batch // (coordinates * microbatches))
    fewest = -(-global_batch // (coordinates * microbatch))
    if microbatch != fits and microbatches != fewest:
        raise ValueError(
            f"--global-batch {global_batch} --microbatch {microbatch} --microbatches {microbatches}: {coordinates} "
            f"data-parallel coordinates x {microbatches} x {microbatch} = {coordinates * microbatches * microbatch}. The "
            f"product must be the global batch. Use --global-batch {coordinates * microbatches * microbatch}, or "
            f"--microbatch {fits}, or leave one of the three out."
        )
    return global_batch, BatchShape(coordinates, microbatches, microbatch)


def _wasteful(plan: Plan, heads: ModelConfig | None, global_batch: int, shape: BatchShape) -> list[str]:
    """Say what is legal but leaves ranks idle; ``heads`` of a model that has some."""
    found = []
    tp = plan.sizes.get("tp", 1)
    if heads is not None:
        by_kv = head_axis(heads.kv_heads, heads.q_per_kv, tp) == "kv_heads"
        split, name = (heads.kv_heads, "kv heads") if by_kv else (heads.q_per_kv, "query heads per kv head")
        idle = tp - -(-split // -(-split // tp))
        if idle > 0:
            found.append(f"{split} {name} over tp={tp}: {idle} of {tp} ranks have no head and idle during attention.")
    padded = shape.coordinates * shape.microbatches * shape.microbatch
    if padded >= 1.1 * global_batch:
        found.append(
            f"global batch {global_batch} is padded to {padded} rows "
            f"({shape.coordinates} x {shape.microbatches} x {shape.microbatch}): {padded - global_batch} rows are idle work."
        )
    return found


def new_run_dir(options: TrainOptions, now: str) -> Path:
    """Return the folder of a new run: runs/ and the time, model, plan and mesh."""
    model = Path(options.model.model.partition(":")[0]).stem
    mesh = options.mesh.mesh.replace("=", "").replace(",", "-").replace(" ", "")
    return Path("runs") / f"{now}-{options.model.size or model}-{options.mesh.plan}-{mesh}"
