"""One training step, composed of programs.

    accumulate   one microbatch: loss, and gradients in the layout of the gradient buffers
    update       reduce the buffers, norm, clip, optimizer, parameters back to where they are stored
    evaluate     one held-out microbatch: loss and count

Each is an ordinary function on local tensors; traced it becomes a Program, with ``eager=True`` it is called as it is.
The step owns every scale: the summed token loss is divided once by the number of counted tokens of the whole global
batch, and no accumulation or reduction rescales.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtengine import random, trees
from dtengine.data import Batch
from dtengine.layout import Layout, Placements, Plan, axes_of
from dtengine.mesh import Mesh
from dtengine.model import Model, ModelConfig, Param, Tied
from dtengine.model import parameters as model_parameters
from dtengine.ops import Ops, Recorded
from dtengine.optimizer import Optimizer
from dtengine.parameters import COMPUTE_DTYPES, Parameters
from dtengine.parameters import use as use_parameters
from dtengine.program import Program, check_collectives, count_collectives, trace
from dtengine.shard import Move, redistribute, wrap
from dtengine.torch_private import add_, all_reduce
from dtengine.update import Updater


class State(NamedTuple):
    """All that a step changes.

    Attributes:
        step: number of updates done.
        params: {name: DTensor} in the params layout, fp32 (fp64 where computed so).
        slots: {name: {slot: DTensor}} in the optimizer layout, or whole where the optimizer says so.
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
        label_smoothing: share of each label that is spread evenly over the vocabulary, in training.
        z_loss: coefficient on log(Z)^2, in training.
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
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    seed: int = 0
    eager: bool = False


