"""Where parameters, gradients and optimizer state live on the ranks that have different rows, and how
gradients are summed over them. DDP, ZeRO and FSDP are three answers behind one contract."""

from abc import ABC, abstractmethod

from torch import Tensor
from torch.optim import Optimizer

from fmlab.parallel.build import Build


class States(ABC):
    """One rank's share of the training state. What the optimizer updates stands in the ledger.

    lockstep: whether every rank of the data axis must make the same number of forward and backward passes
    (the
              passes communicate)
    """

    lockstep: bool = False

    def __init__(self, build: Build) -> None:
        self.build, self.ledger = build, build.ledger
        #: All ranks whose gradients belong to one sum: different rows, or different parts of the same rows.
        self.summed = build.mesh.axis("context", "data")

    @abstractmethod
    def start(self) -> None:
        """A step begins: no parameter has a gradient."""

    def last_backward(self) -> None:  # noqa: B027
        """The next backward pass completes the gradients (never said by a pipeline): overlap may begin."""

    @abstractmethod
    def finish(self, sums: Tensor) -> Tensor:
        """All backward passes are done: leave the global gradients in `.grad` of the ledger's parameters.

        Also returns `sums` added up over the ranks of `summed`. A parameter that no rank used has no
        gradient.
        """

    def updated(self) -> None:  # noqa: B027
        """The optimizer has changed the ledger's parameters: bring the model's up to date."""

    def check_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Raise ValueError for an optimizer that would be wrong on what a rank holds."""

    def close(self) -> None:  # noqa: B027
        """Take the hooks off the model."""
