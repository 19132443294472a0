"""Two ways to run the parts of a step: recorded into one graph, or called as they are.

``microbatch`` says in which order parts, gathers and reductions run, once for both. ``GraphExecutor`` works on nodes of a
graph: it traces each kind of part once and copies its nodes into the step wherever the part runs, so a step's trace costs
as much with eighty layers as with one. ``EagerExecutor`` works on tensors, for debugging.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from dtengine.parts import Live, Part, PartFunctions
from dtengine.passes import (
    BACKWARD,
    FORWARD,
    Effect,
    alias_of,
    is_collective,
    is_mutable,
    order_of_changes,
    phase_of,
    root_of,
    run_passes,
)
from dtengine.recompute import Saving, saved_nodes
from dtengine.torch_private import (
    ALL_REDUCE,
    IN_PLACE_ALL_REDUCE,
    WAIT,
    FakeTensorMode,
    inductor,
    make_fx,
    onednn_matmul,
    opaque_onednn_matmul,
)

Value = Any  # a node of the step's graph, or a tensor
LocalFunction = Callable[..., list[Tensor]]
Agree = Callable[[list[bool]], list[bool]]


class Executor(Protocol):
    """What ``microbatch`` needs of a way to run."""

    def call(self, key: tuple, function: LocalFunction, inputs: Sequence[Value]) -> list[Value]:
        """Run a function of local tensors; ``key`` is equal for functions that do the same."""
        ...

    def start(self, key: tuple, function: LocalFunction, inputs: Sequence[Value]) -> Any:
        """Begin a function up to its first waits for a collective; returns what ``finish`` takes."""
        ...

    def finish(self, begun: Any) -> list[Value]:
        """Run the rest of a function that was started."""
        ...

    def forward(
        self,
        part: Part,
        params: Sequence[Value],
        buffers: Sequence[Value],
        x: Value | None,
        batch: Sequence[Value],
        key: Value | None,
        train: bool,
    ) -> tuple[list[Value], Any]:
        """Run a part; returns its outputs and, to train, what ``backward`` takes."""
        ...

    def backward(
        self, part: Part, saved: Any, params: Sequence[Value], grad: Value
    ) -> tuple[Value | None, list[Value | None]]:
        """Run a part's backward, with its parameters as they are now; as ``PartFunctions.backward``."""
        ...


