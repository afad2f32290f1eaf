"""The PyTorch device "sim": registered once in a process, with the module `torch.sim` that torch asks of one.

It takes the place that PyTorch keeps for one device from outside (PrivateUse1), so that it cannot live in a
process beside a native TPU or Neuron device. It needs torch 2.10; before, see fmlab.sim.mode.
"""

from typing import Any

import torch
from torch.utils import backend_registration

from fmlab.sim import attached, autocast, dispatch, numerics, raised
from fmlab.sim.memory import BLOCKS, claim_parameters
from fmlab.sim.streams import Event, SimModule, Stream
from fmlab.sim.where import WHERE

NAME = "sim"
_FREE_NAME = "privateuseone"
_libraries: list[Any] = []


def is_possible() -> bool:
    """Whether this torch lets a device be made in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def registered() -> bool:
    """Whether this process has the device "sim" already."""
    return bool(_libraries)


def register() -> None:
    """Make the device "sim" known to torch, once.

    Raises RuntimeError where torch is older than 2.10 or another device has the place.
    """
    if registered():
        torch._C._set_multithreading_enabled(False)  # see below; it holds for the calling thread alone
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _FREE_NAME:
        raise RuntimeError(
            f"torch has room for one device from outside, and this process has {taken!r} there already: run "
            "simulated chips in another process (for a package that loads itself with torch: "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0)"
        )
    if not is_possible():
        raise RuntimeError(
            f"torch {torch.__version__} cannot make a device in Python; use torch 2.10 or later, or "
            "fmlab.sim.mode.simulated_mode, which charges operators on host tensors"
        )
    module = SimModule()
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=module, device_guard=raised.guard()
    )
    raised.install()
    torch._C._set_multithreading_enabled(False)
    # Backward passes run in the thread that asked for them. torch would start one thread for the one device
    # that it believes a Python device to have, and find none for the second.
    everywhere = torch.library.Library("_", "IMPL")
    everywhere.fallback(dispatch.fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        for name, function in numerics.COMPOSITES.items():
            aten.impl(name, function, key)
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _libraries.extend([everywhere, aten, *autocast.register()])
    _watch_resizing()
    torch.serialization.register_package(5, lambda storage: None, _refuse_files)
    WHERE.install()
    WHERE.after_update.append(_close_graphs)
    WHERE.new_root.append(claim_parameters)
    if torch.distributed.is_available():
        kinds: Any = torch.distributed.Backend
        kinds.default_device_backend_map[NAME] = "gloo"
        kinds.backend_capability["gloo"].append(NAME)


def join_groups() -> None:
    """Let gloo groups that were made before the device carry its tensors, as those made later do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for group in torch.distributed.distributed_c10d._world.pg_map:
        if not isinstance(group, torch.distributed.ProcessGroup) or NAME in str(group._device_types):
            continue
        try:
            gloo = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # a group without the host
            continue
        group._register_backend(torch.device(NAME), torch.distributed.ProcessGroup.BackendType.GLOO, gloo)


def _close_graphs() -> None:
    for chip in attached.CHIPS.values():
        chip.flush()


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return dispatch.run(torch.ops.aten.copy_.default, (target, source), {})


def _refuse_files(storage: Any, location: str) -> None:
    """torch.load asks here before it would move a file's memory to the device, which kills the process."""
    if location.split(":")[0] == NAME:
        raise ValueError(
            f"torch.load cannot put numbers onto {location}: load with map_location='cpu', then move them "
            "(load_state_dict copies to where the model is)"
        )


def _watch_resizing() -> None:
    """FSDP frees and allocates gathered weights by the size of their storage: memory must hear of it."""
    kind: Any = torch.UntypedStorage
    original = kind.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        block = BLOCKS.get(storage._cdata)
        if block is not None:
            block.memory.resized(block, int(size))
        return original(storage, size)

    kind.resize_ = resize_


__all__ = ["NAME", "Event", "Stream", "is_possible", "join_groups", "register", "registered"]
