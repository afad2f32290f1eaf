"""Backends: names, ties that survive a move, precision, and a new backend as one added file."""

import sys
from collections import namedtuple

import pytest
import torch
from torch import nn

import fmlab.backends
from fmlab.backends import available_backends, base, get_backend, registry
from fmlab.backends.base import Backend
from fmlab.backends.moving import move_module, tie_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", self.a)


def test_a_plain_move_to_another_device_unties_and_ours_does_not():
    assert tie_groups(Tied().to("meta")) == [], "this move no longer breaks ties: the test proves nothing"
    moved = move_module(Tied(), lambda module: module.to("meta"))
    assert moved.head.weight is moved.embedding.weight
    assert moved.a is moved.b
    assert moved.head.weight.is_meta
    assert len(list(moved.parameters())) == 1


def test_unknown_and_absent_backends_list_what_is_legal(monkeypatch):
    with pytest.raises(ValueError, match=r"legal: auto, cpu, cuda.*did you mean 'cuda'\?"):
        get_backend("cudda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no 'cuda' device.*available: auto, .*cpu"):
        get_backend("cuda")
    with pytest.raises(ValueError, match=r"unknown variant 'cpu:fast'"):
        get_backend("cpu:fast")


def test_cpu_does_all_of_the_protocol():
    backend = get_backend("cpu")
    assert backend.distributed_backend == "gloo"
    assert backend.device_count() == 1
    backend.synchronize()
    backend.seed(3)
    first = torch.rand(2)
    backend.seed(3)
    assert torch.equal(first, torch.rand(2))
    a = torch.ones(4, 4)
    with backend.autocast("bf16"):
        assert (a @ a).dtype == torch.bfloat16
    with backend.autocast("fp32"):
        assert (a @ a).dtype == torch.float32
    with pytest.raises(ValueError, match="legal: fp32, bf16"):
        backend.autocast("fp16")
    stats = backend.memory_stats()
    assert 1 << 20 < stats["current"] <= stats["total"]
    assert stats["current"] <= stats["peak"] * 1.05
    held = torch.ones(64 << 20, dtype=torch.uint8)
    del held
    if sys.platform == "linux":
        backend.reset_peak_memory()
        now = backend.memory_stats()
        assert now["peak"] < stats["current"] + (48 << 20), "the peak did not start anew"
    assert "total" in backend.memory_summary()
    with backend.step(), backend.on(backend.stream()):
        recomputed = backend.checkpoint(torch.sin, a.requires_grad_())
    recomputed.sum().backward()
    assert torch.equal(a.grad, a.cos())
    backend.set_matmul_precision("highest")
    with pytest.raises(ValueError, match="float32 only"):
        backend.set_matmul_precision("medium")
    batch = backend.to_device({"x": [a, (a,)], "name": "same"})
    assert batch["x"][1][0] is a
    assert batch["name"] == "same"


class Meta(Backend):
    """A device that cannot take over a tensor's identity, as XLA and Trainium cannot."""

    name = "meta"
    static_shapes, dynamic_compile = True, False
    device = torch.device("meta")
    is_available = classmethod(lambda cls: False)
    create = classmethod(lambda cls, variant, index: cls())
    synchronize = device_count = lambda self: 0


def test_what_is_one_tensor_stays_one_in_a_container_and_on_the_way_back():
    pair = namedtuple("pair", "left right")
    a, b = torch.ones(2), torch.zeros(2)
    moved = Meta().to_device(pair([a, b], {"again": a}))
    assert moved.left[0].is_meta
    assert moved.left[0] is moved.right["again"]
    assert moved.left[0] is not moved.left[1]
    state = get_backend("cpu").to_host(Tied().state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    with pytest.raises(ValueError, match="state_dict"):
        get_backend("cpu").to_host({"model": Tied()})


def test_a_device_that_tells_nothing_of_its_memory_says_so():
    backend = Meta()
    assert backend.memory_stats() == {}
    assert "tells nothing" in backend.memory_summary()
    with pytest.raises(ValueError, match=r"fmlab\.meter\.peak_memory"):
        backend.reset_peak_memory()
    with pytest.raises(ValueError, match=r"no dynamic shapes.*pad to fixed lengths"):
        backend.compile(torch.sin, dynamic=True)


def test_a_new_backend_is_one_more_file(tmp_path, monkeypatch):
    (tmp_path / "mps.py").write_text(
        "from fmlab.backends.cpu import CPU\n"
        "class BACKEND(CPU):\n"
        "    name = 'mps'\n"
        "    @classmethod\n"
        "    def variants(cls): return ('m1', 'm2')\n"
        "    @classmethod\n"
        "    def create(cls, variant, index):\n"
        "        self = cls(); self.variant = variant; return self\n"
    )
    monkeypatch.setattr(fmlab.backends, "__path__", [*fmlab.backends.__path__, str(tmp_path)])
    assert "mps" in available_backends()
    assert get_backend("auto").name == "mps"
    assert get_backend("mps:m2").variant == "m2"
    with pytest.raises(ValueError, match="mps:m1, mps:m2"):
        get_backend("mps:m9")


def test_a_simulated_device_is_never_chosen_unasked():
    assert "sim" not in registry.DETECTION_ORDER


def test_every_backend_module_declares_a_backend():
    for name in registry.backend_names():
        backend = registry._backend_class(name)
        assert issubclass(backend, Backend)
        assert backend.name == name
        assert set(backend.precisions) <= set(base.Precision.__args__)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a CUDA build of torch")


@needs_gpu
def test_cuda_moves_trains_in_each_precision_and_counts_memory():
    backend = get_backend("cuda")
    model = backend.to_device(Tied())
    assert model.head.weight is model.embedding.weight
    x = backend.to_device(torch.arange(4))
    for precision in backend.precisions:
        with backend.autocast(precision):
            loss = model.head(model.embedding(x)).float().sum()
        loss.backward()
    backend.synchronize()
    stats = backend.memory_stats()
    assert 0 < stats["current"] <= stats["peak"] <= stats["total"]


@needs_gpu
def test_cuda_refuses_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="start at most"):
        get_backend("cuda", index=99)
