"""Training on images: autoencoders and text-to-image models, by the loop that trains on text."""

from fmlab.train.images.config import ImageConfig

__all__ = ["ImageConfig"]
