"""What chapter 3.6 shows: cuts by hand, a step within the chip, and a longer run told as it was."""

import torch

from fmlab.lab import stable_diffusion
from fmlab.lab.stable_diffusion import bare, chip_step, cuts, longer_run, picture, ready_to_compare
from fmlab.models import UNet


def test_a_cut_sends_the_stream_and_every_skip_that_is_still_to_be_read():
    found = cuts("unet-tiny", size=8)
    unet = UNet.from_preset("unet-tiny")
    assert [cut.block for cut in found] == list(range(1, len(unet.blocks)))
    assert found[0].hidden == found[0].skips == 2 * 32 * 8 * 8  # the first convolution's result, twice needed
    assert found[-1].skips == 0
    assert max(found, key=lambda cut: cut.skips).block in range(5, 9)  # before the way up begins
    first, last = cuts("sd-1.5")[11], cuts("sd-1.5")[-1]
    assert first.skips / first.hidden > 50
    assert last.skips == 0


def test_a_step_on_a_simulated_chip_counts_the_operations_of_the_model():
    one, two = chip_step("h100", "unet-tiny", 2, 32), chip_step("h100", "unet-tiny", 4, 32)
    assert 1.9 < two.flops / one.flops < 2.1
    assert 0 < one.utilisation < two.utilisation < 1
    weights = sum(p.numel() for p in bare("unet-tiny").parameters())
    assert one.peak_bytes > 8 * weights  # weights, gradients and two moments, bf16


def test_what_is_compared_has_a_gradient_everywhere():
    torch.manual_seed(0)
    model = ready_to_compare(lambda: UNet.from_preset("unet-tiny"))()
    sample, text = torch.randn(1, 3, 32, 32), torch.randn(1, 4, 128)
    model(sample, torch.tensor([5]), text).sample.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_the_longer_run_is_whole_and_within_its_band():
    run = longer_run()
    assert run["ends"]["real"] > 0.95
    assert run["ends"]["shuffled"] < 0.1
    best = max(found["reader"] for found in run["guidance"].values())
    assert 0.4 < best < run["ends"]["decoded"]
    assert run["guidance"]["0.0"]["reader"] < 0.1  # without the caption: one in twenty-four
    assert run["word"]["all weights"]["new word"] > 0.5 > run["word"]["the word alone"]["new word"]
    assert all(len(digest) == 64 for name in ("vae", "sd") for digest in run[name]["sha256"].values())
    for name in ("guidance", "samplers", "word"):
        assert picture(name).ndim == 3
    assert set(stable_diffusion.__all__) <= set(vars(stable_diffusion))
