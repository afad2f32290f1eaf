"""UNet against diffusers' UNet2DConditionModel, its counts, its plan, its precision, and what it refuses."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import ParallelPlan, check_plan
from fmlab.models.attention import AttentionMask, sdpa_core
from fmlab.models.diffusion import UNet, UNetConfig
from fmlab.models.diffusion.unet import UNetLayer
from fmlab.models.diffusion.unet_hf import from_hf_config, to_hf_config, weights
from fmlab.models.state import live_names
from tests.models.diffusion.unet_reference import SHAPES, batch, diffusers_twin, small_unet
from tests.models.reference import assert_same_gradients, roughen

COUNTS = {"sd-1.5": 859_520_964, "sd-2.1": 865_910_724}


@pytest.mark.parametrize("preset", COUNTS)
def test_published_shapes_have_the_published_number_of_parameters(preset: str) -> None:
    with torch.device("meta"):
        model = UNet.from_preset(preset)
        text = torch.empty(1, 77, model.config.text_size)
        out = model(torch.empty(1, 4, 64, 64), torch.empty(1), text).sample
    assert model.num_parameters() == COUNTS[preset]
    assert out.shape == (1, 4, 64, 64)


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What either side gives, and its mean squared error from a fixed noise."""
    out = model(**inputs)["sample"]
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return out, nn.functional.mse_loss(out.to(inputs["sample"].dtype), noise.to(inputs["sample"].dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_output_loss_and_every_gradient_equal_diffusers(shape: str) -> None:
    model = small_unet(shape)
    twin = diffusers_twin(model)
    inputs = batch(model)
    if shape == "2.1":
        inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    out, loss = loss_of(model, inputs)
    twin_out, twin_loss = loss_of(twin, inputs)
    torch.testing.assert_close(out, twin_out, rtol=0, atol=1e-5)
    assert abs(loss.item() - twin_loss.item()) < 1e-6 * twin_loss.item()
    loss.backward()
    twin_loss.backward()
    assert_same_gradients(model, twin, weights(model.config))


def test_in_double_precision_nothing_is_left_between_the_two() -> None:
    model = small_unet().double()
    twin = diffusers_twin(model).double()
    inputs = batch(model, size=(4, 8), rows=1)
    torch.testing.assert_close(model(**inputs).sample, twin(**inputs).sample, rtol=0, atol=1e-13)


def test_bf16_autocast_errs_no_more_than_twice_what_diffusers_does() -> None:
    errors: dict[str, Tensor] = {}  # squared, ours and theirs, over some weights: those of one vary by chance
    for seed in range(4):
        model = small_unet("plain", channels=(32, 64, 64), norm_groups=8)
        roughen(model, seed, scale=0.05)
        twin, exact = diffusers_twin(model), copy.deepcopy(model).double()
        for side in (model, twin, exact):
            inputs = batch(exact if side is exact else model)
            with torch.autocast("cpu", torch.bfloat16, enabled=side is not exact):
                loss_of(side, inputs)[1].backward()
        for weight in weights(model.config):
            reference, ours = (side.get_parameter(weight.ours).grad for side in (exact, model))
            theirs = weight.join([twin.get_parameter(name).grad for name in weight.names])
            assert ours.dtype == torch.float32
            error = torch.stack([(ours - reference).norm(), (theirs - reference).norm()]).square()
            errors[weight.ours] = errors.get(weight.ours, 0) + error / reference.norm().square()
    assert not {name: error for name, error in errors.items() if error[0] > 4 * error[1]}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_holds(shape: str) -> None:
    model = small_unet(shape)
    check_plan(model, batch(model, size=(4, 8)))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    check_plan(model, batch(model, size=(4, 8)) | {"encoder_attention_mask": mask})


def test_only_skips_still_needed_cross_a_cut() -> None:
    blocks = list(small_unet(layers_per_level=1).blocks)
    assert [type(block).__name__ for block in blocks[4:7]] == ["UNetResample", "UNetLayer", "UNetLayer"]
    everywhere = {"hidden", "time", "encoder_hidden", "encoder_attention_mask"}
    assert set(live_names(blocks, 6)) == everywhere | {f"skip_{i}" for i in range(6)}
    assert set(live_names(blocks, 9)) == everywhere | {f"skip_{i}" for i in range(4)}
    assert live_names(blocks, len(blocks) - 1) == ["hidden"]


def partial_sums(
    part: nn.Module, name: str, plan: ParallelPlan, run: Callable[[nn.Module], Tensor]
) -> Tensor:
    """What two ranks with their shares of `part` give, added up."""
    total = torch.tensor(0.0)
    for rank in range(2):
        share = copy.deepcopy(part)
        for leaf, parameter in share.named_parameters():
            piece = plan.rule(f"{name}.{leaf}").shard(parameter.detach(), rank, 2)
            module, _, last = leaf.rpartition(".")
            setattr(share.get_submodule(module), last, nn.Parameter(piece))
        total = total + run(share)
    return total


def test_what_ranks_with_their_shares_compute_adds_up() -> None:
    """Whole groups and heads a rank, and no bias in the partial sums."""
    model = small_unet().double()
    plan, x = model.parallel_plan(), torch.randn(2, 24, 6, 8, dtype=torch.float64)
    time, text = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 64), (2, 5, 20)))
    name, block = next(
        (f"blocks.{i}", b) for i, b in enumerate(model.blocks) if i > 4 and isinstance(b, UNetLayer)
    )
    both = partial_sums(block.resnet, f"{name}.resnet", plan, lambda part: part(x, time))
    twice = x + block.resnet.conv2.bias[:, None, None]
    torch.testing.assert_close(both - twice, block.resnet(x, time))

    layer, tokens = block.transformer.layers[0], x.flatten(2).mT
    see_all, see_text = AttentionMask(False, 48, 48), AttentionMask(False, 48, 5)
    runs: dict[str, Callable[[nn.Module], Tensor]] = {
        "attention": lambda part: part(tokens, see_all),
        "cross": lambda part: part(tokens, see_text, memory=text),
        "mlp": lambda part: part(tokens),
    }
    for leaf, run in runs.items():
        part = getattr(layer, leaf)
        both = partial_sums(part, f"{name}.transformer.layers.0.{leaf}", plan, run)
        torch.testing.assert_close(both, run(part))