@dataclass
class Step:
    """A training step bound to a mesh: ``state, metrics = step(state, batch)``.

    Build it with ``make_step``. Programs are traced when they are first needed; ``prepare`` does it ahead.
    """

    model: Model
    specs: Mapping[str, Any]
    parameters: Parameters
    updater: Updater
    config: StepConfig
    rate: Callable[[int], float]
    programs: dict[str, Callable[..., list[Tensor]]] = field(default_factory=dict)
    buffers: dict[str, Placements] = field(default_factory=dict)  # placements of the gradient buffers
    record: Callable[[Recorded], None] | None = None  # called with each activation of a trace

    @property
    def params(self) -> dict[str, Param]:
        """{name: description} of the parameters."""
        return self.parameters.specs

    @property
    def plan(self) -> Plan:
        """Mesh sizes and layouts."""
        return self.parameters.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of all its tensors."""
        return self.parameters.mesh

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.parameters.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of parameters, gradients and optimizer state."""
        return self.parameters.dtype

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
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
            slots = [s.to_local() for name in state.params for s in state.slots[name].values()]
        inverse = torch.tensor(1.0 / max(count, 1e-30), dtype=torch.float64).to(self.dtype).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        loss, buffers = self._accumulate_all(params, batches, inverse, key)
        lr = self.rate(state.step)
        now = (torch.tensor(lr, dtype=torch.float64), torch.tensor(float(state.step + 1)))
        loss, norm, finite, bad = self.programs["update"](*params, *slots, *buffers, loss, inverse, *now)
        return State(state.step + 1, state.params, state.slots), Metrics(loss, norm, finite, bad, lr)

    def gradients(self, state: State, batches: Sequence[Batch], count: float) -> dict[str, DTensor]:
        """Return the raw gradients of a step, reduced to the optimizer layout and not clipped; for tests and verify."""
        self.prepare()
        params = [p.to_local() for p in state.params.values()]
        inverse = torch.tensor(1.0 / count, dtype=torch.float64).to(self.dtype).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        _, buffers = self._accumulate_all(params, batches, inverse, key)
        reduced = redistribute(buffers, self._to_optimizer(), self.mesh)
        return {
            name: wrap(g, self.mesh, self.parameters.placements(self.plan.optimizer, name), self.params[name].shape)
            for name, g in zip(self.params, reduced, strict=True)
        }

    def _accumulate_all(
        self, params: list[Tensor], batches: Sequence[Batch], inverse: Tensor, key: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Run every microbatch; return the summed local loss and the gradient buffers."""
        loss, *buffers = self.programs["accumulate"](*params, *batches[0], inverse, key)
        for batch in batches[1:]:
            part, *grads = self.programs["accumulate"](*params, *batch, inverse, key)
            with torch.inference_mode():
                loss = loss + part
                add_(buffers, grads)
        return loss, buffers

    def evaluate(self, params: Mapping[str, DTensor], batches: Sequence[Batch]) -> tuple[float, float]:
        """Return (mean loss in nats per token, counted tokens) of held-out batches, the same on all ranks.

        Every rank passes equally many batches; rows that only pad have weight 0.
        """
        local = [p.to_local() for p in params.values()]
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            name = f"evaluate {'x'.join(map(str, batch.tokens.shape))}"  # a program serves one shape
            if name not in self.programs:
                self._compile(name, self.evaluate_local, [*local, *batch])
                self._check(name)
            total += torch.stack(self.programs[name](*local, *batch)).to(torch.float64)
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
        buffers = [self.parameters.empty(name, placements) for name, placements in self.buffers.items()]
        now = (torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0))
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        self._compile("update", self._update, [*params, *examples["slots"], *buffers, loss, inverse, *now])
        self._check("accumulate", "update")

    def collectives(self) -> dict[str, dict[str, int]]:
        """Return {mesh axes: {operation: count}} of one step."""
        times = {"accumulate": self.config.microbatches, "update": 1}
        programs = [(p, times[n]) for n, p in self.programs.items() if isinstance(p, Program) and n in times]
        return count_collectives(programs)

    # --- the functions that become programs -----------------------------------------------------------------------

    def _accumulate(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, batch, 1/count, dropout key) -> [local summed loss, gradients in the buffers' layout]."""
        params, batch, (inverse, key) = self._unpack(tensors)
        sink: dict[str, DTensor] = {}
        with torch.enable_grad():
            token = torch.zeros((), device=self.device, requires_grad=True)
            loss, _ = self._loss(params, batch, self._ops(batch, key), sink, token)
            local = loss.to_local()
            # The objective is the mean over the global batch; every rank starts from its own term of it.
            objective = _LocalLoss.apply(loss, self.mesh) * inverse  # type: ignore[operator]
            torch.autograd.grad(objective, token)
        for name in self.params:
            if name not in sink:  # a part that uses none of its parameters
                placements = self.parameters.placements(self.plan.grads, name)
                sink[name] = self.parameters.wrap(name, self.parameters.empty(name, placements).zero_(), placements)
        self.buffers.clear()
        self.buffers.update({name: tuple(sink[name].placements) for name in self.params})
        return [local.detach(), *(sink[name].to_local() for name in self.params)]

    def _update(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, slots, buffers, loss, 1/count, lr, update number) -> [loss, norm, finite, bad_data]."""
        names = list(self.params)
        rest = iter(tensors)
        params = [next(rest) for _ in names]
        slots = [{slot: next(rest) for slot in self.updater.slot_names(name)} for name in names]
        buffers = [next(rest) for _ in names]
        loss, inverse, lr, number = rest
        grads = redistribute(buffers, self._to_optimizer(), self.mesh)
        return self.updater(params, slots, grads, loss * inverse, lr, number)

    def evaluate_local(self, *tensors: Tensor) -> list[Tensor]:
        """(parameters, batch) -> [this coordinate's summed loss, its count]."""
        params, batch, _ = self._unpack(tensors)
        with torch.no_grad():
            loss, count = self._loss(params, batch, self._ops(batch, None), {}, None)
        return [loss.to_local(), count.to_local()]

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
                moved = use_parameters(self.parameters, names, [locals_[n] for n in names], sink, token)
                used.update(zip(names, moved, strict=True))
            return trees.map_named(lambda n, leaf: used[leaf.name if isinstance(leaf, Tied) else n], tree, prefix)

        x = self.model.embed(use("embed", self.specs["embed"]), batch, ops.at("embed"))
        for i, block in enumerate(self.specs["blocks"]):
            x = self.model.block(use(f"blocks.{i}", block), x, ops.at(f"blocks.{i}"))
        ops = ops.at("head")
        loss, count = self.model.loss(self.model.head(use("head", self.specs["head"]), x, ops), batch, ops)
        return loss, count  # type: ignore[return-value]

    def _ops(self, batch: Batch, key: Tensor | None) -> Ops:
        """Return the operations of a training step; without a key those of an evaluation, whose loss is plain."""
        ops = Ops(self.mesh, self.plan.compute, key, batch.rows, self.config.dropout, record=self.record)
        if key is None:
            return ops
        return replace(ops, label_smoothing=self.config.label_smoothing, z_loss=self.config.z_loss)

    def _over_data(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel coordinates."""
        group = self.mesh.groups.get(tuple(a for a in self.mesh.split_axes() if a in self.plan.data_axes))
        return values if group is None else all_reduce(values.clone(), "sum", group)

    def _unpack(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Batch, Sequence[Tensor]]:
        """Split (parameters, batch, the rest) and wrap the batch as the compute layout says."""
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

    def _to_optimizer(self) -> list[Move]:
        return [
            Move(self.buffers[n], self.parameters.placements(self.plan.optimizer, n), p.shape)
            for n, p in self.params.items()
        ]

    def examples(self) -> dict[str, Any]:
        """Return tensors of the shapes and dtypes that the programs are traced for."""
        config, device, parameters = self.config, self.device, self.parameters
        tokens = torch.zeros(config.microbatch, config.seq, dtype=torch.int64, device=device)
        rows = torch.zeros(config.microbatch, dtype=torch.int64, device=device)

        def shards(layout: Layout) -> list[Tensor]:
            return [parameters.empty(name, parameters.placements(layout, name)) for name in self.params]

        return {
            "params": shards(self.plan.params),
            "slots": [s.to_local() for name in self.params for s in self.updater.init_slots(name).values()],
            "batch": Batch(tokens, tokens.clone(), torch.ones_like(tokens, dtype=torch.float32), rows),
            "inverse": torch.ones((), dtype=self.dtype, device=device),
            "key": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _check(self, *names: str) -> None:
        """Compare the collectives of traced programs over all ranks."""
        check_collectives([p for n in names if isinstance(p := self.programs[n], Program)], self.mesh)

    def _compile(self, name: str, function: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> None:
        if self.config.eager:

            def untraced(*tensors: Tensor) -> list[Tensor]:
                with torch.no_grad():
                    return function(*tensors)

            self.programs[name] = untraced
        else:
            self.programs[name] = trace(name, function, examples, self.mesh)


class _LocalLoss(torch.autograd.Function):
    """The local term of a loss that is Partial over the data axes; its gradient starts Replicate."""

    @staticmethod
    def forward(ctx: Any, loss: DTensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return loss.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return wrap(grad, ctx.mesh, tuple(Replicate() for _ in ctx.mesh.axes), ()), None


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
    params = model_parameters(specs)
    for param in params.values():
        plan.params.check(param.names)
    placed = Parameters(params, plan, mesh, config.precision, torch.device(device))
    return Step(model, specs, placed, Updater(placed, optimizer, config.clip, config.norm_order), config, rate)


def init_state(step: Step) -> State:
    """Draw the initial parameters, each rank its own shards; a value depends on (seed, name, global index) alone."""
    parameters = step.parameters
    params = {name: parameters.initial(name, step.config.seed) for name in step.params}
    return State(0, params, {name: step.updater.init_slots(name) for name in params})
