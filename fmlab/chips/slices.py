"""The shapes of TPU slices, and which of their axes wrap.

A torus of v4, v5p or v7 is built from cubes of 4 x 4 x 4 joined by optical switches: all axes wrap when the
slice is made of whole cubes, none does otherwise. In v5e and v6e, whose pods are square, an axis wraps only
when it is as long as the pod's; v3 is taken as they are (jax-ml/scaling-book, tpus.md).
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

Wrap = Literal["full cubes", "whole axis"]
CUBE = 4


def slice_shape(chips: int, block: Sequence[int], pod: Sequence[int] | None) -> tuple[int, ...]:
    """The most even shape of a slice with so many chips.

    block: the chips of one host, along each axis; a slice's axes are multiples of a host's, in some order.
    pod: the largest slice, or None where only its number of chips is known.
    Raises ValueError when there is none.
    """
    shapes = [shape for shape in _factors(chips, len(block)) if _legal(shape, block, pod)]
    if not shapes:
        limit = "" if pod is None else f" of at most {by(pod)}"
        raise ValueError(
            f"{chips} chips make no slice{limit} out of hosts of {by(block)}: "
            f"take another number of hosts, or give shape="
        )
    return min(shapes, key=lambda shape: (max(shape) - min(shape), shape))


def wraps(shape: Sequence[int], pod: Sequence[int] | None, rule: Wrap) -> tuple[bool, ...]:
    """Whether each axis of a slice is closed to a ring."""
    if rule == "full cubes":
        return (all(size % CUBE == 0 for size in shape),) * len(shape)
    assert pod is not None
    return tuple(size == max(pod) for size in shape)


def by(shape: Sequence[int]) -> str:
    """How a shape is written: 4 x 4 x 8."""
    return " x ".join(map(str, shape))


def check_shape(shape: Sequence[int], chips: int, pod: Sequence[int] | None) -> None:
    """Raise ValueError for a shape that is no slice of so many chips."""
    if prod(shape) != chips:
        raise ValueError(f"a slice of {by(shape)} has {prod(shape)} chips, the hosts have {chips}")
    if pod is not None and (len(shape) != len(pod) or not _fits(shape, pod)):
        raise ValueError(f"the largest slice is {by(pod)}, not {by(shape)}")


def _factors(number: int, axes: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many rising factors."""
    if axes == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, axes - 1, first))


def _legal(shape: Sequence[int], block: Sequence[int], pod: Sequence[int] | None) -> bool:
    if pod is not None and not _fits(shape, pod):
        return False
    if len(shape) == 3 and prod(shape) >= CUBE**3 and any(size % CUBE for size in shape):
        return False  # beyond one cube, whole cubes only
    return all(size % part == 0 for size, part in zip(sorted(shape), sorted(block), strict=True))


def _fits(shape: Sequence[int], pod: Sequence[int]) -> bool:
    return all(size <= whole for size, whole in zip(sorted(shape), sorted(pod), strict=True))
