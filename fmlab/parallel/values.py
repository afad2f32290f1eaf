"""Settings as users give them: each becomes a plain Python value, or a ValueError that says what is legal.

`given` is how the caller names what it was given, such as "Layout(data=0)".
"""

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any


def whole(value: Any, given: str, least: int = 1) -> int:
    """`value` as an int; numbers of numpy and torch too, but no bool, float or text."""
    number = index(value)
    if number is None or number < least:
        raise ValueError(f"{given}: give a whole number, {least} or more")
    return number


def above_zero(value: Any, given: str, advice: str) -> float:
    """`value` as a finite number above 0."""
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"{given}: {advice}")
    return number


def one_of(value: Any, legal: Sequence[Any], given: str) -> Any:
    """The one of `legal` (words, or whole numbers) that `value` is."""
    plain = value if isinstance(value, str) else index(value)
    found = [one for one in legal if type(one) is type(plain) and one == plain]
    if not found:
        raise ValueError(f"{given}: legal are {', '.join(map(str, legal))}")
    return found[0]


def each_once(value: Any, names: Sequence[str], given: str) -> tuple[str, ...]:
    """`value` as a tuple that has each of `names` once."""
    order = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if sorted(map(str, order)) != sorted(names):
        raise ValueError(f"{given}: name each of {', '.join(names)} once, neighbours in number first")
    return order


def places(value: Any, words: Sequence[str], given: str) -> str | tuple[int, ...]:
    """One of `words`, or a tuple of indices, also as a text such as "3,6" (from a shell)."""
    if isinstance(value, str) and value not in words:
        value = [int(part) if part.strip().isdecimal() else None for part in value.split(",")]
    if isinstance(value, str):
        return value
    numbers = [index(one) for one in value] if isinstance(value, Iterable) else [None]
    found = tuple(number for number in numbers if number is not None and number >= 0)
    if len(found) < len(numbers):
        raise ValueError(f"{given}: legal are {', '.join(words)}, or indices of blocks such as (3, 6)")
    return found


def real(value: Any) -> float | None:
    """A number as a float, infinite where no float is so large; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value == abs(value) else -math.inf


def index(value: Any) -> int | None:
    """A whole number as an int; None for what is none, and for what is wider than 64 bits. Numpy's and
    torch's truth values are none either."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None
