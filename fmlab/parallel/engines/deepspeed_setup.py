"""DeepSpeed inside processes that torch has joined already, without a compiler and without its launcher."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional


def load() -> Any:
    """The package deepspeed, ready for this process.

    Sets, once and for the whole process: the variable DS_ACCELERATOR to "cpu" where there is no GPU and it is
    not set (DeepSpeed would look for one), and DeepSpeed's logger to errors. Its C++ all-reduce in shared
    memory, which it would compile for a minute or more, is left out.

    Raises ValueError without the package.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with quiet():
            deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"engine 'deepspeed' needs the package ({error}); install the extra: "
            "pip install 'fmlab[deepspeed]'"
        ) from error
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    # A pipeline leaves its grid behind, and engines made later would take it for theirs.
    groups: Any = import_module("deepspeed.utils.groups")
    groups.mpu = None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # The process group is there: this makes DeepSpeed use it.
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed


@contextmanager
def linear_meanwhile(linear: Any = None) -> Iterator[None]:
    """Whatever torch's linear is replaced by, by `linear` or inside the block, it is itself again afterwards.

    ZeRO 3 puts a linear of its own in the place of torch's, for good. Other models of the process would then
    keep other tensors for their backward passes, and peaks measured later would be those of DeepSpeed.
    """
    before = functional.linear
    if linear is not None:
        functional.linear = linear
    try:
        yield
    finally:
        functional.linear = before


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings about names of torch that DeepSpeed still uses and hooks that it does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*For backward hooks to be called", category=UserWarning)
        yield
