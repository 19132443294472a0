"""What a rank of a pipeline holds while it runs a schedule: read off its programs, action by action.

The walk does what ``PipelineStep`` does: a value lives from the piece that makes it to the last one that takes it, a
message that comes from where it is expected, one that goes until it is known to be read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from dtengine.memory import MADE, Moment, key_of, moments, rounded
from dtengine.pipeline.actions import COMPUTE, Action
from dtengine.pipeline.communication import receiver
from dtengine.pipeline.stage import Piece, Stage, StagePrograms

Expected = Callable[[Sequence[Action], int], Iterable[Action]]


def peak_of_actions(
    todo: Sequence[Action],
    expected: Expected,
    read: Mapping[Action, Sequence[Action]],
    stages: Mapping[int, Stage],
    traced: Mapping[int, StagePrograms],
    messages: Mapping[tuple[int, str], Tensor],
    gathered: int,
    alignment: int,
) -> Moment | None:
    """Return the moment of a step's actions at which a rank has allocated most.

    Args:
        todo: what it computes, sends and receives, in order.
        expected: gives the receives that are posted by a place in that list.
        read: {receive: sends of this rank that have been read when it is here}.
        stages: of this rank, by number.
        traced: their programs.
        messages: {(stage, transfer): a tensor of that form}, the transfers of ``todo``.
        gathered: bytes of parameters that are held for all of it.
        alignment: bytes that an allocation is rounded up to.
    """
    walk = _Walk(frozenset(todo), read, gathered, alignment)
    for place, action in enumerate(todo):
        for receive in expected(todo, place):
            walk.expect(receive, messages[receive.stage, receive.kind])
        if action.kind.startswith("SEND"):
            walk.going[action] = walk.ready.pop(action)
        elif action.kind in COMPUTE:
            walk.run(action, stages[action.stage], traced[action.stage])
    return walk.most


@dataclass
class _Heap:
    """Pieces of memory by number, each with its bytes, its kind and how many hold it."""

    bytes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    now: Counter[str] = field(default_factory=Counter)

    def new(self, size: int, kind: str) -> int:
        self.bytes.append(size)
        self.kinds.append(kind)
        self.holders.append(0)
        return len(self.bytes) - 1

    def hold(self, number: int) -> int:
        self.holders[number] += 1
        if self.holders[number] == 1:
            self.now[self.kinds[number]] += self.bytes[number]
        return number

    def drop(self, number: int) -> None:
        self.holders[number] -= 1
        if self.holders[number] == 0:
            self.now[self.kinds[number]] -= self.bytes[number]


@dataclass
class _Walk:
    """Where the values of a step are, by number of their memory: saved by microbatch, come, to be sent, on their way."""

    todo: frozenset[Action]
    read: Mapping[Action, Sequence[Action]]
    gathered: int
    alignment: int
    heap: _Heap = field(default_factory=_Heap)
    live: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    inbox: dict[Action, int] = field(default_factory=dict)
    ready: dict[Action, int] = field(default_factory=dict)
    going: dict[Action, int] = field(default_factory=dict)
    most: Moment | None = None

    def expect(self, receive: Action, message: Tensor) -> None:
        """Allocate a message that is to come."""
        if receive not in self.inbox:
            kind = "activations" if receive.kind == "RECV_F" else "gradients"
            self.inbox[receive] = self.heap.hold(self.heap.new(rounded(message, self.alignment), kind))

    def run(self, action: Action, stage: Stage, made: StagePrograms) -> None:
        """Run a piece: what it uses up is gone at its end, what it makes is saved, sent or handed over."""
        # 1. its inputs: what no later piece takes, nobody but the piece holds; 2. the piece; 3. its results
        number, kind, microbatch = action
        piece, later = made.pieces[kind], made.saved if kind == "F" else made.later(kind)
        saved = self.live.setdefault((number, microbatch), {})
        message = self._message(Action(number, "RECV_F" if kind == "F" else "RECV_B", microbatch), piece)
        known = saved | message
        used = message | {name: saved.pop(name) for name in list(saved) if name in piece.takes and name not in later}
        owned = {name: self.heap.kinds[one] for name, one in used.items() if self.heap.holders[one] == 1}
        for one in used.values():
            self.heap.drop(one)
        self._note(piece.program.graph.graph, owned)
        found = self._results(piece, known)
        goes = {"F": made.result, "W": None}.get(kind, made.input_grad)
        if goes in found and not (kind == "F" and stage.last):
            send = Action(number, "SEND_F" if kind == "F" else "SEND_B", microbatch)
            self.heap.hold(found[goes])
            if send in self.todo:
                self.ready[send] = found[goes]
            else:
                self.inbox[receiver(send)] = found[goes]
        if kind in "BW":
            for one in self.live.pop((number, microbatch)).values():
                self.heap.drop(one)
            return
        for name, one in (known | found).items():
            if name in later and name not in saved:
                saved[name] = self.heap.hold(one)

    def _message(self, receive: Action, piece: Piece) -> dict[str, int]:
        """Take what came for a piece; what the other rank has read by then is no longer held."""
        name = "x" if receive.kind == "RECV_F" else "grad"
        if name not in piece.takes or receive not in self.inbox:
            return {}
        for send in self.read.get(receive, ()):
            if send in self.going:
                self.heap.drop(self.going.pop(send))
        return {name: self.inbox.pop(receive)}

    def _note(self, graph: fx.Graph, owned: Mapping[str, str]) -> None:
        """Look for a new peak while a piece runs."""
        for moment in moments(graph, self.alignment, owned):
            size = {kind: self.heap.now[kind] + moment.bytes[kind] for kind in MADE}
            size["gathered"] += self.gathered
            if self.most is None or sum(size.values()) > sum(self.most.bytes.values()):
                self.most = Moment(moment.node, size)

    def _results(self, piece: Piece, known: Mapping[str, int]) -> dict[str, int]:
        """Return the memory of what a piece gives, where it is the piece's own or that of an input which is counted here."""
        (output,) = piece.program.graph.graph.find_nodes(op="output")
        numbers: dict[tuple[fx.Node, int], int] = {}
        found = {}
        for name, node in zip(piece.gives, output.args[0], strict=True):
            key = key_of(node)
            if key[0].op != "placeholder":
                if key not in numbers:
                    numbers[key] = self.heap.new(rounded(node.meta["val"], self.alignment), "activations")
                found[name] = numbers[key]
            elif key[0].name in known:
                found[name] = known[key[0].name]
        return found
