"""A training step cut into pipeline stages: a rank runs its stages' actions in the order of a schedule, then one update.

For each of its stages a rank traces forward and backward of a microbatch together and cuts the graph into F, I and W
(``split``). Gradients are added to a buffer for each parameter; when all actions are done one program reduces them and
updates, as in any other step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from dtengine.data import Batch
from dtengine.executors import EagerExecutor
from dtengine.layout import Placements, Plan
from dtengine.mesh import Mesh
from dtengine.microbatch import Microbatch, Order, make_order
from dtengine.model import Model, ModelConfig
from dtengine.optimizer import Optimizer
from dtengine.parameters import Parameters
from dtengine.parts import Part
from dtengine.passes import run_passes
from dtengine.pipeline.actions import COMPUTE, Action, Schedule
from dtengine.pipeline.communication import transfers
from dtengine.pipeline.messages import Messages
from dtengine.pipeline.split import Piece, split
from dtengine.program import Program, check_collectives, collectives_of, count_collectives
from dtengine.shard import Move, gather, redistribute
from dtengine.state import State, StepConfig
from dtengine.step import Step, make_step
from dtengine.torch_private import all_gather_flat, all_reduce
from dtengine.update import unscale


@dataclass(frozen=True)
class Stage:
    """Consecutive parts of a model.

    Attributes:
        number: among all stages.
        microbatch: its parts and their functions.
        names: the parameters that it uses.
        buffers: its buffers.
        first, last: whether it has the embedding; the head and the loss.
    """

    number: int
    microbatch: Microbatch
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    first: bool
    last: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """In forward order."""
        return self.microbatch.order.parts


@dataclass
class StagePrograms:
    """What a stage runs for a microbatch.

    Attributes:
        pieces: {"F", "I", "W" or "B": what it takes and gives, by name}.
        programs: the same as programs.
        result: name of the forward's output: x, or the summed loss.
        latest: names of the new values of its buffers.
        input_grad: name of the gradient that goes to the stage before.
    """

    pieces: dict[str, Piece]
    programs: dict[str, Program]
    result: str
    latest: tuple[str, ...]
    input_grad: str | None


@dataclass(kw_only=True)
class PipelineStep(Step):
    """A training step whose model is cut into stages; used as ``Step``.

    Build it with ``make_pipeline_step``.
    """

    own: Parameters  # those of this rank's stages
    stages: tuple[Stage, ...]
    schedule: Schedule
    shared: tuple[str, ...]  # parameters that several ranks' stages use
    held: dict[str, Placements] = field(default_factory=dict)  # of the accumulation buffers
    parts_programs: dict[int, StagePrograms] = field(default_factory=dict)
    forwards: dict[tuple[int, tuple[int, ...]], Program] = field(default_factory=dict)  # of evaluation
    streams: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # {shape of tokens: form of x}

    @property
    def parameters(self) -> Parameters:
        """Of this rank's stages."""
        return self.own

    # --- what a caller does ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See Step."""
        if "step" in self.programs:
            return
        for stage in self.stages:
            self.parts_programs[stage.number] = self._make_stage(stage)
        if self._gathers:
            self.make("gather")
        for name in self.params:  # of no use to any stage
            self.held.setdefault(name, self.own.placements(self.plan.compute, name))
        for index in range(len(self.params)):
            self._sum_of(index)
        self.sums = dict(sorted(self.sums.items()))
        self.make("step")

    def evaluate(self, state: State, batches: Sequence[Batch]) -> tuple[float, float]:
        """See Step; batches go through the stages one behind the other."""
        whole = self._whole(state)
        running = dict(zip(self.own.buffers, (b.to_local() for b in state.buffers.values()), strict=True))
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        messages = Messages(self.mesh, self.schedule, len(batches))
        order = sorted((k + stage.number, stage.number, k) for stage in self.stages for k in range(len(batches)))
        by_number = {stage.number: stage for stage in self.stages}
        for _, number, k in order:
            stage, batch = by_number[number], batches[k]
            x = None
            if not stage.first:
                messages.expect(Action(number, "RECV_F", k), self._stream(batch))
                x = messages.take(Action(number, "RECV_F", k))
            found = self._forward(stage, batch)(
                *(whole[n] for n in stage.names),
                *(running[n] for n in stage.buffers),
                *([] if x is None else [x]),
                *batch,
            )
            if stage.last:
                total += torch.stack(found[:2]).to(torch.float64)
            else:
                messages.give(Action(number, "SEND_F", k), found[0])
        messages.finish()
        total = self.over_data(total)
        assert self.mesh.pipe is not None
        total = all_reduce(total.clone(), "sum", self.mesh.pipe.group)
        return (total[0] / total[1]).item(), total[1].item()

    def collectives(self) -> dict[str, dict[str, int]]:
        """See Step; what this rank's stages communicate with others is not among them."""
        times: list[tuple[Program, int]] = []
        for number, made in self.parts_programs.items():
            for kind, program in made.programs.items():
                assert self.mesh.pipe is not None
                actions = self.schedule.actions(self.mesh.pipe.rank)
                times.append((program, sum(a.stage == number and a.kind == kind for a in actions)))
        times += [(p, 1) for n, p in self.programs.items() if isinstance(p, Program) and n in ("gather", "step")]
        return count_collectives(times)

    def memory(self) -> None:
        """What a rank holds is not estimated for pipelines yet."""
        return

    # --- a step ---------------------------------------------------------------------------------------------------

    def _accumulated(
        self, state: State, batches: Sequence[Batch], count: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]:
        """Run all actions of the schedule; see Step."""
        params, held, _, loss, scalars, scale = super()._accumulated(state, [], count)
        inverse, key = scalars
        seed = inverse * scale[0][0] if scale else inverse
        running = dict(zip(self.own.buffers, held, strict=True))
        whole = self._whole(state)
        todo = self._todo
        messages = Messages(self.mesh, self.schedule, self.schedule.num_microbatches)
        stages = {stage.number: stage for stage in self.stages}
        live: dict[tuple[int, int], Any] = {}
        for place, action in enumerate(todo):
            for receive in _soon(todo, place):
                messages.expect(receive, self._stream(batches[0]))
            if action.kind not in COMPUTE:
                if action.kind.startswith("SEND"):
                    messages.send(action)
                continue
            stage, at = stages[action.stage], (action.stage, action.microbatch)
            grad = seed
            if action.kind in ("I", "B") and not stage.last:
                grad = messages.take(Action(stage.number, "RECV_B", action.microbatch))
            if action.kind == "F":
                x = None if stage.first else messages.take(Action(stage.number, "RECV_F", action.microbatch))
                result, live[at] = self._run_forward(stage, whole, running, x, batches[action.microbatch], key)
                if stage.last:
                    loss = loss + result
                else:
                    messages.give(Action(stage.number, "SEND_F", action.microbatch), result, later=True)
            else:
                of_x = self._run_backward(stage, action.kind, whole, live[at], grad)
                if action.kind in ("W", "B"):
                    del live[at]
                if of_x is not None and not stage.first:
                    messages.give(Action(stage.number, "SEND_B", action.microbatch), of_x, later=True)
        messages.finish()
        return params, held, list(running.values()), loss, scalars, scale

    @cached_property
    def _todo(self) -> tuple[Action, ...]:
        """What this rank computes, sends and receives in a step, in order."""
        assert self.mesh.pipe is not None
        return transfers(self.schedule)[self.mesh.pipe.rank]

    @property
    def _gathers(self) -> bool:
        """Whether parameters are stored elsewhere, or in another dtype, than they are used."""
        moves = self.own.moves(self.plan.params, self.plan.compute)
        return any(m.source != m.target for m in moves) or self.own.stored_dtype != self.own.compute_dtype

    def _whole(self, state: State) -> dict[str, Tensor]:
        """Return {name: parameter in the compute layout and dtype}, gathered once."""
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
        if not self._gathers:
            return dict(zip(self.params, params, strict=True))
        return dict(zip(self.params, self.programs["gather"](*params), strict=True))

    def _run_forward(
        self,
        stage: Stage,
        whole: Mapping[str, Tensor],
        running: dict[str, Tensor],
        x: Tensor | None,
        batch: Batch,
        key: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run a stage's forward; returns its result, and what its backward takes."""
        if self.config.eager:
            run = EagerExecutor(self.functions, self.saving)
            held = [running[n] for n in stage.buffers]
            outputs, latest, live = _forward(stage, run, whole, held, x, batch, key)
            running.update(latest)
            return outputs, {"live": live}
        made = self.parts_programs[stage.number]
        values = {f"whole_{i}": whole[n] for i, n in enumerate(stage.names)}
        values |= {f"running_{i}": running[n] for i, n in enumerate(stage.buffers)}
        values |= {f"batch_{i}": one for i, one in enumerate(batch)} | {"key": key}
        values |= {} if x is None else {"x": x}
        piece = made.pieces["F"]
        found = made.programs["F"](*(values[n] for n in piece.inputs))
        values |= dict(zip(piece.outputs, found, strict=True))
        running.update((n, values[latest]) for n, latest in zip(stage.buffers, made.latest, strict=True))
        later = {n for kind, one in made.pieces.items() if kind != "F" for n in one.inputs}
        return values[made.result], {n: v for n, v in values.items() if n in later}

    def _run_backward(
        self, stage: Stage, kind: str, whole: Mapping[str, Tensor], live: dict[str, Any], grad: Tensor
    ) -> Tensor | None:
        """Run a stage's input gradient, weight gradients or both; returns the input gradient where it is made."""
        if self.config.eager:
            if kind == "W":
                return None  # its input gradient did all
            run = EagerExecutor(self.functions, self.saving)
            return self._backward(stage, run, whole, live["live"], grad, self._sum_of)[0]
        made = self.parts_programs[stage.number]
        piece = made.pieces[kind]
        values = {"grad": grad} | live | {f"buffer_{i}": flat for i, flat in self.sums.items()}
        found = made.programs[kind](*(values[n] for n in piece.inputs))
        given = dict(zip(piece.outputs, found, strict=True))
        if kind == "I":
            later = made.pieces["W"].inputs
            left = {n: v for n, v in (live | given | {"grad": grad}).items() if n in later}
            live.clear()
            live.update(left)
        return None if kind == "W" or made.input_grad is None else given[made.input_grad]

    # --- what becomes programs ------------------------------------------------------------------------------------

    def _run(self, run: Any, program: str, inputs: Mapping[str, list], buffer: Any) -> list:
        """See Step: programs are "gather", and "step" or "gradients" behind all actions."""
        if program == "gather":
            moves, dtype = self.own.moves(self.plan.params, self.plan.compute), self.own.compute_dtype

            def gather(*shards: Tensor) -> list[Tensor]:
                return redistribute([x.to(dtype) for x in shards], moves, self.mesh)

            return run.call(("gather",), gather, inputs["params"])
        flats = [buffer(i, self._size(i)) for i in range(len(self.params))]
        grads = run.call(("finish",), self._reduced, flats)
        scale = inputs["scale"]
        if program == "gradients":
            raw = [*scale, *grads]
            return run.call(("unscale",), lambda scale, *grads: unscale(list(grads), scale), raw) if scale else raw
        (none,) = run.call(("none",), lambda loss: [torch.zeros_like(loss)], [inputs["scalars"][2]])
        latest = dict(zip(self.own.buffers, inputs["running"], strict=True))
        return self.updated(run, inputs, dict(zip(self.params, grads, strict=True)), latest, none)

    def _reduced(self, *flats: Tensor) -> list[Tensor]:
        """Bring accumulated gradients to the optimizer's layout, and sum those that several stages have."""
        own, dtype = self.own, self.microbatch.reduce_dtype
        sums = [
            flat.view(own.empty(n, self.held[n]).shape).to(dtype) for n, flat in zip(self.params, flats, strict=True)
        ]
        target = {n: own.placements(self.plan.optimizer, n) for n in self.params}
        moves = [Move(self.held[n], target[n], own.specs[n].shape) for n in self.params]
        grads = dict(zip(self.params, redistribute(sums, moves, self.mesh), strict=True))
        assert self.mesh.pipe is not None
        for name in self.shared:  # ranks without it add nothing
            full = self.functions.parameters
            mine = grads.get(name, full.empty(name, full.placements(self.plan.optimizer, name), dtype).zero_())
            summed = all_reduce(mine.clone(), "sum", self.mesh.pipe.group)
            if name in grads:
                grads[name] = summed
        return [grads[n].to(own.dtype) for n in self.params]

    def _make_stage(self, stage: Stage) -> StagePrograms:
        """Trace a stage's forward and backward, and cut them."""
        batch = Batch(*self.examples()["batch"])
        x = None if stage.first else self._stream(batch)
        if self.config.eager:
            return StagePrograms({}, {}, "", (), None)
        full, run = self.functions.parameters, self.executor
        run.begin()
        whole = {
            n: run.placeholder(f"whole_{i}", full.empty(n, full.placements(self.plan.compute, n), full.compute_dtype))
            for i, n in enumerate(stage.names)
        }
        held = [run.placeholder(f"running_{i}", full.initial_buffer(n)) for i, n in enumerate(stage.buffers)]
        stream = None if x is None else run.placeholder("x", x)
        given = [run.placeholder(f"batch_{i}", t) for i, t in enumerate(batch)]
        key = run.placeholder("key", torch.empty((), dtype=torch.int64, device=self.device))
        result, latest, live = _forward(stage, run, whole, held, stream, given, key)
        like = torch.empty((), dtype=self.dtype, device=self.device) if stage.last else self._stream(batch)
        grad = run.placeholder("grad", like)

        def buffer(index: int) -> fx.Node:
            return run.placeholder(f"buffer_{index}", self._sum_of(index))

        of_x, root = self._backward(stage, run, whole, live, grad, buffer)
        news = [latest[n] for n in stage.buffers]
        pieces = split(run.graph, [result, *news], root)
        assert self.mesh.pipe is not None
        kinds = {a.kind for a in self.schedule.actions(self.mesh.pipe.rank) if a.stage == stage.number}
        programs, kept = {}, {kind: piece for kind, piece in pieces.items() if kind in kinds}
        for kind, piece in kept.items():
            name = f"{kind} of stage {stage.number}"
            run.effects += run_passes(piece.graph, name, "program", self.config.disable_pass)
            module = fx.GraphModule(run.root, piece.graph, "Piece")
            module.graph.lint()
            programs[kind] = Program(name, module, tuple(collectives_of(module.graph, self.mesh)))
        check_collectives(list(programs.values()), self.mesh)
        input_grad = None if stage.first or root is None else root.name
        return StagePrograms(kept, programs, result.name, tuple(n.name for n in news), input_grad)

    def _backward(
        self, stage: Stage, run: Any, whole: Mapping[str, Any], live: list[Any], grad: Any, buffer: Any
    ) -> tuple[Any, Any]:
        """Run a stage's backward and add gradients to their buffers.

        Returns:
            (gradient of its input or None, that of the first stage's embedding where it has one: where I ends).
        """
        root = None
        index_of = {n: i for i, n in enumerate(self.params)}
        flats: dict[int, Any] = {}
        for i in range(len(stage.parts) - 1, -1, -1):
            part = stage.parts[i]
            root = grad
            grad, ours = run.backward(part, live[i], [whole[n] for n in part.names], grad)
            each = enumerate(zip(part.names, ours, strict=True))
            found = [(n, one, self.functions.grads[part.kind, k]) for k, (n, one) in each if one is not None]
            for name, _, placements in found:
                self.held.setdefault(name, self._held(name, placements))
            indices = [index_of[n] for n, _, _ in found]
            for k in indices:
                if k not in flats:
                    flats[k] = buffer(k)
            sources = tuple((self.own.specs[n], placements, self.held[n]) for n, _, placements in found)

            def add(*tensors: Tensor, sources: tuple = sources) -> list[Tensor]:
                return self._add(sources, tensors)

            run.call(("add", sources), add, [*(one for _, one, _ in found), *(flats[k] for k in indices)])
        return grad, grad if grad is not None else root

    def _add(self, sources: tuple, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add gradients to their flat buffers: (Param, placements, those of the buffer) of each."""
        grads, flats = tensors[: len(sources)], tensors[len(sources) :]
        moves = [Move(placed, held, param.shape) for param, placed, held in sources]
        terms = redistribute([g.to(self.microbatch.reduce_dtype) for g in grads], moves, self.mesh)
        for flat, term in zip(flats, terms, strict=True):
            flat.add_(term.reshape(-1))
        return []

    def _held(self, name: str, source: Placements) -> Placements:
        """Return where a gradient is accumulated; one that several parts give is summed over ranks each time."""
        uses = sum(name in part.names for stage in self.stages for part in stage.parts)
        return self.microbatch.held(name, source if uses == 1 else self.own.placements(self.plan.compute, name))

    def _size(self, index: int) -> int:
        name = list(self.params)[index]
        return self.own.empty(name, self.held[name]).numel()

    def _sum_of(self, index: int) -> Tensor:
        return self.sum_buffer(index, self._size(index))

    def _forward(self, stage: Stage, batch: Batch) -> Any:
        """Return a program of a stage's forward for evaluation: parameters, buffers, x, batch -> x, or loss and count."""
        shape = (stage.number, tuple(batch.tokens.shape))
        if shape in self.forwards:
            return self.forwards[shape]
        full = self.functions.parameters

        def evaluate(run: Any, tensors: Sequence[Any]) -> list[Any]:
            rest = iter(tensors)
            whole = {n: next(rest) for n in stage.names}
            running = {n: next(rest) for n in stage.buffers}
            x = None if stage.first else next(rest)
            given, outputs = list(rest), []
            for part in stage.parts:
                params, held = [whole[n] for n in part.names], [running[n] for n in part.buffers]
                outputs, _ = run.forward(part, params, held, x, given, None, train=False)
                x = outputs[0]
            return outputs if stage.parts else [x]

        if self.config.eager:
            return lambda *tensors: evaluate(EagerExecutor(self.functions, self.saving), tensors)
        run = self.executor
        run.begin()
        examples = [full.empty(n, full.placements(self.plan.compute, n), full.compute_dtype) for n in stage.names]
        examples += [full.initial_buffer(n) for n in stage.buffers]
        examples += [] if stage.first else [self._stream(batch)]
        nodes = [run.placeholder(f"input_{i}", t) for i, t in enumerate([*examples, *batch])]
        name = f"evaluate stage {stage.number}"
        module = run.end(name, evaluate(run, nodes))
        self.forwards[shape] = Program(name, module, tuple(collectives_of(module.graph, self.mesh)))
        check_collectives([self.forwards[shape]], self.mesh)
        return self.forwards[shape]

    def _stream(self, batch: Batch) -> Tensor:
        """Return a tensor as x is between stages, for a batch of this shape; learnt from the embedding."""
        shape = tuple(batch.tokens.shape)
        if shape not in self.streams:
            full = self.functions.parameters
            embed = self.microbatch.order.parts[0]
            mode = self.executor.mode

            def fake(x: Tensor) -> Tensor:
                return mode.from_tensor(x)

            params = [full.empty(n, full.placements(self.plan.compute, n), full.compute_dtype) for n in embed.names]
            held = [full.initial_buffer(n) for n in embed.buffers]
            key = torch.zeros((), dtype=torch.int64, device=self.device)
            with mode, torch.no_grad():
                live = self.functions.forward(
                    embed,
                    list(map(fake, params)),
                    list(map(fake, held)),
                    None,
                    list(map(fake, batch)),
                    fake(key),
                    False,
                )
            x = live.outputs[0]
            self.streams[shape] = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return self.streams[shape]


AHEAD = 2  # compute actions that receives are posted ahead of


def _soon(todo: Sequence[Action], place: int) -> Iterator[Action]:
    """Yield the receives up to ``AHEAD`` compute actions from here."""
    computed = 0
    for action in todo[place:]:
        if action.kind.startswith("RECV"):
            yield action
        computed += action.kind in COMPUTE
        if computed > AHEAD:
            return


def _forward(
    stage: Stage, run: Any, whole: Mapping[str, Any], held: Sequence[Any], x: Any, batch: Sequence[Any], key: Any
) -> tuple[Any, dict[str, Any], list[Any]]:
    """Run a stage's forward: (x or summed loss, new values of buffers, what each part's backward takes)."""
    keys = stage.microbatch.keys(run, key) if stage.parts else []
    running, latest, live = dict(zip(stage.buffers, held, strict=True)), {}, []
    for part, own in zip(stage.parts, keys, strict=True):
        given = [running[n] for n in part.buffers]
        outputs, kept = run.forward(part, [whole[n] for n in part.names], given, x, batch, own, train=True)
        latest.update(zip(part.buffers, outputs[part.num_outputs - len(given) :], strict=True))
        live.append(kept)
        x = outputs[0]
    return x, latest, live


def make_pipeline_step(
    model: Model,
    model_config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    optimizer: Optimizer,
    config: StepConfig,
    rate: Any,
    schedule: Schedule,
    layers: Sequence[int],
    device: torch.device | str = "cpu",
) -> PipelineStep:
    """Bind a model to a mesh with stages.

    Args:
        schedule: of ``config.microbatches``.
        layers: blocks of each stage.
        device: of this rank.
        model, model_config, plan, mesh, optimizer, config, rate: as ``make_step`` takes them.
    """
    base = make_step(model, model_config, plan, mesh, optimizer, config, rate, device)
    full, parts = base.parameters, base.microbatch.order.parts
    blocks, cut = list(parts[1:-1]), []
    for number, count in enumerate(layers):
        own, blocks = blocks[:count], blocks[count:]
        first, last = number == 0, number == len(layers) - 1
        cut.append([*([parts[0]] if first else []), *own, *([parts[-1]] if last else [])])
    assert not blocks and mesh.pipe is not None
    users: dict[str, list[int]] = {}
    for number, some in enumerate(cut):
        for name in dict.fromkeys(n for part in some for n in part.names):
            users.setdefault(name, []).append(schedule.rank_of[number])
    mine = schedule.stages(mesh.pipe.rank)
    names = {n for number in mine for part in cut[number] for n in part.names}
    held = {n for number in mine for part in cut[number] for n in part.buffers}
    own = replace(
        full,
        specs={n: p for n, p in full.specs.items() if n in names},
        buffers={n: b for n, b in full.buffers.items() if n in held},
        borrowed=frozenset(n for n in names if users[n][0] != mesh.pipe.rank),
    )
    stages, seen, ordered = [], set(), []
    for number in mine:
        some = []
        for part in cut[number]:
            some.append(replace(part, own=tuple(n for n in part.names if n not in seen)))
            seen.update(part.names)
        ordered += some
        everything = (tuple(range(len(some))),)
        order = Order(tuple(some), everything, (tuple(reversed(everything[0])),), 0, False)
        used = tuple(dict.fromkeys(n for part in some for n in part.names))
        buffers = tuple(n for part in some for n in part.buffers)
        one = replace(base.microbatch, order=order)
        stages.append(Stage(number, one, used, buffers, number == 0, number == len(layers) - 1))
    buckets = make_order(ordered, full, config.bucket_mb, 0, False).buckets(list(own.specs))
    return PipelineStep(
        base.functions,
        base.microbatch,
        replace(base.updater, parameters=own, buckets=buckets),
        config,
        rate,
        own=own,
        stages=tuple(stages),
        schedule=schedule,
        shared=tuple(n for n in full.specs if len(set(users.get(n, ()))) > 1),
    )


def whole_tensors(
    values: Mapping[str, DTensor], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, Tensor]:
    """Return whole tensors on every rank, those of other stages included; for tests, small models and reports.

    Args:
        values: of this rank's stages.
        shapes: {name: global shape} of the whole model; more than there are values of is no harm.
        mesh: of the tensors.
    """
    mine = dict(zip(values, gather(list(values.values()), mesh), strict=True))
    if mesh.pipe is None:
        return mine
    # The first stage that has a tensor gives it; the others add nothing.
    device = mesh.device_mesh.device_type
    has = torch.tensor([float(name in mine) for name in shapes], device=device)
    table = all_gather_flat(has, mesh.pipe.size, mesh.pipe.group).view(mesh.pipe.size, -1)
    found = {}
    for index, (name, shape) in enumerate(shapes.items()):
        owners = table[:, index].nonzero().flatten().tolist()
        if owners:
            own = mine[name].double() if owners[0] == mesh.pipe.rank else torch.zeros(shape, dtype=torch.float64)
            found[name] = all_reduce(own.to(device, copy=True), "sum", mesh.pipe.group)
    return found
