"""Trace a function of local tensors into a graph of its own, ready to be copied into a step's or to be compiled.

The trace happens on fake tensors, so it costs no memory and no communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dtengine.nodes import BACKWARD, FORWARD, alias_of, ancestors, is_mutable, phase_of, root_of
from dtengine.passes import Effect, run_passes
from dtengine.torch_private import (
    ALL_REDUCE,
    IN_PLACE_ALL_REDUCE,
    FakeTensorMode,
    graph_of,
    inductor,
    onednn_matmul,
    opaque_onednn_matmul,
)

LocalFunction = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Traced:
    """A function's own graph, ready to be copied into others.

    Attributes:
        name: for reports.
        module: holds its constants.
        inputs: its placeholders.
        outputs: what it returns, in order.
        forward: nodes of the forward, in order (all of them where there is no backward).
        backward: nodes of the backward, in order.
    """

    name: str
    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[Any]
    forward: list[fx.Node]
    backward: list[fx.Node]

    @property
    def read_by_backward(self) -> set[fx.Node]:
        """Nodes of the forward that the backward reads, inputs aside."""
        read = {a for n in self.backward for a in n.all_input_nodes if phase_of(a) == FORWARD}
        return {n for n in read if n.op != "placeholder"}


def trace(
    name: str,
    function: LocalFunction,
    fakes: Sequence[Tensor],
    mode: FakeTensorMode,
    num_forward: int | None,
    disabled: Sequence[str],
) -> tuple[Traced, list[Effect]]:
    """Trace a function and run the passes over parts.

    Args:
        name: for reports.
        function: from local tensors to a list of local tensors. Numbers that change from step to step must be among
            its tensors: a Python number becomes part of the graph.
        fakes: fake tensors of the forms it will be called with.
        mode: of these.
        num_forward: number of outputs that are of a forward, in front of those of its backward; None where there is none.
        disabled: names of passes that do not run.

    Returns:
        (the trace, what each pass did).
    """
    with mode:
        module = graph_of(function, fakes)
    graph = module.graph
    if num_forward is not None:
        _mark_phases(graph, num_forward)
    effects = run_passes(graph, name, "part", disabled)
    graph.lint()
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    (output,) = (n for n in graph.nodes if n.op == "output")
    traced = Traced(
        name,
        module,
        [n for n in graph.nodes if n.op == "placeholder"],
        list(output.args[0]),
        [n for n in nodes if phase_of(n) == FORWARD],
        [n for n in nodes if phase_of(n) == BACKWARD],
    )
    for node in nodes:
        node.meta["alias"] = alias_of(node)
    for node in traced.forward:
        if is_mutable(node):
            for target in {root_of(a) for a in node.all_input_nodes}:
                target.meta.setdefault("changed_by", []).append(node)
    return traced, effects


def _mark_phases(graph: fx.Graph, num_forward: int) -> None:
    """Mark what belongs to the forward: all up to the last of its outputs."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    ends = set(output.args[0][:num_forward])
    phase = BACKWARD
    for node in reversed(graph.nodes):
        if node in ends:
            phase = FORWARD
        node.meta["phase"] = FORWARD if node.op == "placeholder" else phase


def closure(nodes: Sequence[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """Return nodes of a trace and all they depend on, as far as it is not known."""
    return ancestors(nodes, known, lambda node: node.meta.get("changed_by", ()))


# --- compiled ---------------------------------------------------------------------------------------------------


class _Region(torch.nn.Module):
    """A compiled piece of a graph."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: Tensor) -> Any:
        return self.compiled(*inputs)


def compile_region(
    module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> torch.nn.Module:
    """Compile nodes of a graph by Inductor, as a function from ``inputs`` to ``results``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.target is onednn_matmul:
            env[node].target, env[node].args = opaque_onednn_matmul, env[node].args[:2]
        elif node.target is IN_PLACE_ALL_REDUCE:  # Inductor takes the one that is not in place, and makes it so again
            env[node].target = ALL_REDUCE
    graph.output([env[n] for n in results])
    return _Region(inductor(fx.GraphModule(module, graph), [n.meta["val"] for n in inputs]))
