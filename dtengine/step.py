"""One training step, composed of programs.

    accumulate   a microbatch before the last: loss, gradients added into the buffers
    step         the last microbatch, its gradients reduced to the optimizer's layout, norm, clip, optimizer
    evaluate     one held-out microbatch: loss and count

``microbatch`` says what runs in which order; here it is recorded into programs, or with ``eager=True`` called as it is. The
step owns every scale: the summed token loss is divided once by the number of counted tokens of the whole global batch, and
no accumulation or reduction rescales.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from dtengine import loss_scale, random
from dtengine.data import Batch
from dtengine.executors import EagerExecutor, GraphExecutor
from dtengine.layout import Plan
from dtengine.memory import CUDA_ALIGNMENT, MemoryEstimate, bytes_of, estimate, measure_peak
from dtengine.mesh import Mesh
from dtengine.microbatch import Microbatch, make_order
from dtengine.model import Model, ModelConfig, Param
from dtengine.model import buffers as model_buffers
from dtengine.model import parameters as model_parameters
from dtengine.ops import Ops, Recorded
from dtengine.optimizer import Optimizer
from dtengine.parameters import COMPUTE_DTYPES, Parameters
from dtengine.parts import PartFunctions, parts_of
from dtengine.passes import Effect
from dtengine.program import CudaGraph, Program, check_collectives, collectives_of, count_collectives
from dtengine.recompute import parse_saving
from dtengine.state import Metrics, State, StepConfig
from dtengine.torch_private import FakeTensorMode, all_gather_flat, all_reduce, keep_on_host
from dtengine.trace_cache import TraceCache, program_key
from dtengine.update import Updater, unscale


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
    sums: dict[int, Tensor] = field(default_factory=dict)  # of gradients, flat, by number of the group reduced together
    runs: dict[str, CudaGraph] = field(default_factory=dict)  # programs that are replayed
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
        params, held, running, loss, scalars, scale = self._accumulated(state, batches, count)
        with torch.no_grad():
            master = [p.to_local() for p in state.master.values()]
            slots = [s.to_local() for name in state.params for s in state.slots[name].values()]
        lr = self.rate(state.step)
        now = (
            torch.tensor(lr, dtype=torch.float64, device=self.device),
            torch.tensor(float(state.step + 1), device=self.device),
        )
        changed = (*params, *master, *slots, *held, *running)
        run = self.runs.get("step", self.programs["step"])
        loss, norm, finite, bad, *used = run(*changed, *batches[-1], *scalars, loss, *now, *scale, *self.sums.values())
        return state._replace(step=state.step + 1), Metrics(loss, norm, finite, bad, lr, used[0] if used else None)

    def gradients(self, state: State, batches: Sequence[Batch], count: float) -> dict[str, DTensor]:
        """Return the raw gradients of a step, reduced to the optimizer layout and not clipped; for tests and verify."""
        self.prepare()
        if "gradients" not in self.programs:
            self.make("gradients")
        params, _, running, _, scalars, scale = self._accumulated(state, batches, count)
        found = self.programs["gradients"](*params, *running, *batches[-1], *scalars, *scale, *self.sums.values())
        layout = self.plan.optimizer
        return {
            name: self.parameters.wrap(name, g.clone(), self.parameters.placements(layout, name))
            for name, g in zip(self.params, found, strict=True)
        }

    def evaluate(self, state: State, batches: Sequence[Batch]) -> tuple[float, float]:
        """Return (mean loss in nats per token, counted tokens) of held-out batches, the same on all ranks.

        Every rank passes equally many batches; rows that only pad have weight 0. The state stays as it is.
        """
        local = [x.to_local() for x in (*state.params.values(), *state.buffers.values())]
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            name = f"evaluate {'x'.join(map(str, batch.tokens.shape))}"  # a program serves one shape
            if name not in self.programs:
                self.make(name, batch)
            total += torch.stack(self.programs[name](*local, *batch)).to(torch.float64)
        total = self.over_data(total)
        return (total[0] / total[1]).item(), total[1].item()

    def global_count(self, batches: Sequence[Batch]) -> float:
        """Return the number of counted tokens (sum of weights) of the global batch.

        Collectives:
            One all-reduce of a scalar over the mesh.
        """
        local = sum(torch.where(b.targets >= 0, b.weights, 0).sum(dtype=torch.float64) for b in batches)
        return self.over_data(torch.as_tensor(local, dtype=torch.float64, device=self.device).reshape(1)).item()

    def prepare(self) -> None:
        """Make the programs of a step and compare their collectives over all ranks, where that was not done yet."""
        if "step" in self.programs:
            return
        if self.config.microbatches > 1:
            self.make("accumulate")
        self.make("step")

    def in_a_step(self) -> list[tuple[Program, int]]:
        """Return the programs of a step, and how often each runs in it; none where nothing is traced."""
        times = {"accumulate": self.config.microbatches - 1, "step": 1}
        return [(p, times[n]) for n, p in self.programs.items() if isinstance(p, Program) and n in times]

    def collectives(self) -> dict[str, dict[str, int]]:
        """Return {mesh axes: {operation: count}} of one step."""
        return count_collectives(self.in_a_step())

    def memory(self) -> MemoryEstimate | None:
        """Estimate what this rank holds at the peak of a step, from its programs; None where they do not show it: where
        nothing is traced, or Inductor made of a part what it thought best."""
        graphs = [program.graph.graph for program, _ in self.in_a_step()]
        if self.config.compile or not graphs:
            return None
        return estimate(graphs, alignment=self.alignment, microbatches=self.config.microbatches, on_host=self.on_host)

    @property
    def alignment(self) -> int:
        """Bytes that the device's allocator rounds up to."""
        return 1 if self.device.type == "cpu" else CUDA_ALIGNMENT

    def measured(
        self, state: State, batches: Sequence[Batch], count: float | None = None
    ) -> tuple[State, Metrics, int]:
        """Run one step and measure the most bytes that it held on the device at once; slower than a plain one."""
        with measure_peak(self.device) as peak:
            state, metrics = self(state, batches, count)
        groups = {"params": [state.params], "master": [state.master], "slots": state.slots.values()}
        on_device = [own for name, group in groups.items() if name not in self.on_host for own in group]
        held = [t.to_local() for own in (*on_device, state.buffers) for t in own.values()]
        held += [*self.sums.values(), *(t for batch in batches for t in batch)]
        held += [constant for program, _ in self.in_a_step() for constant in program.graph.buffers()]
        return state, metrics, peak.bytes + bytes_of(held)

    def marked(self) -> AbstractContextManager[Any]:
        """Mark what a step consists of for a profiler that records it: operators speak for themselves."""
        return nullcontext()

    def record(self, record: Callable[[Recorded], None]) -> None:
        """Run a forward pass on fake tensors and report each value that an operation made."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            examples = self.examples()
            fakes = {name: [mode.from_tensor(t) for t in tensors] for name, tensors in examples.items()}
            functions = PartFunctions(self.functions.model, self.parameters, self.functions.ops, record=record)
            run = EagerExecutor(functions, parse_saving("none", None))
            params = dict(zip(self.params, fakes["params"], strict=True))
            running = dict(zip(self.parameters.buffers, fakes["running"], strict=True))
            microbatch = replace(self.microbatch, functions=functions, dropout=False)
            microbatch.evaluate(run, params, running, fakes["batch"])

    @property
    def on_host(self) -> tuple[str, ...]:
        """Groups of a program's inputs that lie in host memory."""
        return {"none": (), "optimizer": ("slots", "master"), "parameters": ("slots", "params")}[self.config.offload]

    @property
    def facts(self) -> tuple[Any, ...]:
        """What shapes its programs beside model, plan and options."""
        return ()

    @property
    def effects(self) -> list[Effect]:
        """What each pass did to each graph."""
        return self.executor.effects

    # --- the functions that become programs -----------------------------------------------------------------------

    def _accumulated(
        self, state: State, batches: Sequence[Batch], count: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]:
        """Run all microbatches but the last.

        Returns:
            (parameters, buffers as the step found them, buffers now, summed loss so far, [1 / count, dropout key],
            [loss scale] in fp16).
        """
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
            held = [b.to_local() for b in state.buffers.values()]
        scale = [] if state.scale is None else [state.scale]
        inverse = torch.tensor(1.0 / max(count, 1e-30), dtype=torch.float64).to(self.dtype).to(self.device)
        key = random.fold(random.key(self.config.seed, "dropout"), torch.tensor(state.step)).to(self.device)
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            for flat in self.sums.values():
                flat.zero_()
        running = held
        for batch in batches[:-1]:
            run = self.runs.get("accumulate", self.programs["accumulate"])
            loss, *running = run(*params, *running, *batch, inverse, key, loss, *scale, *self.sums.values())
        return params, held, running, loss, [inverse, key], scale

    def _run(self, run: Any, program: str, inputs: Mapping[str, list], buffer: Callable[[int, int], Any]) -> list:
        """Run what a program consists of.

        Args:
            run: the executor.
            program: "accumulate", "step", "gradients" or "evaluate ...".
            inputs: {"params", "master", "slots", "buffers" of the state, "running": their values now, "batch",
                "scalars": [1 / count, key, loss, lr, number], "scale"}; those that it needs.
            buffer: gives a group's flat accumulation buffer, by its number and size.
        """
        params = dict(zip(self.params, inputs["params"], strict=True))
        running = dict(zip(self.parameters.buffers, inputs["running"], strict=True))
        batch = inputs["batch"]
        if program.startswith("evaluate"):
            return self.microbatch.evaluate(run, params, running, batch)
        inverse, key, *rest = inputs["scalars"]
        seed, scale = inverse, inputs["scale"]
        if scale:
            (seed,) = run.call(("seed",), lambda inverse, scale: [inverse * scale[0]], [inverse, *scale])
        last = program != "accumulate"
        buffers = buffer if self.config.microbatches > 1 else None
        loss, grads, latest = self.microbatch.train(run, params, running, batch, key, seed, buffers, last=last)
        if program == "gradients":
            raw = [*scale, *(grads[n] for n in self.params)]
            return run.call(("unscale",), lambda scale, *grads: unscale(list(grads), scale), raw) if scale else raw
        if program == "accumulate":
            so_far = rest[0]
            return [*run.call(("add",), lambda a, b: [a + b], [so_far, loss]), *(latest[n] for n in running)]
        return self.updated(run, inputs, grads, latest, loss)

    def updated(
        self, run: Any, inputs: Mapping[str, list], grads: Mapping[str, Any], latest: Mapping[str, Any], loss: Any
    ) -> list:
        """End a step: reduced gradients to new parameters, and new values of the model's buffers."""
        names = list(self.params)
        inverse, _, so_far, *now = inputs["scalars"]
        scale = inputs["scale"]

        def update(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            params = [next(rest) for _ in names]
            master = [next(rest) for _ in inputs["master"]]
            slots = [{slot: next(rest) for slot in self.updater.slot_names(name)} for name in names]
            grads = [next(rest) for _ in names]
            held = [(next(rest), next(rest)) for _ in latest]
            inverse, so_far, loss, lr, number, *last = rest
            scale, loss = last[0] if last else None, (so_far + loss) * inverse
            found = self.updater(params, slots, grads, loss, lr, number, master=master, scale=scale)
            for old, new in held:
                old.copy_(torch.where(found[2] > 0, new, old))  # a step that is skipped keeps them too
            return found

        scalars = [inverse, so_far, loss, *now, *scale]
        changed = [*inputs["params"], *inputs["master"], *inputs["slots"]]
        news = (latest[n] for n in self.parameters.buffers)
        held = [x for old, new in zip(inputs["buffers"], news, strict=True) for x in (old, new)]
        return run.call(("update",), update, [*changed, *(grads[n] for n in names), *held, *scalars])

    def make(self, name: str, batch: Batch | None = None) -> None:
        """Make a program, and compare its collectives over all ranks."""
        groups = _INPUTS[name.split()[0]]
        num_scalars = {"step": 5, "accumulate": 3, "gradients": 2}.get(name, 0)
        examples = self.examples(batch)
        examples["scalars"] = examples["scalars"][:num_scalars]
        if self.config.eager:

            def untraced(*tensors: Tensor) -> list[Tensor]:
                rest = iter(tensors)
                inputs = {g: [next(rest) for _ in examples[g]] for g in groups}
                with torch.no_grad():
                    return self._run(EagerExecutor(self.functions, self.saving), name, inputs, self.sum_buffer)

            self.programs[name] = untraced
            return
        key, module = self.recall(name, {g: examples[g] for g in groups})
        if module is None:
            run = self.executor
            run.begin()
            inputs = {g: [run.placeholder(f"{g}_{i}", t) for i, t in enumerate(examples[g])] for g in groups}
            outputs = self._run(
                run, name, inputs, lambda g, size: run.placeholder(f"buffer_{g}", self.sum_buffer(g, size))
            )
            module = run.end(name, outputs)
            self.remember(key, module)
        program = Program(name, module, tuple(collectives_of(module.graph, self.mesh)))
        self.programs[name] = program
        check_collectives([program], self.mesh)
        if self.config.cuda_graphs and name in ("accumulate", "step"):
            self.runs[name] = CudaGraph(program)

    def recall(
        self, name: str, examples: Mapping[str, list[Tensor]], *facts: Any
    ) -> tuple[str | None, GraphModule | None]:
        """Return (key, program from the cache); no program where any rank has none: to trace takes all ranks.

        Args:
            name: of the program.
            examples: {group of inputs: tensors of the forms that they have}.
            facts: what shapes it beside these and what shapes all programs of the step.
        """
        if self.cache is None or dist.get_backend() == "fake":
            return None, None
        parameters, mesh = self.parameters, self.mesh
        forms = {g: [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in ts] for g, ts in examples.items()}
        key = program_key(
            {
                "program": (name, forms, self.device.type),
                "model": (self.functions.model, parameters.specs, parameters.buffers),
                "plan": (self.plan, mesh.sizes, mesh.coordinate, list(mesh.groups), dist.get_backend()),
                "step": (
                    replace(self.config, seed=0),
                    self.microbatch.order,
                    self.microbatch.dropout,
                ),  # the seed is an input
                "optimizer": self.updater.optimizer,
                "facts": (*self.facts, *facts),
            }
        )
        module = None if key is None else self.cache.load(key, mesh, self.device, self.executor.mode)
        if any(self._agree([module is None])) or module is None:
            return key, None
        for node in module.graph.find_nodes(op="placeholder"):
            group = str(node.target).partition("buffer_")[2]
            if group:
                self.sum_buffer(int(group), node.meta["val"].numel())
        self.recalled.add(name)
        return key, module

    def remember(self, key: str | None, module: GraphModule) -> None:
        """Put a traced program into the cache, under the key that ``recall`` gave."""
        if self.cache is not None and key is not None:
            self.cache.save(key, module, self.mesh)

    # --- parts of them --------------------------------------------------------------------------------------------

    @cached_property
    def saving(self) -> Any:
        """What blocks keep for their backward."""
        return parse_saving(self.config.recompute, self.config.activation_budget, self.config.save)

    @cached_property
    def executor(self) -> GraphExecutor:
        """What records programs; its traces are shared by all of them."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return GraphExecutor(
            self.functions, self.saving, mode, self._agree, self.config.disable_pass, self.config.compile
        )

    def _agree(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        everyone = self.mesh.groups.get(self.mesh.split_axes())
        if everyone is None or dist.get_backend() == "fake":
            return flags
        mine = torch.tensor(flags, dtype=torch.int64, device=self.device)
        table = all_gather_flat(mine, self.mesh.num_ranks, everyone).view(self.mesh.num_ranks, -1)
        return table.any(0).tolist()

    def sum_buffer(self, group: int, size: int) -> Tensor:
        """Return the flat accumulation buffer of a group."""
        if group not in self.sums:
            self.sums[group] = torch.zeros(size, dtype=self.dtype, device=self.device)
        return self.sums[group]

    def over_data(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel coordinates."""
        group = self.mesh.groups.get(tuple(a for a in self.mesh.split_axes() if a in self.plan.data_axes))
        return values if group is None else all_reduce(values.clone(), "sum", group)

    def examples(self, batch: Batch | None = None) -> dict[str, list[Tensor]]:
        """Return tensors of the shapes and dtypes that programs are traced for, by group of inputs."""
        config, device, parameters = self.config, self.device, self.parameters
        tokens = torch.empty(config.microbatch, config.seq, dtype=torch.int64, device=device)
        if batch is None:
            weights, rows = torch.empty_like(tokens, dtype=torch.float32), tokens[:, 0].contiguous()
            batch = Batch(tokens, torch.empty_like(tokens), weights, rows)
        scalar = torch.empty((), dtype=self.dtype, device=device)

        def shards(layout: Any, kind: str, dtype: torch.dtype | None = None) -> list[Tensor]:
            found = [parameters.empty(name, parameters.placements(layout, name), dtype) for name in self.params]
            return [shard.cpu() for shard in found] if kind in self.on_host else found

        slots = [s.to_local() for name in self.params for s in self.updater.init_slots(name).values()]

        buffers = [parameters.initial_buffer(name) for name in parameters.buffers]
        return {
            "params": shards(self.plan.params, "params", parameters.stored_dtype),
            "master": shards(self.plan.optimizer, "master") if parameters.has_master else [],
            "buffers": buffers,
            "running": buffers,
            "slots": [s.cpu() for s in slots] if "slots" in self.on_host else slots,
            "batch": list(batch),
            "scalars": [
                scalar,
                torch.empty((), dtype=torch.int64, device=device),
                scalar,
                torch.empty((), dtype=torch.float64),
                torch.empty(()),
            ],
            "scale": [torch.empty(3, device=device)] if config.precision == "fp16" else [],
        }


_INPUTS = {
    "accumulate": ("params", "running", "batch", "scalars", "scale"),
    "step": ("params", "master", "slots", "buffers", "running", "batch", "scalars", "scale"),
    "gradients": ("params", "running", "batch", "scalars", "scale"),
    "evaluate": ("params", "running", "batch"),
    "gather": ("params",),  # of pipelines
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
    if config.reduce_dtype not in ("fp32", "compute"):
        raise ValueError(f"--reduce-dtype {config.reduce_dtype}: use fp32 or compute.")
    loss_scale.check(config.loss_scale, config.loss_scale_window)
    parse_saving(config.recompute, config.activation_budget, config.save)
    if config.cuda_graphs and torch.device(device).type != "cuda":
        raise ValueError(f"--cuda-graphs: ranks run on {torch.device(device).type}. Leave it out, or run on GPUs.")
    specs = model.specs(model_config)
    params, buffers = model_parameters(specs), model_buffers(specs)
    for leaf in (*params.values(), *buffers.values()):
        plan.params.check(leaf.names)
    placed = Parameters(params, plan, mesh, config.precision, torch.device(device), buffers)
    ops = Ops(
        mesh,
        plan.compute,
        dropout_rate=config.dropout,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
    )
    functions = PartFunctions(model, placed, ops)
    order = make_order(parts_of(specs, params), placed, config.bucket_mb, config.prefetch, config.reshard)
    reduce_dtype = placed.compute_dtype if config.reduce_dtype == "compute" else placed.dtype
    microbatch = Microbatch(order, functions, config.dropout > 0, reduce_dtype, config.offload == "parameters")
    updater = Updater(
        placed,
        optimizer,
        config.clip,
        config.norm_order,
        config.loss_scale_window,
        order.buckets(list(params)),
        config.offload,
    )
    return Step(functions, microbatch, updater, config, rate, cache=cache)


def init_state(step: Step) -> State:
    """Draw the initial parameters, each rank its own shards; a value depends on (seed, name, global index) alone."""
    parameters, plan, seed = step.parameters, step.plan, step.config.seed
    params, master = {}, {}
    for name in step.params:
        drawn = parameters.initial(name, seed, plan.params)
        placements = parameters.placements(plan.params, name)
        params[name] = parameters.wrap(name, drawn.to_local().to(parameters.stored_dtype), placements)
        if parameters.has_master:
            master[name] = parameters.initial(name, seed, plan.optimizer)
    slots = {name: step.updater.init_slots(name) for name in params}
    buffers = {name: parameters.wrap_buffer(name, parameters.initial_buffer(name)) for name in parameters.buffers}
    groups = {"params": [params], "master": [master], "slots": list(slots.values())}
    for tensor in [t for group in step.on_host for own in groups[group] for t in own.values()]:
        keep_on_host(tensor)
    scale = None
    if step.config.precision == "fp16":
        scale = torch.tensor(loss_scale.LossScale(step.config.loss_scale), device=step.device)
    return State(0, params, slots, master, scale, buffers)
