"""Programs: a flat graph of torch calls and functional collectives on local tensors, and the order of its collectives.

Nothing of DTensor, autograd or Python is left to pay for in a step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx

from dtengine.mesh import Mesh
from dtengine.nodes import is_collective
from dtengine.torch_private import OPERATION, BoxedCodeGen, all_gather_flat, schema_of

_OPERATIONS = {
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_reduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",  # where it is a part of another operation, OPERATION says of which
}


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        operation: all_gather, reduce_scatter, all_reduce or all_to_all; on gloo the first three may take the last one's
            form. "" for the second exchange of one operation.
        axes: the mesh axes whose ranks take part.
        bytes: size of the operand that a rank hands in.
        signature: operator and operand shapes, equal on all ranks of a group.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    signature: str


@dataclass(frozen=True)
class Program:
    """A traced function. Call it with local tensors, in the order of the trace's examples.

    Attributes:
        name: what it does, for reports.
        graph: the torch.fx module; ``print(program.graph.code)`` shows it.
        collectives: in the order in which they are issued.
    """

    name: str
    graph: fx.GraphModule
    collectives: tuple[Collective, ...] = field(repr=False)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run on local tensors; inputs that the program updates are updated in place."""
        with torch.inference_mode():
            return list(self.graph.forward(*tensors))

    def consume(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run a program whose graph is ``boxed``, and empty the list: an input is free when its last reader has run."""
        with torch.inference_mode():
            return list(self.graph.forward(tensors))


def boxed(module: fx.GraphModule) -> fx.GraphModule:
    """Have a program take its inputs as one list, which it empties."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    return module


class CudaGraph:
    """A program captured as a CUDA graph and replayed, which leaves Python out of the step.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs. What the caller holds between calls
    (parameters, slots, buffers) is read where it lies; batches and scalars are copied to where the graph reads them.
    Outputs are overwritten by the next call. This code has never run: it was written without a GPU.
    """

    WARM_UP = 3  # plain calls first, in which libraries make their plans and NCCL its connections

    def __init__(self, program: Program) -> None:
        self.program = program
        names = [str(n.target) for n in program.graph.graph.nodes if n.op == "placeholder"]
        self.copied = [i for i, name in enumerate(names) if name.startswith(("batch_", "scalars_", "running_"))]
        self.calls = 0
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run on local tensors, as Program; those that are not copied must be the same at each call."""
        self.calls += 1
        if self.calls <= self.WARM_UP:
            return self.program(*tensors)
        with torch.inference_mode():
            if self.graph is None:
                self.inputs = [t.clone() if i in self.copied else t for i, t in enumerate(tensors)]
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.outputs = self.program(*self.inputs)
            for i, tensor in enumerate(tensors):
                if i in self.copied:
                    self.inputs[i].copy_(tensor, non_blocking=True)
                elif tensor.data_ptr() != self.inputs[i].data_ptr():
                    raise RuntimeError(
                        f"{self.program.name}: input {i} lies elsewhere than when its CUDA graph was captured."
                    )
            self.graph.replay()
        return self.outputs


# --- collectives ------------------------------------------------------------------------------------------------


def collectives_of(graph: fx.Graph, mesh: Mesh) -> list[Collective]:
    """List the collectives of a graph, in the order in which they are issued."""
    axes_of_group, found = mesh.axes_of_groups, []
    for node in [inner for n in graph.nodes for inner in n.meta.get("inside", (n,))]:
        if node.op != "call_function" or not is_collective(node):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes]
        operator = _operator(node)
        group = next(a for a in reversed(node.args) if isinstance(a, str) and a in axes_of_group)
        size = sum(t.numel() * t.element_size() for t in operands)
        operation = node.meta.get(OPERATION, _OPERATIONS[operator])
        if operation in ("all_gather", "all_reduce", "") and _OPERATIONS[operator] == "all_to_all":
            size //= operands[0].shape[0]  # every row is the operand
        shapes = [f"{tuple(t.shape)}{t.dtype}" for t in operands]
        found.append(Collective(operation, axes_of_group[group], size, f"{operator} {' '.join(shapes)}"))
    return found


def _operator(node: fx.Node) -> str:
    """The operator's own name: "all_reduce_"."""
    schema = schema_of(node)
    assert schema is not None
    return schema.name.rpartition("::")[2]


def count_collectives(programs: Sequence[tuple[Program, int]]) -> dict[str, dict[str, int]]:
    """Return {mesh axes: {operation: count}} of programs that run so many times each; axes are joined by "+"."""
    counts: dict[str, dict[str, int]] = {}
    for program, times in programs:
        for collective in program.collectives:
            operations = counts.setdefault("+".join(collective.axes), {})
            if collective.operation:
                operations[collective.operation] = operations.get(collective.operation, 0) + times
    return counts


def check_collectives(programs: Sequence[Program], mesh: Mesh) -> None:
    """Compare the order of collectives over all ranks before the first one runs: a difference would be a hang.

    Ranks with uneven shards trace different graphs. All ranks must issue the same operations over the same axes in
    the same order, and within a group the same operand shapes.

    Raises:
        RuntimeError: on all ranks alike, naming the ranks that differ from the first of their group.
    """
    if mesh.num_ranks == 1:
        return
    sequence = [c for program in programs for c in program.collectives]
    whole = _digest([f"{c.operation} {c.axes}" for c in sequence])
    by_axes = [_digest([c.signature for c in sequence if c.axes == axes]) for axes in mesh.groups]
    mine = torch.tensor([whole, *by_axes], dtype=torch.int64, device=mesh.device_mesh.device_type)
    everywhere = all_gather_flat(mine, mesh.num_ranks, mesh.groups[mesh.split_axes()]).view(mesh.num_ranks, -1)
    table = everywhere.cpu().view(*(mesh.sizes[a] for a in mesh.split_axes()), -1)
    wrong = []
    if (table[..., 0] != table.flatten(0, -2)[0, 0]).any():
        wrong.append("the order of operations differs between ranks")
    for column, axes in enumerate(mesh.groups, start=1):
        hashes = table[..., column]
        for axis in axes:
            dim = mesh.split_axes().index(axis)
            if (hashes != hashes.narrow(dim, 0, 1)).any():
                wrong.append(f"operand shapes over {'+'.join(axes)} differ within a group")
                break
    if wrong:
        raise RuntimeError(
            f"collectives: {'; '.join(wrong)}. All ranks of a group must issue the same collectives in the same order; "
            "the step would hang. A model function must not decide by rank or by a local size."
        )


def _digest(lines: Sequence[str]) -> int:
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
