"""An autoencoder's loss: how far the image that comes back is from the one that went in, and a KL term.

Kingma and Welling 2014, arXiv:1312.6114, equation 10, weighted as Rombach et al. 2022, arXiv:2112.10752,
appendix G: the KL term only keeps latents from growing. Their autoencoder learns from absolute errors, a
perceptual and an adversarial loss, which sharpen photographs. Here the error is squared, and nothing else: on
small shapes before a black ground absolute errors, whose best guess is the median, draw black for long.

Shapes: b images, c channels, h height, w width; z latent channels, p and q height and width of latents.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.objectives.denoising import draw
from fmlab.objectives.terms import LossTerms, Term


class Reconstruction:
    """Terms "reconstruction" (mean squared error of an image's numbers) and "kl".

    The model is called as model(sample=images, noise=[b,z,p,q]) and returns "sample", "mean" and
    "log_variance". The KL divergence is that of a whole image in nats, divided by the number of the image's
    values, so that `kl_weight` means what it does beside a sum of errors over the image, as in the paper.

    latent_channels, downscale: z, and how many times smaller latents are than images
    kl_weight: the paper's is 1e-6; 0 leaves the term in at no weight
    image:     name of the images in the batch

    A batch has "noise_seed" [b], see NoiseSeeds. Raises ValueError for a weight below 0.
    """

    name = "reconstruction"

    def __init__(
        self, latent_channels: int, downscale: int, kl_weight: float = 1e-6, image: str = "pixel_values"
    ) -> None:
        if not kl_weight >= 0:
            raise ValueError(f"kl_weight must be at least 0, got {kl_weight}")
        self.latent_channels, self.downscale = latent_channels, downscale
        self.kl_weight, self.image = kl_weight, image

    # region loss
    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return {"reconstruction": Term, "kl": Term}."""
        images = batch[self.image]  # [b,c,h,w]
        output = model(sample=images, noise=self._noise(batch, images))
        precise = torch.promote_types(images.dtype, torch.float32)
        error_b = (output["sample"].to(precise) - images.to(precise)).square().flatten(1).mean(1)
        mean, log_variance = output["mean"].to(precise), output["log_variance"].to(precise)
        each = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        kl_b = each.flatten(1).sum(1) / images[0].numel()
        count = torch.tensor(len(images))
        return {
            "reconstruction": Term(sum=error_b.sum(), count=count),
            "kl": Term(sum=kl_b.sum(), count=count, weight=self.kl_weight),
        }

    # endregion

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many images the batch has."""
        count = torch.tensor(batch[self.image].shape[0])
        return {"reconstruction": count, "kl": count}

    def _noise(self, batch: Batch, images: Tensor) -> Tensor:
        """Standard normal noise for the latents, from each image's seed."""
        if "noise_seed" not in batch:
            raise ValueError("the batch needs noise_seed, one whole number an image (wrap it in NoiseSeeds)")
        size = [side // self.downscale for side in images.shape[2:]]
        like = images.new_empty(len(images), self.latent_channels, *size)
        return draw(batch["noise_seed"], like, steps=1).noise
