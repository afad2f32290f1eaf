"""What torch_xla reads from the environment, once: which devices, how hard to compile, what to write down."""

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from fmlab.backends.environment import set_early

#: Compiles a small model's step several times faster; results and fusions stay the same, the programs run
#: somewhat slower. For lessons and tests on the CPU.
FAST_COMPILE = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
#: Programs whose name begins so are written down while they are compiled; see xla_program.
CAPTURED = "captured_"
_folder: tempfile.TemporaryDirectory[str] | None = None


def guess_device() -> str:
    """The kind of device that is here, without loading torch_xla: "TPU", "NEURON" or "CPU"."""
    if os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0"):
        return "TPU"
    return "NEURON" if os.path.exists("/dev/neuron0") else "CPU"


def configure(
    device: str | None = None,
    devices: int | None = None,
    fast_compile: bool = False,
    capture: bool = False,
) -> None:
    """Set up torch_xla for this process; call it before anything of torch_xla runs.

    device:       "CPU", "TPU" or "NEURON"; default: PJRT_DEVICE if it is set, else what is here
    devices:      how many devices the CPU pretends to be, for SPMD
    fast_compile: compile faster and run slower, on the CPU
    capture:      keep the programs that `fmlab.backends.xla_program.capture` asks for

    Raises ValueError for a device that does not exist, and when the runtime of torch_xla has started already
    with other settings: it reads them once.
    """
    device = (device or os.environ.get("PJRT_DEVICE") or guess_device()).upper()
    if device not in ("CPU", "TPU", "NEURON", "CUDA"):
        raise ValueError(f"PJRT_DEVICE={device}: legal are CPU, TPU, NEURON and CUDA")
    wanted = {"PJRT_DEVICE": device}
    if devices is not None:
        if device != "CPU":
            raise ValueError(f"devices={devices} is for the CPU only; a {device} host has the devices it has")
        if devices < 1:
            raise ValueError(f"devices must be at least 1, got {devices}")
        wanted["CPU_NUM_DEVICES"] = str(devices)
    flags = list(FAST_COMPILE) if fast_compile and device == "CPU" else []
    flags += _capture_flags() if capture else []
    present = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in present}
    if missing := [flag for flag in flags if flag.split("=")[0] not in names]:  # the user's own settings win
        wanted["XLA_FLAGS"] = " ".join([*present, *missing])
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if changed and has_started():
        late = ", ".join(f"{name}={value}" for name, value in changed.items())
        raise ValueError(
            f"torch_xla has started already and would not see {late}: restart (in a notebook: Kernel, "
            "Restart) and set it before anything else uses torch_xla"
        )
    for name, value in changed.items():
        if "torch_xla" in sys.modules:
            os.environ[name] = value  # loaded, but its runtime reads these when it starts
        else:
            set_early("torch_xla", name, value)


def has_started() -> bool:
    """Whether the runtime of torch_xla runs in this process: from then on settings do nothing."""
    if "torch_xla" not in sys.modules:
        return False
    return bool(import_module("torch_xla")._XLAC._xla_runtime_is_initialized())


def capture_folder() -> Path | None:
    """Where captured programs appear; None when capturing was not switched on before the start."""
    flags = dict(flag.split("=", 1) for flag in os.environ.get("XLA_FLAGS", "").split() if "=" in flag)
    folder = flags.get("--xla_dump_to")
    return Path(folder) if folder else None


def _capture_flags() -> list[str]:
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="fmlab-xla-")  # removed when the process ends
    return [
        f"--xla_dump_to={_folder.name}",
        "--xla_dump_hlo_as_text=true",
        f"--xla_dump_hlo_module_re=^{CAPTURED}.*",
    ]
