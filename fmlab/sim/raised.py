"""Errors of Python code in a backward pass on simulated chips, carried past the guard of the device's stream.

When a hook, a Function or a simulated operator raises inside a backward pass, torch leaves the error with the
interpreter while it unwinds, and its guard of the stream asks the device for its type on the way. A device
made in Python answers with Python code, which ends under a pending error as an error of its own: torch does
not expect one there and ends the process. So the answer is given without the error, and whoever asked for the
backward pass gets it afterwards.
"""

import ctypes
import functools
import threading
from typing import Any

import torch

_held = threading.local()  # .error: what was pending last, in this thread
_pending = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_Occurred", ctypes.pythonapi))
_KIND = torch._C._autograd.DeviceType.PrivateUse1


def guard() -> Any:
    """What tells torch the type of the device; register it before the first backward pass."""

    class Guard(torch._C._acc.DeviceGuard):  # not in torch before 2.10
        def type_(self) -> Any:
            try:
                _pending()  # ctypes raises the error that is pending after a call, so that it is no longer
            except BaseException as error:  # also an interrupt
                _held.error = error
            return _KIND

    return Guard()


def install() -> None:
    """Let backward passes raise the error that the guard kept, where torch says that it has none."""
    found = torch.autograd.graph._engine_run_backward

    @functools.wraps(found)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        _held.error = None
        try:
            return found(*args, **kwargs)
        except SystemError:
            error, _held.error = getattr(_held, "error", None), None
            if error is None:
                raise
            raise error from None

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
