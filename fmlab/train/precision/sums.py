"""Adding many small numbers to a large one, when the sum is kept in few bits.

Shapes: s numbers in a row, ... independent sums beside each other.
"""

import torch
from torch import Tensor

from fmlab.train.precision.formats import Format, number_format
from fmlab.train.precision.rounding import round_to

WAYS = ("nearest", "stochastic", "zero", "kahan")


def running_sum(
    numbers: Tensor,
    fmt: str | torch.dtype | Format,
    start: Tensor | float = 0.0,
    how: str = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """start + numbers[0] + numbers[1] + … where the sum is rounded to `fmt` after every addition.

    numbers: [s,...]; start: a number or [...]; returns [...] in fp32.
    how: "nearest", "zero", "stochastic" (see round_to), or "kahan": nearest, with what each addition loses
    kept in a second number of the same format (Kahan 1965)

    Raises ValueError for another way.
    """
    if how not in WAYS:
        raise ValueError(f"there is no way {how!r} to add; legal are {', '.join(WAYS)}")
    fmt = number_format(fmt)
    total = round_to(torch.as_tensor(start, dtype=torch.float32).expand(numbers.shape[1:]).clone(), fmt)
    lost = torch.zeros_like(total)
    for number in numbers.float():
        if how == "kahan":
            total, lost = kahan_add(total, lost, number, fmt)
        else:
            total = round_to(total.double() + number, fmt, how, generator=generator).float()
    return total


# region kahan
def kahan_add(total: Tensor, lost: Tensor, number: Tensor, fmt: str | Format) -> tuple[Tensor, Tensor]:
    """(total + number, what that lost): both kept in `fmt`. `lost` is what earlier additions lost."""
    wanted = number + lost
    new = round_to(total + wanted, fmt)
    return new, round_to(wanted - (new - total), fmt)


# endregion
