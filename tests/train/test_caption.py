"""Caption and retrieval accuracy: 1 for a model that reads the scene, next to chance for one that guesses."""

import pytest
import torch
from torch import Tensor

from fmlab.data.shapes import ShapesDataset, ShapesTokenizer, caption_of
from fmlab.models import (
    CLIP,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    LlamaConfig,
    VisionLanguage,
    VisionLanguageConfig,
)
from fmlab.train.caption import caption_accuracy, caption_images, retrieval_accuracy

WORDS = ShapesTokenizer()
VISION = CLIPVisionConfig(16, 8, num_layers=1, hidden_size=16, num_heads=2)
DATA = ShapesDataset(24, size=16, seed=2)


def decoder() -> VisionLanguage:
    torch.manual_seed(0)
    text = LlamaConfig(WORDS.vocab_size, 32, num_layers=1, hidden_size=16, num_heads=2, ffn_size=16)
    return VisionLanguage(VisionLanguageConfig(VISION, text, WORDS.image, feature_layer=-1))


class Reads(CLIP):
    """Images as the caption that is read from their pixels: a CLIP that is always right."""

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        texts = WORDS.batch([caption_of(image) or "" for image in pixel_values])
        return self.encode_texts(**texts)


def test_retrieval_is_perfect_for_a_model_that_reads_and_poor_for_one_that_guesses() -> None:
    torch.manual_seed(0)
    text = CLIPTextConfig(WORDS.vocab_size, 12, num_layers=1, hidden_size=16, num_heads=2, eos_token_id=3)
    config = CLIPConfig(text, VISION, projection_size=16)
    assert retrieval_accuracy(Reads(config), DATA) == 1
    assert retrieval_accuracy(CLIP(config), DATA) < 0.4


def test_captions_are_words_and_their_accuracy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    captions = caption_images(model, DATA.images()[:5], batch_size=2)
    assert len(captions) == 5
    assert captions == caption_images(model, DATA.images()[:5])  # batches do not matter
    assert set(" ".join(captions).split()) <= set(WORDS.WORDS) | {"<unknown>"}
    assert caption_accuracy(model, DATA) == 0

    def read(model: object, images: Tensor, **options: object) -> list[str]:
        return [caption_of(image) or "" for image in images[:12]] + ["a red circle"] * 12

    monkeypatch.setattr("fmlab.train.caption.caption_images", read)
    right = 12 + sum(scene.caption() == "a red circle" for scene in DATA.scenes[12:])
    assert caption_accuracy(model, DATA) == right / 24
