"""Captions from a vision-language decoder, and how many of them are right.

Shapes: b images, c channels.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.data.shapes import ShapesDataset, ShapesTokenizer, agreement
from fmlab.train.generate import generate_ids


def caption_images(
    model: Any,
    pixel_values: Tensor,
    tokenizer: ShapesTokenizer | None = None,
    batch_size: int = 128,
    **options: Any,
) -> list[str]:
    """A caption for each image [b,c,h,w], generated with the cache: the most likely word each time.

    options: those of generate_ids, to draw words instead (`greedy=False, temperature=...`).
    """
    tokenizer = tokenizer or ShapesTokenizer()
    length, words = tokenizer.MAX_LENGTH, tokenizer.vocab_size
    options = dict(greedy=True, max_new_tokens=length, num_tokens=words) | options
    captions = []
    for images in pixel_values.split(batch_size):
        prompts = tokenizer.prompts(len(images), model.config.image_tokens)
        rows = generate_ids(model.looking_at(images), prompts, tokenizer.eos, **options)
        captions += [tokenizer.decode(row) for row in rows]
    return captions


def caption_accuracy(model: Any, dataset: ShapesDataset, **options: Any) -> float:
    """The share of a dataset's images whose generated caption describes exactly the scene in their pixels.

    "a red circle left of a blue square" and "a blue square right of a red circle" are both right.
    """
    images = dataset.images()
    device = next(model.parameters()).device
    return agreement(images, caption_images(model, images.to(device), **options))


@torch.no_grad()
def retrieval_accuracy(model: Any, dataset: ShapesDataset, tokenizer: ShapesTokenizer | None = None) -> float:
    """The share of images to which a CLIP finds the right one among all different captions of `dataset`."""
    scenes = {scene: i for i, scene in enumerate(dict.fromkeys(dataset.scenes))}
    was_training = model.training
    model.eval()
    texts = (tokenizer or ShapesTokenizer()).batch([scene.caption() for scene in scenes])
    device = next(model.parameters()).device
    texts_e = model.encode_texts(**{name: tensor.to(device) for name, tensor in texts.items()})
    images_e = model.encode_images(dataset.images().to(device))
    model.train(was_training)
    found = (images_e @ texts_e.T).argmax(-1).cpu()
    return float((found == torch.tensor([scenes[scene] for scene in dataset.scenes])).float().mean())
