"""What a published peak does not say: the shares of it that real steps reach, as few numbers as will do.

    Calibration()                         the documented defaults below
    Calibration(memory=0.7)               one of them changed
    Calibration.read("mine.toml")         from a file; a field that it leaves out keeps its default
    fitted()                              what was fitted to published runs, if this package has it

Each field is something that somebody could measure on its own. What the chips' own figures say (peaks,
bandwidths, rates of the best matrix product that a named source found) comes from fmlab.chips.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fmlab.chips import Chip, dtype_name

FILE = "calibration.toml"


@dataclass(frozen=True)
class Calibration:
    """Shares are above 0 and at most 1, the rest at least 0.

    matmul:           chip, or "chip dtype" -> share of the published peak that large matrix products reach.
                      Without an entry: what a named source measured (fmlab.chips), else `matmul_default`.
    matmul_default:   for a chip that nobody measured
    rows_half:        rows at which a product reaches half of that: n rows reach n / (n + rows_half)
    width_half:       the same for the narrowest side of a rank's matrix
    attention:        share of the matrix rate that fused attention reaches, of the pairs that it computes
    attention_of:     chip -> the same for this chip: kernels were written for one generation at a time
    misaligned:       share of their rate that products keep when the narrowest side of a rank's matrix is no
                      multiple of 64: tiles are then partly empty (BigScience, tr11-176B chronicles)
    memory:           share of the memory's bandwidth that passes over tensors reach
    passes:           times the bytes that the formulas count, that layers' passes over tensors really move,
                      where kernels are fused (by hand, or by a compiler)
    passes_eager:     the same where operators run one by one, with casts and copies between them
    inside, between:  share of the links' bandwidth that collectives reach inside a host (or what the chips'
                      own links join), and between hosts
    hop_inside, hop_between: seconds that a message waits before its first byte arrives
    launch:           seconds that the host takes to start the kernels of one layer, forward; a layer takes at
                      least that. Chips whose programs are compiled whole ("static-shape") take none
    hidden_gradients: share of the backward pass behind which gradients' messages can hide
    hidden_gathers:   share of a pass behind which gathers of divided parameters can hide
    hidden_tensor, hidden_context, hidden_expert, hidden_pipeline: shares of those messages that are hidden
    host_link:        bytes a second of a chip's link to its host's memory, one way; 0: not known, and no plan
                      can offload. host_memory: of a host's memory, the part that one chip's update gets
    step:             seconds of a step that are none of this: data, logging, the host's own work
    reserve:          share of the memory that allocators' rounding and fragmentation take
    context_bytes:    bytes that the runtime itself takes (CUDA's context, NCCL's buffers)
    """

    matmul: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_default: float = 0.75
    rows_half: float = 128.0
    width_half: float = 128.0
    attention: float = 0.5
    attention_of: Mapping[str, float] = field(default_factory=dict, hash=False)
    misaligned: float = 0.8
    memory: float = 0.8
    passes: float = 1.0
    passes_eager: float = 2.0
    inside: float = 0.8
    between: float = 0.8
    hop_inside: float = 3e-6
    hop_between: float = 15e-6
    launch: float = 100e-6
    hidden_gradients: float = 0.8
    hidden_gathers: float = 0.8
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0
    hidden_expert: float = 0.0
    hidden_pipeline: float = 0.0
    host_link: float = 0.0
    host_memory: float = 0.0
    step: float = 0.0
    reserve: float = 0.05
    context_bytes: float = 1.5e9

    _ABOVE_0 = ("matmul_default", "attention", "misaligned", "memory", "inside", "between")
    _SHARES = ("hidden_gradients", "hidden_gathers", "hidden_tensor", "hidden_context", "hidden_expert")
    _UP_TO_1 = (*_ABOVE_0, *_SHARES, "hidden_pipeline", "reserve")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("matmul", "attention_of"):
                for chip, share in value.items():
                    self._check(f"{one.name}[{chip!r}]", share, 0.0, 1.0, True)
                continue
            most = 1.0 if one.name in self._UP_TO_1 else float("inf")
            self._check(one.name, value, 0.0, most, one.name in self._ABOVE_0)

    @staticmethod
    def _check(name: str, value: Any, low: float, high: float, above: bool) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or value == float("inf") or (above and value == low):
            limits = f"{'above ' if above else 'at least '}{low:g}" + (
                "" if high > 1 else f" and up to {high:g}"
            )
            raise ValueError(f"Calibration({name}={value!r}): give a number {limits}")

    def changed(self, **values: Any) -> "Calibration":
        """The same with other values."""
        known = [one.name for one in fields(self)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"a calibration has no {', '.join(unknown)}; it has {', '.join(known)}")
        return replace(self, **values)

    def matmul_share(self, chip: Chip, dtype: Any) -> float:
        """The share of the chip's published peak that large products of this dtype reach."""
        name = dtype_name(dtype)
        other = "bf16" if name == "fp16" else name  # the same units multiply both
        for key in (f"{chip.name} {name}", f"{chip.name} {other}", chip.name):
            if key in self.matmul:
                return self.matmul[key]
        measured = chip.achievable_flops(name)
        return self.matmul_default if measured is None else measured / chip.peak_flops(name)

    def attention_share(self, chip: Chip) -> float:
        """The share of its matrix rate that fused attention reaches on a chip; of a core, as on its chip."""
        return self.attention_of.get(chip.name, self.attention_of.get(chip.of or "", self.attention))

    @classmethod
    def read(cls, path: str | Path) -> "Calibration":
        """From a TOML file: `field = value` lines, and a table [matmul]. Raises ValueError for what it has
        not."""
        return cls().changed(**tomllib.loads(Path(path).read_text("utf-8")).get("calibration", {}))


@cache
def fitted() -> Calibration:
    """The calibration that this package was fitted to published runs with; the defaults if it has none."""
    where = files("fmlab.planner").joinpath(FILE)
    if not where.is_file():
        return Calibration()
    return Calibration().changed(**tomllib.loads(where.read_text("utf-8"))["calibration"])
