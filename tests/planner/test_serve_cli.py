"""Serving from the shell, and the plan's counts held to a cache and a decoding step of our own models."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.cli import main as fmlab
from fmlab.meter import flops
from fmlab.models.families import family_of
from fmlab.planner import Calibration, serve_plan
from fmlab.planner.cli import main
from fmlab.planner.hardware import hardware
from fmlab.planner.serve_words import what_would_fit

H100 = hardware("h100", calibration=Calibration())


class MatricesRead(TorchDispatchMode):
    """Bytes of each parameter that enters a matrix product, once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.read: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            for one in args:
                if isinstance(one, torch.Tensor) and one.dim() > 1:
                    where = one.untyped_storage().data_ptr()
                    if where in self.known:
                        self.read[where] = max(self.read.get(where, 0), one.nbytes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
@torch.no_grad()
def test_cache_flops_and_bytes_of_a_decoding_step_are_those_of_our_models(name: str) -> None:
    """Three sequences of 20 + 12 tokens: the cache's buffers, a step's FLOPs, the bytes of its matrices."""
    torch.manual_seed(0)
    model: Any = family_of(name).from_preset(name).eval()
    batch, prompt, generated = 3, 20, 12
    one = serve_plan(name, machine=H100, batch=batch, prompt=prompt, generated=generated)
    cache = model.new_cache(batch, prompt + generated)
    fp32 = 2  # of an fp32 number, 16-bit numbers
    assert one.memory["cache"] * fp32 == cache.nbytes
    model(torch.randint(5, 900, (batch, prompt)), cache=cache)
    read = MatricesRead(model)
    with read, flops() as work:
        model(torch.randint(5, 900, (batch, 1)), cache=cache)
    assert work.total == one.decode_flops(prompt + 1)
    assert sum(read.read.values()) == one.decode_bytes(prompt + 1)["matrices"] * fp32
    per_token = cache.nbytes / batch / (prompt + generated)
    assert one.decode_bytes(prompt + 1)["cache"] * fp32 == batch * (prompt + 1) * per_token


@torch.no_grad()
def test_a_mixture_multiplies_the_experts_that_its_tokens_are_sent_to() -> None:
    torch.manual_seed(0)
    model: Any = family_of("mixtral-tiny").from_preset("mixtral-tiny").eval()
    one = serve_plan("mixtral-tiny", machine=H100, batch=4, prompt=6, generated=2)
    cache = model.new_cache(4, 8)
    assert one.memory["cache"] * 2 == cache.nbytes
    model(torch.randint(5, 900, (4, 6)), cache=cache)
    with flops() as work:
        model(torch.randint(5, 900, (4, 1)), cache=cache)
    assert work.total == one.decode_flops(7)


def test_tensor_ranks_share_flops_and_bytes() -> None:
    one, four = (
        serve_plan("llama3.1-8b", chip="h100", tensor=n, batch=8, prompt=512, generated=64) for n in (1, 4)
    )
    assert four.decode_flops(600) == pytest.approx(one.decode_flops(600) / 4)
    for line, value in one.decode_bytes(600).items():
        assert four.decode_bytes(600)[line] == pytest.approx(value / 4)


# ---- the command -------------------------------------------------------------------------------------------

LLAMA = "llama3.1-70b --chip h100 --prompt 1024 --generated 256"


def test_a_plan_that_fits_comes_with_its_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"serve {LLAMA} --tensor 8 --batch 16".split()) == 0
    text = capsys.readouterr().out
    assert "16 sequences of 1024 + 256 tokens" in text
    assert "latency against throughput" in text
    assert text.count(" matrices\n") >= 4
    assert main(f"serve {LLAMA} --tensor 8 --batches 1,9".split()) == 0
    rows = capsys.readouterr().out.split("latency against throughput")[1].splitlines()
    assert [row.split()[0] for row in rows[2:]] == ["1", "9"]


def test_one_that_does_not_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"serve {LLAMA}".split()) == 1
    text = capsys.readouterr().out
    assert "does NOT fit 80.00 GiB: 60." in text
    assert "it would fit with      tensor=8: " in text
    one = serve_plan("llama3.1-70b", chip="h100", prompt=1024, generated=256)
    near = what_would_fit(one)
    assert near
    assert all(other.fits and other.batch == 1 for _, other in near)
    assert what_would_fit(near[0][1]) == []
    full = serve_plan("llama3.1-8b", chip="h100", prompt=4096, generated=4096, batch=500)
    assert dict(what_would_fit(full))[f"batch={full.largest_batch}"].fits
    assert full.lacking == full.peak_memory - 80 * 2**30


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("t5-base --chip h100 --prompt 8 --generated 8", "no decoder"),
        ("llama3.1-8b --prompt 8 --generated 8", "give chip="),
        ("llama3.1-8b --chip h100 --prompt 0 --generated 8", "prompt=0"),
        ("llama3.1-8b --chip h100 --prompt 8 --generated 8 --tensor 7", "legal are"),
        ("llama3.1-8b --chip h100 --prompt 8 --generated 8 --batches 1,many", "such as 1,8,64"),
        ("llama3.1-8b --chip h100 --prompt 8 --generated 8 --batches 0", "batch=0"),
        ("llama3.1-8b --chip h100 --prompt 8 --generated 8 --calibration nowhere.toml", "nowhere.toml"),
    ],
)
def test_errors_are_one_line(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fmlab(["plan", "serve", *command.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
