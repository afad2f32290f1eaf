"""Denoising: targets and weights by hand, two ranks equal one device, what is random belongs to the image."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmlab import Ranks
from fmlab.data.batch import Batch
from fmlab.data.shapes import ShapesDataset, ShapesSampler
from fmlab.models.diffusion.prediction import clean_from, min_snr_weight, target
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.unet import UNet, UNetConfig
from fmlab.models.state import State
from fmlab.objectives.denoising import Denoising, NoiseSeeds, draw, noise_seed
from fmlab.parallel import Layout, parity
from tests.models.reference import roughen

SD = NoiseSchedule("scaled_linear")
EMPTY = torch.tensor([0, 0])


class TinyDenoiser(nn.Module):
    """Answers with a convolution of the sample plus what its caption says; keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.words = nn.Embedding(9, 3)
        self.time = nn.Linear(1, 3)

    def forward(self, sample: Tensor, timestep: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        self.called = (sample, timestep, input_ids)
        time = self.time(timestep[:, None].to(sample.dtype) / 1000)
        added = self.words(input_ids).mean(1) + time
        return {"sample": torch.tanh(self.conv(sample)) + added[:, :, None, None]}


class SmallUNet(nn.Module):
    """A UNet that reads words of its own."""

    def __init__(self) -> None:
        super().__init__()
        config = UNetConfig((8, 8), (2, 2), 6, None, 1, norm_groups=2, in_channels=3, out_channels=3)
        self.unet, self.words = UNet(config), nn.Embedding(9, 6)
        roughen(self, scale=0.05)

    def forward(self, sample: Tensor, timestep: Tensor, input_ids: Tensor) -> State:
        return self.unet(sample, timestep, self.words(input_ids))


def batch(rows: int = 6, first: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(first)
    return {
        "pixel_values": torch.randn(rows, 3, 4, 4, generator=generator),
        "input_ids": torch.randint(1, 9, (rows, 2), generator=generator),
        "noise_seed": torch.tensor([noise_seed(0, first + i) for i in range(rows)]),
    }


@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_the_loss_is_the_weighted_squared_error_of_the_target(prediction: str, gamma: float | None) -> None:
    torch.manual_seed(0)
    model, data = TinyDenoiser().double(), batch()
    data["pixel_values"] = data["pixel_values"].double()
    term = Denoising(SD, prediction, gamma)(model, data)["denoising"]
    draws = draw(data["noise_seed"], data["pixel_values"], 1000)
    total = 0.0
    for i, t in enumerate(draws.timesteps.tolist()):
        abar = float(SD.alphas_cumprod[t])
        clean, noise = data["pixel_values"][i], draws.noise[i]
        noisy = abar**0.5 * clean + (1 - abar) ** 0.5 * noise
        output = model(noisy[None], draws.timesteps[i : i + 1], data["input_ids"][i : i + 1])["sample"][0]
        snr = abar / (1 - abar)
        weight = {"epsilon": min(snr, 5) / snr, "v": min(snr, 5) / (snr + 1), "x0": min(snr, 5)}[prediction]
        total += F.mse_loss(output, target(prediction, clean, noise, abar)) * (weight if gamma else 1)
    torch.testing.assert_close(term.sum, total, rtol=1e-10, atol=0)
    assert int(term.count) == 6


def test_without_weights_it_is_the_mean_squared_error_of_diffusers_training_scripts() -> None:
    model, data = TinyDenoiser(), batch()
    term = Denoising(SD)(model, data)["denoising"]
    draws = draw(data["noise_seed"], data["pixel_values"], 1000)
    output = model(SD.add_noise(data["pixel_values"], draws.noise, draws.timesteps), *model.called[1:])
    torch.testing.assert_close(term.sum / term.count, F.mse_loss(output["sample"], draws.noise))


@pytest.mark.multirank
@pytest.mark.parametrize(("build", "micro_batches"), [(TinyDenoiser, 1), (SmallUNet, 2)])
def test_two_ranks_equal_one_device(ranks2: Ranks, build: Any, micro_batches: int) -> None:
    objective = Denoising(SD, "v", min_snr_gamma=5.0, empty={"input_ids": EMPTY}, drop_probability=0.5)
    report = parity(
        build,
        Layout(data=2, micro_batches=micro_batches),
        batches=[batch(8), batch(8, first=8)],
        precision="fp64",
        objective=objective,
        ranks=ranks2,
    )
    report.raise_if_different()
    assert len(report.rows) == len(list(build().named_parameters()))


def test_what_is_random_belongs_to_the_image_and_the_step() -> None:
    dataset = ShapesDataset(count=24, size=16)
    build = partial(ShapesSampler, dataset, 8)
    whole = NoiseSeeds(build(), seed=3)
    for step in (0, 5):
        halves = [NoiseSeeds(build(rank=r, world_size=2), seed=3).batch(step) for r in (0, 1)]
        expected = whole.batch(step)
        for name, tensor in expected.items():
            assert torch.equal(tensor, torch.cat([half[name] for half in halves])), name
    seeds = torch.cat([whole.batch(step)["noise_seed"] for step in range(50)])
    assert len(set(seeds.tolist())) == 400, "a later epoch gets other noise"
    batches = iter(whole)
    next(batches), next(batches)
    resumed = NoiseSeeds(build(), seed=3)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(next(iter(resumed))["noise_seed"], next(batches)["noise_seed"])
    with pytest.raises(ValueError, match="noise_seed: 3 saved, 4 now"):
        NoiseSeeds(build(), seed=4).load_state_dict(whole.state_dict())


def test_draws_have_the_right_distribution() -> None:
    seeds = torch.tensor([noise_seed(1, i) for i in range(2000)])
    draws = draw(seeds, torch.empty(2000, 1, 4, 4), 1000)
    assert abs(float(draws.timesteps.double().mean()) - 499.5) < 20
    assert int(draws.timesteps.min()) < 5
    assert int(draws.timesteps.max()) > 994
    assert abs(float(draws.noise.mean())) < 0.02
    assert abs(float(draws.noise.std()) - 1) < 0.02
    assert abs(float((draws.dropping < 0.1).double().mean()) - 0.1) < 0.02
    correlation = torch.corrcoef(torch.stack([draws.dropping, draws.timesteps.double()]))[0, 1]
    assert abs(float(correlation)) < 0.06


def test_captions_are_dropped_with_their_probability_and_only_they_change() -> None:
    model, data = TinyDenoiser(), batch(400)
    Denoising(SD, empty={"input_ids": EMPTY})(model, data)
    dropped = (model.called[2] == EMPTY).all(1)
    assert 20 <= int(dropped.sum()) <= 60  # 10 % of 400
    assert torch.equal(model.called[2][~dropped], data["input_ids"][~dropped])
    seen = model.called[0]
    Denoising(SD)(model, data)
    assert torch.equal(model.called[0], seen)
    assert torch.equal(model.called[2], data["input_ids"])


def test_a_perfect_model_has_no_loss_and_given_draws_replace_the_seeds() -> None:
    data = batch() | {"timesteps": torch.full((6,), 999), "noise": torch.randn(6, 3, 4, 4)}
    del data["noise_seed"]

    def perfect(sample: Tensor, timestep: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        abar = schedule.abar(timestep, sample)
        output = target("v", data["pixel_values"], data["noise"], abar)
        torch.testing.assert_close(clean_from("v", output, sample, abar), data["pixel_values"])
        return {"sample": output}

    for schedule in (SD, NoiseSchedule("linear", zero_terminal_snr=True)):
        assert float(Denoising(schedule, "v")(perfect, data)["denoising"].sum) == 0


def test_min_snr_gives_the_noisiest_step_no_weight_with_v() -> None:
    zero = NoiseSchedule("scaled_linear", zero_terminal_snr=True)
    weights = min_snr_weight("v", zero.alphas_cumprod)
    assert float(weights[-1]) == 0
    assert float(weights.max()) < 5 / 6 + 1e-9


def test_latents_are_encoded_once_and_without_gradients() -> None:
    calls = []

    def encode(images: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return images[:, :, ::2, ::2] * 0.5

    model = TinyDenoiser()
    term = Denoising(SD, encode=encode)(model, batch())["denoising"]
    assert model.called[0].shape == (6, 3, 2, 2)
    assert calls == [False]
    assert int(term.count) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(schedule=NoiseSchedule(zero_terminal_snr=True)), "zero terminal SNR cannot go with epsilon"),
        (dict(prediction="noise"), "epsilon, v, x0"),
        (dict(min_snr_gamma=0.0), "positive"),
        (dict(drop_probability=0.1), "do nothing without each other"),
        (dict(empty={"input_ids": EMPTY}, drop_probability=0.0), "do nothing without each other"),
        (dict(empty={"input_ids": EMPTY}, drop_probability=1.1), "from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Denoising(**({"schedule": SD} | settings))  # type: ignore[arg-type]


def test_batches_that_cannot_be_are_refused() -> None:
    model, data = TinyDenoiser(), batch()
    for change, message in [
        ({"noise_seed": torch.zeros(5, dtype=torch.int64)}, "each of the 6 images"),
        ({"timesteps": torch.full((6,), 1000)}, "from 0 to 999"),
        ({"noise": torch.zeros(6, 3, 2, 2)}, r"noise must be \[6, 3, 4, 4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            Denoising(SD)(model, data | change)
    with pytest.raises(ValueError, match="needs noise_seed"):
        Denoising(SD)(model, {k: v for k, v in data.items() if k != "noise_seed"})
    with pytest.raises(ValueError, match="no 'latents'"):
        Denoising(SD, image="latents")(model, data)
    with pytest.raises(ValueError, match=r"empty\['input_ids'\] is \[3\]"):
        Denoising(SD, empty={"input_ids": torch.zeros(3)})(model, data)
