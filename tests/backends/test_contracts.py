"""The chips' backends against devices that answer the documented calls, and against faked stacks.

Nothing here has seen a Trainium or a TPU; see docs/backends.md.
"""

import importlib
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fmlab.backends import environment, get_backend, neuron_xla, registry, stacks, tpu
from fmlab.backends.neuron_settings import ProgramKey, configure

HERE = Path(__file__).parent
python_device = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="a device written in Python needs torch 2.10",
)


@pytest.mark.slow
@python_device
@pytest.mark.parametrize("chip", ["neuron", "tpu"])
def test_the_documented_calls_are_the_ones_made(chip):
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    script = str(HERE / f"contract_{chip}.py")
    answer = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environ, timeout=120
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


# ---- detection -------------------------------------------------------------------------------------------


def test_native_chips_come_before_gpus_and_a_lazy_cpu_is_never_chosen_by_itself(monkeypatch):
    present = set()
    for name in registry.backend_names():
        backend = registry._backend_class(name)
        monkeypatch.setattr(backend, "is_available", classmethod(lambda cls, name=name: name in present))
    order = []
    for name in ("cpu", "cuda", "tpu", "neuron"):
        present.add(name)
        order.append(registry.detect())
    assert order == ["cpu", "cuda", "tpu", "neuron"]
    present.clear()
    present.update({"cpu", "xla"})
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert registry.detect() == "cpu"


@pytest.fixture
def installed(monkeypatch):
    """Pretend that distributions of these versions are installed."""
    versions = {}

    def version(name):
        if name in versions:
            return versions[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(stacks.metadata, "version", version)
    return versions


def test_a_placeholder_of_the_public_registry_is_told_from_the_real_package(installed, monkeypatch):
    with pytest.raises(ValueError, match=r"torch-neuronx is not installed; .*AWS's Neuron package index"):
        get_backend("neuron")
    installed["torch-neuronx"] = "1.0"
    with pytest.raises(ValueError, match=r"1\.0 is an empty package .*pip uninstall torch-neuronx"):
        get_backend("neuron")
    installed["torch-neuronx"] = "2.13.3.0"
    with pytest.raises(ValueError, match=r"2\.13\.3\.0 does not load"):
        get_backend("neuron")
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    with pytest.raises(ValueError, match="finds no NeuronCore"):
        get_backend("neuron")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ValueError, match="unset TORCH_DEVICE_BACKEND_AUTOLOAD"):
        get_backend("neuron")
    with pytest.raises(ValueError, match=r"torch-tpu is not installed; .*on a TPU machine"):
        get_backend("tpu")
    with pytest.raises(ValueError, match=r"cuda.*a build without GPUs|cuda.*finds no GPU"):
        get_backend("cuda") if not torch.cuda.is_available() else pytest.skip("there is a GPU")


def test_torch_xla_is_not_loaded_to_look_for_chips_that_nothing_points_to(monkeypatch):
    monkeypatch.setattr("fmlab.backends.xla.XLA.is_available", lambda: pytest.fail("torch_xla was asked"))
    for module in (tpu, neuron_xla):
        monkeypatch.setattr(module, "guess_device", lambda: "CPU")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not tpu._through_xla()
    assert not neuron_xla.through_xla()


# ---- environment -----------------------------------------------------------------------------------------


def test_a_variable_that_comes_too_late_is_named_with_the_remedy(monkeypatch, recwarn, tmp_path):
    (tmp_path / "a_chips_stack.py").write_text("import os\nos.environ['CHIP_OWN'] = 'set while loading'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "_seen", {})
    monkeypatch.setitem(environment.READ_ONCE, "a_chips_stack", ("CHIP_",))
    monkeypatch.setenv("CHIP_OWN", "")
    monkeypatch.setenv("CHIP_FLAGS", "")
    environment.set_early("a_chips_stack", "CHIP_FLAGS", "--a")
    assert not recwarn.list, "the library is not loaded: this is in time"
    importlib.import_module("a_chips_stack")
    assert not environment.late_variables("a_chips_stack"), "what it sets itself is not late"
    environment.set_early("a_chips_stack", "CHIP_FLAGS", "--a")
    assert not recwarn.list, "nothing changed"
    with pytest.warns(environment.LateEnvironmentWarning, match=r"CHIP_FLAGS was changed after .*'--a'"):
        environment.set_early("a_chips_stack", "CHIP_FLAGS", "--b")
    assert environment.late_variables("a_chips_stack") == {"CHIP_FLAGS": ("--a", "--b")}


# ---- Neuron's settings and programs ----------------------------------------------------------------------


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(ValueError, match="legal are 1 and 2"):
        configure(logical_core=4)
    with pytest.raises(ValueError, match="does nothing without"):
        configure(rounding_seed=1)


def test_what_makes_a_compiled_program_another_one_is_named(installed):
    installed["neuronx-cc"] = "2.28"
    ids = torch.zeros(8, 512, dtype=torch.long)
    yesterday = ProgramKey.of("gpt", [ids], {"NEURON_CC_FLAGS": "-O1 --model-type=transformer"})
    assert yesterday.shapes == ("int64[8,512]",)
    reordered = {"NEURON_CC_FLAGS": "--model-type=transformer -O1"}
    assert not yesterday.differs(ProgramKey.of("gpt", [ids], reordered))
    elsewhere = {**reordered, "NEURON_CC_FLAGS": "--cache_dir=/cache -O2"}
    assert set(yesterday.differs(ProgramKey.of("gpt", [ids[:7]], elsewhere))) == {"shapes", "flags", "cache"}
    installed["neuronx-cc"] = "2.29"
    assert set(yesterday.differs(ProgramKey.of("gpt", [ids], reordered))) == {"compiler"}


def test_collecting_graphs_runs_a_few_steps_and_not_the_whole_job(monkeypatch):
    command = ["fmlab", "train", "gpt2", "--steps", "20000", "--lr", "1e-3"]
    monkeypatch.setattr(neuron_xla.shutil, "which", lambda name: f"/opt/{name}")
    assert neuron_xla.parallel_compile_command(command) == [
        *("neuron_parallel_compile", "fmlab", "train", "gpt2", "--lr", "1e-3", "--steps", "3")
    ]
    with pytest.raises(ValueError, match="second step is another graph"):
        neuron_xla.parallel_compile_command(command, steps=1)
    monkeypatch.setattr(neuron_xla.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="neuron_parallel_compile is not here"):
        neuron_xla.parallel_compile_command(command)
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    assert neuron_xla.is_extracting()


# ---- CUDA, as far as it goes without a GPU ---------------------------------------------------------------


def test_cuda_asks_for_its_own_gpu_and_says_how_it_multiplies(monkeypatch):
    asked = []
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": asked.append,
        "memory_allocated": lambda device: 1,
        "max_memory_allocated": lambda device: 2,
        "memory_reserved": lambda device: 3,
        "reset_peak_memory_stats": asked.append,
        "get_device_properties": lambda device: types.SimpleNamespace(name="GPU", total_memory=80 * 2**30),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(ValueError, match="wants GPU 2, but the host has 2: start at most 2"):
        get_backend("cuda", index=2)
    backend = get_backend("cuda", index=1)
    assert asked == [torch.device("cuda", 1)]
    assert backend.memory_stats() == {"current": 1, "peak": 2, "total": 80 * 2**30, "reserved": 3}
    backend.reset_peak_memory()
    assert backend.distributed_options() == {"device_id": torch.device("cuda", 1)}
    assert "80.0 GiB; float32 matrices are multiplied in float32" in backend.describe()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert "TF32" in backend.describe()
