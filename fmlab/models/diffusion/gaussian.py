"""The Gaussian that an encoder gives for every number of a latent.

Shapes: b batch, z latent channels, p latent height, q latent width.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent normal distributions, one for each number (Kingma and Welling 2014, arXiv:1312.6114)."""

    mean: Tensor  # [b,z,p,q]
    log_variance: Tensor  # [b,z,p,q]

    @classmethod
    def of(cls, moments: Tensor) -> "DiagonalGaussian":
        """From [b,2z,p,q]: means, then log-variances, which are held within -30..20 against overflow."""
        mean, log_variance = moments.chunk(2, 1)
        return cls(mean, log_variance.clamp(-30.0, 20.0))

    def mode(self) -> Tensor:
        """The most likely latents: the means."""
        return self.mean

    def sample(self, noise: Tensor) -> Tensor:
        """Latents drawn with this standard normal noise [b,z,p,q]; differentiable in the moments."""
        return self.mean + (0.5 * self.log_variance).exp() * noise

    def kl(self) -> Tensor:
        """KL divergence from the standard normal, in nats, summed over each image: [b] (appendix B)."""
        each = self.mean.square() + self.log_variance.exp() - 1.0 - self.log_variance
        return 0.5 * each.flatten(1).sum(1)
