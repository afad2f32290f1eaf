"""Text to image: the same latents and images as diffusers' pipeline, files both ways, seeds of one's own."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmlab.models.clip_config import CLIPTextConfig
from fmlab.models.clip_text import CLIPText
from fmlab.models.diffusion.autoencoder import AutoencoderConfig, AutoencoderKL
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.models.diffusion.pipeline import StableDiffusion, to_uint8
from fmlab.models.diffusion.pipeline_files import load_scheduler
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.schedulers import DDIM, DDPM, DPMSolver2M, Euler, Scheduler
from fmlab.models.diffusion.unet import UNet, UNetConfig
from tests.models.reference import roughen

SD = NoiseSchedule("scaled_linear")
PROMPTS = ["a red circle", "a small blue square above it, twice"]
LENGTH = 24


def small(scheduler: Scheduler | None = None) -> StableDiffusion:
    """A pipeline of random weights whose images are 32x32, latents 4x8x8."""
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.train(PROMPTS * 20, 530, max_length=LENGTH)
    unet = UNetConfig((16, 32), (2, 4), 24, layers_per_level=1, norm_groups=8, sample_size=8)
    text = CLIPTextConfig(tokenizer.vocab_size, LENGTH, 2, 24, 2, eos_token_id=tokenizer.eos)
    vae = AutoencoderConfig((8, 16, 16), layers_per_level=1, norm_groups=8, sample_size=32)
    parts = UNet(unet), CLIPText(text), AutoencoderKL(vae)
    for part in parts:
        roughen(part, scale=0.05)
    return StableDiffusion(*parts, scheduler or DDIM(SD, offset=1, final="first"), tokenizer).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    small().save_pretrained(folder)
    return folder


@pytest.fixture
def theirs(saved: Path) -> Any:
    diffusers = pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(saved)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def their_images(pipeline: Any, seeds: list[int], latents: list[Tensor], **settings: Any) -> Tensor:
    """Images [b,3,H,W] in [0, 1] of diffusers; its latents after each step are added to `latents`."""

    def keep(_: Any, i: int, t: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(values["latents"])
        return values

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    images = pipeline(generator=generators, output_type="np", callback_on_step_end=keep, **settings).images
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@pytest.mark.parametrize("method", [DDIM, Euler, DPMSolver2M, DDPM])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_latents_and_images_equal_diffusers(theirs: Any, method: type[Scheduler], prediction: str) -> None:
    scheduler = method(SD, prediction, "leading", 1)
    fields = scheduler.to_fields()
    import diffusers

    theirs.scheduler = getattr(diffusers, fields["_class_name"]).from_config(fields)
    ours: list[Tensor] = []
    got = replace_scheduler(small(), scheduler).generate(
        PROMPTS, steps=4, guidance=4.0, seed=[3, 8], on_step=lambda i, latents: ours.append(latents)
    )
    wanted: list[Tensor] = []
    images = their_images(theirs, [3, 8], wanted, prompt=PROMPTS, num_inference_steps=4, guidance_scale=4.0)
    assert len(ours) == len(wanted) == 4
    for a, b in zip(ours, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-4 * max(1.0, float(b.abs().max()))
    torch.testing.assert_close(got, images, rtol=0, atol=1e-4)
    assert float(got.std()) > 0.02


def replace_scheduler(pipeline: StableDiffusion, scheduler: Scheduler) -> StableDiffusion:
    pipeline.scheduler = scheduler
    return pipeline


def test_negative_prompts_rescaled_guidance_and_other_sizes_equal_diffusers(theirs: Any) -> None:
    negative = ["blue", "a circle"]
    got = small().generate(
        PROMPTS, 4, 6.0, 1, negative_prompts=negative, guidance_rescale=0.7, height=48, width=16
    )
    images = their_images(
        theirs,
        [1, 2],
        [],
        prompt=PROMPTS,
        num_inference_steps=4,
        guidance_scale=6.0,
        negative_prompt=negative,
        guidance_rescale=0.7,
        height=48,
        width=16,
    )
    assert got.shape == (2, 3, 48, 16)
    torch.testing.assert_close(got, images, rtol=0, atol=1e-4)


def test_folders_go_to_diffusers_and_back(theirs: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path)
    ours, back = small(), StableDiffusion.from_pretrained(tmp_path)
    assert not back.training
    assert back.scheduler == ours.scheduler
    assert {type(p) for p in (back.unet, back.text_encoder, back.autoencoder)} == {
        UNet,
        CLIPText,
        AutoencoderKL,
    }
    state = ours.state_dict()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(back.generate(PROMPTS, 2), ours.generate(PROMPTS, 2))


def test_totals_of_stable_diffusion_1_5_and_2_1() -> None:
    with torch.device("meta"):
        for name, total in [("sd-1.5", 1_066_235_307), ("sd-2.1", 1_289_952_427)]:
            assert StableDiffusion.from_preset(name).num_parameters() == total


def test_an_image_depends_on_its_own_prompt_and_seed_only() -> None:
    pipeline = small()
    together = pipeline.generate([*PROMPTS, "red"], 3, 5.0, seed=7, scheduler=DDPM)
    for i, prompt in enumerate([*PROMPTS, "red"]):
        alone = pipeline.generate([prompt], 3, 5.0, seed=7 + i, scheduler=DDPM)
        torch.testing.assert_close(alone, together[i : i + 1], rtol=0, atol=1e-5)
    other = pipeline.generate([PROMPTS[0]], 3, 5.0, seed=8, scheduler=DDPM)
    assert float((other - together[:1]).abs().max()) > 0.01
    two_calls = pipeline.generate(PROMPTS, 3, 5.0, seed=7, scheduler=DDPM, one_batch=False)
    torch.testing.assert_close(two_calls, together[:2], rtol=0, atol=1e-5)


def test_methods_agree_on_schedule_and_prediction() -> None:
    v = small(DDIM(SD, "v", offset=1))
    assert v._method(DPMSolver2M) == DPMSolver2M(SD, "v", "leading", 1)
    with pytest.raises(ValueError, match="trained to predict v"):
        v.generate(PROMPTS, 2, scheduler=DDIM(SD, "epsilon"))
    with pytest.raises(ValueError, match="trained to predict v"):
        v.generate(PROMPTS, 2, scheduler=DDIM(NoiseSchedule("linear"), "v"))


def test_training_reaches_text_encoder_and_unet() -> None:
    pipeline = small().double()
    rows = pipeline.tokenizer.batch(PROMPTS)  # type: ignore[union-attr]
    sample = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    state = pipeline(sample=sample, timestep=torch.tensor([3, 900]), input_ids=rows)
    state["sample"].square().sum().backward()
    trained = {name for name, p in pipeline.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in pipeline.named_parameters() if not n.startswith("autoencoder.")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(prompts=["red " * 40]), "room for 22; this does not fit"),
        (dict(guidance=-1.0), "at least 0"),
        (dict(seed=[1]), "1 seeds for 2 prompts"),
        (dict(height=20), "height must be a multiple of 8"),
        (dict(negative_prompts=["x"]), "1 negative prompts for 2"),
        (dict(negative_prompts=["x", "y"], guidance=1.0), "do nothing"),
        (dict(steps=0), "from 1 to 1000"),
    ],
)
def test_bad_input_is_refused_before_any_work(settings: dict[str, Any], message: str) -> None:
    pipeline = small()
    pipeline.unet.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ValueError, match=message):
        pipeline.generate(**(dict(prompts=PROMPTS, steps=2) | settings))


def test_parts_that_do_not_fit_are_refused() -> None:
    pipeline = small()
    unet, text, vae = pipeline.unet, pipeline.text_encoder, pipeline.autoencoder
    wide = CLIPText(replace(text.config, hidden_size=32))
    short = CLIPText(replace(text.config, max_positions=8))
    for parts, message in [
        ((unet, wide, vae, pipeline.scheduler), "width 24, the text encoder writes 32"),
        ((unet, text, None, pipeline.scheduler, None), None),
        ((unet, short, vae, pipeline.scheduler, pipeline.tokenizer), "max_length=8"),
    ]:
        if message is None:
            assert StableDiffusion(*parts)._latent_shape(None, None) == (4, 8, 8)  # type: ignore[arg-type]
            continue
        with pytest.raises(ValueError, match=message):
            StableDiffusion(*parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokenizer"):
        StableDiffusion(unet, text, vae, pipeline.scheduler).generate(PROMPTS)


def test_folders_of_other_things_are_refused_or_named(saved: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="FluxPipeline"):
        StableDiffusion.from_pretrained(folder)
    index |= {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    index["scheduler"] = ["diffusers", "PNDMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_class_name": "PNDMScheduler"}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = StableDiffusion.from_pretrained(folder)
    messages = " ".join(str(warning.message) for warning in caught)
    assert "PNDMScheduler is not one of our schedulers" in messages
    assert "safety_checker" in messages
    assert back.scheduler == DDIM(SD, offset=1, final="first")
    with pytest.raises(ValueError, match="there is no"):
        load_scheduler(tmp_path)


def test_bytes_are_made_of_images_in_0_to_1_only() -> None:
    images = torch.tensor([0.0, 0.5, 1.0]).reshape(1, 3, 1, 1)
    assert to_uint8(images).tolist() == [[[[0, 128, 255]]]]
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        to_uint8(images * 2 - 1)
