"""One training step, composed of programs.

    accumulate   one microbatch: loss, and gradients in the layout of the gradient buffers
    update       reduce the buffers, norm, clip, optimizer, parameters back to where they are stored
    evaluate     one held-out microbatch: loss and count

Each is an ordinary function on local tensors; traced it becomes a Program, with ``eager=True`` it is called as it is.
The step owns every scale: the summed token loss is divided once by the number of counted tokens of the whole global
batch, and no accumulation or reduction rescales.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtengine import random, trees
from dtengine.data import Batch
from dtengine.layout import Layout, Placements, Plan, axes_of
from dtengine.mesh import Mesh
from dtengine.model import Model, ModelConfig, Param, Tied, parameters
from dtengine.ops import Ops, Recorded
from dtengine.optim import Optimizer, Update, global_norm_terms
from dtengine.program import Program, check_collectives, count_collectives, trace
from dtengine.shard import Move, bounds_of, redistribute, wrap
from dtengine.torch_private import add_, all_reduce, scale

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class State(NamedTuple):
    """All that a step changes.

    Attributes:
        step: number of updates done.
        params: {name: DTensor} in the params layout, fp32 (fp64 where computed so).
        slots: {name: {slot: DTensor}} in the optimizer layout.
    """

    step: int
    params: dict[str, DTensor]
    slots: dict[str, dict[str, DTensor]]


class Metrics(NamedTuple):
    """What a step found, equal on all ranks; scalar tensors, so that reading them is the caller's choice.

    Attributes:
        loss: nats per counted token of the global batch.
        norm: gradient norm before clipping.
        finite: 0.0 where loss or norm was not finite; then nothing was updated.
        bad_data: [coordinates] 1.0 for each data-parallel coordinate whose own loss was not finite.
        lr: learning rate of the update; the one number that is not a tensor.
    """

    loss: Tensor
    norm: Tensor
    finite: Tensor
    bad_data: Tensor
    lr: float


@dataclass(frozen=True)
class StepConfig:
    """What shapes a step beside model, plan and optimizer.

    Attributes:
        microbatch: sequences that one data-parallel coordinate takes in one pass.
        seq: tokens in a sequence.
        microbatches: passes that make a step.
        precision: a key of COMPUTE_DTYPES; parameters, gradients and optimizer state are fp32 (fp64 with fp64).
        clip: largest global gradient norm; 0 clips nothing.
        norm_order: order of that norm: 1, 2 or inf.
        dropout: probability in [0, 1).
        seed: of dropout and initial parameters.
        eager: run the functions untraced.
    """

    microbatch: int
    seq: int
    microbatches: int = 1
    precision: str = "fp32"
    clip: float = 1.0
    norm_order: float = 2.0
    dropout: float = 0.0
    seed: int = 0
    eager: bool = False


@dataclass
class Step:
    """A training step bound to a mesh: ``state, metrics = step(state, batch)``.

    Build it with ``make_step``. Programs are traced when they are first needed; ``prepare`` does it ahead.
    """

    model: Model
    specs: Mapping[str, Any]
    plan: Plan
    mesh: Mesh
    optimizer: Optimizer
    config: StepConfig
    rate: Callable[[int], float]
    device: torch.device
    params: dict[str, Param] = field(default_factory=dict)
    programs: dict[str, Callable[..., list[Tensor]]] = field(default_factory=dict)
    buffers: dict[str, Placements] = field(default_factory=dict)  # placements of the gradient buffers
    record: Callable[[Recorded], None] | None = None  # called with each activation of a trace

    def __call__(
        self, state: State, batch: Batch | Sequence[Batch], count: float | None = None
    ) -> tuple[State, Metrics]:
        """Run one step. The state passed in is used up: its tensors are updated in place.

        Args:
            state: from ``init_state``, ``checkpoint.load`` or the step before.
            batch: the microbatches of this rank's data-parallel coordinate; one alone may stand for itself.
            count: number of counted tokens of the global batch; where None it is summed over the ranks first.

        Returns:
            (new state, metrics).
        """
        batches = [batch] if isinstance(batch, Batch) else batch
        if len(batches) != self.config.microbatches:
            raise ValueError(f"step: {len(batches)} microbatches, expected {self.config.microbatches}.")
        if count is None:
            count = self.global_count(batches)
        self.prepare()
        wide = self._wide
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
            slots = [s.to_local() for name in state.params for s in state.slots[name].values()]
        inverse = torch.tensor(1.0 / max(count, 1e-30), dtype=torch.float64).to(wide).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        loss, buffers = None, []
        for batch in batches:
            part, *grads = self.programs["accumulate"](*params, *batch, inverse, key)
            if loss is None:
                loss, buffers = part, grads
            else:
                with torch.inference_mode():
                    loss = loss + part
                    add_(buffers, grads)
        lr = self.rate(state.step)
        now = (torch.tensor(lr, dtype=torch.float64), torch.tensor(float(state.step + 1)))
        assert loss is not None
        loss, norm, finite, bad = self.programs["update"](*params, *slots, *buffers, loss, inverse, *now)
        return State(state.step + 1, state.params, state.slots), Metrics(loss, norm, finite, bad, lr)

    def gradients(self, state: State, batches: Sequence[Batch], count: float) -> dict[str, DTensor]:
        """Return the raw gradients of a step, reduced to the optimizer layout and not clipped; for tests and verify."""
        self.prepare()
        params = [p.to_local() for p in state.params.values()]
        inverse = torch.tensor(1.0 / count, dtype=torch.float64).to(self._wide).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        buffers: list[Tensor] = []
        for batch in batches:
            grads = self.programs["accumulate"](*params, *batch, inverse, key)[1:]
            buffers = grads if not buffers else [a + b for a, b in zip(buffers, grads, strict=True)]
        reduced = redistribute(buffers, self._to_optimizer(), self.mesh)
        return {
            name: wrap(g, self.mesh, self._placed(self.plan.optimizer, name), self.params[name].shape)
            for name, g in zip(self.params, reduced, strict=True)
        }

    def evaluate(self, params: Mapping[str, DTensor], batches: Sequence[Batch]) -> tuple[float, float]:
        """Return (mean loss in nats per token, counted tokens) of held-out batches, the same on all ranks.

        Every rank passes equally many batches; rows that only pad have weight 0.
        """
        local = [p.to_local() for p in params.values()]
        if "evaluate" not in self.programs:
            examples = [*local, *batches[0]]
            self._compile("evaluate", self.evaluate_local, examples)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            total += torch.stack(self.programs["evaluate"](*local, *batch)).to(torch.float64)
        total = self._over_data(total)
        return (total[0] / total[1]).item(), total[1].item()

    def global_count(self, batches: Sequence[Batch]) -> float:
        """Return the number of counted tokens (sum of weights) of the global batch.

        Collectives:
            One all-reduce of a scalar over the mesh.
        """
        local = sum(torch.where(b.targets >= 0, b.weights, 0).sum(dtype=torch.float64) for b in batches)
        return self._over_data(torch.as_tensor(local, dtype=torch.float64, device=self.device).reshape(1)).item()

    def prepare(self) -> None:
        """Trace the programs of a step and compare their collectives over all ranks, where that was not done yet."""
        if "update" in self.programs:
            return
        examples = self.examples()
        params, batch, inverse, key = examples["params"], examples["batch"], examples["inverse"], examples["key"]
        self._compile("accumulate", self._accumulate, [*params, *batch, inverse, key])
        if self.config.eager:  # the layout of the buffers is what an accumulation gives
            with torch.no_grad():
                self._accumulate(*params, *batch, inverse, key)
        buffers = [
            self._empty(self.params[name].shape, placements, self._wide) for name, placements in self.buffers.items()
        ]
        now = (torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0))
        loss = torch.zeros((), dtype=self._wide, device=self.device)
        self._compile("update", self._update, [*params, *examples["slots"], *buffers, loss, inverse, *now])
        if not self.config.eager:
            programs = [p for p in self.programs.values() if isinstance(p, Program)]
            check_collectives(programs, self.mesh)

    def collectives(self) -> dict[str, dict[str, int]]:
        """Return {mesh axes: {operation: count}} of one step."""
        times = {"accumulate": self.config.microbatches, "update": 1}
        programs = [(p, times[n]) for n, p in self.programs.items() if isinstance(p, Program) and n in times]
        return count_collectives(programs)

    # --- the functions that become programs -----------------------------------------------------------------------

    def _accumulate(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, batch, 1/count, dropout key) -> [local summed loss, gradients in the buffers' layout]."""
        params, batch, (inverse, key) = self._unpack(tensors, 2)
        sink: dict[str, DTensor] = {}
        with torch.enable_grad():
            token = torch.zeros((), device=self.device, requires_grad=True)
            loss, _ = self._loss(params, batch, self._ops(batch, key), sink, token)
            local = loss.to_local()
            # The objective is the mean over the global batch; every rank starts from its own term of it.
            torch.autograd.grad(_from_loss(loss, self.mesh) * inverse, token)
        self.buffers.clear()
        self.buffers.update({name: tuple(sink[name].placements) for name in self.params})
        return [local.detach(), *(sink[name].to_local() for name in self.params)]

    def evaluate_local(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, batch) -> [this coordinate's summed loss, its count]."""
        params, batch, _ = self._unpack(tensors, 0)
        with torch.no_grad():
            loss, count = self._loss(params, batch, self._ops(batch, None), {}, None)
        return [loss.to_local(), count.to_local()]

    def _update(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, slots, buffers, loss, 1/count, lr, update number) -> [loss, norm, finite, bad_data]."""
        # 1. unpack; 2. reduce gradients; 3. agree on loss and norm; 4. clip; 5. optimizer on shards; 6. store
        mesh, names = self.mesh, list(self.params)
        rest = iter(tensors)
        params = [next(rest) for _ in names]
        slots = [{slot: next(rest) for slot in self._slot_names} for _ in names]
        buffers = [next(rest) for _ in names]
        loss, inverse, lr, number = rest

        grads = redistribute(buffers, self._to_optimizer(), mesh)

        loss, norm, bad = self._agree(loss * inverse, grads)
        finite = torch.isfinite(loss) & torch.isfinite(norm)

        if self.config.clip:
            factor = torch.where(finite, self.config.clip / norm.clamp(min=self.config.clip), 0.0)
            grads = scale(grads, factor)

        skip = 1.0 - finite.to(torch.float32)
        shards = redistribute(params, self._moves(self.plan.params, self.plan.optimizer), mesh)
        for decayed in (True, False):
            chosen = [i for i, n in enumerate(names) if self.params[n].decayed == decayed and shards[i].numel()]
            if chosen:
                self.optimizer.update(
                    [shards[i] for i in chosen],
                    [grads[i] for i in chosen],
                    [slots[i] for i in chosen],
                    self.optimizer.weight_decay if decayed else 0.0,
                    Update(lr, number, skip),
                )

        stored = redistribute(shards, self._moves(self.plan.optimizer, self.plan.params), mesh)
        for param, shard, new in zip(params, shards, stored, strict=True):
            if param is not shard:
                param.copy_(new)
        return [loss, norm, finite.to(torch.float32), bad]

    # --- parts of them --------------------------------------------------------------------------------------------

    def _loss(
        self, params: list[Tensor], batch: Batch, ops: Ops, sink: dict[str, DTensor], token: Tensor | None
    ) -> tuple[DTensor, DTensor]:
        """Compose the model's parts; each part's parameters are moved to the compute layout where it begins."""
        locals_ = dict(zip(self.params, params, strict=True))
        used: dict[str, DTensor] = {}

        def use(prefix: str, tree: Any) -> Any:
            flat = {f"{prefix}.{n}": leaf for n, leaf in trees.leaves(tree)}
            own = [n for n, leaf in flat.items() if isinstance(leaf, Param)]
            tied = [leaf.name for leaf in flat.values() if isinstance(leaf, Tied) and leaf.name not in used]
            names = [n for n in dict.fromkeys(own + tied) if n not in used]
            if names:
                moved = _Use.apply(self, tuple(names), sink, token, *(locals_[n] for n in names))
                used.update(zip(names, moved, strict=True))  # type: ignore[arg-type]
            return trees.map_named(lambda n, leaf: used[leaf.name if isinstance(leaf, Tied) else n], tree, prefix)

        x = self.model.embed(use("embed", self.specs["embed"]), batch, ops.at("embed"))
        for i, block in enumerate(self.specs["blocks"]):
            x = self.model.block(use(f"blocks.{i}", block), x, ops.at(f"blocks.{i}"))
        ops = ops.at("head")
        loss, count = self.model.loss(self.model.head(use("head", self.specs["head"]), x, ops), batch, ops)
        return loss, count  # type: ignore[return-value]

    def _agree(self, loss: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, norm and which coordinates had a non-finite loss, summed once over the mesh.

        Collectives:
            One all-reduce over the whole mesh (two where the norm is the largest element).
        """
        mesh, order = self.mesh, self.config.norm_order
        at = dict(zip(mesh.axes, mesh.coordinate, strict=True))
        # A gradient that several ranks hold alike counts on the first of them only.
        owned = [
            g
            for name, g in zip(self.params, grads, strict=True)
            if g.numel()
            and not any(
                isinstance(p, Replicate) and at[m]
                for m, p in zip(mesh.axes, self._placed(self.plan.optimizer, name), strict=True)
            )
        ]
        term = global_norm_terms(owned, order) if owned else torch.zeros((), dtype=loss.dtype, device=loss.device)
        first = all(at[m] == 0 for m in mesh.axes if m not in self.plan.data_axes)
        bad = torch.zeros(self.plan.coordinates, dtype=loss.dtype, device=loss.device)
        bad[mesh.data_coordinate(self.plan.data_axes)] = torch.where(torch.isfinite(loss), 0.0, 1.0) * first
        mine = loss if first else torch.zeros_like(loss)
        head = torch.stack([mine, torch.zeros_like(term) if math.isinf(order) else term.to(loss.dtype)])
        vector = torch.cat([head, bad])
        everyone = mesh.groups.get(mesh.split_axes())
        if everyone is not None:
            vector = all_reduce(vector, "sum", everyone)
            if math.isinf(order):
                term = all_reduce(term.clone(), "max", everyone)
        norm = term if math.isinf(order) else vector[1] if order == 1 else vector[1].pow(1 / order)
        return vector[0], norm, vector[2:]

    def _ops(self, batch: Batch, key: Tensor | None) -> Ops:
        return Ops(self.mesh, self.plan.compute, key, batch.rows, self.config.dropout, record=self.record)

    def _over_data(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel coordinates."""
        group = self.mesh.groups.get(tuple(a for a in self.mesh.split_axes() if a in self.plan.data_axes))
        return values if group is None else all_reduce(values.clone(), "sum", group)

    def _unpack(self, tensors: Sequence[Tensor], extra: int) -> tuple[list[Tensor], Batch, Sequence[Tensor]]:
        """Split (parameters, batch, extra) and wrap the batch as the compute layout says."""
        n = len(self.params)
        tokens, targets, weights, rows = tensors[n : n + 4]
        shape = (tokens.shape[0] * self.plan.coordinates, tokens.shape[1])
        compute, sizes = self.plan.compute, self.mesh.sizes
        two, one = compute.placements(axes_of("batch seq"), sizes), compute.placements(("batch",), sizes)
        batch = Batch(
            wrap(tokens, self.mesh, two, shape),
            wrap(targets, self.mesh, two, shape),
            wrap(weights, self.mesh, two, shape),
            wrap(rows, self.mesh, one, shape[:1]),
        )
        return list(tensors[:n]), batch, tensors[n + 4 :]

    # --- layouts --------------------------------------------------------------------------------------------------

    @property
    def _wide(self) -> torch.dtype:
        """dtype of parameters, gradients and optimizer state."""
        return torch.float64 if self.config.precision == "fp64" else torch.float32

    @property
    def _slot_names(self) -> list[str]:
        return list(self.optimizer.init(torch.zeros(0)))

    def _placed(self, layout: Layout, name: str) -> Placements:
        return layout.placements(self.params[name].names, self.mesh.sizes)

    def _moves(self, source: Layout, target: Layout) -> list[Move]:
        return [Move(self._placed(source, n), self._placed(target, n), p.shape) for n, p in self.params.items()]

    def _to_optimizer(self) -> list[Move]:
        return [Move(self.buffers[n], self._placed(self.plan.optimizer, n), p.shape) for n, p in self.params.items()]

    def _empty(self, shape: Sequence[int], placements: Placements, dtype: torch.dtype) -> Tensor:
        bounds = bounds_of(shape, placements, self.mesh)
        return torch.empty([stop - start for start, stop in bounds], dtype=dtype, device=self.device)

    def examples(self) -> dict[str, Any]:
        wide, config, device = self._wide, self.config, self.device
        slots = [
            self._empty(p.shape, self._placed(self.plan.optimizer, n), wide)
            for n, p in self.params.items()
            for _ in self._slot_names
        ]
        tokens = torch.zeros(config.microbatch, config.seq, dtype=torch.int64, device=device)
        rows = torch.zeros(config.microbatch, dtype=torch.int64, device=device)
        return {
            "params": [self._empty(p.shape, self._placed(self.plan.params, n), wide) for n, p in self.params.items()],
            "slots": slots,
            "batch": Batch(tokens, tokens.clone(), torch.ones_like(tokens, dtype=torch.float32), rows),
            "inverse": torch.ones((), dtype=wide, device=device),
            "key": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _compile(self, name: str, function: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> None:
        if self.config.eager:

            def untraced(*tensors: Tensor) -> list[Tensor]:
                with torch.no_grad():
                    return function(*tensors)

            self.programs[name] = untraced
        else:
            self.programs[name] = trace(name, function, examples, self.mesh)


class _Use(torch.autograd.Function):
    """Move a part's parameters to the compute layout; its backward brings their gradients to the buffers' layout.

    Both directions treat the whole part at once. Gradients leave through ``sink``, because a buffer's shape may differ
    from the parameter's (zero2), which autograd forbids for a gradient; ``token`` makes autograd come by.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, names: tuple[str, ...], sink: dict[str, DTensor], token: Tensor | None, *params: Tensor
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.names, ctx.sink = step, names, sink
        target = [step._placed(step.plan.compute, n) for n in names]
        shapes = [step.params[n].shape for n in names]
        moves = [Move(step._placed(step.plan.params, n), t, s) for n, t, s in zip(names, target, shapes, strict=True)]
        dtype = COMPUTE_DTYPES[step.config.precision]
        moved = redistribute([p.to(dtype) for p in params], moves, step.mesh)
        ctx.unused = list(zip(target, shapes, strict=True))
        return tuple(wrap(m.view_as(m), step.mesh, t, s) for m, t, s in zip(moved, target, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        step: Step = ctx.step
        local, moves = [], []
        for name, grad, (placements, shape) in zip(ctx.names, grads, ctx.unused, strict=True):
            if grad is None:  # a parameter that nothing used
                local.append(step._empty(shape, placements, step._wide).zero_())
                source = placements
            else:
                local.append(grad.to_local().to(step._wide))
                source = tuple(grad.placements)
            layout = step._placed(step.plan.grads, name)
            moves.append(
                Move(
                    source, tuple(b if isinstance(b, Shard) else s for s, b in zip(source, layout, strict=True)), shape
                )
            )
        reduced = redistribute(local, moves, step.mesh)
        for name, move, grad in zip(ctx.names, moves, reduced, strict=True):
            # buffers are contiguous: the update was traced for that
            ctx.sink[name] = wrap(grad.contiguous(), step.mesh, move.target, move.shape)
        return None, None, None, torch.zeros((), device=step.device), *(None for _ in grads)


class _LocalLoss(torch.autograd.Function):
    """The local term of a loss that is Partial over the data axes; its gradient starts Replicate."""

    @staticmethod
    def forward(ctx: Any, loss: DTensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return loss.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return wrap(grad, ctx.mesh, tuple(Replicate() for _ in ctx.mesh.axes), ()), None


def _from_loss(loss: DTensor, mesh: Mesh) -> Tensor:
    return _LocalLoss.apply(loss, mesh)  # type: ignore[return-value]


def make_step(
    model: Model,
    model_config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    optimizer: Optimizer,
    config: StepConfig,
    rate: Callable[[int], float],
    device: torch.device | str = "cpu",
) -> Step:
    """Bind a model, a plan, an optimizer and a learning rate, a function of the step, to a mesh.

    Raises:
        ValueError: specs that do not fit the contract, unknown axes, or an unknown precision.
    """
    if config.precision not in COMPUTE_DTYPES:
        raise ValueError(f"--precision {config.precision}: use one of {', '.join(COMPUTE_DTYPES)}.")
    specs = model.specs(model_config)
    params = parameters(specs)
    for param in params.values():
        plan.params.check(param.names)
    return Step(model, specs, plan, mesh, optimizer, config, rate, torch.device(device), params)


def init_state(step: Step) -> State:
    """Draw the initial parameters, each rank its own shards; a value depends on (seed, name, global index) alone."""
    mesh, params, slots = step.mesh, {}, {}
    for name, param in step.params.items():
        placements = step._placed(step.plan.params, name)
        local = init_param(param, name, step.config.seed, bounds_of(param.shape, placements, mesh), step.device)
        params[name] = wrap(local.to(step._wide), mesh, placements, param.shape)
        placements = step._placed(step.plan.optimizer, name)
        empty = step._empty(param.shape, placements, step._wide)
        slots[name] = {
            slot: wrap(value, mesh, placements, param.shape) for slot, value in step.optimizer.init(empty).items()
        }
    return State(0, params, slots)


def init_param(
    param: Param, name: str, seed: int, bounds: Sequence[tuple[int, int]], device: torch.device | str
) -> Tensor:
    """Return the initial values, in float64, of the part of a parameter within ``bounds``."""
    if param.std == 0:
        return torch.full([b - a for a, b in bounds], param.mean, dtype=torch.float64, device=device)
    index = random.global_index(param.shape, bounds, device)
    return random.normal(random.key(seed, name), index) * param.std + param.mean
