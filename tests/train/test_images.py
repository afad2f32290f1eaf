"""Autoencoders and text-to-image models by the training loop: resumed, divided, exported, fine-tuned."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fmlab import Ranks
from fmlab.data.shapes import ShapesDataset
from fmlab.models import AutoencoderKL, StableDiffusion
from fmlab.models.diffusion import to_uint8
from fmlab.parallel import Layout
from fmlab.train import Callback, train
from fmlab.train.__main__ import config_from
from fmlab.train.averages import averaged_adamw
from fmlab.train.config_file import config_text, read_config
from fmlab.train.images import ImageConfig
from fmlab.train.images.new_word import bars, share_of_bars
from fmlab.train.images.parts import check_latents
from fmlab.train.images.reader import CLASSES, ShapeReader

FAST = dict(steps=4, batch_size=4, image_size=16, warmup=1, eval_every=0, log_every=0, backend="cpu")


def config(**settings: Any) -> ImageConfig:
    return ImageConfig(**(FAST | settings))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """An autoencoder and a text-to-image model on its latents, four steps each."""
    root = tmp_path_factory.mktemp("runs")
    train(config(model="vae-nano", out=str(root / "vae")))
    train(config(autoencoder=str(root / "vae/model"), out=str(root / "sd"), ema=0.9))
    return root


def test_the_autoencoder_ends_with_latents_of_unit_deviation(runs):
    model = AutoencoderKL.from_pretrained(runs / "vae/model")
    latents = model.encode(ShapesDataset(200, 3, size=16, objects=(1,)).images())
    assert abs(float(latents.std()) - 1) < 0.1


def test_a_resumed_run_ends_as_one_that_never_stopped(runs, tmp_path):
    whole = dict(autoencoder=str(runs / "vae/model"), ema=0.9)
    straight = train(config(**whole))
    first = config(**whole, out=str(tmp_path / "run"), save_every=2)

    class Stop(Exception):
        pass

    class AfterTwo(Callback):
        def on_checkpoint(self, step: int, path: str) -> None:
            raise Stop

    with pytest.raises(Stop):
        train(first, callbacks=[AfterTwo()])
    resumed = train(dataclasses.replace(first, resume=True))
    assert resumed.losses == straight.losses
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name  # averages of the weights, too
    with pytest.raises(ValueError, match="holds a run already"):
        train(first)
    with pytest.raises(ValueError, match=r"cannot resume with other settings; batch_size: 4 .* 8 now"):
        train(dataclasses.replace(first, resume=True, batch_size=8, steps=9))


@pytest.mark.multirank
def test_two_ranks_draw_the_same_noise_and_keep_the_same_averages(ranks2: Ranks, runs):
    settings = dict(autoencoder=str(runs / "vae/model"), ema=0.9)
    alone = train(config(**settings))

    def divided() -> tuple[list[float], dict[str, torch.Tensor]]:
        result = train(config(**settings, layout=Layout(data=2, zero=1)))
        return result.losses, dict(result.model.state_dict())

    for losses, weights in ranks2.run(divided):
        torch.testing.assert_close(losses, alone.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, dict(alone.model.state_dict()), rtol=1e-3, atol=1e-4)


def test_diffusers_draws_the_same_picture(runs):
    diffusers = pytest.importorskip("diffusers")
    ours = StableDiffusion.from_pretrained(runs / "sd/model")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(runs / "sd/model", local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    drawn = theirs(
        "a red circle", latents=noise, num_inference_steps=3, guidance_scale=2.0, output_type="pt"
    ).images
    mine = ours.generate(["a red circle"], steps=3, guidance=2.0, seed=3)
    torch.testing.assert_close(mine, drawn, rtol=1e-3, atol=1e-3)
    assert to_uint8(mine).shape == (1, 16, 16, 3)


def test_fine_tuning_moves_what_it_says_and_nothing_else(runs):
    before = StableDiffusion.from_pretrained(runs / "sd/model").state_dict()

    def moved(**settings: Any) -> dict[str, torch.Tensor]:
        after = train(config(init=str(runs / "sd/model"), ema=0.0, **settings)).model.state_dict()
        assert after.keys() == before.keys()
        return {name: after[name] - w for name, w in before.items() if not torch.equal(w, after[name])}

    word = moved(learn_word="red")
    assert list(word) == ["text_encoder.blocks.0.tokens.weight"]
    assert (word.popitem()[1].abs().sum(1) > 0).sum() == 1
    low_rank = moved(lora_rank=2)
    assert low_rank
    assert all(name.startswith("unet.") and "attention" in name for name in low_rank)
    assert torch.linalg.matrix_rank(next(iter(low_rank.values()))) <= 6  # three parts of rank 2 at most
    everything = moved()
    assert any(name.startswith("text_encoder") for name in everything)
    assert not any(name.startswith("autoencoder") for name in everything)
    finished = train(config(init=str(runs / "sd/model"), ema=0.0, steps=2)).model
    again = train(config(init="anywhere", ema=0.0, steps=2), model=finished)  # its weights came back frozen
    assert again.losses[0] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(), "draws latents of a trained autoencoder: give autoencoder=FOLDER"),
        (dict(model="sd-tny"), "model must be one of vae-nano, vae-tiny, sd-tiny"),
        (dict(autoencoder="a", init="b"), "and not both"),
        (dict(autoencoder="a", lora_rank=4), "lora_rank changes a trained model: give init=FOLDER"),
        (dict(init="a", prediction="v"), "goes on predicting what it was trained to"),
        (dict(init="a", lora_rank=4, learn_word="x"), "choose one"),
        (dict(autoencoder="a", prediction="u"), "prediction must be one of epsilon, v, x0"),
        (dict(autoencoder="a", seq_len=64), "seq_len does nothing for a model that learns from images"),
        (dict(model="vae-tiny", min_snr_gamma=5.0), "min_snr_gamma: nothing of vae-tiny"),
        (dict(autoencoder="a", kl_weight=1.0), "kl_weight: nothing of sd-tiny"),
        (dict(autoencoder="a", ema=1.0), "ema must be at least 0 and below 1"),
        (dict(autoencoder="a", image_size=True), "image_size must be a whole number"),
        (dict(model="vae-tiny", kl_weight=10**400), "kl_weight must be at least 0 and finite, got inf"),
        (dict(autoencoder="a", min_snr_gamma="5"), "min_snr_gamma must be a number, got '5'"),
        (dict(autoencoder="a", min_snr_gamma=0.0), "min_snr_gamma must be above 0 and finite"),
        (dict(autoencoder="a", zero_terminal_snr=1), "zero_terminal_snr must be True or False"),
        (dict(init="a", learn_word=3), "learn_word must be a word, got 3"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_run_that_cannot_work_is_refused_before_it_begins(runs, tmp_path):
    vae = str(runs / "vae/model")
    with pytest.raises(ValueError, match=r"epsilon"):
        train(config(autoencoder=vae, prediction="epsilon", zero_terminal_snr=True))
    with pytest.raises(ValueError, match=r"size=17: shapes can be told apart .* even numbers"):
        train(config(autoencoder=vae, image_size=17))
    with pytest.raises(ValueError, match=r"'purple' is \d+ tokens"):
        train(config(init=str(runs / "sd/model"), learn_word="purple", corpus=str(_folder(tmp_path))))
    with pytest.raises(ValueError, match="no caption has the word 'x'"):
        train(config(init=str(runs / "sd/model"), learn_word="x"))
    model = AutoencoderKL.from_pretrained(vae)
    model.blocks[model.latents_at - 1].scaling_factor *= 9
    with pytest.raises(ValueError, match="latents of these images have a standard deviation of"):
        check_latents(model, ShapesDataset(32, size=16).images())


def _folder(root: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for i, picture in enumerate(to_uint8(ShapesDataset(30, 5, size=16).images() / 2 + 0.5)):
        image.fromarray(picture.numpy()).save(root / f"{i}.png")
        (root / f"{i}.txt").write_text("a purple field")
    return root


def test_settings_come_from_the_shell_and_from_files(tmp_path):
    given = config_from(["sd-tiny", "--autoencoder", "folder", "--ema", "0.5"])
    assert isinstance(given, ImageConfig)
    assert (given.autoencoder, given.ema, given.item) == ("folder", 0.5, "images")
    (tmp_path / "run.toml").write_text(config_text(given))
    assert read_config(tmp_path / "run.toml") == given
    (tmp_path / "bad.toml").write_text('model = "gpt2-tiny"\nema = 0.5\n')
    with pytest.raises(ValueError, match="'ema' is not a setting"):
        read_config(tmp_path / "bad.toml")


def test_averages_follow_the_weights_by_the_formula():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = averaged_adamw(0.5, lr=0.1, weight_decay=0.0)([("w", weight)])
    average = None
    for step in range(1, 12):
        weight.grad = torch.ones(3)
        optimizer.step()
        decay = min(0.5, (1 + step) / (10 + step))
        average = (
            weight.detach().clone() if average is None else decay * average + (1 - decay) * weight.detach()
        )
        torch.testing.assert_close(optimizer.state[weight]["average"], average)
    with pytest.raises(ValueError, match="decay of the average"):
        averaged_adamw(1.0)


def test_the_reader_says_what_it_cannot_judge():
    reader = ShapeReader()
    images = torch.zeros(2, 3, 32, 32)
    assert set(reader.read(images)) <= set(CLASSES)
    with pytest.raises(ValueError, match="as many captions as images"):
        reader.accuracy(images, ["a red circle"])
    with pytest.raises(ValueError, match="not a caption of one object"):
        reader.accuracy(images, ["a red circle", "a red circle left of a blue square"])


def test_a_new_shape_is_told_from_all_old_ones():
    new, old = bars(60, 3), ShapesDataset(60, 1, size=16, objects=(1,))
    assert share_of_bars(new.images(range(60)), new.captions) == 1
    colours = [caption.replace("small ", "") for caption in old.captions]
    assert share_of_bars(old.images(), colours) == 0
    mixed = bars(60, 3, mixed=True)
    assert torch.equal(mixed.images(range(60, 120)), ShapesDataset(60, 3, size=16, objects=(1,)).images())
    assert not any("yellow x" in caption for caption in mixed.captions)
