"""What goes from stage to stage in a step: sent and received within the pipeline at each place of the stage's mesh."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtengine.mesh import Pipe
from dtengine.pipeline.actions import Action
from dtengine.pipeline.communication import receiver, sender
from dtengine.torch_private import group_of


class Messages:
    """Outputs and input gradients on their way.

    A message has a tag made of stage, kind and microbatch: without tags messages of one size could swap.

    Args:
        pipe: this rank's place.
        rank_of: the pipeline rank of each stage.
        num_microbatches: that pass.
        read: {receive: sends of this rank that have been read when it is here}; what was sent is kept until then.
    """

    def __init__(
        self,
        pipe: Pipe,
        rank_of: Sequence[int],
        num_microbatches: int,
        read: Mapping[Action, Sequence[Action]] = MappingProxyType({}),
    ) -> None:
        self.rank, self.pipe = pipe.rank, pipe
        self.rank_of, self.num_microbatches, self.read = rank_of, num_microbatches, read
        self.here: dict[Action, Tensor] = {}  # by the receive that they are for
        self.coming: dict[Action, tuple[Tensor, Any]] = {}
        self.ready: dict[Action, Tensor] = {}  # by the send that they wait for
        self.going: dict[Action, tuple[Tensor, Any]] = {}

    def give(self, send: Action, value: Tensor, *, later: bool = False) -> None:
        """Hand a result on: to another stage of this rank at once, else to its rank; ``later``: by ``send``."""
        receive = receiver(send)
        if self.rank_of[receive.stage] == self.rank:
            self.here[receive] = value
        else:
            self.ready[send] = value
            if not later:
                self.send(send)

    def send(self, action: Action) -> None:
        """Begin to send what was given."""
        value = self.ready.pop(action).contiguous()
        if value.numel():
            where = self._where(self.rank, self.rank_of[receiver(action).stage], sends=True)
            self.going[action] = value, dist.isend(value, group=where[0], group_dst=where[1], tag=self._tag(action))

    def expect(self, receive: Action, like: Tensor) -> None:
        """Begin to receive what another rank sends; nothing where it is here or expected already."""
        source = self.rank_of[sender(receive).stage]
        if source == self.rank or receive in self.coming:
            return
        value = torch.empty_like(like)
        work = None
        if value.numel():
            where = self._where(source, self.rank, sends=False)
            work = dist.irecv(value, group=where[0], group_src=where[1], tag=self._tag(sender(receive)))
        self.coming[receive] = value, work

    def take(self, receive: Action) -> Tensor:
        """Wait for a message."""
        if receive in self.here:
            return self.here.pop(receive)
        value, work = self.coming.pop(receive)
        if work is not None:
            work.wait()
        for send in self.read.get(receive, ()):
            if send in self.going:
                self.going.pop(send)[1].wait()
        return value

    def finish(self) -> None:
        """Wait until everything is sent."""
        for _, work in self.going.values():
            work.wait()
        self.going = {}

    def _where(self, source: int, to: int, *, sends: bool) -> tuple[Any, int]:
        """Return the group of a message, and the other rank's number in it: members are in the order of ranks."""
        if not self.pipe.edges:
            return group_of(self.pipe.group), to if sends else source
        other, mine = (to, source) if sends else (source, to)
        return group_of(self.pipe.edges[source, to]), int(other > mine)

    def _tag(self, send: Action) -> int:
        return (2 * send.stage + (send.kind == "SEND_B")) * self.num_microbatches + send.microbatch
