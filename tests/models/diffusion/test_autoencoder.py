"""AutoencoderKL against diffusers' own, its counts, its one scale, its plan, and what it refuses."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fmlab.models import check_plan
from fmlab.models.diffusion import AutoencoderConfig, AutoencoderKL, DiagonalGaussian
from fmlab.models.diffusion.autoencoder_hf import from_hf_config, to_hf_config, weights
from tests.models.reference import assert_same_gradients, copy_weights, roughen

SMALL = AutoencoderConfig(channels=(8, 12, 16), layers_per_level=2, norm_groups=4, scaling_factor=0.25)


def small(**overrides: object) -> AutoencoderKL:
    torch.manual_seed(0)
    model = AutoencoderKL(AutoencoderConfig(**(vars(SMALL) | overrides)))  # type: ignore[arg-type]
    roughen(model)
    return model


def twin_of(model: AutoencoderKL) -> nn.Module:
    """diffusers' model with the weights of `model`."""
    diffusers = pytest.importorskip("diffusers")
    twin = diffusers.AutoencoderKL.from_config(to_hf_config(model.config))
    copy_weights(model, twin, weights(model.config))
    return twin


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IMAGES, NOISE = normal(2, 3, 12, 20), normal(2, 4, 3, 5, seed=2)


@pytest.mark.parametrize("preset", ["sd-vae", "sdxl-vae"])
def test_published_shapes_have_the_published_number_of_parameters(preset: str) -> None:
    with torch.device("meta"):
        model = AutoencoderKL.from_preset(preset)
        assert model.encode(torch.empty(1, 3, 512, 512)).shape == (1, 4, 64, 64)
        assert model.decode(torch.empty(1, 4, 64, 64)).shape == (1, 3, 512, 512)
    parts = dict.fromkeys(("encoder.", "decoder.", "quant_conv", "post_quant_conv"), 0)
    for weight in weights(model.config):
        side = next(side for side in parts if weight.names[0].startswith(side))
        parts[side] += model.get_parameter(weight.ours).numel()
    assert parts == {"encoder.": 34_163_592, "decoder.": 49_490_179, "quant_conv": 72, "post_quant_conv": 20}
    assert model.num_parameters() == 83_653_863


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_moments_samples_images_losses_and_every_gradient_equal_diffusers(
    dtype: torch.dtype, most: float
) -> None:
    model = small().to(dtype)
    twin = twin_of(model).to(dtype)
    sample, noise = IMAGES.to(dtype), NOISE.to(dtype)
    factor = model.config.scaling_factor
    theirs, ours = twin.encode(sample).latent_dist, model.posterior(sample)
    for got, want in ((ours.mean, theirs.mean), (ours.log_variance, theirs.logvar), (ours.kl(), theirs.kl())):
        torch.testing.assert_close(got, want, rtol=most, atol=most)
    assert torch.equal(ours.mode(), ours.mean)

    state = model(sample, noise)
    latents = theirs.mean + theirs.std * noise
    images = twin.decode(latents).sample
    torch.testing.assert_close(state.latents, factor * latents, rtol=0, atol=most)
    torch.testing.assert_close(state.sample, images, rtol=0, atol=most)
    torch.testing.assert_close(model.decode(model.encode(sample, noise)), images, rtol=0, atol=most)

    divergence = DiagonalGaussian(state.mean, state.log_variance).kl().sum()
    loss = (state.sample - sample).square().sum() + 1e-2 * divergence
    twin_loss = (images - sample).square().sum() + 1e-2 * theirs.kl().sum()
    assert abs(loss.item() - twin_loss.item()) < 1e-6 * twin_loss.item()
    loss.backward()
    twin_loss.backward()
    if dtype == torch.float64:  # in fp32 either side is up to 1.3e-5 off after this many layers
        assert_same_gradients(model, twin, weights(model.config), most=1e-11)


