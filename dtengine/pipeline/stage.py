"""A stage: consecutive parts of a model, their forward and backward on a microbatch, and the programs cut from them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dtengine.data import Batch
from dtengine.executors import Executor, GraphExecutor, Value
from dtengine.mesh import Mesh
from dtengine.microbatch import Microbatch
from dtengine.parts import Part
from dtengine.passes import run_passes
from dtengine.pipeline.split import split
from dtengine.pipeline.stream import Stream
from dtengine.pipeline.sums import Sums
from dtengine.program import Program, boxed, collectives_of


@dataclass(frozen=True)
class Stage:
    """Consecutive parts of a model; it may have none.

    Attributes:
        number: among all stages.
        microbatch: its parts and their functions.
        first, last: whether it has the embedding; the head and the loss.
        takes_whole, gives_whole: whether the stage before, and the one behind it, are on the same rank: x goes over as it
            is, not in pieces.
    """

    number: int
    microbatch: Microbatch
    first: bool
    last: bool
    takes_whole: bool = False
    gives_whole: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """In forward order."""
        return self.microbatch.order.parts

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that it uses."""
        return tuple(dict.fromkeys(n for part in self.parts for n in part.names))

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Its buffers."""
        return tuple(n for part in self.parts for n in part.buffers)

    def enters(self, stream: Stream) -> Stream:
        """Return the form in which it takes x and gives its gradient."""
        return Stream(stream.like) if self.first or self.takes_whole else stream

    def leaves(self, stream: Stream) -> Stream:
        """Return the form in which it gives x and takes its gradient."""
        return Stream(stream.like) if self.last or self.gives_whole else stream

    def forward(
        self,
        run: Executor,
        whole: Mapping[str, Value],
        held: Sequence[Value],
        x: Value | None,
        batch: Sequence[Value],
        key: Value,
        stream: Stream,
    ) -> tuple[Any, dict[str, Value], list[Any]]:
        """Run the forward of a training step: (x or summed loss, new values of buffers, what each part's backward takes)."""
        running, latest, live = dict(zip(self.buffers, held, strict=True)), {}, []
        x = None if x is None else self.enters(stream).join(run, x)
        for part, own in zip(self.parts, self.microbatch.keys(run, key), strict=True):
            given = [running[n] for n in part.buffers]
            outputs, kept = run.forward(part, [whole[n] for n in part.names], given, x, batch, own, train=True)
            latest.update(zip(part.buffers, outputs[part.num_outputs - len(given) :], strict=True))
            live.append(kept)
            x = outputs[0]
        return self.leaves(stream).cut(run, x), latest, live

    def backward(
        self,
        run: Executor,
        whole: Mapping[str, Value],
        live: Sequence[Any],
        grad: Value,
        sums: Sums,
        buffer: Callable[[str], Value],
        stream: Stream,
    ) -> tuple[Value | None, Value]:
        """Run the backward, and add gradients to their buffers.

        Args:
            run: how.
            whole: {name: parameter as it is used}.
            live: of the forward.
            grad: gradient of its output, or of the summed loss.
            sums: how gradients are accumulated.
            buffer: gives a parameter's flat buffer.
            stream: x as it is between stages.

        Returns:
            (gradient of its input, or None where it has the embedding; where the input gradient ends: the same, or the
            gradient of the embedding's output).
        """
        of_x = end = self.leaves(stream).join(run, grad)
        for part, kept in zip(reversed(self.parts), reversed(live), strict=True):
            end = of_x
            of_x, ours = run.backward(part, kept, [whole[n] for n in part.names], end)
            found = [(k, n, one) for k, (n, one) in enumerate(zip(part.names, ours, strict=True)) if one is not None]
            terms = tuple(sums.place(n, self.microbatch.functions.grads[part.kind, k]) for k, n, _ in found)

            def add(*tensors: Tensor, terms: tuple = terms) -> list[Tensor]:
                return sums.add(terms, tensors)

            run.call(("add", terms), add, [*(one for *_, one in found), *(buffer(n) for _, n, _ in found)])
        if of_x is None:
            return None, end
        of_x = self.enters(stream).cut(run, of_x)
        return of_x, of_x

    def evaluate(self, run: Executor, tensors: Iterable[Value], stream: Stream) -> list[Value]:
        """Run the forward on held-out rows: parameters, buffers, x where it takes one, batch -> [x], or [loss, count]."""
        rest = iter(tensors)
        whole = {n: next(rest) for n in self.names}
        running = {n: next(rest) for n in self.buffers}
        outputs = [] if self.first else [self.enters(stream).join(run, next(rest))]
        batch = list(rest)
        for part in self.parts:
            x = outputs[0] if outputs else None
            params, held = [whole[n] for n in part.names], [running[n] for n in part.buffers]
            outputs, _ = run.forward(part, params, held, x, batch, None, train=False)
        return outputs if self.last else [self.leaves(stream).cut(run, outputs[0])]

    def examples(self) -> list[Tensor]:
        """Return tensors as its parameters and buffers are where they are used."""
        full = self.microbatch.parameters
        compute = full.plan.compute
        params = [full.empty(n, full.placements(compute, n), full.compute_dtype) for n in self.names]
        return [*params, *(full.initial_buffer(n) for n in self.buffers)]


@dataclass(frozen=True)
class Piece:
    """A program of a stage for a microbatch: F, I, W or B.

    Attributes:
        program: takes its inputs as a list, which it empties: each is free when its last reader has run.
        takes, gives: names of its inputs and results in the joint graph of the stage.
    """

    program: Program
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class StagePrograms:
    """What a stage runs for a microbatch.

    Attributes:
        pieces: by kind.
        result: name of the forward's output: x, or the summed loss.
        latest: names of the new values of its buffers.
        input_grad: name of the gradient that goes to the stage before; None where nobody takes one.
    """

    pieces: Mapping[str, Piece]
    result: str
    latest: tuple[str, ...]
    input_grad: str | None

    @cached_property
    def saved(self) -> frozenset[str]:
        """Names of what the backward takes of a microbatch's forward."""
        return frozenset(n for kind, piece in self.pieces.items() if kind != "F" for n in piece.takes)

    def later(self, kind: str) -> frozenset[str]:
        """Names of what must outlive a piece of the backward: after I, what W takes."""
        return frozenset(self.pieces["W"].takes) if kind == "I" else frozenset()

    def run(self, kind: str, live: dict[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run F, I, W or B.

        Args:
            kind: which.
            live: {name: value} that it may use up: what no later piece takes is gone from it afterwards.
            given: {name: value} of what stays.

        Returns:
            {name: result}.
        """
        piece, later = self.pieces[kind], self.later(kind)
        inputs = [given[n] if n in given else live[n] if n in later else live.pop(n) for n in piece.takes]
        return dict(zip(piece.gives, piece.program.consume(inputs), strict=True))


def trace_stage(
    stage: Stage,
    run: GraphExecutor,
    sums: Sums,
    batch: Batch,
    stream: Stream,
    kinds: Iterable[str],
    buffer: Callable[[str], Tensor],
) -> StagePrograms:
    """Trace a stage's forward and backward together, cut them, and make the pieces programs.

    Args:
        stage: which.
        run: what records; shared by all stages, which have alike parts.
        sums: where gradients are accumulated.
        batch: of the shapes that it will be called with.
        stream: x as it is between stages.
        kinds: of pieces that are wanted.
        buffer: gives a parameter's accumulation buffer.
    """
    # 1. inputs; 2. forward and backward; 3. pieces, and programs of them
    names, device, mesh = stage.names, stream.like.device, sums.own.mesh
    run.begin()
    examples = stage.examples()
    whole = {n: run.placeholder(f"whole_{i}", t) for i, (n, t) in enumerate(zip(names, examples, strict=False))}
    held = [run.placeholder(f"running_{i}", t) for i, t in enumerate(examples[len(names) :])]
    x = None if stage.first else run.placeholder("x", stage.enters(stream).message)
    given = [run.placeholder(f"batch_{i}", t) for i, t in enumerate(batch)]
    key = run.placeholder("key", torch.empty((), dtype=torch.int64, device=device))
    result, latest, live = stage.forward(run, whole, held, x, given, key, stream)
    scalar = torch.empty((), dtype=sums.own.dtype, device=device)
    grad = run.placeholder("grad", scalar if stage.last else stage.leaves(stream).message)
    flats: dict[str, fx.Node] = {}
    index_of = {n: i for i, n in enumerate(sums.own.specs)}

    def flat(name: str) -> fx.Node:
        if name not in flats:
            flats[name] = run.placeholder(f"buffer_{index_of[name]}", buffer(name))
        return flats[name]

    _, end = stage.backward(run, whole, live, grad, sums, flat, stream)
    news = [latest[n] for n in stage.buffers]
    found = {kind: cut for kind, cut in split(run.graph, [result, *news], end).items() if kind in set(kinds)}
    notes = {
        "result": result.name,
        "latest": [n.name for n in news],
        "input_grad": None if stage.first else end.name,
        "held": {n: [_placement(p) for p in sums.held[n]] for n in names if n in sums.held},
    }
    modules = {}
    for kind, cut in found.items():
        run.effects += run_passes(cut.graph, piece_name(kind, stage), "program", run.disabled)
        modules[kind] = fx.GraphModule(run.root, cut.graph, "Piece")
        modules[kind].graph.lint()
        modules[kind].meta["notes"] = notes | {"takes": list(cut.inputs), "gives": list(cut.outputs)}
    return stage_programs(stage, modules, mesh)


def recall_stage(stage: Stage, sums: Sums, modules: Mapping[str, fx.GraphModule]) -> StagePrograms:
    """Return a stage's programs from their graphs, which ``trace_stage`` made in an earlier start."""
    held = modules["F"].meta["notes"]["held"]
    for name, placements in held.items():
        sums.held.setdefault(name, tuple(_placed(p) for p in placements))
    return stage_programs(stage, modules, sums.own.mesh)


def stage_programs(stage: Stage, modules: Mapping[str, fx.GraphModule], mesh: Mesh) -> StagePrograms:
    """Make programs of a stage's graphs, each with what is to be known of it in its notes."""
    pieces = {}
    for kind, module in modules.items():
        collectives, notes = tuple(collectives_of(module.graph, mesh)), module.meta["notes"]
        program = Program(piece_name(kind, stage), boxed(module), collectives)
        pieces[kind] = Piece(program, tuple(notes["takes"]), tuple(notes["gives"]))
    notes = modules["F"].meta["notes"]
    return StagePrograms(pieces, notes["result"], tuple(notes["latest"]), notes["input_grad"])


def piece_name(kind: str, stage: Stage) -> str:
    """Return the name of a stage's program."""
    return f"{kind} of stage {stage.number}"


def _placement(placement: Placement) -> list[str | int]:
    """Write a placement for JSON."""
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    return ["partial", placement.reduce_op] if isinstance(placement, Partial) else ["replicate"]


def _placed(text: list) -> Placement:
    """Read what ``_placement`` wrote."""
    return {"shard": Shard, "partial": Partial, "replicate": Replicate}[text[0]](*text[1:])
