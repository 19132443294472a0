"""Every private torch name that the engine uses, each with its reason and the public name to move to."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._ops import OpOverload  # what a node calls; public: none yet
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # traces without data; public: none yet
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]  # a group by its name; public: none yet
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx  # joint forward and backward graph; public: torch.export, later
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen  # a call that gives its inputs away; public: none yet
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode  # sees each operation as it runs; public: none yet

__all__ = [
    "ALL_REDUCE",
    "BoxedCodeGen",
    "COLLECTIVES",
    "FakeTensorMode",
    "IN_PLACE_ALL_REDUCE",
    "OPERATION",
    "OpOverload",
    "UNSAFE_VIEW",
    "WAIT",
    "agent_processes",
    "add",
    "add_",
    "all_gather",
    "all_gather_flat",
    "all_reduce",
    "all_to_all",
    "fake_process_group",
    "fake_tensor",
    "flat_group",
    "inductor",
    "fused_adamw_",
    "graph_of",
    "group_of",
    "norms",
    "onednn_matmul",
    "opaque_onednn_matmul",
    "preload",
    "keep_on_host",
    "profiled_allocations",
    "reduce_scatter",
    "scale",
    "scale_",
    "schema_of",
    "signs",
    "storage_of",
    "subtract",
]


def storage_of(tensor: Tensor) -> int:
    """Return what two tensors that share memory have in common; public: none yet for fake tensors (data_ptr lies)."""
    return tensor.untyped_storage()._cdata


def fake_tensor(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor over a meta tensor, sharing its storage: 9 microseconds against 50 through the mode."""
    return FakeTensor(mode, meta, device)


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """Return the schema of the operator that a graph node calls; public: none yet."""
    return getattr(node.target, "_schema", None)


# The functional collectives as operators: the public wrappers in torch.distributed._functional_collectives return
# AsyncCollectiveTensor, a subclass that costs a dispatch for each use and would have to be unwrapped in a trace.
_collectives = torch.ops._c10d_functional
COLLECTIVES = "_c10d_functional"  # their namespace
WAIT = _collectives.wait_tensor.default
ALL_REDUCE = _collectives.all_reduce.default
IN_PLACE_ALL_REDUCE = _collectives.all_reduce_.default
OPERATION = "operation"  # meta of a node: the operation that an exchange is a part of


# The view that a trace makes of a product, where nobody else has the memory; public: none yet.
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

# On CPUs, oneDNN's product of an input and a transposed weight, as Inductor calls it; public: none yet.
onednn_matmul = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def preload() -> None:
    """Import what the first trace would import (0.5 s), so that ranks which are forked after it find it there."""
    collecting = gc.isenabled()
    gc.disable()  # as in dtengine/__init__.py
    import torch._dynamo  # noqa: F401

    if collecting:
        gc.enable()


