"""ResNet against transformers' (batch norm) and against torch.nn's layers (group norm)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmlab.models import ResNet, check_plan
from fmlab.models.resnet import BatchNorm, ConvNorm, GroupNorm, ResNetConfig
from fmlab.models.resnet_hf import to_hf_config, weights
from tests.models.reference import assert_same_gradients, copy_weights, roughen

SHAPES = {
    "basic": ResNetConfig((8, 12), (2, 1), "basic", num_labels=5, stem_width=8),
    "bottleneck": ResNetConfig((8, 16), (1, 2), "bottleneck", num_labels=5, stem_width=4, image_channels=1),
}


def small(shape: str, **overrides: object) -> ResNet:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(**{**vars(SHAPES[shape]), **overrides}))
    roughen(model)
    return model


def pictures(model: ResNet, batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch, model.config.image_channels, 21, 26)
    return torch.randn(shape, generator=generator), torch.randint(5, (batch,), generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_resnet_equals_transformers(shape: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    model = small(shape).double()
    fields = {k: v for k, v in to_hf_config(model.config).items() if k not in ("architectures", "model_type")}
    twin = transformers.ResNetForImageClassification(transformers.ResNetConfig(**fields)).double()
    copy_weights(model, twin, weights(model.config))
    x, labels = pictures(model)
    x = x.double()
    for ours, theirs in ((model.train(), twin.train()), (model.eval(), twin.eval())):  # statistics move once
        torch.testing.assert_close(ours(x).class_logits, theirs(x).logits, rtol=0, atol=1e-9)
    loss = model(x, class_labels=labels).class_loss_sum / len(x)
    wanted = twin(x, labels=labels).loss
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    model.train()(x).class_logits.square().sum().backward()
    twin.train()(x).logits.square().sum().backward()
    assert_same_gradients(model, twin, weights(model.config), most=1e-8)

    model = model.float().eval()
    model.save_pretrained(tmp_path)
    loaded, report = transformers.ResNetForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert all(key.endswith("num_batches_tracked") for key in report["missing_keys"])
    expected = model(x.float()).class_logits
    torch.testing.assert_close(loaded.eval()(x.float()).logits, expected, rtol=0, atol=1e-4)
    loaded.save_pretrained(tmp_path / "theirs")
    again = ResNet.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(x.float()).class_logits, expected)


def test_batch_and_group_norm_equal_torch_and_batch_norm_ties_pictures_together() -> None:
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64, requires_grad=True)
    config = ResNetConfig((6,), (1,), "basic", norm="group", groups=3, stem_width=6)
    pairs = [
        (BatchNorm(6, 1e-5, 0.1).double(), nn.BatchNorm2d(6).double()),
        (GroupNorm(6, 3, 1e-5).double(), nn.GroupNorm(3, 6).double()),
    ]
    for ours, theirs in pairs:
        with torch.no_grad():
            for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
                reference.normal_()
                mine.copy_(reference)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
        upstream = torch.randn_like(x)
        got = torch.autograd.grad(ours(x), [x, *ours.parameters()], upstream)
        want = torch.autograd.grad(theirs(x), [x, *theirs.parameters()], upstream)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    batch, group = pairs[0][0], pairs[1][0]
    torch.testing.assert_close(batch.running_var, pairs[0][1].running_var, rtol=0, atol=1e-12)
    torch.testing.assert_close(group(x[:1]), group(x)[:1], rtol=0, atol=1e-12)
    assert (batch(x[:1]) - batch(x)[:1]).abs().max() > 0.01
    conv = ConvNorm(config, 6, 6, 3, stride=2).double()
    nn.init.normal_(conv.weight)
    wanted = F.group_norm(F.conv2d(x, conv.weight, stride=2, padding=1), 3, conv.norm.weight, conv.norm.bias)
    torch.testing.assert_close(conv(x), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_holds_with_group_norm(shape: str) -> None:
    model = small(shape, norm="group", groups=2 if shape == "bottleneck" else 4)
    x, labels = pictures(model)
    check_plan(model, {"pixel_values": x, "class_labels": labels})
    check_plan(model, {"pixel_values": x})


# as printed by every library that ships these weights; batch statistics are not parameters
COUNTS = {"resnet-18": 11_689_512, "resnet-34": 21_797_672, "resnet-50": 25_557_032,
          "resnet-101": 44_549_160, "resnet-152": 60_192_808}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_published_shapes_have_the_published_counts(name: str) -> None:
    with torch.device("meta"):
        assert ResNet.from_preset(name).num_parameters() == COUNTS[name]


def test_bad_input_is_refused_with_the_reason(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = small("basic")
    x, labels = pictures(model)
    with pytest.raises(ValueError, match=r"pixel_values must be \[batch, 3, height, width\]"):
        model(x[:, :1])
    with pytest.raises(ValueError, match=r"class_labels must be 0\.\.4, got .*\.\.9"):
        model(x, class_labels=labels.clamp(min=1) * 0 + 9)
    with pytest.raises(ValueError, match=r"one a picture, got \[5\]"):
        model(x, class_labels=labels[:5])
    with pytest.raises(ValueError, match="5 groups do not divide each of the widths"):
        small("basic", norm="group", groups=5)
    with pytest.raises(ValueError, match="batch norm with eps 1e-5"):
        small("basic", norm="group", groups=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="legal"):
        ResNetConfig(layer="wide")
    with pytest.raises(ValueError, match="more than one value a channel"):
        BatchNorm(3, 1e-5, 0.1)(torch.zeros(1, 3, 1, 1))
