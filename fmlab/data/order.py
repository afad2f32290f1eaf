"""The order in which windows of a corpus come: a function of (seed, step), whatever the number of ranks.

An epoch is a permutation of the windows drawn from (seed, epoch). Step s takes the windows s * batch_size
onwards of the endless row of epochs: an epoch whose windows do not fill the last batch is continued by the
next one, and every batch is full. Rank r of n takes the r-th n-th of the batch. What is random inside a
window (masks, spans, pairs) depends on (seed, epoch, window) alone, so that ranks and resumed runs agree.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmlab.data.batch import Batch

EVALUATION = -1  # the epoch of windows that are evaluated: always the same random choices


class Window(NamedTuple):
    """One row to make. number -1: a row without targets, which fills up the last batch of an evaluation."""

    epoch: int
    number: int
    offset: int  # how far the windows of this epoch are moved


class Resumable:
    """Batches by number, taken one after another from `step` on, and taken up again where they stopped."""

    step: int

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """The settings that a saved step only makes sense with."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        """Endless batches from the current step on."""
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: the step, and the settings that it only makes sense with."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved step; the world size may differ. Raises ValueError when the data has changed."""
        changed = [
            f"{key}: {state.get(key)!r} in the checkpoint, {value!r} now"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if changed:
            raise ValueError("cannot resume with other data; " + "; ".join(changed))
        self.step = int(state["step"])


class WindowSampler(Resumable):
    """Batches of this rank; a subclass says how many windows there are and turns them into rows.

    It sets `windows` (of an epoch) and `evaluation_windows`, calls this `__init__`, and defines `_rows`.

    batch_size: sequences of the global batch, over all ranks
    seed:       of order and of all that is random in a window; every rank passes the same
    versions:   how many versions of the random choices in a window there are: None makes new ones in every
                epoch, 1 keeps the same for ever, n comes round after n epochs
    offsets:    the windows of an epoch are moved by a random offset below this
    """

    def __init__(
        self,
        windows: int,
        evaluation_windows: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        versions: int | None = None,
        offsets: int = 1,
    ) -> None:
        """Raises ValueError when batch_size is not divisible by world_size, or there is no such rank."""
        check_batch_size(batch_size, world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 to {world_size - 1}")
        if versions is not None and versions < 1:
            raise ValueError(f"versions must be at least 1, or None for new ones every epoch, got {versions}")
        self.windows_per_epoch, self.evaluation_windows = windows, evaluation_windows
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.versions = versions
        self.step = 0
        self._offsets = offsets
        self._epoch: tuple[int, int, NDArray[np.int64]] = (-1, 0, np.empty(0, np.int64))

    # ---- for a subclass to say -----------------------------------------------------------------------------

    def _rows(self, windows: Sequence[Window]) -> Batch:
        """A batch with a row for each window."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """The settings that a saved step only makes sense with."""
        return {"seed": self.seed, "batch_size": self.batch_size}

    # ---- batches -------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        return self._rows([self._window(first + i) for i in range(share)])

    def evaluation(self, max_batches: int | None = None) -> Iterator[Batch]:
        """Every window of the whole corpus once, over all ranks together, in order.

        Every rank gets the same number of batches of the same shape; rows that fill up the last one have no
        labels (-100). With max_batches, that many batches of windows spread evenly over the corpus.
        """
        for numbers in evaluation_shares(
            self.evaluation_windows, self.batch_size, self.rank, self.world_size, max_batches
        ):
            yield self._rows([Window(EVALUATION, number, 0) for number in numbers])

    def epoch_of(self, step: int) -> float:
        """How many epochs have been seen before step `step`."""
        return step * self.batch_size / self.windows_per_epoch

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self._identity().items())
        return f"{type(self).__name__}({self.windows_per_epoch:,} windows an epoch, {settings})"

    # ---- randomness ----------------------------------------------------------------------------------------

    def _window(self, index: int) -> Window:
        """Window number `index` of the endless row of epochs."""
        epoch, place = divmod(index, self.windows_per_epoch)
        if self._epoch[0] != epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            offset = int(random.integers(self._offsets))
            self._epoch = (epoch, offset, random.permutation(self.windows_per_epoch))
        return Window(epoch, int(self._epoch[2][place]), self._epoch[1])

    def _random(self, window: Window) -> np.random.Generator:
        """The random numbers of one window: the same on every rank and in a resumed run."""
        version = window.epoch
        if self.versions is not None and version != EVALUATION:
            version %= self.versions
        return np.random.Generator(np.random.PCG64([self.seed, version + 1, window.number + 1, 1]))


def evaluation_shares(
    windows: int, batch_size: int, rank: int, world_size: int, max_batches: int | None
) -> Iterator[list[int]]:
    """This rank's window numbers of each batch of an evaluation; -1 for rows that only fill up the last one.

    Raises ValueError when batch_size is not divisible by world_size.
    """
    check_batch_size(batch_size, world_size)
    chosen = np.arange(windows)
    if max_batches is not None and windows > max_batches * batch_size:
        chosen = np.linspace(0, windows - 1, max_batches * batch_size).astype(np.int64)
    share = batch_size // world_size
    for first in range(0, len(chosen), batch_size):
        mine = range(first + rank * share, first + (rank + 1) * share)
        yield [int(chosen[i]) if i < len(chosen) else -1 for i in mine]


def check_batch_size(batch_size: int, world_size: int, micro_batches: int = 1) -> None:
    """Raise ValueError unless every rank and micro-batch gets the same, non-zero number of sequences."""
    parts = world_size * micro_batches
    if batch_size < 1 or batch_size % parts:
        near = max(1, round(batch_size / parts)) * parts
        legal = sorted({max(parts, near - parts), near, near + parts})
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {world_size} ranks x {micro_batches} "
            f"micro-batches; legal: multiples of {parts}, such as {', '.join(map(str, legal))}"
        )
