"""What the three stages have in common: slices with their optimizer, and the end of a step."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fmlab.parallel.build import Build
from fmlab.parallel.states import States
from fmlab.parallel.zero.owned import Owned, check_by_element
from fmlab.parallel.zero.partition import Axes, Flat, plan_flats
from fmlab.parallel.zero.summing import ScatteringReducer


class DividedStates(States):
    """States of which each data rank owns a slice."""

    owned: Sequence[Owned]

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.axes = Axes(build)
        self.stage = build.layout.zero
        self.on_host = build.layout.offload != "none"
        self.trained = list(build.ledger.trainable())  # names only: to keep them whole is not meant

    def check_optimizer(self, optimizer: Optimizer) -> None:
        check_by_element(optimizer)

    @abstractmethod
    def weights_held(self) -> list[Tensor]:
        """The parameters that this rank holds on its device between steps."""

    def gradients_held(self) -> list[Tensor]:
        """The gradients that this rank holds after a step."""
        return [mine.gradient for mine in self.owned if mine.gradient is not None]

    # region used
    def _agree_on_used(self, sums: Tensor, used: set[str]) -> tuple[Tensor, list[str]]:
        """(`sums` over ranks, the parameters that some rank used): one message.

        What no rank used has no gradient, as on one device: the optimizer leaves it alone.
        """
        flags = torch.tensor([float(name in used) for name in self.trained]).to(sums)
        message = self.summed.all_reduce_(torch.cat([sums, flags]))
        ranks = message[len(sums) :].tolist()
        return message[: len(sums)], [name for name, n in zip(self.trained, ranks, strict=True) if n]

    # endregion

    def _show_gradients(self, used: list[str]) -> None:
        """The sums of one copy of the states are here: add up those of the other copies, and hand them on."""
        for mine in self.owned:
            if mine.gradient is not None:
                mine.flat.copies.all_reduce_(mine.gradient)
                mine.show_gradients(used)


class WholeParameters(DividedStates):
    """Stages 1 and 2: every rank has all parameters, and the optimizer's state of its slices.

    Stage 1 keeps all gradients of the rank's own rows too; stage 2 gives them back once they were sent.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.trainable = build.ledger.trainable()
        flats = plan_flats(self.trainable, self.axes, build.layout.bucket_mb * 2**20)
        #: The weights of each vector, of which the model's parameters are views.
        self.weights = [self._flatten(flat) for flat in flats]
        self.owned = [
            Owned(flat, weights[flat.own], self.on_host)
            for flat, weights in zip(flats, self.weights, strict=True)
        ]
        for mine in self.owned:
            mine.note(self.ledger)
        self.reducer = ScatteringReducer(self.trainable, self.owned, frees=self.stage == 2)

    def _flatten(self, flat: Flat) -> Tensor:
        vector = flat.fill(self.trainable)
        for name, view in flat.views(vector).items():
            self.trainable[name].data = view
        return vector

    def start(self) -> None:
        for mine in self.owned:
            mine.clear()
        self.reducer.start()

    def last_backward(self) -> None:
        self.reducer.expect_last_backward()

    def finish(self, sums: Tensor) -> Tensor:
        self.reducer.finish()
        sums, used = self._agree_on_used(sums, self.reducer.used)
        self._show_gradients(used)
        return sums

    # region updated
    @torch.no_grad()
    def updated(self) -> None:
        """Each rank has new weights in its slices: gather everyone's."""
        work = []
        for mine, weights in zip(self.owned, self.weights, strict=True):
            own = weights[mine.flat.own]
            if mine.master.data_ptr() != own.data_ptr():  # a master copy: rounded, or moved to the device
                own.copy_(mine.master)
            work.append(self.all_gather(mine.flat, weights, own))
        for one in work:
            if one is not None:
                one.wait()

    def all_gather(self, flat: Flat, weights: Tensor, own: Tensor) -> Any:
        """Fill `weights` with all ranks' slices; returns what to wait for."""
        return flat.axis.all_gather_into(weights, own, async_op=not flat.axis.ours)

    # endregion

    def weights_held(self) -> list[Tensor]:
        return self.weights

    def gradients_held(self) -> list[Tensor]:
        rooms = [vector.room for vector in self.reducer.vectors if vector.room is not None]
        return [*rooms, *super().gradients_held()]

    def close(self) -> None:
        self.reducer.close()