def test_the_scale_is_applied_once_each_way_and_never_elsewhere() -> None:
    """Forgotten or applied twice, it is the commonest mistake with latents."""
    scaled, plain = small(), small(scaling_factor=1.0)
    latents = scaled.encode(IMAGES, NOISE)
    assert torch.equal(latents, 0.25 * plain.encode(IMAGES, NOISE))
    assert torch.equal(scaled.decode(latents), plain.decode(latents / 0.25))
    assert torch.equal(scaled(IMAGES, NOISE).sample, plain(IMAGES, NOISE).sample)  # 1/4 is exact in binary
    assert torch.equal(scaled.posterior(IMAGES).mean, plain.posterior(IMAGES).mean)
    factors = {name: AutoencoderKL.PRESETS[name]["scaling_factor"] for name in ("sd-vae", "sdxl-vae")}
    assert factors == {"sd-vae": 0.18215, "sdxl-vae": 0.13025}


def test_a_measured_scale_gives_latents_of_unit_deviation(tmp_path: Path) -> None:
    model = small()
    before = model(IMAGES, NOISE).sample
    factor = model.measure_scale(IMAGES, NOISE)
    assert abs(model.encode(IMAGES, NOISE).std().item() - 1) < 1e-5
    torch.testing.assert_close(model(IMAGES, NOISE).sample, before)
    model.save_pretrained(tmp_path)
    assert AutoencoderKL.from_pretrained(tmp_path).config.scaling_factor == factor


def test_the_divergence_of_known_gaussians_is_exact() -> None:
    moments = torch.tensor([0.0, 2.0, 0.0, 100.0]).view(1, 4, 1, 1)  # N(0, 1) and N(2, e^20): held from e^100
    variance = torch.tensor(20.0).exp()
    torch.testing.assert_close(DiagonalGaussian.of(moments).kl(), ((4 + variance - 1 - 20) / 2)[None])


@pytest.mark.parametrize("batch", [{"sample": IMAGES}, {"sample": IMAGES, "noise": NOISE}])
def test_the_plan_holds(batch: dict[str, Tensor]) -> None:
    check_plan(small(), batch)


def test_diffusers_loads_what_we_save_and_back_and_old_names_too(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = small().eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = diffusers.AutoencoderKL.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    twin.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "diffusion_pytorch_model.safetensors"
    for old in (False, True):
        if old:  # as Stable Diffusion 1.5's file has them
            names = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}
            tensors = load_file(file)
            for new, name in names.items():
                tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
            save_file(tensors, file)
        again = AutoencoderKL.from_pretrained(tmp_path / "theirs")
        assert again.config == model.config
        for (name, a), (_, b) in zip(again.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(a, b), name


def test_a_step_is_one_graph_and_runs_in_other_precisions() -> None:
    model = small(channels=(8, 12), layers_per_level=1).double()
    images, noise = IMAGES[:, :, :4, :8].double(), normal(2, 4, 2, 4).double()

    def loss(batch: Tensor) -> Tensor:
        state = model(batch, noise)
        return state.sample.square().mean() + DiagonalGaussian(state.mean, state.log_variance).kl().mean()

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got, want = (torch.autograd.grad(f(images), list(model.parameters())) for f in (captured, loss))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)

    half = copy.deepcopy(model).float()
    with torch.autocast("cpu", torch.bfloat16):
        rough = half.decode(half.encode(images.float(), noise.float()))
    exact = model.decode(model.encode(images, noise))
    assert (rough - exact).norm() < 0.05 * exact.norm()


def changed(**fields: object) -> Callable[[], object]:
    return lambda: from_hf_config(to_hf_config(SMALL) | fields)


MODEL = small()
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "side": (lambda: MODEL.encode(normal(1, 3, 10, 12)), "height of sample must be divisible by 4 .*8 or 12"),
    "channels": (lambda: MODEL.encode(normal(1, 4, 8, 8)), "must have 3 channels"),
    "latents": (lambda: MODEL.decode(normal(1, 3, 8, 8)), "latents must have 4 channels"),
    "noise": (lambda: MODEL.encode(IMAGES, normal(2, 4, 12, 20)), r"the latents, \[2, 4, 3, 5\]"),
    "groups": (lambda: small(norm_groups=5), "norm_groups=5 does not divide a level of 8"),
    "scale": (lambda: small(scaling_factor=0.0), "scaling_factor must be above 0"),
    "shifted latents": (changed(shift_factor=0.1159), "shift_factor=0.1159; only None"),
    "other blocks": (changed(up_block_types=["AttnUpDecoderBlock2D"]), "only DownEncoderBlock2D and Up"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
