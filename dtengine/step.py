"""One training step, composed of programs.

    accumulate   a microbatch before the last: loss, gradients added into the buffers
    step         the last microbatch, its gradients reduced to the optimizer's layout, norm, clip, optimizer
    evaluate     one held-out microbatch: loss and count

``microbatch`` says what runs in which order; here it is recorded into programs, or with ``eager=True`` called as it is. The
step owns every scale: the summed token loss is divided once by the number of counted tokens of the whole global batch, and
no accumulation or reduction rescales.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from dtengine import random
from dtengine.data import Batch
from dtengine.executors import EagerExecutor, GraphExecutor
from dtengine.layout import Plan
from dtengine.mesh import Mesh
from dtengine.microbatch import Microbatch, make_order
from dtengine.model import Model, ModelConfig, Param
from dtengine.model import parameters as model_parameters
from dtengine.ops import Ops, Recorded
from dtengine.optim import Optimizer
from dtengine.parameters import COMPUTE_DTYPES, Parameters
from dtengine.parts import PartFunctions, parts_of
from dtengine.passes import Effect
from dtengine.program import Program, check_collectives, collectives_of, count_collectives
from dtengine.recompute import parse_saving
from dtengine.torch_private import FakeTensorMode, all_gather_flat, all_reduce
from dtengine.trace_cache import TraceCache, program_key
from dtengine.update import Updater


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
        recompute: what blocks compute again in their backward: none, full, selective or every-N.
        activation_budget: share of the activations that blocks keep; None for what ``recompute`` says.
        prefetch: groups of blocks whose parameters are gathered ahead of the one that computes.
        bucket_mb: parameters are gathered, and gradients reduced, by whole parts together until they have this size, in
            units of 2^20 bytes.
        disable_pass: names of passes that do not run.
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
    recompute: str = "none"
    activation_budget: float | None = None
    prefetch: int = 1
    bucket_mb: float = 25.0
    disable_pass: tuple[str, ...] = ()


@dataclass
class Step:
    """A training step bound to a mesh: ``state, metrics = step(state, batch)``.

    Build it with ``make_step``. Programs are made when they are first needed; ``prepare`` does it ahead.
    """

    functions: PartFunctions
    microbatch: Microbatch
    updater: Updater
    config: StepConfig
    rate: Callable[[int], float]
    programs: dict[str, Callable[..., list[Tensor]]] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)  # flat, by number of the group that is reduced together
    cache: TraceCache | None = None
    recalled: set[str] = field(default_factory=set)  # names of the programs that came from the cache

    @property
    def parameters(self) -> Parameters:
        """Of the model, on their plan."""
        return self.functions.parameters

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

    # --- what a caller does ---------------------------------------------------------------------------------------

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
        params, slots, loss, scalars = self._accumulated(state, batches, count)
        lr = self.rate(state.step)
        now = (torch.tensor(lr, dtype=torch.float64), torch.tensor(float(state.step + 1)))
        buffers = self.buffers.values()
        loss, norm, finite, bad = self.programs["step"](*params, *slots, *batches[-1], *scalars, loss, *now, *buffers)
        return State(state.step + 1, state.params, state.slots), Metrics(loss, norm, finite, bad, lr)

    def gradients(self, state: State, batches: Sequence[Batch], count: float) -> dict[str, DTensor]:
        """Return the raw gradients of a step, reduced to the optimizer layout and not clipped; for tests and verify."""
        self.prepare()
        if "gradients" not in self.programs:
            self._make("gradients")
        params, _, _, scalars = self._accumulated(state, batches, count)
        found = self.programs["gradients"](*params, *batches[-1], *scalars, *self.buffers.values())
        layout = self.plan.optimizer
        return {
            name: self.parameters.wrap(name, g.clone(), self.parameters.placements(layout, name))
            for name, g in zip(self.params, found, strict=True)
        }

    def evaluate(self, params: Mapping[str, DTensor], batches: Sequence[Batch]) -> tuple[float, float]:
        """Return (mean loss in nats per token, counted tokens) of held-out batches, the same on all ranks.

        Every rank passes equally many batches; rows that only pad have weight 0.
        """
        local = [p.to_local() for p in params.values()]
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            name = f"evaluate {'x'.join(map(str, batch.tokens.shape))}"  # a program serves one shape
            if name not in self.programs:
                self._make(name, batch)
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
        """Make the programs of a step and compare their collectives over all ranks, where that was not done yet."""
        if "step" in self.programs:
            return
        if self.config.microbatches > 1:
            self._make("accumulate")
        self._make("step")

    def collectives(self) -> dict[str, dict[str, int]]:
        """Return {mesh axes: {operation: count}} of one step."""
        times = {"accumulate": self.config.microbatches - 1, "step": 1}
        programs = [(p, times[n]) for n, p in self.programs.items() if isinstance(p, Program) and n in times]
        return count_collectives(programs)

    def record(self, record: Callable[[Recorded], None]) -> None:
        """Run a forward pass on fake tensors and report each value that an operation made."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            examples = self._examples()
            fakes = {name: [mode.from_tensor(t) for t in tensors] for name, tensors in examples.items()}
            functions = PartFunctions(self.functions.model, self.parameters, self.functions.ops, record=record)
            run = EagerExecutor(functions, parse_saving("none", None))
            params = dict(zip(self.params, fakes["params"], strict=True))
            Microbatch(self.microbatch.order, functions, False).evaluate(run, params, fakes["batch"])

    @property
    def effects(self) -> list[Effect]:
        """What each pass did to each graph."""
        return self._executor.effects

    # --- the functions that become programs -----------------------------------------------------------------------

    def _accumulated(
        self, state: State, batches: Sequence[Batch], count: float
    ) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
        """Run all microbatches but the last; return (parameters, slots, summed loss so far, [seed, dropout key])."""
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
            slots = [s.to_local() for name in state.params for s in state.slots[name].values()]
        inverse = torch.tensor(1.0 / max(count, 1e-30), dtype=torch.float64).to(self.dtype).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            for flat in self.buffers.values():
                flat.zero_()
        for batch in batches[:-1]:
            loss = self.programs["accumulate"](*params, *batch, inverse, key, loss, *self.buffers.values())[0]
        return params, slots, loss, [inverse, key]

    def _run(self, run: Any, program: str, inputs: Mapping[str, list], buffer: Callable[[int, int], Any]) -> list:
        """Run what a program consists of.

        Args:
            run: the executor.
            program: "accumulate", "step", "gradients" or "evaluate ...".
            inputs: {"params", "slots", "batch", "scalars": [seed, key, loss, lr, number]}; those that it needs.
            buffer: gives a group's flat accumulation buffer, by its number and size.
        """
        params = dict(zip(self.params, inputs["params"], strict=True))
        batch = inputs["batch"]
        if program.startswith("evaluate"):
            return self.microbatch.evaluate(run, params, batch)
        seed, key, *rest = inputs["scalars"]
        last = program != "accumulate"
        buffers = buffer if self.config.microbatches > 1 else None
        loss, grads = self.microbatch.train(run, params, batch, key, seed, buffers, last=last)
        if program == "gradients":
            return [grads[n] for n in self.params]
        so_far, *now = rest
        if program == "accumulate":
            return run.call(("add",), lambda a, b: [a + b], [so_far, loss])
        names, slot_names = list(self.params), self.updater.slot_names

        def update(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            params = [next(rest) for _ in names]
            slots = [{slot: next(rest) for slot in slot_names} for _ in names]
            grads = [next(rest) for _ in names]
            seed, so_far, loss, lr, number = rest
            return self.updater(params, slots, grads, (so_far + loss) * seed, lr, number)

        scalars = [seed, so_far, loss, *now]
        return run.call(
            ("update",), update, [*inputs["params"], *inputs["slots"], *(grads[n] for n in names), *scalars]
        )

    def _make(self, name: str, batch: Batch | None = None) -> None:
        """Make a program, and compare its collectives over all ranks."""
        groups = [g for g in ("params", "slots", "batch", "scalars") if g in _INPUTS[name.split()[0]]]
        num_scalars = {"step": 5, "accumulate": 3, "gradients": 2}.get(name, 0)
        examples = self._examples(batch)
        examples["scalars"] = examples["scalars"][:num_scalars]
        if self.config.eager:

            def untraced(*tensors: Tensor) -> list[Tensor]:
                rest = iter(tensors)
                inputs = {g: [next(rest) for _ in examples[g]] for g in groups}
                with torch.no_grad():
                    return self._run(EagerExecutor(self.functions, self._saving), name, inputs, self._buffer)

            self.programs[name] = untraced
            return
        key, module = self._recall(name, {g: examples[g] for g in groups})
        if module is None:
            run = self._executor
            run.begin()
            inputs = {g: [run.placeholder(f"{g}_{i}", t) for i, t in enumerate(examples[g])] for g in groups}
            outputs = self._run(
                run, name, inputs, lambda g, size: run.placeholder(f"buffer_{g}", self._buffer(g, size))
            )
            module = run.end(name, outputs)
            if self.cache is not None and key is not None:
                self.cache.save(key, module, self.mesh)
        program = Program(name, module, tuple(collectives_of(module.graph, self.mesh)))
        self.programs[name] = program
        check_collectives([program], self.mesh)

    def _recall(self, name: str, examples: Mapping[str, list[Tensor]]) -> tuple[str | None, GraphModule | None]:
        """Return (key, program from the cache); no program where any rank has none: to trace takes all ranks."""
        if self.cache is None or dist.get_backend() == "fake":
            return None, None
        parameters, mesh = self.parameters, self.mesh
        forms = {g: [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in ts] for g, ts in examples.items()}
        key = program_key(
            {
                "program": (name, forms, self.device.type),
                "model": (self.functions.model, parameters.specs, self.functions.ops.dropout_rate),
                "plan": (self.plan, mesh.sizes, mesh.coordinate, list(mesh.groups), mesh.on_gloo),
                "step": (self.config, self.microbatch.order, self.microbatch.dropout),
                "update": (self.updater.optimizer, self.updater.clip, self.updater.norm_order),
            }
        )
        module = None if key is None else self.cache.load(key, mesh, self.device, self._executor.mode)
        if any(self._agree([module is None])) or module is None:
            return key, None
        for node in module.graph.find_nodes(op="placeholder"):
            group = str(node.target).partition("buffer_")[2]
            if group:
                self._buffer(int(group), node.meta["val"].numel())
        self.recalled.add(name)
        return key, module

    # --- parts of them --------------------------------------------------------------------------------------------

    @cached_property
    def _saving(self) -> Any:
        return parse_saving(self.config.recompute, self.config.activation_budget)

    @cached_property
    def _executor(self) -> GraphExecutor:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return GraphExecutor(self.functions, self._saving, mode, self._agree, self.config.disable_pass)

    def _agree(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        everyone = self.mesh.groups.get(self.mesh.split_axes())
        if everyone is None or dist.get_backend() == "fake":
            return flags
        mine = torch.tensor(flags, dtype=torch.int64, device=self.device)
        table = all_gather_flat(mine, self.mesh.num_ranks, everyone).view(self.mesh.num_ranks, -1)
        return table.any(0).tolist()

    def _buffer(self, group: int, size: int) -> Tensor:
        """Return the flat accumulation buffer of a group."""
        if group not in self.buffers:
            self.buffers[group] = torch.zeros(size, dtype=self.dtype, device=self.device)
        return self.buffers[group]

    def _over_data(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel coordinates."""
        group = self.mesh.groups.get(tuple(a for a in self.mesh.split_axes() if a in self.plan.data_axes))
        return values if group is None else all_reduce(values.clone(), "sum", group)

    def _examples(self, batch: Batch | None = None) -> dict[str, list[Tensor]]:
        """Return tensors of the shapes and dtypes that programs are traced for, by group of inputs."""
        config, device, parameters = self.config, self.device, self.parameters
        tokens = torch.empty(config.microbatch, config.seq, dtype=torch.int64, device=device)
        if batch is None:
            weights, rows = torch.empty_like(tokens, dtype=torch.float32), tokens[:, 0].contiguous()
            batch = Batch(tokens, torch.empty_like(tokens), weights, rows)
        scalar = torch.empty((), dtype=self.dtype, device=device)

        def shards(layout: Any) -> list[Tensor]:
            return [parameters.empty(name, parameters.placements(layout, name)) for name in self.params]

        return {
            "params": shards(self.plan.params),
            "slots": [shard for shard in shards(self.plan.optimizer) for _ in self.updater.slot_names],
            "batch": list(batch),
            "scalars": [
                scalar,
                torch.empty((), dtype=torch.int64, device=device),
                scalar,
                torch.empty((), dtype=torch.float64),
                torch.empty(()),
            ],
        }


_INPUTS = {
    "accumulate": ("params", "batch", "scalars"),
    "step": ("params", "slots", "batch", "scalars"),
    "gradients": ("params", "batch", "scalars"),
    "evaluate": ("params", "batch"),
}


def make_step(
    model: Model,
    model_config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    optimizer: Optimizer,
    config: StepConfig,
    rate: Callable[[int], float],
    device: torch.device | str = "cpu",
    cache: TraceCache | None = None,
) -> Step:
    """Bind a model, a plan, an optimizer and a learning rate, a function of the step, to a mesh.

    Args:
        cache: where finished programs are kept; None traces each time.

    Raises:
        ValueError: specs that do not fit the contract, unknown axes, or an unknown precision or recompute mode.
    """
    if config.precision not in COMPUTE_DTYPES:
        raise ValueError(f"--precision {config.precision}: use one of {', '.join(COMPUTE_DTYPES)}.")
    parse_saving(config.recompute, config.activation_budget)
    specs = model.specs(model_config)
    params = model_parameters(specs)
    for param in params.values():
        plan.params.check(param.names)
    placed = Parameters(params, plan, mesh, config.precision, torch.device(device))
    ops = Ops(mesh, plan.compute, dropout_rate=config.dropout)
    functions = PartFunctions(model, placed, ops)
    order = make_order(parts_of(specs, params), placed, config.bucket_mb, config.prefetch)
    microbatch = Microbatch(order, functions, config.dropout > 0)
    updater = Updater(placed, optimizer, config.clip, config.norm_order)
    return Step(functions, microbatch, updater, config, rate, cache=cache)


def init_state(step: Step) -> State:
    """Draw the initial parameters, each rank its own shards; a value depends on (seed, name, global index) alone."""
    parameters = step.parameters
    params = {name: parameters.initial(name, step.config.seed) for name in step.params}
    slots = {}
    for name in params:
        placements = parameters.placements(step.plan.optimizer, name)
        values = step.updater.optimizer.init(parameters.empty(name, placements))
        slots[name] = {slot: parameters.wrap(name, value, placements) for slot, value in values.items()}
    return State(0, params, slots)
