"""Serving a decoder: memory, time to the first token, time of each further one, tokens a second.

    one = serve_plan("llama3.1-70b", chip="h100", tensor=8, batch=16, prompt=1024, generated=256)
    print(one)                                memory and times, line by line
    one.first_token, one.each_token           seconds
    one.tokens_per_second, one.largest_batch
    for other in one.over((1, 8, 64)): ...    latency against throughput

A roofline: what is multiplied at the rate of large matrix products, what is read at the memory's bandwidth,
and the longer of the two counts. Prefill works on all positions of a prompt at once and is bound by the
products. Decoding reads every weight and the whole cache for one position a sequence, and is bound by memory
until the batch is large (Pope et al. 2022, arXiv:2211.05102, section 2). All sequences of a batch begin
together and have equal lengths. Everything is modelled, and the constants are those of training.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fmlab.chips import Chip
from fmlab.parallel import Layout
from fmlab.parallel.values import one_of, whole
from fmlab.planner.calibration import Calibration
from fmlab.planner.hardware import Hardware, hardware
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.parts import MOST, LayerGroup
from fmlab.planner.passes import passes_of
from fmlab.planner.setup import Setup
from fmlab.planner.shapes import model_shape

#: bytes of a number: of weights, of the cache
WEIGHTS = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
CACHE = {"bf16": 2.0, "fp8": 1.0}
STREAM_BYTES = 2  # of a number between the layers

#: line -> how it is worked out
FORMULAS: dict[str, str] = {
    "weights": "parameters on the rank x bytes of a weight",
    "cache": "sequences x positions x layers x 2 (keys, values) x key/value heads on the rank x head width",
    "working memory": "of a layer at work on the prompts: the stream twice, and its widest tensors",
    "runtime": "what the chip's runtime and the communication library take themselves",
    "reserve": "a share of all lines above",
    "matrices": "longer of: weights that are read / bandwidth; 2 FLOPs a sequence and element / rate",
    "attention": "longer of: cache that is read / bandwidth; 4 FLOPs a position and unit of a head / rate",
    "memory passes": "norms, additions, activation functions, rotations of the prompts",
    "messages": "two all-reduces of the stream a layer, and the logits of all ranks",
}


@dataclass(frozen=True, repr=False)
class ServePlan:
    """Serving one batch on `tensor` chips. Every number is modelled; make it with `serve_plan`.

    batch: sequences at a time. prompt, generated: tokens of each. weights, cache: how they are kept.
    """

    shape: ModelShape
    machine: Hardware
    tensor: int
    batch: int
    prompt: int
    generated: int
    weights: str = "bf16"
    cache: str = "bf16"

    # ---- memory --------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """On a rank; tensor ranks divide each expert too."""
        return sum(
            part.count * part.on(self.tensor, split_experts=True)
            if isinstance(part, LayerGroup)
            else part.count * part.on(self.tensor)
            for part in self.shape.parts
        )

    # region cache
    def cache_bytes(self, positions: int) -> float:
        """Keys and values of one sequence on a rank; a layer with a window keeps no more than it sees."""
        return sum(
            group.count
            * _visible(group, positions)
            * 2 * group.kv_heads_on(self.tensor) * group.head_width
            * CACHE[self.cache]
            for group in self.shape.layers
        )  # fmt: skip

    # endregion

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of each line on a rank, when the last token has been generated."""
        one = self.machine.calibration
        lines = {
            "weights": self.parameters * WEIGHTS[self.weights],
            "cache": self.batch * self.cache_bytes(self.prompt + self.generated),
            "working memory": self.batch * self._working,
            "runtime": one.context_bytes,
        }
        return lines | {"reserve": one.reserve * sum(lines.values())}

    @property
    def _working(self) -> float:
        """Of one prompt."""
        inner = max(
            max(g.active_ffn * (g.branches - 1), g.query_width + 2 * g.kv_width) / self.tensor + 2 * g.width
            for g in self.shape.layers
        )
        return self.prompt * inner * STREAM_BYTES

    @property
    def peak_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """None where no source gives the chip's memory."""
        return None if self.machine.capacity is None else self.peak_memory <= self.machine.capacity

    @property
    def lacking(self) -> float:
        """Bytes that a rank lacks; 0 where it fits. ValueError for an unknown memory."""
        if self.machine.capacity is None:
            raise ValueError(f"no source gives the memory of {self.machine.chip.name}")
        return max(0.0, self.peak_memory - self.machine.capacity)

    def changed(self, **values: Any) -> "ServePlan":
        """The same with other fields (tensor, batch, prompt, …). Raises ValueError like `serve_plan`."""
        kept = ("tensor", "batch", "prompt", "generated", "weights", "cache")
        asked = {name: getattr(self, name) for name in kept} | values
        return serve_plan(self.shape, machine=self.machine, **asked)

    @property
    def largest_batch(self) -> int:
        """The most sequences of these lengths that fit; 0 where the weights do not. ValueError for an unknown
        memory."""
        if self.machine.capacity is None:
            raise ValueError(f"no source gives the memory of {self.machine.chip.name}")
        room = self.machine.capacity / (1 + self.machine.calibration.reserve)
        room -= self.memory["weights"] + self.memory["runtime"]
        return max(0, int(room // (self.cache_bytes(self.prompt + self.generated) + self._working)))

    # ---- time ----------------------------------------------------------------------------------------------

    @cached_property
    def prefill(self) -> dict[str, float]:
        """Seconds of the pass over all prompts, by line: what a training step's forward pass takes, with the
        logits of each last position only. Weights are read in 16 bits here, as products take them."""
        setup = Setup(
            self.shape,
            Layout(tensor=self.tensor),
            self.batch,
            {self.shape.streams[0].name: self.prompt},
            split_experts=True,
        )
        # nothing of another micro-batch hides its messages
        exposed = self.machine.calibration.changed(hidden_tensor=0.0)
        machine = replace(self.machine, calibration=exposed)
        found = dict.fromkeys(("matrices", "attention", "memory passes", "messages"), 0.0)
        for group in self.shape.layers:
            there, _, _ = passes_of(group, setup, machine)
            for name, value in zip(
                found, (there.products, there.attention, there.memory, there.tensor), strict=True
            ):
                found[name] += group.count * value
        found["matrices"] += self._roof(self.batch, self._head, self._head)
        found["messages"] += self._gathered_logits
        return {name: value for name, value in found.items() if value}

    def decode(self, positions: int) -> dict[str, float]:
        """Seconds of one step for all sequences, by line, when each attends to so many positions."""
        _counted("positions", positions)
        return {
            "matrices": self._matrices,
            "attention": self._attention(positions, positions),
            "messages": self._decode_messages,
        }

    def decode_flops(self, positions: int) -> float:
        """FLOPs of one step for all sequences on a rank: 2 a sequence and element of what its position meets,
        4 a position and unit of a head."""
        _counted("positions", positions)
        found = 2.0 * self._head
        for group in self.shape.layers:
            dense, expert = _elements(group, self.tensor)
            found += 2.0 * group.count * (dense + group.experts_per_token * expert)
            found += 4.0 * group.count * _visible(group, positions) * group.query_width / self.tensor
        return self.batch * found

    def decode_bytes(self, positions: int) -> dict[str, float]:
        """Bytes that one step for all sequences reads on a rank: of matrices, and of the cache."""
        _counted("positions", positions)
        elements = self._head
        for group in self.shape.layers:
            dense, expert = _elements(group, self.tensor)
            elements += group.count * (dense + _experts_met(group, self.batch) * expert)
        cache = self.batch * self.cache_bytes(positions)
        return {"matrices": elements * WEIGHTS[self.weights], "cache": cache}

    # region roofline
    def _roof(self, rows: float, multiplied: float, read: float) -> float:
        """Seconds of products: `multiplied` elements meet each row, `read` elements come from memory."""
        computed = 2 * rows * multiplied / self.machine.rate("bf16")
        return max(computed, read * WEIGHTS[self.weights] / self.machine.bandwidth)

    @cached_property
    def _matrices(self) -> float:
        """Of a decoding step: layers and logits. Of experts, those that some sequence is sent to are read."""
        seconds = self._roof(self.batch, self._head, self._head)
        for group in self.shape.layers:
            dense, expert = _elements(group, self.tensor)
            sent = dense + group.experts_per_token * expert
            read = dense + _experts_met(group, self.batch) * expert
            seconds += group.count * self._roof(self.batch, sent, read)
        return seconds

    def _attention(self, first: int, last: int) -> float:
        """Scores and values of one new position a sequence; the mean of steps from `first` to `last`."""
        rate = self.machine.rate("bf16") * self.machine.calibration.attention_share(self.machine.chip)
        seconds = 0.0
        for group in self.shape.layers:
            flops = 4.0 * group.query_width / self.tensor
            read = 2 * group.kv_heads_on(self.tensor) * group.head_width * CACHE[self.cache]
            each = max(flops / rate, read / self.machine.bandwidth)
            seconds += group.count * _mean_visible(group, first, last) * each
        return self.batch * seconds

    # endregion

    @property
    def _head(self) -> float:
        """Elements of the output matrix on a rank."""
        return sum(-(-head.outputs // self.tensor) * head.width for head in self.shape.heads)

    @cached_property
    def _decode_messages(self) -> float:
        payload = float(self.batch * STREAM_BYTES)
        halves = (
            group.count * 2 * self._collective("all_reduce", payload * group.width)
            for group in self.shape.layers
        )
        return sum(halves) + self._gathered_logits

    @property
    def _gathered_logits(self) -> float:
        return self._collective("all_gather", float(self.batch * self.shape.vocab_size * STREAM_BYTES))

    def _collective(self, kind: str, payload: float) -> float:
        if self.tensor == 1:
            return 0.0
        wires = self.machine.need_wires(self.tensor)
        return wires.seconds(kind, payload, wires.group(self.tensor, 1), self.machine.calibration)

    @cached_property
    def first_token(self) -> float:
        """Seconds until the prompts are read and the first token of each sequence is there."""
        return sum(self.prefill.values())

    @cached_property
    def each_token(self) -> float:
        """Mean seconds of a further token of a sequence: of the second to the last."""
        first, last = self.prompt + 1, self.prompt + max(1, self.generated - 1)
        return self._matrices + self._decode_messages + self._attention(first, last)

    @property
    def seconds(self) -> float:
        """Until the batch is done."""
        return self.first_token + (self.generated - 1) * self.each_token

    @property
    def tokens_per_second(self) -> float:
        """Generated, of all sequences together."""
        return self.batch * self.generated / self.seconds

    @property
    def bound(self) -> str:
        """What takes most of a decoding step: "matrices", "attention" or "messages"."""
        lines = self.decode(self.prompt + self.generated)
        return max(lines, key=lines.__getitem__)

    def over(self, batches: Iterable[int]) -> list["ServePlan"]:
        """The same with other batches: what more throughput costs in latency. Raises ValueError like
        `serve_plan`."""
        return [replace(self, batch=_counted("batch", one)) for one in batches]

    # ---- words ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"<ServePlan: {self.shape.name} on {self.tensor} x {self.machine.chip.name}, batch {self.batch}, "
            f"first token {self.first_token:.3g} s, then {self.each_token * 1e3:.3g} ms each>"
        )

    def __str__(self) -> str:
        from fmlab.planner.serve_words import text

        return text(self)


def serve_plan(
    model: str | ModelShape | Any,
    *,
    chip: str | Chip | None = None,
    tensor: int = 1,
    batch: int = 1,
    prompt: int,
    generated: int,
    weights: str = "bf16",
    cache: str = "bf16",
    host: str | None = None,
    network_bandwidth: float | None = None,
    calibration: Calibration | None = None,
    machine: Hardware | None = None,
) -> ServePlan:
    """Plan serving a decoder with tensor parallelism.

    Args:
        model, chip, host, network_bandwidth, calibration, machine: as for `plan`.
        tensor: chips that divide every matrix, experts too, and the key/value heads.
        batch: sequences at a time. prompt, generated: tokens of each.
        weights: "bf16", "fp8", "int8" or "int4" in memory; products are in bf16. cache: "bf16" or "fp8".

    Raises ValueError, with what is legal, for models that generate no text, for degrees that do not divide,
    and for more tokens than the model has positions. A plan that does not fit says so.
    """
    shape = model_shape(model)
    decoder = all(group.causal and not group.cross_width for group in shape.layers)
    writes = shape.vocab_size > 0 and any(head.outputs for head in shape.heads)
    if len(shape.streams) > 1 or not decoder or not writes:
        raise ValueError(f"{shape.name} is no decoder of text: GPT, Llama, Qwen2 and Mixtral are served")
    if machine is None:
        machine = hardware(chip, host, network_bandwidth, calibration)
    elif any(one is not None for one in (chip, host, network_bandwidth, calibration)):
        raise ValueError("machine= brings its chip, host, network and calibration: leave the others out")
    one_of(weights, tuple(WEIGHTS), f"weights={weights!r}")
    one_of(cache, tuple(CACHE), f"cache={cache!r}")
    numbers = dict(tensor=tensor, batch=batch, prompt=prompt, generated=generated)
    counted = {name: _counted(name, number) for name, number in numbers.items()}
    shape.lengths(counted["prompt"] + counted["generated"])
    if counted["tensor"] > 1:
        machine.need_wires(counted["tensor"])
    machine.peak("bf16")  # raises for a chip without it
    made = ServePlan(shape, machine, **counted, weights=weights, cache=cache)
    _ = made.parameters  # raises for a degree that does not divide a part
    return made


def _counted(name: str, value: Any) -> int:
    number = whole(value, f"{name}={value!r}")
    if number > MOST:
        raise ValueError(f"{name}={value}: more than {MOST} cannot be meant")
    return number


def _visible(group: LayerGroup, positions: int) -> int:
    return min(group.window, positions) if group.window else positions


def _mean_visible(group: LayerGroup, first: int, last: int) -> float:
    """The mean of _visible over positions from `first` to `last`."""
    if not group.window or group.window >= last:
        return (first + last) / 2
    if group.window <= first:
        return float(group.window)
    grows = group.window - first + 1
    total = grows * (first + group.window) / 2 + (last - group.window) * group.window
    return total / (last - first + 1)


def _elements(group: LayerGroup, tensor: int) -> tuple[float, float]:
    """(elements of a layer's matrices on a rank that every position meets, of one routed expert)."""
    kv = group.kv_heads_on(tensor) * group.head_width
    own = group.width * (2 * group.query_width / tensor + 2 * kv) + group.router
    always = group.shared_ffn if group.experts else group.ffn
    dense = own + group.branches * group.width * always / tensor + group.other_matrices
    return dense, group.expert_matrices / tensor if group.experts else 0.0


def _experts_met(group: LayerGroup, sequences: int) -> float:
    """How many experts of a layer are met by some of the tokens, if each goes to any of them alike."""
    if not group.experts:
        return 0.0
    return group.experts * (1 - (1 - group.experts_per_token / group.experts) ** sequences)
