"""What a rank owns of a vector of parameters: the slice that its optimizer updates, and the slice's gradient.

The optimizer works in fp32 (fp64 for fp64 parameters). Where the parameters are bf16, the slice is a master
copy of them in fp32, and what the optimizer makes of it (moments) is fp32 too. With offload it all lies in
the host's memory, where the update happens; gradients come in as they are summed, new weights go out.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fmlab.parallel.ledger import Ledger
from fmlab.parallel.zero.partition import Flat

_BY_ELEMENT = "Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"
_BY_MATRIX = {
    "Adafactor": "keeps sums over the rows and columns of a matrix",
    "LAMB": "scales by the norm of a whole parameter",
    "LARS": "scales by the norm of a whole parameter",
    "LBFGS": "takes inner products over all parameters",
    "Muon": "makes whole matrices orthogonal",
    "Shampoo": "keeps statistics of the rows and columns of a matrix",
    "SOAP": "keeps statistics of the rows and columns of a matrix",
    "SparseAdam": "takes sparse gradients",
}


class Owned:
    """This rank's slice of a `Flat`.

    master:   [length], the weights that the optimizer updates
    gradient: [length], summed over ranks (None until the first sum of a step arrives)
    """

    def __init__(self, flat: Flat, own: Tensor, on_host: bool) -> None:
        """own: [length], this rank's slice of the weights; where it will do, it is the master itself."""
        self.flat, self.on_host = flat, on_host
        device = torch.device("cpu") if on_host else own.device
        same = own.dtype == flat.wide and not on_host
        self.master = own if same else own.to(device, flat.wide, copy=True)
        self.gradient: Tensor | None = None
        self.pieces = {
            name: nn.Parameter(piece, requires_grad=flat.trainable)
            for name, piece in flat.pieces(self.master).items()
        }

    def note(self, ledger: Ledger) -> None:
        """Tell the ledger what is held here from now on."""
        for name, piece in self.pieces.items():
            ledger.cut(name, self.flat.axis, self.flat.rules[name], piece)

    def clear(self) -> None:
        """Forget the gradient of the step before."""
        self.gradient = None
        for piece in self.pieces.values():
            piece.grad = None

    def add(self, summed: Tensor) -> None:
        """Take in the sum over ranks of one backward pass, [length]; it is kept, unless it lies elsewhere."""
        summed = summed.to(self.master.device, copy=self.on_host)
        self.gradient = summed if self.gradient is None else self.gradient.add_(summed)

    def show_gradients(self, used: Iterable[str]) -> None:
        """Give the optimizer the gradients of the parameters that some rank `used`."""
        assert self.gradient is not None
        gradients = self.flat.pieces(self.gradient)
        for name in set(used) & set(self.pieces):
            self.pieces[name].grad = gradients[name]


def check_by_element(optimizer: Optimizer) -> None:
    """Refuse an optimizer that looks at more than one element at a time: a slice is no matrix.

    One that asks for norms of whole parameters (its `measure`, which the engine sets) may scale by them. Of
    optimizers that are not torch's only the best-known are known here; any other must update each element
    from that element's own history alone. Raises ValueError.
    """
    if hasattr(optimizer, "measure"):
        return
    for kind in type(optimizer).__mro__:
        why = _BY_MATRIX.get(kind.__name__) or _BY_MATRIX.get(kind.__name__.upper())
        if why:
            raise ValueError(
                f"{type(optimizer).__name__} {why}, but with zero=1, 2 or 3 a rank has slices that begin "
                f"and end anywhere; use one that works element by element ({_BY_ELEMENT}), or zero=0"
            )
