"""Which simulated chip is behind which device index of this process."""

from typing import Any

import torch

from fmlab.sim.simulated import Simulated

#: device index -> chip
CHIPS: dict[int, Simulated] = {}
_current = 0


def current() -> int:
    """The index that "sim" without a number means."""
    return _current


def set_current(index: int) -> None:
    """Make "sim" without a number mean this index. A negative one changes nothing, as torch has it."""
    global _current
    if index >= 0:
        chip_at(index)
        _current = index


def chip_at(device: Any = None) -> Simulated:
    """The chip behind a device or an index; None and "sim" are the current one.

    Raises RuntimeError that says which indices have a chip.
    """
    if isinstance(device, int):
        index = device
    else:
        found = None if device is None else torch.device(device).index
        index = _current if found is None else found
    chip = CHIPS.get(index)
    if chip is None:
        known = ", ".join(f"sim:{i} ({chip.chip.title})" for i, chip in sorted(CHIPS.items()))
        raise RuntimeError(
            f"there is no simulated chip at sim:{index}; attached: {known or 'none'}. "
            'Attach one: fmlab.sim.simulate("h100", count=...)'
        )
    return chip