# Inductor has a rule of its own for oneDNN's product, for constant weights only; behind another name it is left alone.
_library = torch.library.Library("dtengine", "DEF")
_library.define("onednn_matmul(Tensor a, Tensor b_transposed) -> Tensor")
_library.impl("onednn_matmul", lambda a, b: onednn_matmul(a, b, None, "none", [], ""), "CPU")  # type: ignore[misc]
_library.impl("onednn_matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[0]), "Meta")
opaque_onednn_matmul = torch.ops.dtengine.onednn_matmul.default


def inductor(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Compile a graph of torch calls, not differentiated again; public: torch.compile, which would trace it anew.

    Inductor's caches on disk are pickles, so they stay off.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own, of other parts of torch
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(force_disable_caches=True):
            return compile_fx(module, examples)  # type: ignore[return-value,arg-type]


def flat_group(mesh: DeviceMesh, names: tuple[str, ...]) -> ProcessGroup:
    """Return the group over several mesh axes at once; DeviceMesh._flatten is to become public as ``flatten``."""
    return mesh[names]._flatten().get_group()


def graph_of(function: Callable[..., list[Tensor]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of fake tensors; nodes keep their value, and of which operation they are a part."""
    with preserve_node_meta():
        module = make_fx(function)(*fakes)
    for node in module.graph.nodes:
        labels = node.meta.get("custom", {})
        node.meta = {key: value for key, value in (*node.meta.items(), *labels.items()) if key in ("val", OPERATION)}
    return module


# --- collectives --------------------------------------------------------------------------------------------------

# Bytes, up to which a collective on gloo is made of exchanges: its own ones often wait 4 ms for a thread of theirs. Measured
# on 2 ranks, one core each: a gather of 200 KB takes 0.13 ms in place of 0.2 to 3.6, of 4 MB 2.9 in place of 5.
ONE_EXCHANGE, TWO_EXCHANGES, GATHER = 1 << 20, 1 << 21, 1 << 22


def group_of(name: str) -> ProcessGroup:
    """Return a process group by its name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def _on_gloo(group: str) -> bool:
    return dist.get_backend(group_of(group)) == "gloo"


def _exchange(rows: Tensor, group: str, operation: str) -> Tensor:
    """Send row i of [ranks, n] to rank i of the group, and return what they sent; it is a part of ``operation``."""
    ones = [1] * len(rows)
    with annotate({OPERATION: operation}):
        sent = _collectives.all_to_all_single(rows, ones, ones, group)
    return _collectives.wait_tensor(sent)


def all_to_all(rows: Tensor, group: str) -> Tensor:
    """Send row i of [ranks, n] to rank i of the group, and return what they sent, [ranks, n]."""
    return _exchange(rows, group, "all_to_all")


def all_gather(tensors: list[Tensor], group: str) -> list[Tensor]:
    """Gather tensors of one dtype in one call: each as [ranks, *shape].

    On gloo up to ``GATHER`` bytes of results by an exchange, which needs as much memory once more.
    """
    parts = group_of(group).size()
    if not _on_gloo(group) or parts * sum(t.numel() * t.element_size() for t in tensors) > GATHER:
        gathered = _collectives.all_gather_into_tensor_coalesced(tensors, parts, group)
        return [_collectives.wait_tensor(g).view(parts, *t.shape) for g, t in zip(gathered, tensors, strict=True)]
    flat = [t.reshape(-1) for t in tensors]
    received = _exchange(torch.cat(flat * parts).view(parts, -1), group, "all_gather")
    pieces = received.split([t.numel() for t in tensors], 1)
    return [piece.reshape(parts, *t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def all_gather_flat(tensor: Tensor, parts: int, group: str) -> Tensor:
    """Gather a tensor along dim 0."""
    return _collectives.wait_tensor(_collectives.all_gather_into_tensor(tensor, parts, group))


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Reduce a tensor that nobody reads afterwards ("sum" or "max"): in place, which saves a copy.

    On gloo a small one (``ONE_EXCHANGE`` bytes to all ranks together) goes through one exchange and a larger one (itself of
    ``TWO_EXCHANGES``) through two; both add in rank order, and a maximum does not lose a NaN. Beyond that gloo's own is
    faster (measured on 2 ranks from about 4 MB on).
    """
    parts, size = group_of(group).size(), tensor.numel() * tensor.element_size()
    if _on_gloo(group) and parts * size <= ONE_EXCHANGE:
        rows = _exchange(tensor.reshape(1, -1).expand(parts, -1).contiguous(), group, "all_reduce")
        return _reduced(rows, operation).view(tensor.shape)
    if _on_gloo(group) and size <= TWO_EXCHANGES:
        flat, missing = tensor.reshape(-1), -tensor.numel() % parts
        whole = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        mine = _reduced(_exchange(whole.view(parts, -1), group, "all_reduce"), operation)
        rows = _exchange(mine.view(1, -1).expand(parts, -1).contiguous(), group, "")
        return rows.view(-1)[: tensor.numel()].view(tensor.shape)
    return _collectives.wait_tensor(_collectives.all_reduce_(tensor, operation, group))


def _reduced(rows: Tensor, operation: str) -> Tensor:
    return rows.sum(0) if operation == "sum" else rows.amax(0)


def reduce_scatter(rows: Tensor, group: str) -> Tensor:
    """Sum [ranks, n] over the group and return this rank's row, [n].

    gloo's own reduce-scatter costs as much as an all-reduce; an exchange and a local sum take less than half of it
    (measured on 2 ranks, one core each) and add in rank order.
    """
    if _on_gloo(group):
        return _exchange(rows, group, "reduce_scatter").sum(0)
    return _collectives.wait_tensor(_collectives.reduce_scatter_tensor(rows.view(-1), "sum", len(rows), group))


def add_(sums: list[Tensor], terms: list[Tensor]) -> None:
    """Add lists of tensors in place, in one call; torch.optim uses it, public name: none yet."""
    torch._foreach_add_(sums, terms)  # type: ignore[attr-defined]


def scale(tensors: list[Tensor], factor: Tensor | float | list[float]) -> list[Tensor]:
    """Multiply tensors by one scalar, or each by its own, in one call."""
    return list(torch._foreach_mul(tensors, factor)) if tensors else []  # type: ignore[attr-defined]


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a scalar tensor in place, in one call; torch.optim uses it, public name: none yet."""
    if tensors:  # torch refuses an empty list
        torch._foreach_mul_(tensors, factor)  # type: ignore[attr-defined]


def keep_on_host(tensor: DTensor) -> DTensor:
    """Move a DTensor's shard to host memory, pinned where there is an accelerator, as FSDP2 does; public: none yet.

    ``DTensor.from_local`` would bring it back to the device of the mesh.
    """
    local = tensor.to_local().detach().to("cpu", copy=True)
    tensor._local_tensor = local.pin_memory() if torch.accelerator.is_available() else local
    return tensor


def add(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Add lists of tensors, in one call."""
    return list(torch._foreach_add(tensors, others))  # type: ignore[attr-defined]


def subtract(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Subtract lists of tensors, in one call."""
    return list(torch._foreach_sub(tensors, others))  # type: ignore[attr-defined]


def signs(tensors: list[Tensor]) -> list[Tensor]:
    """Return the sign of each element, in one call."""
    return list(torch._foreach_sign(tensors))  # type: ignore[attr-defined]


def norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each tensor, in one call."""
    return list(torch._foreach_norm(tensors, order))  # type: ignore[attr-defined]


def fused_adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: Tensor,
    **options: float | Tensor,
) -> None:
    """AdamW in one pass over memory, in place; public: torch.optim.AdamW(fused=True), which owns its parameters."""
    steps = [step] * len(params)
    torch._fused_adamw_(params, grads, means, squares, [], steps, amsgrad=False, maximize=False, **options)  # type: ignore[arg-type]


def agent_processes(agent: object) -> list[BaseProcess]:
    """List a LocalElasticAgent's rank processes, by local rank.

    Its public results name one failure, the first that a poll met; who died first, and who left with exit code 0, can
    be told only from the processes. Public: none yet (a ``processes`` on the agent, or failures ordered by time).
    """
    context = getattr(getattr(agent, "_pcontext", None), "_pc", None)
    return list(context.processes) if context is not None else []


@contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """Stand as rank 0 of any number of ranks in one process, without communication; public: none yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- measuring ----------------------------------------------------------------------------------------------------


@contextmanager
def profiled_allocations() -> Iterator[list[tuple[int, int, int]]]:
    """Fill a list with the allocations and frees of this thread's CPU tensors: (ns, address, bytes; negative where freed).

    The profiler's public events have no addresses, without which a free on another thread looks like a leak.
    """
    found: list[tuple[int, int, int]] = []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of its start and stop
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler, _SettledWaits():
        yield found
    todo = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        todo += event.children
        kind, fields = event.typed
        fields: Any
        if kind.name == "Allocation" and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort()


class _SettledWaits(TorchDispatchMode):
    """Gives gloo's threads a moment, after each wait, to let go of what they were handed.

    Else the thread that was waited for may be the one to free it, out of the profiler's sight.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is WAIT:
            time.sleep(0.005)
        return result
