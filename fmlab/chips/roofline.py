"""The roofline: what a chip can do at most with an operation, from its FLOPs and its bytes alone.

Williams, Waterman and Patterson, "Roofline", CACM 2009. An operation of intensity I FLOPs a byte runs at most
at min(peak, I x bandwidth) FLOPs a second; the intensity where both are equal is the ridge.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Roofline:
    """peak: FLOPs a second. bandwidth: bytes a second to and from memory."""

    peak: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.peak > 0 and self.bandwidth > 0):
            raise ValueError(f"peak and bandwidth are above 0, not {self.peak!r} and {self.bandwidth!r}")

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which computing is the limit, below which memory is."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOPs a second at most, at so many FLOPs a byte."""
        if intensity < 0:
            raise ValueError(f"an intensity is in FLOPs a byte, not below 0: {intensity!r}")
        return min(self.peak, intensity * self.bandwidth)

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time for so much work (modelled): computing and moving overlap, nothing else costs."""
        _not_negative(flops, nbytes)
        return max(flops / self.peak, nbytes / self.bandwidth)

    def bound(self, flops: float, nbytes: float) -> Literal["compute", "memory"]:
        """What takes longer. On the ridge itself: compute."""
        _not_negative(flops, nbytes)
        return "compute" if flops / self.peak >= nbytes / self.bandwidth else "memory"


def _not_negative(flops: float, nbytes: float) -> None:
    if flops < 0 or nbytes < 0:
        raise ValueError(f"FLOPs and bytes are not below 0: {flops!r}, {nbytes!r}")
