"""Trace a function of local tensors as the engine does, for tests that look at a graph."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dtengine.mesh import Mesh
from dtengine.program import Program, collectives_of
from dtengine.torch_private import FakeTensorMode, graph_of


def traced(function: Callable[..., list[Tensor]], examples: Sequence[Tensor], mesh: Mesh) -> Program:
    """Trace a function into a program, without passes."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = graph_of(function, [mode.from_tensor(t.detach()) for t in examples])
    return Program("traced", module, tuple(collectives_of(module.graph, mesh)))
