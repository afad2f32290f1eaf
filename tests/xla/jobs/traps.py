"""A backward pass before torch_xla, which autograd never forgives; and a device that does not exist."""

import json
import os
import warnings

import torch

from fmlab.backends import get_backend
from fmlab.backends.environment import LateEnvironmentWarning
from fmlab.backends.registry import detect
from fmlab.backends.xla_environment import configure

found: dict[str, object] = {"auto": detect()}
torch.ones((), requires_grad=True).mul(1.0).backward()
for name, call in {
    "backward first": lambda: get_backend("xla"),
    "device": lambda: configure("GPU9"),
    "devices": lambda: configure("TPU", devices=8),
    "none": lambda: configure("CPU", devices=0),
}.items():
    try:
        call()
    except ValueError as error:
        found[name] = str(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    os.environ["XLA_FLAGS"] = "--xla_dump_to=somewhere"
    from fmlab.backends.environment import warn_if_late

    warn_if_late("torch_xla")
found["warned"] = [str(w.message) for w in caught if issubclass(w.category, LateEnvironmentWarning)]
print(json.dumps(found))
