"""TPUs and NeuronCores as torch_xla drives them, as far as its CPU goes; the device is faked."""

import json
import os
import sys
import types

os.environ["PJRT_DEVICE"] = "CPU"
neuronx = types.ModuleType("torch_neuronx")
neuronx.trace = lambda model, example, **options: ("traced", model.training, options)
sys.modules["torch_neuronx"] = neuronx

import torch  # noqa: E402

from fmlab.backends import get_backend, neuron, neuron_xla, tpu  # noqa: E402
from fmlab.backends.xla_environment import configure  # noqa: E402
from fmlab.train import TrainConfig, train  # noqa: E402

configure(fast_compile=True)

neuron.through_xla = tpu._through_xla = lambda: True  # what PJRT_DEVICE=NEURON or TPU would say
found = {}
for name in ("neuron", "tpu"):
    backend = get_backend(name)
    found[name] = {
        "name": backend.name,
        "device": backend.device.type,
        "distributed": backend.distributed_backend,
        "class": type(backend).__name__,
    }
try:
    get_backend("neuron:native")
except ValueError as error:
    found["native"] = str(error)
shared = dict(steps=3, batch_size=2, seq_len=32, eval_every=0, log_every=0)
losses = {name: train(TrainConfig(backend=name, **shared)).losses for name in ("neuron", "cpu")}
found["losses"] = list(losses.values())
model = get_backend("neuron:xla")
found["trace"] = model.trace(torch.nn.Linear(2, 2), torch.ones(1, 2), inline_weights_to_neff=True)
found["extracting"] = neuron_xla.is_extracting()
print(json.dumps(found))