# --- called as they are -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagerExecutor:
    """Runs parts as untraced functions on tensors."""

    functions: PartFunctions
    saving: Saving

    def call(self, key: tuple, function: LocalFunction, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See Executor."""
        with torch.no_grad():
            return function(*inputs)

    def start(self, key: tuple, function: LocalFunction, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See Executor; nothing is left to do."""
        return self.call(key, function, inputs)

    def finish(self, begun: list[Tensor]) -> list[Tensor]:
        """See Executor."""
        return begun

    def forward(
        self,
        part: Part,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        x: Tensor | None,
        batch: Sequence[Tensor],
        key: Tensor | None,
        train: bool,
    ) -> tuple[list[Tensor], Any]:
        """See Executor."""
        again = self.saving.recomputes(part)
        with torch.set_grad_enabled(train and not again):
            live = self.functions.forward(part, params, buffers, x, batch, key, train)
        saved = (buffers, x, batch, key, train) if again else live
        return [t.detach() for t in live.outputs], saved if train else None

    def backward(
        self, part: Part, saved: Any, params: Sequence[Tensor], grad: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See Executor."""
        with torch.enable_grad():
            live = saved if isinstance(saved, Live) else self.functions.forward(part, params, *saved)
            return self.functions.backward(part, live, grad)


# --- recorded into one graph ------------------------------------------------------------------------------------


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


Env = dict[fx.Node, fx.Node]


@dataclass
class GraphExecutor:
    """Records what runs into one graph.

    Attributes:
        functions: of the parts.
        saving: what the forward keeps for the backward.
        mode: of all fake tensors; one, so that traces fit each other.
        agree: gives for each flag of this rank whether it is set on any rank.
        disabled: names of passes that do not run.
        compile: whether forward and backward of each kind of part are compiled by Inductor.
        traces: {key and forms of the inputs: Traced}, shared by the programs of a step.
        effects: what each pass did.
    """

    functions: PartFunctions
    saving: Saving
    mode: FakeTensorMode
    agree: Agree
    disabled: Sequence[str] = ()
    compile: bool = False
    traces: dict[tuple, Traced] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[int, str] = field(default_factory=dict)
    regions: dict[tuple, torch.nn.Module] = field(default_factory=dict)
    none_grads: dict[tuple, list[bool]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin another graph; traces are kept."""
        self.root, self.graph, self.constants = torch.nn.Module(), fx.Graph(), {}

    def placeholder(self, name: str, example: Tensor) -> fx.Node:
        """Add an input of the graph."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        if len(inputs) == len(self.graph.nodes):
            node = self.graph.placeholder(name)
        else:  # behind the inputs that are there
            with self.graph.inserting_after(inputs[-1]):
                node = self.graph.placeholder(name)
        node.meta["val"] = self._fake(example)
        return node

    def end(self, name: str, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """Finish the graph and run the passes over it."""
        self.graph.output(list(outputs))
        self.effects += run_passes(self.graph, name, "program", self.disabled)
        module = fx.GraphModule(self.root, self.graph, name)
        module.graph.lint()
        return module

    # --- as Executor says -----------------------------------------------------------------------------------------

    def call(self, key: tuple, function: LocalFunction, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """See Executor."""
        return self.finish(self.start(key, function, inputs))

    def start(self, key: tuple, function: LocalFunction, inputs: Sequence[fx.Node]) -> tuple[Traced, Env]:
        """See Executor; what depends on no wait is put here, the rest where it is finished."""
        traced = self._trace(key, function, inputs)
        env = dict(zip(traced.inputs, inputs, strict=True))
        behind: set[fx.Node] = set()
        changes = order_of_changes(traced.forward)
        for node in traced.forward:
            before = [*node.all_input_nodes, *changes.get(node, ())]
            if node.target is WAIT or any(n in behind for n in before):
                behind.add(node)
        self._emit([n for n in traced.forward if n not in behind], env, traced.name)
        return traced, env

    def finish(self, begun: tuple[Traced, Env]) -> list[fx.Node]:
        """See Executor."""
        traced, env = begun
        self._emit([n for n in traced.forward if n not in env], env, traced.name)
        return [env[n] for n in traced.outputs]

    def forward(
        self,
        part: Part,
        params: Sequence[fx.Node],
        buffers: Sequence[fx.Node],
        x: fx.Node | None,
        batch: Sequence[fx.Node],
        key: fx.Node,
        train: bool,
    ) -> tuple[list[fx.Node], Any]:
        """See Executor."""
        stream = [*buffers, *([] if x is None else [x])]
        if not train:

            def plain(*tensors: Tensor) -> list[Tensor]:
                with torch.no_grad():
                    return self.functions.forward(part, *self._unpack(part, tensors), train=False).outputs

            return self.call(("evaluate", part.kind), plain, [*params, *stream, *batch]), None
        inputs = [*params, *stream, *batch, key]
        traced = self._joint(part, inputs)
        env = dict(zip(traced.inputs[:-1], inputs, strict=True))
        outputs = traced.outputs[: part.num_outputs]
        if self.compile:
            wanted = [*outputs, *self._keep(part, traced, regathered=True, views=False)]
            needed = _closure(wanted, set())
            self._emit_compiled(traced, "forward", [n for n in traced.forward if n in needed], env, wanted)
        elif self.saving.recomputes(part):
            needed = _closure(outputs, set())
            self._emit([n for n in traced.forward if n in needed], env, f"forward {part.name}")
        else:
            self._emit(traced.forward, env, f"forward {part.name}")
        return [env[n] for n in outputs], (traced, env, list(params))

    def backward(
        self, part: Part, saved: Any, params: Sequence[fx.Node], grad: fx.Node
    ) -> tuple[fx.Node | None, list[fx.Node | None]]:
        """See Executor."""
        traced, before, then = saved
        num = len(part.names)
        results = traced.outputs[part.num_outputs :]
        if not self.compile and not self.saving.recomputes(part) and list(params) == then:
            env, again = before, []
        else:
            env, again = self._restore(part, traced, before, params, regathered=self.compile or list(params) != then)
        env[traced.inputs[-1]] = grad
        if self.compile:
            self._emit_compiled(traced, "backward", [*again, *traced.backward], env, results)
        else:
            self._emit(again, env, f"again {part.name}")
            self._emit(traced.backward, env, f"backward {part.name}")
        rest = [env[n] for n in results]
        of_x = None if part.role == "embed" else rest.pop(0)
        found = iter(rest)
        return of_x, [None if none else next(found) for none in self.none_grads[part.kind][:num]]

    # --- the mechanism --------------------------------------------------------------------------------------------

    def _restore(
        self, part: Part, traced: Traced, before: Env, params: Sequence[fx.Node], *, regathered: bool
    ) -> tuple[Env, list[fx.Node]]:
        """Return what the backward of a part may read, and the nodes of the forward that it computes again."""
        num = len(part.names)
        inputs = traced.inputs[:-1]
        env: Env = dict(zip(inputs[:num], params, strict=True))
        env |= {n: before[n] for n in inputs[num:]}
        keep = self._keep(part, traced, regathered=regathered, views=not self.compile)
        env |= {n: before[n] for n in keep if n in before}
        needed = _closure([n for n in _read_by_backward(traced) if n not in env], set(env))
        collectives = [n for n in traced.forward if is_collective(n)]
        if collectives:  # all ranks repeat the same ones, also those whose shards are empty
            flags = self.agree([n in needed for n in collectives])
            needed |= _closure([n for n, flag in zip(collectives, flags, strict=True) if flag], set(env))
        return env, [n for n in traced.forward if n in needed and n not in env]

    def _keep(self, part: Part, traced: Traced, *, regathered: bool, views: bool) -> set[fx.Node]:
        """Return the nodes of a part's forward whose values its backward finds as they were."""
        own, wanted = set(traced.inputs[: len(part.names)]), _read_by_backward(traced)
        saving = self.saving if self.saving.recomputes(part) else None
        keep = saved_nodes(traced.forward, wanted, own, saving, regathered)
        if views:
            return keep
        # A compiled forward hands out memory of its own only; views of it are taken again.
        return {root_of(n) for n in wanted & keep if root_of(n).op != "placeholder"}

    def _joint(self, part: Part, inputs: Sequence[fx.Node]) -> Traced:
        """Trace forward and backward of a kind of part together."""
        boundary: list[int] = []

        def joint(*tensors: Tensor) -> list[Tensor]:
            *rest, grad = tensors
            with torch.enable_grad():
                live = self.functions.forward(part, *self._unpack(part, rest), train=True)
                outputs = [t.detach() for t in live.outputs]
                boundary.append(len(outputs))
                of_x, grads = self.functions.backward(part, live, grad)
            self.none_grads[part.kind] = [g is None for g in grads]
            return [*outputs, *([] if of_x is None else [of_x]), *(g for g in grads if g is not None)]

        examples = [n.meta["val"] for n in inputs]
        with self.mode:
            if part.role == "head":
                grad = torch.empty((), dtype=self.functions.parameters.dtype, device=examples[0].device)
            elif part.role == "block":
                grad = torch.empty_like(
                    examples[len(part.names) + len(part.buffers)], memory_format=torch.contiguous_format
                )
            else:
                with torch.no_grad():
                    x, *_ = self.functions.forward(part, *self._unpack(part, examples), train=True).outputs
                grad = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._trace(("train", part.kind), joint, inputs, [grad], part.num_outputs, part.name)

    def _unpack(self, part: Part, tensors: Sequence[Tensor]) -> tuple:
        """Split (parameters, buffers, x, batch, key) into the arguments of a part's forward."""
        num, behind = len(part.names), len(part.names) + len(part.buffers)
        params, buffers, rest = tensors[:num], tensors[num:behind], list(tensors[behind:])
        x = None if part.role == "embed" else rest.pop(0)
        return params, buffers, x, rest[:4], rest[4] if len(rest) > 4 else None

    def _trace(
        self,
        key: tuple,
        function: LocalFunction,
        inputs: Sequence[fx.Node],
        extra: Sequence[Tensor] = (),
        num_forward: int | None = None,
        name: str = "",
    ) -> Traced:
        """Trace a function for inputs of these forms, or find it among those traced before.

        Args:
            extra: fake tensors of further inputs.
            num_forward: number of outputs that are of the forward; None for a function without a backward.
        """
        examples = [*(n.meta["val"] for n in inputs), *extra]
        whole = (key, tuple((tuple(t.shape), t.stride(), t.dtype) for t in examples))
        if whole in self.traces:
            return self.traces[whole]
        name = name or str(key[0])
        with self.mode:
            fakes = [self._fake(t) for t in examples]
            module = make_fx(function)(*fakes)
        graph = module.graph
        if num_forward is not None:
            _mark_phases(graph, num_forward)
        self.effects += run_passes(graph, name, "part", self.disabled)
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
        self.traces[whole] = traced
        return traced

    def _fake(self, example: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)

    def _emit(self, nodes: Sequence[fx.Node], env: Env, of: str) -> None:
        """Copy nodes into the graph, each marked with what it is of ("backward blocks.3"); env maps what was put already."""
        for node in nodes:
            if node.op == "get_attr":
                env[node] = self._constant(node)
                continue
            new = self.graph.node_copy(node, env.__getitem__)
            alias = node.meta.get("alias")
            new.meta["of"] = of
            new.meta["root"] = new if alias is None else env[alias].meta.get("root", env[alias])
            env[node] = new

    def _emit_compiled(
        self, traced: Traced, phase: str, nodes: Sequence[fx.Node], env: Env, wanted: Sequence[fx.Node]
    ) -> None:
        """Put nodes into the graph as one call of what Inductor makes of them; compiled once for parts that are alike."""
        inside = set(nodes)
        results = list(dict.fromkeys(n for n in wanted if n in inside))
        inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        key = (id(traced), phase, tuple(n.name for n in (*results, *inputs)))
        if key not in self.regions:
            self.regions[key] = compile_region(traced.module, nodes, inputs, results)
        name = f"{phase}_{list(self.regions).index(key)}"
        self.root.add_module(name, self.regions[key])
        call = self.graph.call_module(name, tuple(env[n] for n in inputs))
        call.meta["val"] = [n.meta["val"] for n in results]
        call.meta["inside"] = list(nodes)
        for index, node in enumerate(results):
            got = self.graph.call_function(operator.getitem, (call, index))
            got.meta.update(node.meta, root=got)
            env[node] = got

    def _constant(self, node: fx.Node) -> fx.Node:
        value = getattr(node.graph.owning_module, str(node.target))
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = f"constant_{len(self.constants)}"
            self.root.register_buffer(name, value, persistent=False)
        new = self.graph.get_attr(name)
        new.meta.update(node.meta)
        return new


def _read_by_backward(traced: Traced) -> set[fx.Node]:
    """Return the nodes of the forward that the backward reads, inputs aside."""
    return {a for n in traced.backward for a in n.all_input_nodes if phase_of(a) == FORWARD and a.op != "placeholder"}


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
    env: Env = {}
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


def _closure(nodes: Sequence[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """Return nodes and all they depend on, as far as it is not known; what changes a needed value in place included."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        one = todo.pop()
        if one in known or one in found or one.op == "placeholder":
            continue
        found.add(one)
        todo += [*one.all_input_nodes, *one.meta.get("changed_by", ())]
    return found


def _mark_phases(graph: fx.Graph, num_forward: int) -> None:
    """Mark what belongs to the forward: all up to the last of its outputs."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    ends = set(output.args[0][:num_forward])
    phase = BACKWARD
    for node in reversed(graph.nodes):
        if node in ends:
            phase = FORWARD
        node.meta["phase"] = FORWARD if node.op == "placeholder" else phase
