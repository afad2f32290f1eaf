"""A pipeline schedule, executed: one stage's actions one after the other, and the messages in between.

Every stage has the whole micro-batch, and calls the objective with a stand-in for the model. The stand-in
prepares the state, puts in what has come from the stage before, and runs its own blocks. On all but the last
chunk it then ends the call: what the objective does with the results happens on the last one only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmlab.parallel.build import Build
from fmlab.parallel.layout import Batch
from fmlab.parallel.mesh import Axis
from fmlab.parallel.pipeline.agree import agree
from fmlab.parallel.pipeline.chunk import Ended, InFlight, StandIn
from fmlab.parallel.pipeline.messages import Header, Mail, Route, Signature, orders, signature
from fmlab.parallel.pipeline.split_backward import SplitBackward, edge_of
from fmlab.parallel.pipeline.stages import Chunk
from fmlab.parallel.pipeline.trace import PipelineTrace, Recorder
from fmlab.sim.schedule import Action, schedule

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine


@dataclass
class _Step:
    """What a step needs from its first action to its last."""

    batches: Sequence[Batch]
    counts: Mapping[str, int]
    engine: "Engine"
    mail: Mail
    sums: Tensor
    flying: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    recorder: Recorder | None = None


class Pipeline:
    """This rank's stage: its chunks of the model, and the schedule that it follows.

    most_in_flight: the most micro-batches (of a chunk) that it held at once in the last step
    """

    def __init__(
        self, build: Build, chunks: Sequence[Chunk], ties: Sequence[tuple[Axis, Sequence[str]]] = ()
    ) -> None:
        """chunks: of this stage, in the order of the model. ties: the stages that share some parameters with
        this one, and which."""
        layout, mesh = build.layout, build.mesh
        self.model, self.backend, self.kind = build.model, build.backend, layout.schedule
        self.chunks, self.axis = list(chunks), mesh.axis("pipeline")
        self.route = Route(
            self.kind, len(chunks), mesh.channel("pipeline", "down"), mesh.channel("pipeline", "up")
        )
        self.ledger, self.ties = build.ledger, list(ties)
        self.most_in_flight = 0
        self._known: dict[tuple[int, Signature], Header] = {}
        self._frozen: list[bool] = []
        self._recorder: Recorder | None = None
        self._recorded: Recorder | None = None

    # region schedule
    def actions(self, micro_batches: int) -> list[list[Action]]:
        """What each stage does in a step of so many micro-batches.

        "interleaved" is made for whole groups of as many micro-batches as stages. Where some are missing
        (they had no target), the actions of the missing ones are left out: no other action waits for them.
        """
        stages = self.route.stages
        planned = -(-micro_batches // stages) * stages if self.kind == "interleaved" else micro_batches
        if not planned:
            return [[] for _ in range(stages)]
        every = schedule(self.kind, stages, planned, len(self.chunks))
        return [[action for action in todo if action.micro_batch < micro_batches] for todo in every]

    # endregion

    # region run
    def run(self, batches: Sequence[Batch], counts: Mapping[str, int], engine: "Engine") -> Tensor:
        """Forward and backward passes of all micro-batches; the loss sums, on the stage that has the last
        chunk.

        Raises ValueError on every stage if they have different micro-batches.
        """
        if agree(batches, self._thawed(), self.axis, self.backend.device):
            self._known.clear()  # whether gradients come back may have changed
        plan = self.actions(len(batches))
        routes = orders(plan, self.kind, len(self.chunks))  # the same on every stage
        here = self.route.stage
        expected = {source: todo for (source, target), todo in routes.items() if target == here}
        signatures = [signature(batch) for batch in batches]
        mail = Mail(self.route, signatures, self._known, expected, self.backend.device)
        recorder, self._recorder = self._recorder, None
        step = _Step(batches, counts, engine, mail, engine._zero_sums(), recorder=recorder)
        with nullcontext() if recorder is None else recorder.recording(self.model, self.backend):
            self._perform(plan[here], step)
        self._recorded = recorder or self._recorded
        mail.finish()
        assert not step.flying
        return step.sums

    # endregion

    # region perform
    def _perform(self, todo: Sequence[Action], step: _Step) -> None:
        self.most_in_flight = 0
        passes: dict[str, Callable[[Action, _Step, Any], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "input": self._input,
            "weight": self._weight,
        }
        for action, following in zip_longest(todo, todo[1:]):
            received = step.mail.receive(action) if self._waits(action) else None
            if following is not None and self._waits(following):
                step.mail.expect(following)  # arrives while this pass runs
            start = time.perf_counter()
            passes[action.direction](action, step, received)
            self.most_in_flight = max(self.most_in_flight, len(step.flying))
            if step.recorder is not None:
                step.recorder.note(action, start, step.flying.values())

    # endregion

    def _waits(self, action: Action) -> bool:
        """Whether an action needs a message: at either end of the model, and for weights, none comes."""
        number = self.route.number(action)
        if action.direction == "forward":
            return number > 0
        return action.direction != "weight" and number < self.route.stages * len(self.chunks) - 1

    # region forward
    def _forward(self, action: Action, step: _Step, received: Any) -> None:
        chunk = self.chunks[action.chunk]
        inputs, notes = _named(*received) if received else ({}, {})
        model = StandIn(self.model, chunk, inputs, notes)
        try:
            share, sums = step.engine._forward(step.batches[action.micro_batch], step.counts, model)
        except Ended as ended:
            sent = {name: ended.state[name] for name in chunk.sends if name in ended.state}
            step.mail.send_forward(action, sent, ended.state.derived)
            outputs = [tensor for tensor in sent.values() if tensor.requires_grad]
            gradients = None
        else:
            model.check_called()
            step.sums += sums
            outputs = [share] if share.requires_grad else []
            gradients = [torch.ones_like(share)] if share.requires_grad else []
        leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
        ends = [edge_of(tensor) for tensor in leaves] if received else model.made_first
        flying = InFlight(leaves, [edge_of(tensor) for tensor in outputs], ends, gradients)
        step.flying[action.micro_batch, action.chunk] = flying

    # endregion

    # region backward
    def _backward(self, action: Action, step: _Step, received: Any) -> None:
        flying = step.flying.pop((action.micro_batch, action.chunk))
        gradients = received[0] if received else flying.gradients
        if flying.outputs:
            torch.autograd.backward(flying.outputs, gradients)
        self._send_back(action, step, [leaf.grad for leaf in flying.inputs], flying)

    def _input(self, action: Action, step: _Step, received: Any) -> None:
        flying = step.flying[action.micro_batch, action.chunk]
        flying.split = SplitBackward(flying.outputs, flying.ends)
        found = flying.split.input_pass(received[0] if received else flying.gradients or [])
        flying.outputs, flying.gradients = [], None
        self._send_back(action, step, found, flying)

    def _weight(self, action: Action, step: _Step, _: Any) -> None:
        flying = step.flying.pop((action.micro_batch, action.chunk))
        assert flying.split is not None
        flying.split.weight_pass()

    def _send_back(
        self, action: Action, step: _Step, gradients: Sequence[Tensor | None], flying: InFlight
    ) -> None:
        if self.route.number(action) > 0:
            pairs = zip(flying.inputs, gradients, strict=True)
            whole = [torch.zeros_like(leaf) if g is None else g for leaf, g in pairs]
            step.mail.send_gradients(action, whole)

    # endregion

    # region ties
    def finish(self) -> None:
        """Behind a step: a parameter that some stage has used has a gradient on each stage that holds it.

        So that the ledger can add them up: a head that no objective asked for has none, its embedding has.
        """
        held = dict(self.ledger.parameters())
        for axis, names in self.ties:
            used = torch.tensor([held[name].grad is not None for name in names], device=self.backend.device)
            anywhere = axis.all_reduce_(used.int(), op="max").tolist()
            for name in (name for name, flag in zip(names, anywhere, strict=True) if flag):
                if held[name].grad is None:
                    held[name].grad = torch.zeros_like(held[name])

    # endregion

    def _thawed(self) -> bool:
        """Whether other parameters are frozen than in the step before."""
        now = [parameter.requires_grad for parameter in self.model.parameters()]
        changed, self._frozen = now != self._frozen and bool(self._frozen), now
        return changed

    # ---- a record of a step ------------------------------------------------------------------------------

    def record_next_step(self) -> None:
        """Write down the passes of the next step, and what is held between them; every stage calls it.

        The device is waited for behind each pass, and autograd's saved tensors are counted, which costs time.
        """
        self._recorder = Recorder(self.route.stage)

    def trace(self) -> PipelineTrace:
        """The recorded step of all stages; every stage calls it. Raises ValueError before any was
        recorded."""
        if self._recorded is None:
            raise ValueError("no step was recorded; call record_next_step() on every stage, then step()")
        return PipelineTrace(self.kind, self.axis.gather_objects(self._recorded.trace))


def _named(tensors: Sequence[Tensor], header: Header) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What came in, by name, as leaves of a new graph where gradients go back."""
    named = {}
    for tensor, (name, _, _, needs_gradient) in zip(tensors, header.tensors, strict=True):
        named[name] = tensor.requires_grad_() if needs_gradient else tensor
    return named, dict(header.notes)
