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
from dtengine.pipeline.stage import Stage, StagePrograms

Expected = Callable[[Sequence[Action], int], Iterable[Action]]


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

    def hold(self, number: int | None) -> None:
        if number is not None:
            self.holders[number] += 1
            if self.holders[number] == 1:
                self.now[self.kinds[number]] += self.bytes[number]

    def drop(self, number: int | None) -> None:
        if number is not None:
            self.holders[number] -= 1
            if self.holders[number] == 0:
                self.now[self.kinds[number]] -= self.bytes[number]


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
    heap, most = _Heap(), None
    live: dict[tuple[int, int], dict[str, int]] = {}
    inbox: dict[Action, int] = {}
    ready: dict[Action, int] = {}
    going: dict[Action, int] = {}

    def note(graph: fx.Graph, owned: Mapping[str, str]) -> None:
        nonlocal most
        for moment in moments(graph, alignment, owned):
            size = {kind: heap.now[kind] + moment.bytes[kind] for kind in MADE}
            size["gathered"] += gathered
            if most is None or sum(size.values()) > sum(most.bytes.values()):
                most = Moment(moment.node, size)

    for place, action in enumerate(todo):
        for receive in expected(todo, place):
            if receive not in inbox:
                kind = "activations" if receive.kind == "RECV_F" else "gradients"
                inbox[receive] = heap.new(rounded(messages[receive.stage, receive.kind], alignment), kind)
                heap.hold(inbox[receive])
        if action.kind.startswith("SEND"):
            going[action] = ready.pop(action)
        if action.kind not in COMPUTE:
            continue
        stage, made, of = stages[action.stage], traced[action.stage], (action.stage, action.microbatch)
        piece, later = made.pieces[action.kind], made.later(action.kind)
        # 1. what the piece takes, and what of it nobody else holds
        name, form = ("x", "RECV_F") if action.kind == "F" else ("grad", "RECV_B")
        taken = dict(live.get(of, {}))
        receive = Action(action.stage, form, action.microbatch)
        if name in piece.takes and receive in inbox:
            taken[name] = inbox.pop(receive)
            for send in read.get(receive, ()):
                heap.drop(going.pop(send, None))
        for kept in () if action.kind == "F" else [n for n in live[of] if n in piece.takes and n not in later]:
            live[of].pop(kept)
        given = {n: taken[n] for n in piece.takes if n in taken}
        if action.kind != "F":
            given = {n: number for n, number in given.items() if n not in later or n == name}
        owned = {n: heap.kinds[number] for n, number in given.items() if heap.holders[number] == 1}
        for number in given.values():
            heap.holders[number] -= 1
            if heap.holders[number] == 0:
                heap.now[heap.kinds[number]] -= heap.bytes[number]
        graph = piece.program.graph.graph
        note(graph, owned)
        # 2. what it gives, and who holds that
        (output,) = graph.find_nodes(op="output")
        numbers: dict[object, int] = {}
        found: dict[str, int | None] = {}
        for label, node in zip(piece.gives, output.args[0], strict=True):
            key = key_of(node)
            if key[0].op == "placeholder":
                found[label] = taken.get(key[0].name)
            else:
                size = node.meta["val"].untyped_storage().nbytes()
                if key not in numbers:
                    numbers[key] = heap.new(-(-size // alignment) * alignment, "activations")
                found[label] = numbers[key]
        goes = made.result if action.kind == "F" else made.input_grad if action.kind in "IB" else None
        send = Action(action.stage, "SEND_F" if action.kind == "F" else "SEND_B", action.microbatch)
        number = found.get(goes) if goes else None
        if number is not None and not (action.kind == "F" and stage.last):
            if send in todo:
                ready[send] = number
            else:
                inbox[receiver(send)] = number
            heap.hold(number)
        keep = made.saved if action.kind == "F" else later
        known = taken | {n: i for n, i in found.items() if i is not None}
        if action.kind in "FI":
            before = live.get(of, {})
            live[of] = {n: known[n] for n in keep if n in known}
            for n, number in live[of].items():
                if n not in before:
                    heap.hold(number)
        elif of in live:
            for number in live.pop(of).values():
                heap.drop(number)
    return most
