"""A tensor on a simulated chip: torch sees one on the device "sim"; the numbers are a host tensor's.

The class is a wrapper: it has sizes and strides of its own and holds the raw tensor, on the host (or on
"meta" in a dry run). Every operator on it comes to `__torch_dispatch__`.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.sim.memory import block_of

_make: Any = Tensor._make_wrapper_subclass


class SimTensor(Tensor):
    """See the module. `raw` holds the numbers.

    It has no __slots__, since torch exchanges the __dict__ of two tensors (torch.utils.swap_tensors).
    """

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> "SimTensor":
        t = _make(cls, raw.size(), raw.stride(), raw.storage_offset(), None, raw.dtype, raw.layout, device)
        t.raw = raw
        # Lazy conjugates and negatives are a mark on a view: torch resolves them only where it sees the mark.
        if raw.is_conj():
            torch._C._set_conj(t, True)
        if raw.is_neg():
            torch._C._set_neg(t, True)
        return t

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from fmlab.sim.dispatch import run

        return run(op, args, kwargs or {})

    # region memory
    @property
    def data(self) -> Tensor:
        """As everywhere in torch: the same memory without a graph."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        # torch replaces what it sees (`module.to(dtype)` does this); the numbers must follow
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.raw = new.raw  # type: ignore[attr-defined]
        if self._is_param:
            self._enter_as("parameters")

    @property
    def _is_param(self) -> bool:
        """torch marks parameters of tensor subclasses so; here the ledger of memory hears of it too."""
        return self.__dict__.get("parameter", False)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__dict__["parameter"] = value
        if value:
            self._enter_as("parameters")

    def _enter_as(self, line: str) -> None:
        if (block := block_of(self.raw)) is not None:
            block.move_to(line)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The raw tensor's: what shares memory there shares it on the chip."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """An address that tells memories apart: the raw tensor's, or, without numbers, one made up."""
        if self.raw.device.type != "meta":
            return self.raw.data_ptr()
        block = block_of(self.raw)
        start = 0 if block is None else block.serial << 32
        return start + int(self.storage_offset()) * self.element_size()

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is not handed to another tensor while a stream may still use it."""

    # endregion

    # region reads by the host
    def tolist(self) -> Any:
        """A host read. A dry run has no numbers: every one is 1 (or True)."""
        if self.raw.device.type == "meta":
            from fmlab.sim.dispatch import run

            run(torch.ops.aten._local_scalar_dense.default, (self,), {})
            return torch.ones(self.shape, dtype=self.dtype).tolist()
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As on every device: only by way of the host. Raises TypeError in torch's words."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            text = repr(self.raw.detach())
        extra = [f"device='{self.device}'"]
        if self.grad_fn is not None:
            extra.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            extra.append("requires_grad=True")
        text = text.replace("device='meta', ", "").replace(", device='meta'", "")
        text = f"{text[:-1]}, {', '.join(extra)})"
        return f"Parameter containing:\n{text}" if self._is_param else text

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    # endregion

    # region copies of objects
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only graph leaves can be copied by copy.deepcopy; detach the tensor first")
        with torch.no_grad():
            new: Any = self.clone()
        if self._is_param:
            new = torch.nn.Parameter(new, self.requires_grad)
        else:
            new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None:
            new.grad = self.grad.__deepcopy__(memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files and other processes get a host tensor: it loads where there is no simulated chip."""
        host = self.detach().cpu()
        if self._is_param:
            return torch._utils._rebuild_parameter, (host, self.requires_grad, {})
        return host.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    # endregion
