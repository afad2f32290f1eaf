"""The autoencoder's loss: by hand, in micro-batches, and without what it needs."""

import pytest
import torch

from fmlab.models import AutoencoderKL
from fmlab.models.diffusion import DiagonalGaussian
from fmlab.objectives import Reconstruction, total_loss
from fmlab.objectives.denoising import draw

SEEDS = torch.tensor([3, 5, 7, 9])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoencoderKL.from_preset("vae-tiny", channels=(8, 8), norm_groups=4)


def batch(rows=slice(None)):
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"pixel_values": images[rows], "noise_seed": SEEDS[rows]}


def test_terms_are_the_mean_squared_error_and_the_divergence_of_an_image(model):
    objective = Reconstruction(4, 2, kl_weight=0.5)
    terms, images = objective(model, batch()), batch()["pixel_values"]
    noise = draw(SEEDS, torch.empty(4, 4, 8, 8), 1).noise
    output = model(images, noise)
    error = (output.sample - images).square().mean()
    divergence = DiagonalGaussian(output.mean, output.log_variance).kl().mean() / images[0].numel()
    torch.testing.assert_close(terms["reconstruction"].sum / 4, error)
    torch.testing.assert_close(terms["kl"].sum / 4, divergence)
    loss = total_loss(terms, objective.counts(batch()))
    torch.testing.assert_close(loss, error + 0.5 * divergence)


def test_halves_add_up_to_the_whole(model):
    objective = Reconstruction(4, 2)
    counts = objective.counts(batch())
    parts = sum(total_loss(objective(model, batch(rows)), counts) for rows in (slice(2), slice(2, None)))
    torch.testing.assert_close(parts, total_loss(objective(model, batch()), counts))


def test_what_is_missing_is_named(model):
    with pytest.raises(ValueError, match="needs noise_seed"):
        Reconstruction(4, 2)(model, {"pixel_values": batch()["pixel_values"]})
    with pytest.raises(ValueError, match="kl_weight must be at least 0"):
        Reconstruction(4, 2, kl_weight=-1)
