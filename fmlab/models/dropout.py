"""Dropout whose mask depends on where an element stands in the whole, not on who draws it.

Ordinary dropout takes the next numbers of a generator, so that a mask depends on which tensors a process
holds and in which order it meets them. Here a mask is a function of (seed, step, block, place in the block,
number of the element in the undivided tensor): any division of the work over ranks and micro-batches draws
the same one, and so does a second forward pass that recomputes the first (counter-based random numbers,
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; mixing by splitmix64, Steele et al. 2014).

An engine says what a process holds, around its forward passes:

    with drawing_masks(Masks(seed, step, numbers={"b": from_number(first_row)})): model(...)

and a model, what the dims of a tensor are: `drop_out(hidden, p, training, "bld")`. Without an engine's masks
that is torch's own dropout.

Letters of dims: b row; l position in the stream between layers; q position inside a layer, s position looked
at; d feature of the stream, f feature inside a layer, h head, y and x of a pixel. Elements along a dim of
which an engine says nothing are numbered from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: How many elements a process holds along a dim -> their numbers in the whole, int64 [n] if not consecutive.
Numbers = Callable[[int], range | Tensor]

_LANES, _LEVELS = 4, 2**16  # 16-bit numbers in one hash of 64 bits
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number: 0x9E3779B97F4A7C15
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass
class Masks:
    """Draws the masks of one forward pass.

    Args:
        seed, step: of the run; another step has other masks.
        numbers: for each letter of a dim which elements this process holds, if not all.
        block: number of the model's block that is running; `begin` sets it.
        place: how many masks the block has drawn.
    """

    seed: int
    step: int
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    block: int = -1
    place: int = 0

    def begin(self, block: int) -> None:
        """A block of the model begins: its places are counted from 0."""
        self.block, self.place = block, 0

    def next_key(self) -> int:
        """The key of the next mask of this block."""
        key = 0
        for part in (self.seed, self.step, self.block, self.place):
            key = _mix_number(key ^ _mix_number(part + 1))
        self.place += 1
        return key

    def kept(
        self,
        shape: torch.Size,
        dims: str,
        p: float,
        device: torch.device,
        key: int | None = None,
        at: Mapping[str, range | Tensor] | None = None,
    ) -> Tensor:
        """Bool of `shape`, False where an element is dropped, with probability round(65536 p) / 65536.

        dims: a letter for each dim. key: of the mask, if it is drawn in parts; else the next one. at: numbers
        [n] of the elements along some dims, instead of those this process holds (a tile of a table).
        """
        key = self.next_key() if key is None else key
        at = at or {}
        sizes = zip(dims, shape, strict=True)
        held = [at[letter] if letter in at else self.numbers_of(letter, n) for letter, n in sizes]
        return _bits(key, held, device) >= _dropped_levels(p) - _LEVELS // 2

    def numbers_of(self, letter: str, n: int) -> range | Tensor:
        """Which elements of the whole the `n` are that this process holds along a dim."""
        return self.numbers.get(letter, range)(n)


_current: ContextVar[Masks | None] = ContextVar("dropout masks", default=None)


def current_masks() -> Masks | None:
    """A copy of the masks in force: what `drawing_masks` needs to draw the next ones again."""
    masks = _current.get()
    return None if masks is None else replace(masks)


@contextmanager
def drawing_masks(masks: Masks | None) -> Iterator[None]:
    """Inside, `drop_out` draws from `masks`; with None it is torch's."""
    token = _current.set(None if masks is None else replace(masks))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def holding(**numbers: Numbers) -> Iterator[None]:
    """Inside, this process holds other elements along these dims than around; places go on being counted.

    For a part of a model that divides its work in another way (heads instead of positions).
    """
    masks = _current.get()
    if masks is None:
        yield
        return
    before, masks.numbers = masks.numbers, {**masks.numbers, **numbers}
    try:
        yield
    finally:
        masks.numbers = before


def begin_block(number: int) -> None:
    """A block of the model begins; see Masks.begin."""
    if (masks := _current.get()) is not None:
        masks.begin(number)


def next_key() -> int:
    """The key of the next mask; see Masks.next_key. Only where `draws_masks()`."""
    masks = _current.get()
    assert masks is not None
    return masks.next_key()


def draws_masks() -> bool:
    """Whether an engine has said what this process holds."""
    return _current.get() is not None


def drop_out(x: Tensor, p: float, training: bool, dims: str) -> Tensor:
    """x with elements set to 0 with probability p and the others divided by 1 - p, while `training`.

    dims: a letter for each dim of x, see above. p is rounded to 1 / 65536 where an engine's masks are drawn.
    """
    if not p or not training:
        return x
    masks = _current.get()
    if masks is None:
        return F.dropout(x, p)
    return _Masked.apply(x, masks.kept(x.shape, dims, p, x.device), scale_of(p))


def scale_of(p: float) -> float:
    """What kept elements are multiplied by, so that the mean stays."""
    return _LEVELS / (_LEVELS - _dropped_levels(p))


class _Masked(torch.autograd.Function):
    """Forward and backward: times the mask, times the scale. Kept: the mask, a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return torch.where(kept, x, 0).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return torch.where(kept, d_out, 0).mul_(ctx.scale), None, None


# ---- which elements a process holds ------------------------------------------------------------------------


def from_number(first: int) -> Numbers:
    """Consecutive elements, the first of which has this number."""
    return lambda n: range(first, first + n)


def chunk_number(rank: int) -> Numbers:
    """The `rank`-th of several chunks of equal length."""
    return lambda n: range(rank * n, (rank + 1) * n)


# ---- hashing -----------------------------------------------------------------------------------------------


def _dropped_levels(p: float) -> int:
    return min(round(p * _LEVELS), _LEVELS - 1)


# region bits
def _bits(key: int, held: Sequence[range | Tensor], device: torch.device) -> Tensor:
    """A number of -2^15 ... 2^15 - 1 for each element, int16; `held` are the numbers along each dim.

    Each dim is folded into the hash of those before it. Of the last, four neighbours share a hash of 64 bits
    and take 16 of it each, so that a pass over the hashes of all elements is two bytes an element.
    """
    *leading, last = held
    hashes = torch.full((), key, dtype=torch.int64, device=device)
    for numbers in leading:
        hashes = _fold(hashes, _as_tensor(numbers, device))
    if isinstance(last, range) and last.step == 1:
        groups = torch.arange(last.start // _LANES, -(-last.stop // _LANES), device=device)
        bits = _fold(hashes, groups).view(torch.int16)
        return bits[..., last.start % _LANES :][..., : len(last)]
    last = _as_tensor(last, device)
    bits = _fold(hashes, last // _LANES).view(torch.int16).unflatten(-1, (-1, _LANES))
    lane = (last % _LANES).expand(bits.shape[:-1])
    return bits.gather(-1, lane[..., None]).squeeze(-1)


def _fold(hashes: Tensor, numbers: Tensor) -> Tensor:
    """Hashes [..., n] from those of the dims before [...] and numbers [n]."""
    return _mix_(hashes[..., None] ^ _mix_(numbers * _GOLDEN))


def _as_tensor(numbers: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
    return numbers.to(device)


def _mix_(x: Tensor) -> Tensor:
    """splitmix64's finalizer, in place: every bit of the result depends on every bit of x (int64)."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # >> is arithmetic: the mask clears the copied sign
        x *= multiplier
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


# endregion


def _mix_number(x: int) -> int:
    """The same of a Python number, as a signed number of 64 bits."""
    x &= 2**64 - 1
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & (2**64 - 1)
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x
