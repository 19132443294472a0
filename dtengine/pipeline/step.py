"""A training step cut into pipeline stages: a rank runs its stages' actions in the order of a schedule, then one update.

For each of its stages a rank traces forward and backward of a microbatch together and cuts the graph into F, I and W
(``stage``). Gradients are added to a buffer for each parameter (``sums``); when all actions are done one program reduces
them and updates, as in any other step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dtengine.data import Batch
from dtengine.executors import EagerExecutor
from dtengine.memory import MemoryEstimate, estimate, gathered_bytes
from dtengine.mesh import Pipe
from dtengine.microbatch import Order, make_order
from dtengine.parameters import Parameters
from dtengine.pipeline.actions import COMPUTE, Action, Schedule
from dtengine.pipeline.communication import acknowledged, transfers
from dtengine.pipeline.holdings import peak_of_actions
from dtengine.pipeline.messages import Messages
from dtengine.pipeline.partition import cut
from dtengine.pipeline.simulate import Simulation
from dtengine.pipeline.stage import Stage, StagePrograms, piece_name, recall_stage, trace_stage
from dtengine.pipeline.stream import Stream, stream_of
from dtengine.pipeline.sums import Sums
from dtengine.pipeline.timeline import Timeline, gather_times
from dtengine.program import Program, check_collectives, collectives_of
from dtengine.state import Metrics, State
from dtengine.step import Step
from dtengine.torch_private import all_reduce
from dtengine.update import unscale

AHEAD = 2  # compute actions that receives are posted ahead of


@dataclass(kw_only=True)
class PipelineStep(Step):
    """A training step whose model is cut into stages; used as ``Step``, made by ``cut_into_stages``.

    Attributes:
        stages: of this rank.
        schedule: what all ranks do in a step.
        totals: this rank's parameters, and how their gradients are accumulated.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    totals: Sums
    traced: dict[int, StagePrograms] = field(default_factory=dict)  # by number of the stage
    forwards: dict[tuple[int, tuple[int, ...]], Program] = field(default_factory=dict)  # of evaluation
    streams: dict[tuple[int, ...], Stream] = field(default_factory=dict)  # {shape of tokens: form of x}
    timeline: Timeline | None = None  # of the step that runs

    @property
    def parameters(self) -> Parameters:
        """Of this rank's stages."""
        return self.totals.own

    @property
    def pipe(self) -> Pipe:
        """This rank's place among the stages."""
        assert self.mesh.pipe is not None
        return self.mesh.pipe

    @cached_property
    def lists(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank computes, sends and receives in a step, in order."""
        return transfers(self.schedule)

    @property
    def todo(self) -> tuple[Action, ...]:
        """What this rank does."""
        return self.lists[self.pipe.rank]

    @cached_property
    def read(self) -> dict[Action, tuple[Action, ...]]:
        """What of its own this rank knows to have been read when it receives something."""
        return acknowledged(self.lists, self.schedule.rank_of, self.pipe.rank)

    # --- what a caller does ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See Step."""
        if "step" in self.programs:
            return
        for stage in self.stages if not self.config.eager else ():
            self.traced[stage.number] = self._programs_of(stage)
            check_collectives([piece.program for piece in self.traced[stage.number].pieces.values()], self.mesh)
        if self._gathers:
            self.make("gather")
        self.totals.place_rest()
        for name in self.params:
            self._sum_of(name)
        self.sums = dict(sorted(self.sums.items()))  # in the order in which programs take them
        self.make("step")

    def evaluate(self, state: State, batches: Sequence[Batch]) -> tuple[float, float]:
        """See Step; batches go through the stages one behind the other."""
        whole = self._whole(state)
        running = dict(zip(self.parameters.buffers, (b.to_local() for b in state.buffers.values()), strict=True))
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        messages = Messages(self.pipe, self.schedule.rank_of, len(batches))
        every = [(stage, k) for stage in self.stages for k in range(len(batches))]
        for stage, k in sorted(every, key=lambda one: (one[0].number + one[1], one[1])):
            receive, batch = Action(stage.number, "RECV_F", k), batches[k]
            if not stage.first:
                messages.expect(receive, self._stream(batch).message)
            x = [] if stage.first else [messages.take(receive)]
            held = [*(whole[n] for n in stage.names), *(running[n] for n in stage.buffers)]
            found = self._evaluator(stage, batch)(*held, *x, *batch)
            if stage.last:
                total += torch.stack(found[:2]).to(torch.float64)
            else:
                messages.give(Action(stage.number, "SEND_F", k), found[0])
        messages.finish()
        total = all_reduce(self.over_data(total).clone(), "sum", self.pipe.group)
        return (total[0] / total[1]).item(), total[1].item()

    @property
    def facts(self) -> tuple[Any, ...]:
        """See Step."""
        stages = [(s.microbatch.order, s.first, s.last, s.takes_whole, s.gives_whole) for s in self.stages]
        totals = (dict(self.totals.uses), self.totals.shared, self.totals.microbatch.reduce_dtype)
        return self.pipe.rank, self.pipe.size, stages, totals, self.updater.buckets

    def in_a_step(self) -> list[tuple[Program, int]]:
        """See Step; messages between stages are no programs."""
        times = Counter((a.stage, a.kind) for a in self.todo)
        pieces = [(p.program, times[n, kind]) for n, made in self.traced.items() for kind, p in made.pieces.items()]
        rest = [self.programs.get(name) for name in ("gather", "step")]
        return pieces + [(program, 1) for program in rest if isinstance(program, Program)]

    def collectives(self) -> dict[str, dict[str, int]]:
        """See Step; messages that this rank sends to other stages are counted, too."""
        counts = super().collectives()
        counts.setdefault("pp", {})["send"] = sum(action.kind.startswith("SEND") for action in self.todo)
        return counts

    def memory(self) -> MemoryEstimate | None:
        """See Step."""
        if self.config.compile or not self.traced:
            return None
        message = self._stream(self._batch()).message
        transfers = {(a.stage, a.kind): message for a in self.todo if a.kind not in COMPUTE}
        ends = [self.programs[name] for name in ("gather", "step") if name in self.programs]
        graphs = [program.graph.graph for program in ends if isinstance(program, Program)]
        gathered = gathered_bytes(graphs[0], self.alignment) if self._gathers else 0
        peak = peak_of_actions(
            self.todo,
            _soon,
            self.read,
            {s.number: s for s in self.stages},
            self.traced,
            transfers,
            gathered,
            self.alignment,
        )
        others = [piece.program.graph.graph for made in self.traced.values() for piece in made.pieces.values()]
        return estimate(
            graphs, alignment=self.alignment, microbatches=self.config.microbatches, on_host=self.on_host, other=peak,
            others=others,
        )  # fmt: skip

    def timed(
        self, state: State, batches: Sequence[Batch], count: float | None = None
    ) -> tuple[State, Metrics, Simulation]:
        """Run one step and note when each action of the ranks at this place of their stages ran."""
        self.prepare()
        with self.marked() as timeline:
            state, metrics = self(state, batches, count)
        return state, metrics, gather_times(timeline, self.schedule, self.pipe, self.device)

    @contextmanager
    def marked(self) -> Iterator[Timeline]:
        """Note when actions run, and mark them for a profiler."""
        self.timeline = Timeline(self.device)
        try:
            yield self.timeline
        finally:
            self.timeline = None

    # --- a step ---------------------------------------------------------------------------------------------------

    def _accumulated(
        self, state: State, batches: Sequence[Batch], count: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]:
        """Run all actions of the schedule; see Step."""
        params, held, _, loss, scalars, scale = super()._accumulated(state, [], count)
        inverse, key = scalars
        seed = inverse * scale[0][0] if scale else inverse
        running = dict(zip(self.parameters.buffers, held, strict=True))
        whole, stages = self._whole(state), {stage.number: stage for stage in self.stages}
        messages = Messages(self.pipe, self.schedule.rank_of, self.schedule.num_microbatches, self.read)
        message, timeline = self._stream(batches[0]).message, self.timeline
        live: dict[tuple[int, int], dict[str, Any]] = {}
        for place, action in enumerate(self.todo):
            for receive in _soon(self.todo, place):
                messages.expect(receive, message)
            if action.kind not in COMPUTE:
                if action.kind.startswith("SEND"):
                    messages.send(action)
                continue
            number, kind, k = action
            stage, given = stages[number], {}
            if kind == "F" and not stage.first:
                given["x"] = messages.take(Action(number, "RECV_F", k))
            elif kind in "IB":
                given["grad"] = seed if stage.last else messages.take(Action(number, "RECV_B", k))
            with timeline.running(action) if timeline else nullcontext():
                if kind == "F":
                    value, live[number, k] = self._run_forward(stage, whole, running, given, batches[k], key)
                else:
                    value = self._run_backward(stage, kind, whole, live[number, k], given)
            if kind in "BW":
                del live[number, k]
            if value is None:
                continue
            if kind == "F" and stage.last:
                loss = loss + value
            else:
                messages.give(Action(number, f"SEND_{'F' if kind == 'F' else 'B'}", k), value, later=True)
            del value
        messages.finish()
        return params, held, list(running.values()), loss, scalars, scale

    @cached_property
    def _gathers(self) -> bool:
        """Whether parameters are stored elsewhere, or in another dtype, than they are used."""
        return self.microbatch.gathers or self.parameters.stored_dtype != self.parameters.compute_dtype

    def _whole(self, state: State) -> dict[str, Tensor]:
        """Return {name: parameter in the compute layout and dtype}, gathered once."""
        with torch.no_grad():
            params = [p.to_local() for p in state.params.values()]
        return dict(zip(self.params, self.programs["gather"](*params) if self._gathers else params, strict=True))

    def _run_forward(
        self,
        stage: Stage,
        whole: Mapping[str, Tensor],
        running: dict[str, Tensor],
        given: dict[str, Any],
        batch: Batch,
        key: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run a stage's forward on what came from the stage before; returns its result, and what its backward takes."""
        held = [running[n] for n in stage.buffers]
        if self.config.eager:
            stream = self._stream(batch)
            result, latest, live = stage.forward(self._eagerly, whole, held, given.pop("x", None), batch, key, stream)
            running.update(latest)
            return result, {"live": live, "stream": stream}
        made = self.traced[stage.number]
        stays = {f"whole_{i}": whole[n] for i, n in enumerate(stage.names)}
        stays |= {f"running_{i}": one for i, one in enumerate(held)} | {f"batch_{i}": b for i, b in enumerate(batch)}
        stays["key"] = key
        kept = {n: given[n] for n in given if n in made.saved}
        found = made.run("F", given, stays)
        running.update((n, found[latest]) for n, latest in zip(stage.buffers, made.latest, strict=True))
        return found[made.result], {n: one for n, one in (stays | kept | found).items() if n in made.saved}

    def _run_backward(
        self, stage: Stage, kind: str, whole: Mapping[str, Tensor], live: dict[str, Any], given: dict[str, Tensor]
    ) -> Tensor | None:
        """Run a stage's input gradient, weight gradients or both; returns the gradient that goes to the stage before.

        Args:
            stage: which.
            kind: I, W or B.
            whole: {name: parameter as it is used}.
            live: what its forward kept; where it runs I, what W takes afterwards.
            given: {"grad": gradient of its output}, used up; nothing for W.
        """
        if self.config.eager:  # its input gradient does all
            if not given:
                return None
            of_x, _ = stage.backward(
                self._eagerly, whole, live["live"], given.pop("grad"), self.totals, self._sum_of, live["stream"]
            )
            return of_x
        made = self.traced[stage.number]
        flats = {f"buffer_{i}": flat for i, flat in self.sums.items()}
        live |= given
        given.clear()
        found = made.run(kind, live, flats)
        live.update((n, one) for n, one in found.items() if n in made.later(kind))
        return found[made.input_grad] if kind != "W" and made.input_grad else None

    @cached_property
    def _eagerly(self) -> EagerExecutor:
        return EagerExecutor(self.functions, self.saving)

    # --- what becomes programs ------------------------------------------------------------------------------------

    def _run(self, run: Any, program: str, inputs: Mapping[str, list], buffer: Any) -> list:
        """See Step: programs are "gather", and "step" or "gradients" behind all actions."""
        own = self.parameters
        if program == "gather":
            shards = dict(zip(self.params, inputs["params"], strict=True))
            return run.finish(self.microbatch.start_gather(run, shards, list(shards)))
        flats = [buffer(i, self.totals.size(name)) for i, name in enumerate(self.params)]
        grads = run.call(("finish",), self.totals.reduced, flats)
        scale = inputs["scale"]
        if program == "gradients":
            raw = [*scale, *grads]
            return run.call(("unscale",), lambda scale, *grads: unscale(list(grads), scale), raw) if scale else raw
        (none,) = run.call(("none",), lambda loss: [torch.zeros_like(loss)], [inputs["scalars"][2]])
        latest = dict(zip(own.buffers, inputs["running"], strict=True))
        return self.updated(run, inputs, dict(zip(self.params, grads, strict=True)), latest, none)

    def _sum_of(self, name: str) -> Tensor:
        """Return the flat buffer of a parameter."""
        return self.sum_buffer(list(self.params).index(name), self.totals.size(name))

    def _evaluator(self, stage: Stage, batch: Batch) -> Any:
        """Return what runs a stage on held-out rows of this shape; see ``Stage.evaluate``."""
        if self.config.eager:
            return lambda *tensors: stage.evaluate(self._eagerly, tensors, self._stream(batch))
        shape, stream = (stage.number, tuple(batch.tokens.shape)), self._stream(batch)
        if shape not in self.forwards:
            run = self.executor
            x = [] if stage.first else [stage.enters(stream).message]
            examples, name = [*stage.examples(), *x, *batch], f"evaluate stage {stage.number}"
            key, module = self.recall(name, {"input": examples}, stream.pieces, stream.index)
            if module is None:
                run.begin()
                nodes = [run.placeholder(f"input_{i}", t) for i, t in enumerate(examples)]
                module = run.end(name, stage.evaluate(run, nodes, stream))
                self.remember(key, module)
            self.forwards[shape] = Program(name, module, tuple(collectives_of(module.graph, self.mesh)))
            check_collectives([self.forwards[shape]], self.mesh)
        return self.forwards[shape]

    def _programs_of(self, stage: Stage) -> StagePrograms:
        """Return a stage's programs, from the cache where all its pieces are there on all ranks."""
        kinds = sorted({a.kind for a in self.todo if a.stage == stage.number and a.kind in COMPUTE})
        batch = self._batch()
        stream = self._stream(batch)
        forms = {"stage": stage.examples(), "batch": list(batch), "x": [stream.like]}
        facts = (stage.number, kinds, stream.pieces, stream.index)
        entries = {kind: self.recall(piece_name(kind, stage), forms, *facts) for kind in kinds}
        modules = {kind: module for kind, (_, module) in entries.items() if module is not None}
        if len(modules) == len(kinds):
            return recall_stage(stage, self.totals, modules)
        made = trace_stage(stage, self.executor, self.totals, batch, stream, kinds, self._sum_of)
        for kind, (key, _) in entries.items():
            self.remember(key, made.pieces[kind].program.graph)
        return made

    def _batch(self) -> Batch:
        """Return a microbatch of the shapes that the step is for."""
        return Batch(*self.examples()["batch"])

    def _stream(self, batch: Batch) -> Stream:
        """Return the form of x between stages, for a batch of this shape; learnt from the embedding."""
        shape = tuple(batch.tokens.shape)
        if shape not in self.streams:
            mode, embed = self.executor.mode, self.microbatch.order.parts[0]
            alone = Stage(0, replace(self.microbatch, order=_order([embed])), first=True, last=True)
            tensors, none = [*alone.examples(), *batch], Stream(torch.empty(0))
            with mode, torch.no_grad():
                run = EagerExecutor(self.functions, self.saving)
                x, *_ = alone.evaluate(run, [mode.from_tensor(t) for t in tensors], none)
            placements, _ = self.functions.streams[shape]
            like = torch.empty(x.shape, dtype=x.dtype, device=self.device)
            self.streams[shape] = stream_of(like, placements, self.mesh)
        return self.streams[shape]


def _soon(todo: Sequence[Action], place: int) -> Iterator[Action]:
    """Yield the receives up to ``AHEAD`` compute actions from here."""
    computed = 0
    for action in todo[place:]:
        if action.kind.startswith("RECV"):
            yield action
        computed += action.kind in COMPUTE
        if computed > AHEAD:
            return


def _order(parts: Sequence[Any]) -> Order:
    """Return the order of parts whose parameters are there already."""
    every = tuple(range(len(parts)))
    return Order(tuple(parts), (every,), (every[::-1],), 0, False)


def cut_into_stages(step: Step, schedule: Schedule, layers: Sequence[int]) -> PipelineStep:
    """Cut a step's model into stages.

    Args:
        step: of a mesh with stages, from ``make_step``.
        schedule: of as many microbatches as the step has.
        layers: blocks of each stage.
    """
    whole, pipe = step.parameters, step.mesh.pipe
    assert pipe is not None
    pieces = cut(step.microbatch.order.parts, layers)
    users: dict[str, list[int]] = {}  # pipeline ranks whose stages use a parameter, in the order of stages
    for number, parts in enumerate(pieces):
        for name in dict.fromkeys(n for part in parts for n in part.names):
            users.setdefault(name, []).append(schedule.rank_of[number])
    stages, seen = [], set()
    for number in schedule.stages(pipe.rank):
        parts = []
        for part in pieces[number]:  # a parameter is of the first part of this rank that uses it
            parts.append(replace(part, own=tuple(n for n in part.names if n not in seen)))
            seen.update(part.names)
        one = replace(step.microbatch, order=_order(parts))
        first, last = number == 0, number == len(layers) - 1
        takes_whole = not first and schedule.rank_of[number - 1] == pipe.rank
        gives_whole = not last and schedule.rank_of[number + 1] == pipe.rank
        stages.append(Stage(number, one, first, last, takes_whole, gives_whole))
    buffers = {n for stage in stages for n in stage.buffers}
    own = replace(
        whole,
        specs={n: p for n, p in whole.specs.items() if n in seen},
        buffers={n: b for n, b in whole.buffers.items() if n in buffers},
        borrowed=frozenset(n for n in seen if users[n][0] != pipe.rank),
    )
    parts = [part for stage in stages for part in stage.parts]
    uses = Counter(n for part in parts for n in part.names)
    shared = tuple(n for n in whole.specs if len(set(users.get(n, ()))) > 1)
    buckets = make_order(parts, whole, step.config.bucket_mb, 0, False).buckets(list(own.specs))
    return PipelineStep(
        step.functions,
        step.microbatch,
        replace(step.updater, parameters=own, buckets=buckets),
        step.config,
        step.rate,
        cache=step.cache,
        stages=tuple(stages),
        schedule=schedule,
        totals=Sums(own, step.microbatch, uses, shared),
    )
