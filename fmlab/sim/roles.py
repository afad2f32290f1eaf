"""Trace each kind of block once, as one rank of a tensor-parallel group runs it, on shapes alone."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fmlab.models.families import family_of
from fmlab.models.presets import find_preset
from fmlab.models.state import Block, State, live_names
from fmlab.sim.block_run import BlockRun, Outputs, empty, size_of
from fmlab.sim.cores import Again, attention_core
from fmlab.sim.program import BlockTrace, Chunk, Program, Tie
from fmlab.sim.recorder import Recorder
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


def trace(
    preset: str,
    split: Split,
    rows: int,
    seq_len: int,
    recorder: Recorder,
    attention: str = "fused",
    **overrides: Any,
) -> Program:
    """The program of a model under a split.

    rows, seq_len: of one micro-batch. recorder: of the chip, not yet entered. attention: see
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
    tracer = _Tracer(split, rows, seq_len, recorder)
    again = recorder.making_again if split.recompute == "selective" else None
    model = _build(preset, attention, again, tracer.regions, overrides)
    check_tensor(model, split.tensor)
    ranges = cut(model, split.pipeline * split.virtual_stages)
    parameters = sum(parameter.numel() for _, parameter in model.named_parameters())
    layers = len(layer_indices(model, model.parallel_plan()))
    shared = ties(model, ranges)
    numels = {w.name: w.numel for i in range(len(model.blocks)) for w in weights_of(model, i, split.tensor)}
    with recorder:
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


def _build(preset: str, attention: str, again: Again | None, regions: Regions, overrides: Any) -> Traceable:
    """The model on meta, with a core and a loss that a trace can follow."""
    family = family_of(preset)
    takes = inspect.signature(family.__init__).parameters
    missing = [name for name in ("attention_core", "cross_entropy") if name not in takes]
    if missing:
        raise ValueError(
            f"a dry run cannot follow {preset}: {family.__name__} takes no {' or '.join(missing)}"
        )
    core = attention_core(attention, again)
    family._check_fields(overrides)
    config = family.CONFIG(**(find_preset(preset, dict(family.PRESETS)) | overrides))
    # weights without values need no filling, which on large shapes takes longer than all the rest
    make = cast(Callable[..., Any], type(family.__name__, (family,), {"reset_parameters": lambda self: None}))
    with torch.device("meta"):
        return cast(Traceable, make(config, attention_core=core, cross_entropy=regions.cross_entropy).train())


class _Tracer:
    """Walks over the blocks with the shapes of the state, and traces each kind where it first appears."""

    def __init__(self, split: Split, rows: int, seq_len: int, recorder: Recorder) -> None:
        self.split, self.rows, self.seq_len, self.recorder = split, rows, seq_len, recorder
        self.regions = Regions(self.send, split.tensor, split.sequence_parallel)
        self.kinds: dict[tuple[object, ...], tuple[BlockTrace, Outputs]] = {}

    def send(self, collective: str, tensor: Tensor) -> None:
        """Note a message of the tensor group."""
        self.recorder.message(collective, tensor)

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
                state = state.updated(**{n: empty(shape, dtype) for n, (shape, dtype) in outputs.items()})
                traces.append(trace)
                kept.append(tuple(w for w in weights[i] if tied.get(w.name, w.name) not in seen))
                seen.update(tied.get(w.name, w.name) for w in weights[i])
            names = live_names(blocks, chunk.stop) if chunk.stop < len(blocks) else []
            sent = sum(size_of(state[n]) for n in names if n in state and state[n].is_floating_point())
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
        again = layer and self.split.recompute == "full"
        run = BlockRun(block, state, self.split, self.recorder, self.regions, spread, again)
        self.kinds[kind] = run.trace()
        return self.kinds[kind]
