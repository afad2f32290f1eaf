"""Convolutions over few pixels as products of patches: torch's own numbers, without reordered weights."""

import pytest
import torch
import torch.nn.functional as F

from fmlab.models.diffusion.convolution import Conv2d


def conv(kernel: int, **settings: int) -> Conv2d:
    torch.manual_seed(0)
    made = Conv2d(6, 40, kernel, **settings).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [dict(kernel=3, padding=1), dict(kernel=3, stride=2), dict(kernel=1)])
@pytest.mark.parametrize("size", [(3, 5), (1, 4), (9, 7)])  # 30, 8 and 126 pixels for 40 channels
def test_outputs_and_gradients_are_torchs(
    size: tuple[int, int], settings: dict[str, int], bias: bool
) -> None:
    if min(size) == 1 and settings.get("stride"):
        size = (3, 3)
    made, x = conv(**settings), torch.randn(2, 6, *size, dtype=torch.float64, requires_grad=True)
    inputs = (x, *made.parameters()) if bias else (x, made.weight)
    reference = F.conv2d(x, made.weight, made.bias if bias else None, made.stride, made.padding)
    out = made(x, with_bias=bias)
    torch.testing.assert_close(out, reference)
    weights = torch.randn_like(out)
    want = torch.autograd.grad((reference * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), inputs), want)


def test_few_pixels_are_multiplied_as_patches_and_weights_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = conv(3, padding=1)
    assert made.weight.permute(0, 2, 3, 1).is_contiguous()
    for height, called in ((4, False), (10, True)):
        calls = []
        monkeypatch.setattr(made, "_conv_forward", lambda *given, into=calls: into.append(given) or given[0])
        made(torch.randn(1, 6, height, 10, dtype=torch.float64))
        assert bool(calls) is called
    monkeypatch.undo()
    made(torch.randn(1, 6, 4, 10, dtype=torch.float64)).sum().backward()
    assert made.weight.grad.permute(0, 2, 3, 1).is_contiguous()
