"""Run by test_contracts.py in a process of its own: what fmlab asks of TorchTPU."""

import importlib.util
import os
from pathlib import Path

spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

import pytest  # noqa: E402
import torch  # noqa: E402

from fmlab.backends import get_backend  # noqa: E402

stand_in.register("tpu", stand_in.TPUModule())
waited = []
torch.accelerator.synchronize = waited.append  # the stand-in has no queues to wait for


backend = get_backend("auto")
assert backend.name == "tpu"
backend.synchronize()
assert waited == [torch.device("tpu", 0)]
assert backend.device_count() == 1
assert backend.memory_stats() == {"total": 96 * 2**30}, "TorchTPU shows no public counter"
with pytest.raises(ValueError, match="tpu backend cannot start a new count"):
    backend.reset_peak_memory()
assert backend.stream() is None
assert backend.distributed_backend == "tpu_dist"
assert "1/2 of a chip" in backend.describe()
with pytest.raises(ValueError, match=r"bound to TPU device 0.*torch\.tpu\.distributed"):
    get_backend("tpu", index=1)
os.environ["LOCAL_WORLD_SIZE"] = "4"
assert get_backend("tpu", index=3).device == torch.device("tpu", 0), (
    "each rank sees its own device as the first"
)
del os.environ["LOCAL_WORLD_SIZE"]

settings = {}
torch.compile = lambda fn, **given: settings.update(given) or fn
backend.compile(torch.sin)
assert settings == {}, "backend and dynamic are left to TorchTPU, which chooses where nothing is said"
backend.compile(torch.sin, dynamic=True)
assert settings == {"dynamic": True}

backend.set_matmul_precision("medium")
assert "medium" in backend.describe()
model = backend.to_device(torch.nn.Linear(2, 1))
with backend.autocast("bf16"):
    model(backend.to_device(torch.ones(3, 2))).sum().backward()
assert model.weight.grad.device.type == "tpu"
