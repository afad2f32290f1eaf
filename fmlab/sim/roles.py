"""Trace each kind of block once, as one rank of a tensor-parallel group runs it, on shapes alone."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fmlab.models.families import family_of
from fmlab.models.presets import find_preset
from fmlab.models.state import Block, State, live_names
from fmlab.sim.cores import FusedDropout, attention_core
from fmlab.sim.event import Event, Phase
from fmlab.sim.program import BlockTrace, Chunk, Pass, Program, Tie
from fmlab.sim.regions import Regions
from fmlab.sim.split import Split
from fmlab.sim.stages import (
    Traceable,
    check_tensor,
    cut,
    divide,
    is_layer,
    layer_indices,
    signature,
    ties,
    weights_of,
)

Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Watch(Protocol):
    """What a recorder offers: a context, and what ran in it so far.

    events: in order; live: bytes of what was made inside and is alive; peak: the most at any moment.
    """

    events: list[Event]
    live: int
    peak: int

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


def trace(
    preset: str,
    split: Split,
    rows: int,
    seq_len: int,
    watch: Callable[[str], Watch],
    attention: str = "fused",
    **overrides: Any,
) -> Program:
    """The program of a model under a split.

    rows, seq_len: of one micro-batch. watch: makes a recorder, which knows the chip. attention: see
    fmlab.sim.cores. overrides: fields of the model's config.
    Raises ValueError, with what is legal, for a split that the model cannot have.
    """
    if split.recompute == "selective" and attention == "fused":
        raise ValueError(
            "recompute='selective' makes attention's scores again, which fused attention never keeps; "
            "use recompute='none' or attention='unfused'"
        )
    if split.sequence_parallel and seq_len % split.tensor:
        raise ValueError(f"sequence_parallel: tensor={split.tensor} does not divide seq_len={seq_len}")
    tracer = _Tracer(split, rows, seq_len, watch)
    model = _build(preset, attention, split.recompute, tracer.regions, overrides)
    check_tensor(model, split.tensor)
    ranges = cut(model, split.pipeline * split.virtual_stages)
    parameters = sum(parameter.numel() for _, parameter in model.named_parameters())
    layers = len(layer_indices(model, model.parallel_plan()))
    shared = ties(model, ranges)
    numels = {w.name: w.numel for i in range(len(model.blocks)) for w in weights_of(model, i, split.tensor)}
    chunks = tracer.chunks(model, ranges)
    return Program(
        name=preset,
        split=split,
        rows=rows,
        seq_len=seq_len,
        attention=attention,
        chunks=chunks,
        ties=tuple(Tie(name, numels[name], places) for name, places in shared),
        parameters=parameters,
        layers=layers,
    )


def _build(preset: str, attention: str, recompute: str, regions: Regions, overrides: Any) -> Traceable:
    """The model on meta, with a core and a loss that a trace can follow."""
    family = family_of(preset)
    takes = inspect.signature(family.__init__).parameters
    missing = [name for name in ("attention_core", "cross_entropy") if name not in takes]
    if missing:
        raise ValueError(
            f"a dry run cannot follow {preset}: {family.__name__} takes no {' or '.join(missing)}"
        )
    core = attention_core(attention, again=recompute == "selective")
    family._check_fields(overrides)
    config = family.CONFIG(**(find_preset(preset, dict(family.PRESETS)) | overrides))
    # weights without values need no filling, which on large shapes takes longer than all the rest
    make = cast(Callable[..., Any], type(family.__name__, (family,), {"reset_parameters": lambda self: None}))
    with torch.device("meta"):
        return cast(Traceable, make(config, attention_core=core, cross_entropy=regions.cross_entropy).train())


class _Tracer:
    """Walks over the blocks with the shapes of the state, and traces each kind where it first appears."""

    def __init__(self, split: Split, rows: int, seq_len: int, watch: Callable[[str], Watch]) -> None:
        self.split, self.rows, self.seq_len, self.watch = split, rows, seq_len, watch
        self.current: Watch | None = None
        self.regions = Regions(self.send, split.tensor, split.sequence_parallel)
        self.kinds: dict[tuple[object, ...], tuple[BlockTrace, Outputs]] = {}

    def send(self, collective: str, tensor: Tensor) -> None:
        """Note a message of the tensor group."""
        if self.current is not None:
            event = Event(
                "collective",
                collective,
                seconds=0.0,
                dtype=str(tensor.dtype).removeprefix("torch."),
                live_bytes_after=self.current.live,
                shape=tuple(tensor.shape),
                collective=collective,
                payload_bytes=tensor.numel() * tensor.itemsize,
            )
            self.current.events.append(event)

    def chunks(self, model: Traceable, ranges: list[range]) -> tuple[Chunk, ...]:
        """All chunks of the model, block by block."""
        blocks = [cast(Block, block) for block in model.blocks]
        kinds = [signature(block) for block in blocks]
        weights = [weights_of(model, i, self.split.tensor) for i in range(len(blocks))]
        tied = {name: group[0] for group in model.parallel_plan().tied for name in group}
        state = self._batch(model)
        found = []
        received = 0
        for chunk in ranges:
            traces, kept = [], []
            seen: set[str] = set()
            for i in chunk:
                trace, outputs = self.kinds.get(kinds[i]) or self._trace(model, i, kinds[i], state)
                state = state.updated(**{n: _empty(shape, dtype) for n, (shape, dtype) in outputs.items()})
                traces.append(trace)
                kept.append(tuple(w for w in weights[i] if tied.get(w.name, w.name) not in seen))
                seen.update(tied.get(w.name, w.name) for w in weights[i])
            names = live_names(blocks, chunk.stop) if chunk.stop < len(blocks) else []
            sent = sum(_bytes(state[n]) for n in names if n in state and state[n].is_floating_point())
            found.append(Chunk(chunk, tuple(traces), tuple(kept), sent, received))
            received = sent
        return tuple(found)

    def _batch(self, model: Traceable) -> State:
        ids = torch.zeros(self.rows, self.seq_len, dtype=torch.long, device="cpu")
        try:
            state = model.prepare(input_ids=ids, labels=ids)
            return State({name: x.to("meta") for name, x in state.items()})
        except (TypeError, NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"a dry run gives a model input_ids and labels of {self.rows} x {self.seq_len}; "
                f"{type(model).__name__} does not take them: {error}"
            ) from error

    def _trace(
        self, model: Traceable, i: int, kind: tuple[object, ...], state: State
    ) -> tuple[BlockTrace, Outputs]:
        plan = model.parallel_plan()
        layer = is_layer(model.blocks[i], f"blocks.{i}", plan)
        block = divide(model, i, self.split.tensor, self.split.dtype)
        self.regions.watch(block, f"blocks.{i}", plan)
        looks_up = any(plan.rule(f"blocks.{i}.{n}").kind == "vocab" for n, _ in block.named_parameters())
        spread = block.writes if looks_up and not layer else ()
        made = _OneBlock(self, block, state, spread, again=layer and self.split.recompute == "full")
        self.kinds[kind] = made.trace()
        return self.kinds[kind]


class _OneBlock:
    """Forward and backward passes of one block, with everything it needs as leaves."""

    def __init__(
        self, tracer: _Tracer, block: Block, state: State, spread: tuple[str, ...], again: bool
    ) -> None:
        self.tracer, self.block, self.again, self.spread = tracer, block, again, spread
        self.dtype, self.gradients = tracer.split.dtype, tracer.split.gradient_dtype
        self.state = state.only(block.reads)
        self.state.derived = dict(state.derived)
        try:
            with torch.no_grad():
                self._forward()  # makes what the layers share (masks, rotary angles), which is not ours
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error) and tracer.split.sequence_parallel:
                raise ValueError(
                    f"sequence_parallel: {type(block).__name__} works something out from the length of what "
                    f"it gets, which is a share of the positions here; leave it off "
                    f"({str(error).splitlines()[0]})"
                ) from error
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"a dry run cannot follow {type(block).__name__}: what it does depends on the values of its "
                f"inputs, and there are only shapes ({str(error).splitlines()[0]})"
            ) from error

    def _forward(self) -> dict[str, Tensor]:
        leaves = {
            name: x.detach().requires_grad_() if x.is_floating_point() else x
            for name, x in self.state.items()
        }
        state = State(leaves, derived=self.state.derived)
        after = self.tracer.regions.spread(self.block(state), self.spread)
        return {name: after[name] for name in self.block.writes if name in after}

    def trace(self) -> tuple[BlockTrace, Outputs]:
        """Run it: forward, and backward as for the first and for a later micro-batch."""
        forward, saved, outputs = self._forward_pass()
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in outputs.items()}
        result = sum(_bytes(x) for x in outputs.values() if x.dim())
        del outputs
        first, later = self._backward_pass(first=True), self._backward_pass(first=False)
        return BlockTrace(type(self.block).__name__, forward, first, later, saved, result), shapes

    def _forward_pass(self) -> tuple[Pass, int, dict[str, Tensor]]:
        with self._watched() as watch, torch.set_grad_enabled(not self.again):
            outputs = self._keeping(self._forward)
            saved = watch.live
        return Pass(_phased(watch.events, "forward"), watch.peak), saved, outputs

    def _backward_pass(self, first: bool) -> Pass:
        sums = {id(p): torch.empty_like(p, dtype=self.gradients) for p in self.block.parameters()}
        handles = [
            p.register_post_accumulate_grad_hook(_collect(sums, first)) for p in self.block.parameters()
        ]
        try:
            with self._watched() as watch:
                outputs = self._keeping(self._forward)
                start, before = len(watch.events), watch.live
                if not self.again:  # the forward pass was traced before: only what follows counts
                    watch.peak = before
                roots = [x for x in outputs.values() if x.requires_grad]
                gradients = [_empty(tuple(x.shape), x.dtype) for x in roots]
                del outputs
                torch.autograd.backward(roots, gradients)
        finally:
            for handle in handles:
                handle.remove()
        if self.again:
            return Pass(_phased(watch.events, "backward"), watch.peak, again=start)
        return Pass(_phased(watch.events[start:], "backward"), watch.peak - before)

    def _keeping(self, run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        with self.tracer.regions.keeping_shares(), FusedDropout():
            return run()

    @contextmanager
    def _watched(self) -> Iterator[Watch]:
        self.tracer.current = watch = self.tracer.watch(type(self.block).__name__)
        try:
            with watch:
                yield watch
        finally:
            self.tracer.current = None


def _collect(sums: dict[int, Tensor], first: bool) -> Callable[[Tensor], None]:
    """What becomes of a weight's gradient: the first one is the sum so far, later ones are added to it."""

    def collect(parameter: Tensor) -> None:
        gradient, parameter.grad = cast(Tensor, parameter.grad), None
        total = sums[id(parameter)]
        if not first:
            total.add_(gradient)
        elif gradient.dtype != total.dtype:
            total.copy_(gradient)

    return collect


def _phased(events: Iterable[Event], phase: Phase) -> tuple[Event, ...]:
    return tuple(replace(event, phase=phase) for event in events)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
