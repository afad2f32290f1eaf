"""The software of a chip: is it there, is it the real thing, and how to get it.

The public package registry holds packages under the names of AWS's Neuron software that are empty: they keep
the names and raise ImportError. `pip install torch-neuronx` gets one unless it is told of AWS's own index.
"""

from dataclasses import dataclass
from importlib import import_module, metadata

import torch


@dataclass(frozen=True)
class Stack:
    """A package that brings a device to torch.

    distribution, module: its name to pip, and to import
    placeholders:         versions that are empty packages
    how:                  how to install it, in words
    """

    distribution: str
    module: str
    placeholders: tuple[str, ...]
    how: str

    def version(self) -> str | None:
        """The installed version; None where it is not installed or is a placeholder."""
        version = self._installed()
        return None if version in self.placeholders else version

    def problem(self) -> str:
        """Why it cannot be used, as a sentence with the remedy; "" when it loads."""
        version = self._installed()
        if version is None:
            return f"{self.distribution} is not installed; {self.how}"
        if version in self.placeholders:
            return (
                f"{self.distribution} {version} is an empty package that only keeps the name: "
                f"pip uninstall {self.distribution}; then {self.how}"
            )
        try:
            import_module(self.module)
        except Exception as error:  # a broken installation fails in many ways
            return f"{self.distribution} {version} does not load ({error}); {self.how}"
        return ""

    def _installed(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


NEURON = Stack(
    "torch-neuronx",
    "torch_neuronx",
    ("1.0", "1.0.0"),
    "install torch-neuronx, neuronx-cc and nki of the version of your torch from AWS's Neuron package index "
    "(see the Neuron documentation, 'Quickstart: install and verify torch-neuronx')",
)
TPU = Stack(
    "torch-tpu",
    "torch_tpu",
    (),
    "install torch-tpu (torch 2.11 or newer, on a TPU machine: it registers itself only where it finds one)",
)
XLA = Stack(
    "torch_xla",
    "torch_xla",
    (),
    "pip install '.[xla]' in fmlab's folder, into an environment of its own (torch 2.9)",
)


def native_device() -> str | None:
    """The name of the chip that registered itself with torch as a device of its own and is there, or None.

    Asks only torch and the stack that torch has loaded already; loads nothing.
    """
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if name == "privateuseone" or module is None:
        return None
    try:
        # torch_tpu raises when its own is_available is called by user code: ask torch.accelerator first.
        device = torch.accelerator.current_accelerator(check_available=True)
        present = device is not None and device.type == name
        return name if present or (name != "tpu" and module.is_available()) else None
    except Exception:  # a stack without hardware may fail in its own way
        return None
