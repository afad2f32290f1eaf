"""Run by test_contracts.py in a process of its own: what fmlab asks of native TorchNeuron."""

import importlib.util
import os
import warnings
from pathlib import Path

os.environ["NEURON_LOGICAL_NC_CONFIG"] = "2"
spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

import pytest  # noqa: E402
import torch  # noqa: E402

from fmlab.backends import available_backends, environment, get_backend  # noqa: E402
from fmlab.backends.neuron_settings import configure  # noqa: E402

module = stand_in.register("neuron", stand_in.NeuronModule())
calls = stand_in.calls


def asked(action):
    """What `action` asked of the device's module."""
    del calls[:]
    action()
    return list(calls)


# found first, and by its number
assert available_backends()[:1] != ["neuron"]
assert "neuron" in available_backends()
assert get_backend("auto").name == "neuron"
assert get_backend("neuron:native", index=2).device == torch.device("neuron", 2)
assert module.index == 2
with pytest.raises(ValueError, match=r"sees 4.*NEURON_RT_VISIBLE_CORES"):
    get_backend("neuron", index=4)
os.environ["LOCAL_WORLD_SIZE"] = "4"  # a launched rank takes the core it was given
module.index = 1
assert get_backend("neuron", index=3).device.index == 1
del os.environ["LOCAL_WORLD_SIZE"]
module.index = 0
backend = get_backend("neuron")
assert backend.distributed_backend == "neuron"
assert "trn2" in backend.describe()
assert "2 core(s) to a logical one" in backend.describe()

# memory is read after the device was waited for
before = module.known
assert asked(lambda: backend.memory_stats()) == ["synchronize"]
assert backend.memory_stats()["current"] > before
assert asked(backend.reset_peak_memory) == ["synchronize", "reset_peak_memory_stats"]
assert backend.memory_summary().startswith("allocated")
assert asked(lambda: backend.seed(7)).count("manual_seed_all(7)") >= 1
assert "Stream" in asked(lambda: backend.on(backend.stream()))

# compile: the Neuron backend, one graph, no dynamic shapes
settings = {}
original, torch.compile = torch.compile, lambda fn, **given: settings.update(given) or fn
backend.compile(torch.sin)
assert settings == {"backend": "neuron", "fullgraph": True, "dynamic": False}
backend.compile(torch.sin, fullgraph=False)
assert settings["fullgraph"] is False
with pytest.raises(ValueError, match=r"no dynamic shapes.*pad to fixed lengths"):
    backend.compile(torch.sin, dynamic=True)
torch.compile = original

# the training loop, with tied weights, gives the losses of the CPU
from fmlab.train import TrainConfig, train  # noqa: E402

shared = dict(steps=2, batch_size=2, seq_len=32, eval_every=0, log_every=0)
losses = {name: train(TrainConfig(backend=name, **shared)).losses for name in ("cpu", "neuron")}
assert all(abs(a - b) < 1e-4 for a, b in zip(*losses.values(), strict=True)), losses
state = backend.to_host(backend.to_device(torch.nn.Linear(2, 2)).state_dict())
assert state["weight"].device.type == "cpu"

# settings come before the library is loaded, or with a warning
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    configure(stochastic_rounding=True, rounding_seed=3)
    assert not caught, "nothing was loaded yet"
    environment._seen["torch_neuronx"] = environment._relevant("torch_neuronx")  # as when it is imported
    configure(stochastic_rounding=False)
    assert "NEURON_RT_STOCHASTIC_ROUNDING_EN was changed after torch_neuronx" in str(caught[0].message)
assert "to nearest" in backend.describe()
