"""A stage: consecutive parts of a model, their forward and backward on a microbatch, and the programs cut from them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from dtengine.data import Batch
from dtengine.executors import Executor, GraphExecutor, Value
from dtengine.microbatch import Microbatch
from dtengine.parts import Part
from dtengine.passes import run_passes
from dtengine.pipeline.split import Piece, split
from dtengine.pipeline.sums import Sums
from dtengine.program import Program, check_collectives, collectives_of


@dataclass(frozen=True)
class Stage:
    """Consecutive parts of a model; it may have none.

    Attributes:
        number: among all stages.
        microbatch: its parts and their functions.
        first, last: whether it has the embedding; the head and the loss.
    """

    number: int
    microbatch: Microbatch
    first: bool
    last: bool

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

    def forward(
        self,
        run: Executor,
        whole: Mapping[str, Value],
        held: Sequence[Value],
        x: Value | None,
        batch: Sequence[Value],
        key: Value,
    ) -> tuple[Any, dict[str, Value], list[Any]]:
        """Run the forward of a training step: (x or summed loss, new values of buffers, what each part's backward takes)."""
        running, latest, live = dict(zip(self.buffers, held, strict=True)), {}, []
        for part, own in zip(self.parts, self.microbatch.keys(run, key), strict=True):
            given = [running[n] for n in part.buffers]
            outputs, kept = run.forward(part, [whole[n] for n in part.names], given, x, batch, own, train=True)
            latest.update(zip(part.buffers, outputs[part.num_outputs - len(given) :], strict=True))
            live.append(kept)
            x = outputs[0]
        return x, latest, live

    def backward(
        self,
        run: Executor,
        whole: Mapping[str, Value],
        live: Sequence[Any],
        grad: Value,
        sums: Sums,
        buffer: Callable[[str], Value],
    ) -> tuple[Value | None, Value]:
        """Run the backward, and add gradients to their buffers.

        Args:
            run: how.
            whole: {name: parameter as it is used}.
            live: of the forward.
            grad: gradient of its output, or of the summed loss.
            sums: how gradients are accumulated.
            buffer: gives a parameter's flat buffer.

        Returns:
            (gradient of its input, or None where it has the embedding; where the input gradient ends: the same, or the
            gradient of the embedding's output).
        """
        of_x, end = grad, grad
        for part, kept in zip(reversed(self.parts), reversed(live), strict=True):
            end = of_x
            of_x, ours = run.backward(part, kept, [whole[n] for n in part.names], end)
            found = [(k, n, one) for k, (n, one) in enumerate(zip(part.names, ours, strict=True)) if one is not None]
            terms = tuple(sums.place(n, self.microbatch.functions.grads[part.kind, k]) for k, n, _ in found)

            def add(*tensors: Tensor, terms: tuple = terms) -> list[Tensor]:
                return sums.add(terms, tensors)

            run.call(("add", terms), add, [*(one for *_, one in found), *(buffer(n) for _, n, _ in found)])
        return of_x, end if of_x is None else of_x

    def evaluate(self, run: Executor, tensors: Iterable[Value]) -> list[Value]:
        """Run the forward on held-out rows: parameters, buffers, x where it takes one, batch -> [x], or [loss, count]."""
        rest = iter(tensors)
        whole = {n: next(rest) for n in self.names}
        running = {n: next(rest) for n in self.buffers}
        outputs = [] if self.first else [next(rest)]
        batch = list(rest)
        for part in self.parts:
            x = outputs[0] if outputs else None
            params, held = [whole[n] for n in part.names], [running[n] for n in part.buffers]
            outputs, _ = run.forward(part, params, held, x, batch, None, train=False)
        return outputs

    def examples(self) -> list[Tensor]:
        """Return tensors as its parameters and buffers are where they are used."""
        full = self.microbatch.parameters
        compute = full.plan.compute
        params = [full.empty(n, full.placements(compute, n), full.compute_dtype) for n in self.names]
        return [*params, *(full.initial_buffer(n) for n in self.buffers)]


@dataclass(frozen=True)
class StagePrograms:
    """What a stage runs for a microbatch.

    Attributes:
        pieces: {"F", "I", "W" or "B": what it takes and gives, by name}.
        programs: the same as programs.
        result: name of the forward's output: x, or the summed loss.
        latest: names of the new values of its buffers.
        input_grad: name of the gradient that goes to the stage before; None where nobody takes one.
    """

    pieces: dict[str, Piece]
    programs: dict[str, Program]
    result: str
    latest: tuple[str, ...]
    input_grad: str | None

    @cached_property
    def saved(self) -> frozenset[str]:
        """Names of what the backward takes of a microbatch's forward."""
        return frozenset(n for kind, piece in self.pieces.items() if kind != "F" for n in piece.inputs)

    def run(self, kind: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run F, I, W or B on {name: input}, of which there may be more than it takes; returns {name: output}."""
        piece = self.pieces[kind]
        return dict(zip(piece.outputs, self.programs[kind](*(values[n] for n in piece.inputs)), strict=True))


def trace_stage(
    stage: Stage,
    run: GraphExecutor,
    sums: Sums,
    batch: Batch,
    stream: Tensor,
    kinds: Iterable[str],
    buffer: Callable[[str], Tensor],
) -> StagePrograms:
    """Trace a stage's forward and backward together, cut them, and make the pieces programs.

    Args:
        stage: which.
        run: what records; shared by all stages, which have alike parts.
        sums: where gradients are accumulated.
        batch: of the shapes that it will be called with.
        stream: a tensor as x is between stages.
        kinds: of pieces that are wanted.
        buffer: gives a parameter's accumulation buffer.
    """
    names, mesh, device = stage.names, sums.own.mesh, stream.device
    run.begin()
    examples = stage.examples()
    whole = {n: run.placeholder(f"whole_{i}", t) for i, (n, t) in enumerate(zip(names, examples, strict=False))}
    held = [run.placeholder(f"running_{i}", t) for i, t in enumerate(examples[len(names) :])]
    x = None if stage.first else run.placeholder("x", stream)
    given = [run.placeholder(f"batch_{i}", t) for i, t in enumerate(batch)]
    key = run.placeholder("key", torch.empty((), dtype=torch.int64, device=device))
    result, latest, live = stage.forward(run, whole, held, x, given, key)
    scalar = torch.empty((), dtype=sums.own.dtype, device=device)
    grad = run.placeholder("grad", scalar if stage.last else stream)
    flats: dict[str, fx.Node] = {}
    index_of = {n: i for i, n in enumerate(sums.own.specs)}

    def flat(name: str) -> fx.Node:
        if name not in flats:
            flats[name] = run.placeholder(f"buffer_{index_of[name]}", buffer(name))
        return flats[name]

    _, end = stage.backward(run, whole, live, grad, sums, flat)
    news = [latest[n] for n in stage.buffers]
    pieces = {kind: piece for kind, piece in split(run.graph, [result, *news], end).items() if kind in set(kinds)}
    programs = {}
    for kind, piece in pieces.items():
        name = f"{kind} of stage {stage.number}"
        run.effects += run_passes(piece.graph, name, "program", run.disabled)
        module = fx.GraphModule(run.root, piece.graph, "Piece")
        module.graph.lint()
        programs[kind] = Program(name, module, tuple(collectives_of(module.graph, mesh)))
    check_collectives(list(programs.values()), mesh)
    return StagePrograms(pieces, programs, result.name, tuple(n.name for n in news), None if stage.first else end.name)
