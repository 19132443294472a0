"""Two ways to run the parts of a step: recorded into one graph, or called as they are.

``microbatch`` says in which order parts, gathers and reductions run, once for both. ``GraphExecutor`` works on nodes of a
graph: it traces each kind of part once and copies its nodes into the step wherever the part runs, so a step's trace costs
as much with eighty layers as with one. ``EagerExecutor`` works on tensors, for debugging.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from dtengine.nodes import is_collective, order_of_changes, root_of, with_siblings
from dtengine.parts import Live, Part, PartFunctions
from dtengine.passes import Effect, run_passes
from dtengine.recompute import Saving, saved_nodes
from dtengine.torch_private import WAIT, FakeTensorMode
from dtengine.traces import LocalFunction, Traced, closure, compile_region, trace

Value = Any  # a node of the step's graph, or a tensor
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
        again = self.saving.policy(part) is not None
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
    repeats: dict[tuple, tuple[set[fx.Node], set[fx.Node]]] = field(default_factory=dict)
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
        behind = _behind_waits(traced, ())
        collectives = [n for n in traced.forward if is_collective(n)]
        if len(collectives) > 1:
            # Where a rank's shards are empty, a collective depends on nothing. All ranks put the same ones here.
            flags = self.agree([n in behind for n in collectives])
            if any(flags):
                behind = _behind_waits(traced, collectives[flags.index(True) :])
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
        key: fx.Node | None,
        train: bool,
    ) -> tuple[list[fx.Node], Any]:
        """See Executor."""
        stream = [*buffers, *([] if x is None else [x])]
        if not train:

            def plain(*tensors: Tensor) -> list[Tensor]:
                with torch.no_grad():
                    return self.functions.forward(part, *self._unpack(part, tensors), train=False).outputs

            return self.call(("evaluate", part.kind), plain, [*params, *stream, *batch]), None
        assert key is not None, "a training step has a dropout key, used or not"
        inputs = [*params, *stream, *batch, key]
        traced = self._joint(part, inputs)
        env = dict(zip(traced.inputs[:-1], inputs, strict=True))
        outputs = traced.outputs[: part.num_outputs]
        if self.compile:
            wanted = [*outputs, *self._keep(part, traced, regathered=True, views=False)]
            needed = closure(wanted, set())
            nodes = [n for n in traced.forward if n in needed]
            self._emit_compiled(traced, nodes, env, wanted, f"forward {part.name}")
        elif self.saving.policy(part):
            needed = with_siblings(closure(outputs, set()))
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
        if not self.compile and not self.saving.policy(part) and list(params) == then:
            env, again = before, []
        else:
            env, again = self._restore(part, traced, before, params, regathered=self.compile or list(params) != then)
        env[traced.inputs[-1]] = grad
        if self.compile:
            self._emit_compiled(traced, [*again, *traced.backward], env, results, f"backward {part.name}")
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
        key = (id(traced), regathered, self.saving.policy(part))
        if key not in self.repeats:  # the same for parts that are alike
            keep = self._keep(part, traced, regathered=regathered, views=not self.compile)
            if self.saving.policy(part) and not self.compile:  # the forward put no more than its outputs need
                keep &= with_siblings(closure(traced.outputs[: part.num_outputs], set()))
            needed = closure([n for n in traced.read_by_backward if n not in keep], keep | set(inputs))
            self.repeats[key] = keep, needed
        keep, needed = self.repeats[key]
        collectives = [n for n in traced.forward if is_collective(n)]
        if collectives:
            # All ranks repeat the same ones, also those whose shards are empty. They agree for each part: whether two
            # parts are alike is a matter of strides too, and differs between ranks.
            flags = self.agree([n in needed for n in collectives])
            theirs = [n for n, flag in zip(collectives, flags, strict=True) if flag]
            needed = needed | closure(theirs, keep | set(inputs))
        again = [n for n in traced.forward if n in needed and n not in keep]
        env: Env = dict(zip(inputs[:num], params, strict=True))
        env |= {n: before[n] for n in (*inputs[num:], *keep)}
        return env, again

    def _keep(self, part: Part, traced: Traced, *, regathered: bool, views: bool) -> set[fx.Node]:
        """Return the nodes of a part's forward whose values its backward finds as they were."""
        own, wanted = set(traced.inputs[: len(part.names)]), traced.read_by_backward
        policy, budget = self.saving.policy(part), self.saving.budget
        keep = saved_nodes(traced.forward, wanted, own, policy, budget, regathered)
        if views:
            return keep
        # A compiled forward hands out memory of its own only; views of it are taken again.
        return {root_of(n) for n in wanted & keep if root_of(n).op != "placeholder"}

    def _joint(self, part: Part, inputs: Sequence[fx.Node]) -> Traced:
        """Trace forward and backward of a kind of part together."""

        def joint(*tensors: Tensor) -> list[Tensor]:
            *rest, grad = tensors
            with torch.enable_grad():
                live = self.functions.forward(part, *self._unpack(part, rest), train=True)
                outputs = [t.detach() for t in live.outputs]
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
        fakes = [self._fake(t) for t in examples]
        traced, effects = trace(name or str(key[0]), function, fakes, self.mode, num_forward, self.disabled)
        self.effects += effects
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
        self, traced: Traced, nodes: Sequence[fx.Node], env: Env, wanted: Sequence[fx.Node], of: str
    ) -> None:
        """Put nodes into the graph as one call of what Inductor makes of them; compiled once for parts that are alike."""
        inside = set(nodes)
        results = list(dict.fromkeys(n for n in wanted if n in inside))
        inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        phase = of.partition(" ")[0]
        key = (id(traced), phase, tuple(n.name for n in (*results, *inputs)))
        if key not in self.regions:
            self.regions[key] = compile_region(traced.module, nodes, inputs, results)
        name = f"{phase}_{list(self.regions).index(key)}"
        self.root.add_module(name, self.regions[key])
        call = self.graph.call_module(name, tuple(env[n] for n in inputs))
        call.meta["val"] = [n.meta["val"] for n in results]
        call.meta.update(inside=list(nodes), of=of)
        for index, node in enumerate(results):
            got = self.graph.call_function(operator.getitem, (call, index))
            got.meta.update(node.meta, root=got, of=of)
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


def _behind_waits(traced: Traced, later: Collection[fx.Node]) -> set[fx.Node]:
    """Return what depends on a wait, or on nodes that are to come later in any case; these included."""
    behind = set(later)
    changes = order_of_changes(traced.forward)
    for node in traced.forward:
        if node.target is WAIT or any(n in behind for n in (*node.all_input_nodes, *changes.get(node, ()))):
            behind.add(node)
    return behind