def test_diffusers_loads_what_we_save_and_back(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    for shape in SHAPES:
        model, folder = small_unet(shape).eval(), tmp_path / shape
        model.save_pretrained(folder / "ours")
        twin, report = diffusers.UNet2DConditionModel.from_pretrained(
            folder / "ours", output_loading_info=True
        )
        assert not any(report.values()), report
        inputs = batch(model)
        torch.testing.assert_close(twin(**inputs).sample, model(**inputs).sample, rtol=0, atol=1e-5)
        twin.save_pretrained(folder / "theirs")
        again = UNet.from_pretrained(folder / "theirs")
        assert again.config == model.config
        for (name, a), (_, b) in zip(again.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(a, b), name


def test_configs_of_the_released_checkpoints_are_read() -> None:
    """As published: 1.5 with 8 as "attention_head_dim" and few fields, 2.1 with a list and an upcast."""
    fields = {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768, "sample_size": 64}
    assert from_hf_config(fields | {"attention_head_dim": 8}) == UNetConfig(**UNet.PRESETS["sd-1.5"])
    second = {"cross_attention_dim": 1024, "sample_size": 96, "use_linear_projection": True}
    fields |= second | {"attention_head_dim": [5, 10, 20, 20], "upcast_attention": True}
    assert from_hf_config(fields) == UNetConfig(**UNet.PRESETS["sd-2.1"])


def test_a_step_is_one_graph_and_models_are_copied_whole() -> None:
    small = dict(channels=(16, 24), heads=(2, 2), attention=(False, True))
    model = small_unet("plain", **small).double()
    inputs = batch(model, size=(4, 8))

    def loss(side: UNet, arguments: dict[str, Tensor]) -> Tensor:
        return side(**arguments).sample.square().mean()

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    names, parameters = zip(*model.named_parameters(), strict=True)
    got = torch.autograd.grad(captured(model, inputs), parameters)
    for twin in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        want = torch.autograd.grad(loss(twin, inputs), [twin.get_parameter(name) for name in names])
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_the_injected_core_sees_every_attention_and_real_tokens() -> None:
    seen = []

    def core(q, k, v, mask, dropout=0.0, **more):  # type: ignore[no-untyped-def]
        seen.append((q.shape[1], mask.queries, mask.keys, mask.real_keys is not None))
        return sdpa_core(q, k, v, mask, dropout, **more)

    model = UNet(small_unet(layers_per_level=1).config, attention_core=core)
    inputs = batch(model, size=(4, 8)) | {"encoder_attention_mask": torch.ones(2, 5)}
    model(**inputs)
    full = [(2, 32, 32, False), (2, 32, 5, True)]
    assert seen[:2] == full
    assert len(seen) == 2 * 7  # down 2, middle 1, up 2 layers of each of the 2 levels with attention


def test_the_first_step_starts_from_zero_and_one_timestep_serves_all() -> None:
    model = UNet.from_preset("unet-tiny")
    assert not model(**batch(model, size=(8, 8))).sample.any()  # the last convolution starts at zero
    model = small_unet()
    inputs = batch(model) | {"timestep": torch.tensor([7, 7])}
    one = model(**inputs | {"timestep": torch.tensor(7)}).sample
    assert torch.equal(model(**inputs).sample, one)


def changed(**fields: object) -> Callable[[], object]:
    return lambda: from_hf_config(to_hf_config(small_unet().config) | fields)


MODEL = small_unet()
GOOD = batch(MODEL)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "side": (
        lambda: MODEL(**GOOD | batch(MODEL, (12, 18))),
        "width of sample must be divisible by 4 .*16 or 20",
    ),
    "channels": (lambda: MODEL(**GOOD | {"sample": torch.zeros(2, 3, 4, 4)}), "must have 4 channels"),
    "one image": (lambda: MODEL(**GOOD | {"sample": torch.zeros(4, 4, 4)}), r"\[batch, channels, height"),
    "whole numbers": (lambda: MODEL(**GOOD | {"sample": torch.zeros(2, 4, 4, 4).long()}), "floating-point"),
    "text width": (
        lambda: MODEL(**GOOD | {"encoder_hidden_states": torch.zeros(2, 5, 768)}),
        "768 wide, the model's cross-attention 20",
    ),
    "text batch": (
        lambda: MODEL(**GOOD | {"encoder_hidden_states": torch.zeros(1, 5, 20)}),
        "batch of sample, 2",
    ),
    "mask": (
        lambda: MODEL(**GOOD, encoder_attention_mask=torch.ones(2, 4)),
        r"must be \[2, 5\], got \[2, 4\]",
    ),
    "timesteps": (lambda: MODEL(**GOOD | {"timestep": torch.zeros(3)}), "each of the 2 images"),
    "python timestep": (lambda: MODEL(**GOOD | {"timestep": 3}), "must be a tensor of numbers, got int"),
    "heads": (lambda: small_unet(heads=(2, 5, 2)), "heads=5 does not divide a level of 24"),
    "groups": (lambda: small_unet(norm_groups=5), "norm_groups=5 does not divide .*legal: .*1, 2, 4, 8, 16"),
    "levels": (lambda: small_unet(heads=(2, 2)), "one entry for each level"),
    "layers": (lambda: small_unet(layers_per_level=0), "layers_per_level must be at least 1"),
    "class conditions": (changed(num_class_embeds=10), "num_class_embeds=10; only None"),
    "other blocks": (changed(up_block_types=["UpBlock2D"] * 3), "the same upwards"),
    "uneven": (changed(layers_per_block=[2, 1, 2]), "only one value for all"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_an_autoencoders_folder_is_not_taken_for_a_unet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(ValueError, match="'AutoencoderKL'; 'UNet2DConditionModel' is needed"):
        UNet.from_pretrained(tmp_path)
