"""What stands in a module for a parameter that is divided: its name and shape, and no numbers."""

from typing import Any

import torch
from torch import Tensor, nn


class DividedParameter(nn.Parameter):
    """Answers questions about shape and type; whatever would need its elements raises RuntimeError."""

    full_name: str
    ranks: int
    by: str
    place: torch.device

    @classmethod
    def standing_for(cls, name: str, parameter: Tensor, ranks: int, by: str) -> "DividedParameter":
        """A stand-in for `parameter`, which is divided among so many ranks by "zero=3" or "fsdp"; it takes no
        memory."""
        meta = torch.empty((), dtype=parameter.dtype, device="meta").expand(parameter.shape)
        made: DividedParameter = torch.Tensor._make_subclass(cls, meta, parameter.requires_grad)
        made.full_name, made.ranks, made.by, made.place = name, ranks, by, parameter.device
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.device.__get__:
            return args[0].place  # where a model makes what it adds to its parameters
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        mine = next(arg for arg in _flat(args, kwargs) if isinstance(arg, cls))
        module = mine.full_name.rpartition(".")[0] or "the model"
        raise RuntimeError(
            f"{module!r} was used outside a forward pass of what holds it: its parameter "
            f"{mine.full_name!r} is divided among {mine.ranks} ranks ({mine.by}) and whole only while the "
            "blocks that hold it run. Call the whole model, on every rank, or read engine.full_params(); a "
            "model that reads it elsewhere in its forward must hold it outside of its blocks too"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DividedParameter({self.full_name!r}, shape={tuple(self.shape)}, among {self.ranks} ranks)"


def _flat(args: Any, kwargs: Any) -> Any:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, list | tuple):
            yield from _flat(value, {})
        else:
            yield value


_HARMLESS = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "layout",
            "requires_grad",
            "is_leaf",
            "grad",
            "grad_fn",
            "ndim",
        )
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_meta", "is_sparse", "is_quantized", "is_cpu", "is_cuda")
    ),
    *(
        getattr(Tensor, name)
        for name in ("size", "dim", "numel", "element_size", "is_floating_point", "is_complex")
    ),
    *(getattr(Tensor, name) for name in ("untyped_storage", "__len__", "__hash__", "nelement", "ndimension")),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
