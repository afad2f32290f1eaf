"""A chip: its figures, and what is computed from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fmlab.chips.figures import Figure
from fmlab.chips.roofline import Roofline

#: dtype names of torch and others -> ours
DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float64": "fp64",
    "double": "fp64",
    "cfp8": "fp8",
    "mxfp8": "fp8",
}


def dtype_name(dtype: Any) -> str:
    """Our name of a dtype: "bf16" for "bf16", "bfloat16" or torch.bfloat16."""
    name = str(dtype).removeprefix("torch.").lower()
    return DTYPES.get(name, name)


@dataclass(frozen=True)
class Chip:
    """One chip, or one core of a chip where `unit` says so.

    Rates are dense; `figures()` has each number with its unit, convention and source, and what other sources
    say. Where no source gives a figure, its property raises ValueError and nothing is made up.

    name:     what `chip` calls it          title:    the full name
    vendor:   who makes it                  unit:     "chip", or "core" for a part of a chip (`of` names it)
    cores:    cores that it consists of (where published; 1 for a core, 2 for a logical core)
    compiler: "eager", or "static-shape" where each new shape is compiled before it can run
    """

    name: str
    title: str
    vendor: str
    unit: Literal["chip", "core"]
    compiler: Literal["eager", "static-shape"]
    cores: int | None = None
    of: str | None = None
    table: Mapping[str, Figure] = field(default_factory=dict, repr=False, hash=False)

    def figures(self) -> dict[str, Figure]:
        """Every figure by name: "peak.bf16", "achievable.bf16", "memory", "memory_bandwidth", …"""
        return dict(self.table)

    def figure(self, name: str) -> Figure:
        """One figure by name. Raises ValueError when no source gives it."""
        if name not in self.table:
            known = ", ".join(self.table)
            raise ValueError(f"no source gives {name!r} for {self.name}; known: {known}")
        return self.table[name]

    @property
    def dtypes(self) -> list[str]:
        """The dtypes that have a peak."""
        return [name.removeprefix("peak.") for name in self.table if name.startswith("peak.")]

    def peak_flops(self, dtype: Any = "bf16") -> float:
        """FLOPs a second in dense matrix products, as published. ValueError for a dtype without a peak."""
        name = dtype_name(dtype)
        if name not in self.dtypes:
            raise ValueError(
                f"no source gives a {name} rate for {self.name}; it has {', '.join(self.dtypes)}"
            )
        return self.table[f"peak.{name}"].base

    def achievable_flops(self, dtype: Any = "bf16") -> float | None:
        """FLOPs a second that a named source measured in the best matrix product it found, or None."""
        name = dtype_name(dtype)
        self.peak_flops(name)
        figure = self.table.get(f"achievable.{name}")
        return None if figure is None else figure.base

    def roofline(self, dtype: Any = "bf16", achievable: bool = False) -> Roofline:
        """The roofline of a dtype under the published peak, or under the rate that somebody measured."""
        peak = self.peak_flops(dtype)
        if achievable:
            measured = self.achievable_flops(dtype)
            if measured is None:
                raise ValueError(
                    f"no measured {dtype_name(dtype)} rate of {self.name} is known; use achievable=False"
                )
            peak = measured
        return Roofline(peak, self.memory_bandwidth)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return round(self.figure("memory").base)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second to and from its memory."""
        return self.figure("memory_bandwidth").base

    @property
    def on_chip_bytes(self) -> int:
        """Bytes of the largest memory on the chip itself: L2, SBUF or VMEM."""
        return round(self.figure("on_chip").base)

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second that one chip sends to other chips through all its links together: one way."""
        return self.figure("link_bandwidth").base

    @classmethod
    def measured(
        cls,
        name: str,
        flops: Mapping[str, float],
        memory_bandwidth: float,
        memory_bytes: int,
        link_bandwidth: float | None = None,
        how: str = "measured here",
        on_chip_bytes: int | None = None,
        compiler: Literal["eager", "static-shape"] = "eager",
    ) -> "Chip":
        """This machine, or any device somebody measured, as a chip.

        flops: dtype -> FLOPs a second in matrix products. A measured rate is both the peak and what is
            achievable: nothing higher is known. memory_bandwidth, link_bandwidth: bytes a second.
        how: how it was measured; it becomes the source of every figure.
        """
        if not flops:
            raise ValueError("a measured chip needs a rate for one dtype at least: flops={'fp32': ...}")
        table = {}
        for dtype, rate in flops.items():
            for kind in ("peak", "achievable"):
                table[f"{kind}.{dtype_name(dtype)}"] = Figure(rate, "FLOP/s", "dense, measured", how)
        table["memory"] = Figure(memory_bytes, "B", "of the device", how)
        table["memory_bandwidth"] = Figure(memory_bandwidth, "B/s", "measured", how)
        if on_chip_bytes is not None:
            table["on_chip"] = Figure(on_chip_bytes, "B", "last cache", how)
        if link_bandwidth is not None:
            table["link_bandwidth"] = Figure(link_bandwidth, "B/s", "one way, measured", how)
        return cls(name, name, "measured", "chip", compiler, table=table)
