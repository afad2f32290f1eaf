"""One kernel, two ways to run: compiled where its tensors are on a GPU, interpreted on the CPU.

    @kernel
    def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    double[(4,)](x, y, 1000, 256)         four programs, on whichever device x and y are

Triton itself chooses once, when it is imported (TRITON_INTERPRET=1 or not). Here the choice is made at each
launch, so that one process can interpret a kernel, count its bytes, and compile it for a GPU elsewhere.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmlab.kernels.triton import interpreter

Grid = tuple[int, ...] | Callable[[Mapping[str, Any]], tuple[int, ...]]


def kernel(fn: Callable[..., None]) -> "Kernel":
    """Make a Triton function a kernel: `name[grid](arguments)` runs it; see this module.

    A parameter called DOT is filled in: the dtype that tl.dot multiplies in, that of the first tensor on a
    GPU and fp32 in the interpreter, whose bf16 is not a number (`fmlab.kernels.triton.interpreter`).
    """
    return Kernel(fn)


class Kernel:
    """A Triton function, to be launched over a grid of programs."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.__wrapped__ = fn
        parameters = inspect.signature(fn).parameters
        self.parameters = tuple(parameters)
        self.constants = tuple(
            name for name, one in parameters.items() if one.annotation in (tl.constexpr, "tl.constexpr")
        )

    def __repr__(self) -> str:
        return f"kernel {self.__name__}({', '.join(self.parameters)})"

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{self.__name__} runs over a grid of programs: write {self.__name__}[grid](...)")

    def launch(self, grid: Grid, *args: Any, **kwargs: Any) -> None:
        """Run every program of the grid; returns when they are done on a CPU, when they are queued on a GPU.

        kwargs that are no parameters (num_warps, num_stages) go to the compiler, not to the interpreter.
        Raises ValueError for arguments that do not fit, tensors on different devices, or on neither.
        """
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.parameters}
        arguments = self.bind(args, kwargs)
        size = tuple(grid(arguments)) if callable(grid) else tuple(grid)
        if not 1 <= len(size) <= 3 or any(one < 1 for one in size):
            raise ValueError(
                f"grid {size} of {self.__name__}: give 1 to 3 numbers of programs, each 1 or more"
            )
        if self.device(arguments).type == "cpu":
            interpreter.run(self, size, self.completed(arguments, tl.float32))
        elif interpreter.observers:
            raise ValueError("bytes are counted in the interpreter: give tensors on the CPU")
        else:
            self.compiled[size](**self.completed(arguments), **options)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name -> argument. Raises ValueError where they are not those of the kernel; DOT may be left out."""
        signature = inspect.signature(self.fn)
        try:
            arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        except TypeError as error:
            raise ValueError(f"{self.__name__}: {error}; its parameters are {self.parameters}") from None
        missing = [name for name in self.parameters if name not in arguments and name != "DOT"]
        if missing:
            raise ValueError(f"{self.__name__} got no {', '.join(missing)}")
        return arguments

    def completed(self, arguments: Mapping[str, Any], dot: Any = None) -> dict[str, Any]:
        """The arguments with DOT filled in where the kernel has it and nobody gave it."""
        if "DOT" not in self.parameters or "DOT" in arguments:
            return dict(arguments)
        if dot is None:
            first = next(one for one in arguments.values() if isinstance(one, Tensor))
            dot = DOTS[first.dtype]
        return {**arguments, "DOT": dot}

    def device(self, arguments: Mapping[str, Any]) -> torch.device:
        """Where all tensors are. Raises ValueError when that is not one CPU or one GPU."""
        places = {one.device for one in arguments.values() if isinstance(one, Tensor)}
        if len(places) != 1:
            found = ", ".join(sorted(map(str, places))) or "no tensor at all"
            raise ValueError(f"{self.__name__} got tensors on: {found}; give them on one device")
        place = places.pop()
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"{self.__name__} got tensors on {place}; kernels run on cpu and cuda")
        return place

    @cached_property
    def compiled(self) -> Any:
        """Triton's own function, which compiles for the GPU at hand at its first launch."""
        interpreter.refuse_environment()
        return triton.JITFunction(self.fn)


class Tuned:
    """A kernel that tries several constants at the first launch of a shape, and keeps the fastest; on a GPU.

    choices: pairs of constants and compiler options; key: the parameters that make a shape.
    """

    def __init__(
        self, what: Kernel, choices: Sequence[tuple[dict[str, int], dict[str, int]]], key: Sequence[str]
    ) -> None:
        configs = [triton.Config(constants, **options) for constants, options in choices]
        self.kernel, self.tried = what, tuple(choices[0][0])
        self.tuner = triton.autotune(configs, key=list(key))(what.compiled)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if interpreter.observers:
                raise ValueError("bytes are counted in the interpreter: give tensors on the CPU")
            given = dict(zip((n for n in self.kernel.parameters if n not in self.tried), args, strict=False))
            self.tuner[grid](**self.kernel.completed(given))

        return launch


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers: about 16 numbers a thread, 4 to 16 warps."""
    return min(16, max(4, block // 512))


DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
