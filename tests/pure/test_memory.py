"""The memory estimate on graphs made by hand: exact bytes of each kind at each node."""

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from dtengine.config import resolve
from dtengine.memory import MADE, MemoryEstimate, estimate, moments, peak_of
from dtengine.options import MeshOptions, ModelOptions, ProgramOptions, StepOptions
from dtengine.screens import memory_rows
from dtengine.torch_private import FakeTensorMode

aten = torch.ops.aten
MODE = FakeTensorMode(allow_non_fake_inputs=True)
KB = 256  # floats


class Made:
    """A graph under construction; values are fake tensors of float32."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, size: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with MODE:
            node.meta["val"] = torch.empty(size)
        return node

    def call(self, of: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with MODE:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)  # type: ignore[misc]
        node.meta["of"] = of
        return node

    def end(self, *outputs: fx.Node) -> fx.Graph:
        self.graph.output(list(outputs))
        return self.graph


def totals(graph: fx.Graph) -> list[int]:
    """KiB that are allocated at each call."""
    return [sum(m.bytes.values()) // 1024 for m in moments(graph) if m.node.op == "call_function"]


def kinds(graph: fx.Graph) -> dict[str, list[int]]:
    """KiB of each kind at each call."""
    found = [m.bytes for m in moments(graph) if m.node.op == "call_function"]
    return {kind: [b[kind] // 1024 for b in found] for kind in MADE}


def test_a_value_lives_until_its_last_use() -> None:
    """Its node and that of its last user both hold it; what nobody reads is gone after its own; outputs stay."""
    made = Made()
    x = made.input("x", KB)
    a = made.call("", aten.neg.default, x)
    made.call("", aten.neg.default, x)  # read by nobody
    b = made.call("", aten.neg.default, a)
    c = made.call("", aten.neg.default, b)
    d = made.call("", aten.neg.default, c)
    assert totals(made.end(b, d)) == [1, 2, 2, 2, 3]


def test_views_keep_what_they_are_views_of() -> None:
    """A view allocates nothing, and the last use of a view of a view ends the memory."""
    made = Made()
    x = made.input("x", KB)
    a = made.call("", aten.neg.default, x)
    view = made.call("", aten.view.default, a, [16, 16])
    turned = made.call("", aten.t.default, view)
    made.call("", aten.sum.default, turned)
    made.call("", aten.neg.default, x)
    assert totals(made.end()) == [1, 1, 1, 1, 1]


def test_changes_in_place_allocate_nothing() -> None:
    """In-place operations, and those that write where they are told, hold what they change and nothing more."""
    made = Made()
    x = made.input("x", KB)
    a = made.call("", aten.neg.default, x)
    b = made.call("", aten.add_.Tensor, a, x)
    made.call("", aten.copy_.default, x, b)
    made.call("", aten.neg.default, x)
    assert totals(made.end()) == [1, 1, 1, 1]


def test_lists_hold_their_results_one_by_one() -> None:
    """A list of new tensors is allocated at once; each dies after its own last use, all at the earliest after unpacking."""
    made = Made()
    x, y = made.input("x", KB), made.input("y", 2 * KB)
    both = made.call("", torch._foreach_neg, [x, y])  # type: ignore[attr-defined]
    first = made.call("", operator.getitem, both, 0)
    second = made.call("", operator.getitem, both, 1)
    made.call("", aten.neg.default, second)
    made.call("", aten.neg.default, first)
    assert totals(made.end()) == [3, 3, 3, 1 + 2 + 2, 2]


def test_pieces_of_a_split_are_views() -> None:
    """A split of a value allocates nothing, and its pieces keep it alive."""
    made = Made()
    x = made.input("x", 2 * KB)
    a = made.call("", aten.neg.default, x)
    pieces = made.call("", aten.split.Tensor, a, KB)
    piece = made.call("", operator.getitem, pieces, 1)
    made.call("", aten.neg.default, piece)
    made.call("", aten.neg.default, x)
    assert totals(made.end()) == [2, 2, 2, 3, 2]


def test_kinds_follow_from_who_makes_and_who_reads_last() -> None:
    """Activations cross from a forward to a backward, gradients from a backward to a reduction; the rest is temporary."""
    made = Made()
    x = made.input("params_0", KB)
    whole = made.call("gather", aten.neg.default, x)
    gone = made.call("forward a", aten.neg.default, whole)
    kept = made.call("forward a", aten.neg.default, gone)
    grad = made.call("backward a", aten.mul.Tensor, kept, whole)
    bucket = made.call("reduce", aten.neg.default, grad)
    made.call("update", aten.sub_.Tensor, x, bucket)
    assert kinds(made.end()) == {
        "gathered": [1, 1, 1, 1, 0, 0],
        "activations": [0, 0, 1, 1, 0, 0],
        "gradients": [0, 0, 0, 1, 2, 1],
        "temporaries": [0, 1, 1, 0, 0, 0],
    }


def test_estimate_adds_inputs_and_the_peak() -> None:
    """Inputs count by their names, each once; the batch as often as the caller holds one; the peak says where it is."""
    made = Made()
    param, slot, host = made.input("params_0", KB), made.input("slots_0", 2 * KB), made.input("slots_1", 4 * KB)
    made.input("buffer_0", KB)
    made.input("batch_0", KB)
    a = made.call("forward blocks.0", aten.neg.default, param)
    b = made.call("backward blocks.0", aten.mul.Tensor, a, a)
    made.call("update", aten.add_.Tensor, param, b)
    made.call("update", aten.add_.Tensor, slot, slot)
    graph = made.end(host)
    found = estimate([graph], microbatches=3)
    expected = MemoryEstimate(
        parameters=1024, optimizer=6144, buffers=1024, batch=3072, activations=1024, gradients=1024
    )
    assert found.numbers == expected.numbers
    assert found.where == "backward blocks.0: mul_tensor"
    assert found.total == 13312 and found.resident == 11264
    assert estimate([graph], on_host=("slots",)).numbers["host"] == 6144
    assert estimate([graph], on_host=("slots",)).optimizer == 0


def test_estimate_takes_the_program_that_needs_most() -> None:
    """Of a step of several programs the larger peak counts, and what they share counts once."""
    small, large = Made(), Made()
    small.call("", aten.neg.default, small.input("params_0", KB))
    one = large.call("", aten.neg.default, large.input("params_0", KB))
    large.call("", aten.neg.default, one)
    graphs = small.end(), large.end()
    for order in (graphs, graphs[::-1]):
        found = estimate(order)
        assert (found.parameters, found.temporaries) == (1024, 2048)


@pytest.mark.parametrize(("alignment", "bytes_"), [(1, 4), (64, 64), (512, 512)])
def test_allocations_are_rounded_up(alignment: int, bytes_: int) -> None:
    """Every allocation takes whole units of the allocator."""
    made = Made()
    made.call("", aten.neg.default, made.input("params_0", 1))
    found = estimate([made.end()], alignment=alignment)
    assert (found.parameters, found.temporaries) == (bytes_, bytes_)


@pytest.mark.parametrize(
    ("events", "most"),
    [
        ([], 0),
        ([(0, 64, 10), (1, 128, 20), (2, 64, -10), (3, 256, 15)], 35),
        ([(0, 64, -10), (1, 128, 20)], 20),  # freed, but from before
        ([(0, 64, 10), (1, 64, 30)], 30),  # the free in between was not seen
        ([(0, 64, 10), (1, 70, 30)], 30),
    ],
)
def test_peak_of_events(events: Sequence[tuple[int, int, int]], most: int) -> None:
    """Frees of what was there before do not count, and what is overwritten must have been freed."""
    assert peak_of(events) == most


def test_parameters_are_offloaded_as_shards() -> None:
    """Where the optimizer's layout is not the parameters', they cannot be fetched as shards: said before a rank starts."""
    with pytest.raises(
        ValueError, match="--offload parameters --plan zero1: .* Use --offload optimizer, or --plan fsdp."
    ):
        resolve(
            StepOptions(
                MeshOptions(mesh="2", plan="zero1"),
                ModelOptions(seq=8, vocab=8),
                program=ProgramOptions(offload="parameters"),
            )
        )


def test_table_of_ranks() -> None:
    """The table shows rank 0 and how uneven ranks are, without rows of what no rank has."""
    ranks = [MemoryEstimate(parameters=2000, batch=500).numbers, MemoryEstimate(parameters=1000, batch=500).numbers]
    assert memory_rows(ranks) == [
        ("memory of a step", "rank 0", "largest / mean"),
        ("parameters", "2.00 kB", "1.33"),
        ("other", "500 B", "1.00"),
        ("total at the peak", "2.50 kB", "1.25"),
    ]
    heading, first, *_ = memory_rows(ranks, stages=2)
    assert heading == ("memory of a step", "rank 0", "rank 1", "largest / mean")
    assert first == ("parameters", "2.00 kB", "1.00 kB", "1.33")
