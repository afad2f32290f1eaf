"""What stages send each other: live tensors of a micro-batch down the pipeline, their gradients back up.

Nothing can wait for itself: a message is sent without waiting, and each pair of stages has one channel for
each direction, on which a receiver takes what comes in the order in which the sender's schedule sends it.
That order is known to all, since schedules are data. What arrives before it is needed is kept.

Shapes and element types go ahead of the first message of a kind (as a header), and are known from then on:
they follow from the shapes of the micro-batch, which all stages have. Another shape of micro-batch has its
own header.
"""

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmlab.parallel.layout import Batch
from fmlab.parallel.mesh import Axis
from fmlab.sim.actions import Action, model_chunk, place, source_of

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def signature(batch: Batch) -> Signature:
    """Names, shapes and element types of a micro-batch: what the shapes of all activations follow from."""
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in sorted(batch.items()))


@dataclass(frozen=True)
class Header:
    """What a message holds.

    tensors: (name, shape, element type, whether a gradient comes back) of each tensor
    notes:   numbers that ride along in State.derived: how long a stream is that ranks hold parts of
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    notes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], derived: Mapping[str, Any]) -> "Header":
        notes = [(k, v) for k, v in derived.items() if k.endswith(" positions") and isinstance(v, int)]
        return cls(
            tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors.items()),
            tuple(sorted(notes)),
        )

    def empty(self, device: torch.device, gradients: bool = False) -> list[Tensor]:
        """Memory for the message, or for the gradients that answer it."""
        kept = (t for t in self.tensors if t[3] or not gradients)
        return [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype, _ in kept]


# region order
def orders(
    schedule: Sequence[Sequence[Action]], kind: str, chunks: int
) -> dict[tuple[int, int], list[Action]]:
    """(sender, receiver) -> the actions of the receiver that wait for a message, in the order in which the
    messages are sent. Weight passes send nothing, and a stage sends nothing to itself."""
    stages = len(schedule)
    waits = {
        source: (stage, action)
        for stage, todo in enumerate(schedule)
        for action in todo
        if (source := source_of(action, stage, stages, chunks, kind)) is not None
    }
    found: dict[tuple[int, int], list[Action]] = {}
    for stage, todo in enumerate(schedule):
        for action in todo:
            if (stage, action) in waits:
                receiver, waiting = waits[stage, action]
                if receiver != stage:
                    found.setdefault((stage, receiver), []).append(waiting)
    return found


# endregion


class Mail:
    """The messages of one stage in one step.

    known: headers by (chunk of the model that receives, signature of the micro-batch), kept from step to step
    """

    def __init__(
        self,
        route: "Route",
        signatures: Sequence[Signature],
        known: dict[tuple[int, Signature], Header],
        expected: Mapping[int, Sequence[Action]],
        device: torch.device,
    ) -> None:
        """signatures: of the micro-batches. expected: sender -> this stage's actions that wait for its
        messages, in the order of sending."""
        self.route, self.signatures, self.known, self.device = route, signatures, known, device
        self._expected = {source: deque(actions) for source, actions in expected.items()}
        self._arriving: dict[Action, tuple[list[Any], list[Tensor], Header]] = {}
        self._leaving: list[tuple[Any, Tensor]] = []
        self._sent: dict[tuple[int, int], Header] = {}  # (micro-batch, chunk of the model that sent it)

    # region send
    def send_forward(
        self, action: Action, tensors: Mapping[str, Tensor], derived: Mapping[str, Any]
    ) -> Header:
        """Send what `action` made to the next chunk of the model, behind a header if this kind is new.

        Raises ValueError for tensors of other shapes than the last time, from a micro-batch of the same
        shape.
        """
        chunk = self.route.number(action)
        header = self._sent[action.micro_batch, chunk] = Header.of(tensors, derived)
        receiver, waiting = self.route.after(action)
        if receiver == self.route.stage:  # the turn of a V
            self._arriving[waiting] = [], [tensor.detach() for tensor in tensors.values()], header
            return header
        key = chunk + 1, self.signatures[action.micro_batch]
        if key not in self.known:
            self.known[key] = header
            packed = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
            self._send(receiver, [torch.tensor([len(packed)]).to(self.device), packed.to(self.device)])
        elif self.known[key] != header:
            raise ValueError(
                f"what crosses to chunk {chunk + 1} was {self.known[key]} for a micro-batch of the same "
                f"shapes, and is {header} now: what blocks write may have shapes that follow from the shapes "
                "of the batch only"
            )
        self._send(receiver, list(tensors.values()))
        return header

    def send_gradients(self, action: Action, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what `action`'s chunk was given back to where it came from."""
        receiver, waiting = self.route.after(action)
        if receiver == self.route.stage:
            header = self._sent[action.micro_batch, self.route.number(waiting)]
            self._arriving[waiting] = [], list(gradients), header
        else:
            self._send(receiver, gradients)

    def _send(self, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Without waiting; the memory is kept until the message has left."""
        self._leaving = [(work, tensor) for work, tensor in self._leaving if not work.is_completed()]
        channel = self.route.channel(self.route.stage, receiver)
        for tensor in (tensor.detach().contiguous() for tensor in tensors):
            if tensor.numel():
                self._leaving.append((channel.send(tensor, receiver), tensor))

    # endregion

    # region receive
    def receive(self, action: Action) -> tuple[list[Tensor], Header]:
        """What `action` waits for, when it is here; and what is in it."""
        source, _ = self.route.before(action)
        while action not in self._arriving:
            self._take(source)
        works, tensors, header = self._arriving.pop(action)
        for work in works:
            work.wait()
        return tensors, header

    def expect(self, action: Action) -> None:
        """Let the message for `action` arrive meanwhile, if it is next on its channel and of a known kind."""
        source, _ = self.route.before(action)
        queue = self._expected.get(source)
        if action not in self._arriving and queue and queue[0] == action and self._header(action):
            self._take(source)

    def _take(self, source: int) -> None:
        """Begin to receive the next message from `source`; a header is waited for."""
        action, channel = self._expected[source].popleft(), self.route.channel(source, self.route.stage)
        header = self._header(action)
        if header is None:
            size = torch.empty(1, dtype=torch.int64, device=self.device)
            channel.receive(size, source).wait()
            packed = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            channel.receive(packed, source).wait()
            header = pickle.loads(packed.cpu().numpy().tobytes())
            self.known[self.route.number(action), self.signatures[action.micro_batch]] = header
        tensors = header.empty(self.device, gradients=action.direction != "forward")
        works = [channel.receive(tensor, source) for tensor in tensors if tensor.numel()]
        self._arriving[action] = works, tensors, header

    def _header(self, action: Action) -> Header | None:
        chunk = self.route.number(action)
        if action.direction == "forward":
            return self.known.get((chunk, self.signatures[action.micro_batch]))
        return self._sent.get((action.micro_batch, chunk))

    # endregion

    def finish(self) -> None:
        """All messages of the step have left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()
        assert not self._arriving
        assert not any(self._expected.values())


class Route:
    """Who sends what to whom on one stage of a pipeline.

    down carries messages to stages with a higher place, up those to lower ones: on each channel between two
    stages one only sends and the other only receives, so that neither can block the other's way.
    """

    def __init__(self, kind: str, chunks: int, down: Axis, up: Axis) -> None:
        self.kind, self.chunks, self._down, self._up = kind, chunks, down, up
        self.stage, self.stages = down.rank, down.size

    def number(self, action: Action) -> int:
        """The chunk of the model that an action of this stage runs."""
        return model_chunk(self.kind, self.stage, action.chunk, self.stages)

    def before(self, action: Action) -> tuple[int, Action]:
        """The stage and action that an action of this stage waits for."""
        source = source_of(action, self.stage, self.stages, self.chunks, self.kind)
        assert source is not None
        return source

    def after(self, action: Action) -> tuple[int, Action]:
        """The stage and action that wait for an action of this stage."""
        there = self.number(action) + (1 if action.direction == "forward" else -1)
        receiver, chunk = place(self.kind, there, self.stages)
        return receiver, Action(action.direction, action.micro_batch, chunk)

    def channel(self, source: int, target: int) -> Axis:
        return self._down if source < target else self._up
