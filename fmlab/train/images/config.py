"""Settings of a run that learns from images: an autoencoder, or a text-to-image model."""

import math
import os
from dataclasses import dataclass
from typing import Literal

import tyro

from fmlab.models.diffusion.prediction import PREDICTIONS
from fmlab.parallel import values
from fmlab.train.config import TrainConfig

AUTOENCODERS, PIPELINES = ("vae-nano", "vae-tiny"), ("sd-tiny",)
IMAGE_MODELS = (*AUTOENCODERS, *PIPELINES)
_TEXT_ONLY = (
    "tokenizer",
    "objective",
    "seq_len",
    "pack_documents",
    "numbers",
    "optimizer",
    "mask_versions",
    "teacher",
)


@dataclass(frozen=True)
class ImageConfig(TrainConfig):
    """Settings of a run on images. First an autoencoder (vae-nano), then a text-to-image model on its latents
    (sd-tiny --autoencoder FOLDER)."""

    model: tyro.conf.Positional[str] = "sd-tiny"
    """What to train: vae-nano (latents of half the size), vae-tiny (a quarter) or sd-tiny."""
    corpus: str = "shapes-one"
    """What to look at: shapes-one (one object), shapes (one or two), or a folder of images with captions."""
    batch_size: int = 32
    """Images a step, over all ranks and micro-batches."""
    steps: int = 1000
    """Optimizer steps."""
    lr: float | None = None
    """Highest learning rate; by default 4e-3 for autoencoders, 2e-3 for sd-tiny, 3e-4 where it goes on
    learning, 1e-2 for LoRA and for a new word."""
    beta2: float = 0.99
    """AdamW: memory of the mean squared gradient."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases are not decayed. A new word is not either."""
    image_size: int = 16
    """Side of an image in pixels; a folder's images must have it."""
    autoencoder: str | None = None
    """Folder of a trained autoencoder: OUT/model of a run of vae-nano, or diffusers' AutoencoderKL."""
    kl_weight: float = 1e-6
    """Autoencoder: weight of the KL term."""
    prediction: str | None = None
    """What the UNet predicts: epsilon, v or x0; by default v, or what the model that is gone on with does."""
    zero_terminal_snr: bool = False
    """Leave nothing of the image at the last timestep (Lin et al. 2023); with v or x0."""
    min_snr_gamma: float | None = None
    """Weigh timesteps by min-SNR with this gamma (Hang et al. 2023: 5)."""
    drop_captions: float = 0.1
    """Share of captions that are left out, so that guidance can be used."""
    ema: float = 0.999
    """Decay of the average of the weights that is kept as the model; 0 for the last weights themselves."""
    init: str | None = None
    """Folder of a trained text-to-image model to go on with, in diffusers' layout: fine-tuning."""
    lora_rank: int = 0
    """Fine-tuning: learn updates of this rank in the UNet's attention alone; 0 for all weights."""
    learn_word: str | None = None
    """Fine-tuning: learn the vector of this one word of the captions alone (textual inversion)."""

    # What a run on text has and one on images has not.
    tokenizer: tyro.conf.Suppress[str | None] = None
    objective: tyro.conf.Suppress[str | None] = None
    seq_len: tyro.conf.Suppress[int] = 1
    pack_documents: tyro.conf.Suppress[bool] = False
    numbers: tyro.conf.Suppress[str | None] = None
    optimizer: tyro.conf.Suppress[Literal["adamw", "lamb"]] = "adamw"
    mask_versions: tyro.conf.Suppress[int] = 0
    teacher: tyro.conf.Suppress[str | None] = None

    def __post_init__(self) -> None:
        """Raises ValueError that says what is legal, for values that cannot work whatever the data."""
        super().__post_init__()
        _require(self.model in IMAGE_MODELS, "model", f"one of {', '.join(IMAGE_MODELS)}", repr(self.model))
        for name in _TEXT_ONLY:
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(f"{name} does nothing for a model that learns from images; leave it out")
        for name in ("autoencoder", "init"):
            if (value := getattr(self, name)) is not None:
                _require(isinstance(value, str | os.PathLike), name, "a folder", repr(value))
                object.__setattr__(self, name, os.path.expanduser(value))
        self._check_kinds()
        _require(0 <= self.ema < 1, "ema", "at least 0 and below 1", self.ema)
        _require(0 <= self.drop_captions < 1, "drop_captions", "at least 0 and below 1", self.drop_captions)
        _require(0 <= self.kl_weight < math.inf, "kl_weight", "at least 0 and finite", self.kl_weight)
        _require(self.image_size >= 16, "image_size", "at least 16", self.image_size)
        _require(self.lora_rank >= 0, "lora_rank", "at least 0", self.lora_rank)
        self._check_parts()

    def _check_kinds(self) -> None:
        """Raise ValueError for a setting of another kind than its own; numbers become Python's."""
        for name in ("image_size", "lora_rank", "ema", "drop_captions", "kl_weight", "min_snr_gamma"):
            value, whole = getattr(self, name), name in ("image_size", "lora_rank")
            if name == "min_snr_gamma" and value is None:
                continue
            number = values.index(value) if whole else values.real(value)
            legal = "a whole number" if whole else "a number"
            _require(number is not None, name, legal, repr(value))
            object.__setattr__(self, name, number)
        gamma, word, zero = self.min_snr_gamma, self.learn_word, self.zero_terminal_snr
        _require(gamma is None or 0 < gamma < math.inf, "min_snr_gamma", "above 0 and finite", gamma)
        _require(word is None or isinstance(word, str), "learn_word", "a word", repr(word))
        _require(isinstance(zero, bool), "zero_terminal_snr", "True or False", repr(zero))

    def _check_parts(self) -> None:
        """Raise ValueError for settings that would do nothing with this model, or need another one."""
        ours = {each.name: each.default for each in type(self).__dataclass_fields__.values()}
        given = {name for name, default in ours.items() if getattr(self, name) != default}
        if self.model in AUTOENCODERS:
            others = {"autoencoder", "prediction", "zero_terminal_snr", "min_snr_gamma", "drop_captions"}
            others |= {"init", "lora_rank", "learn_word"}
            if wrong := sorted(given & others):
                raise ValueError(
                    f"{', '.join(wrong)}: nothing of {self.model}; leave it out, or train sd-tiny"
                )
            return
        if "kl_weight" in given:
            raise ValueError(f"kl_weight: nothing of {self.model}; its autoencoder is trained before it")
        if (self.autoencoder is None) == (self.init is None):
            raise ValueError(
                f"{self.model} draws latents of a trained autoencoder: give autoencoder=FOLDER (first: fmlab "
                "train vae-nano --out FOLDER, then FOLDER/model), or init=FOLDER of a trained model to "
                "go on with, and not both"
            )
        if self.prediction is not None and self.prediction not in PREDICTIONS:
            raise ValueError(f"prediction must be one of {', '.join(PREDICTIONS)}, got {self.prediction!r}")
        tunes = {"lora_rank", "learn_word"} & given
        if self.init is None and tunes:
            raise ValueError(f"{', '.join(sorted(tunes))} changes a trained model: give init=FOLDER")
        if self.init is not None and (fixed := {"prediction", "zero_terminal_snr"} & given):
            raise ValueError(
                f"{', '.join(sorted(fixed))}: a trained model goes on predicting what it was trained to; "
                "leave it out"
            )
        if len(tunes) > 1:
            raise ValueError("lora_rank and learn_word are two ways to fine-tune: choose one")

    @property
    def items_per_step(self) -> int | None:
        """Images."""
        return self.batch_size

    @property
    def item(self) -> str:
        """What is counted: images."""
        return "images"

    def lr_for(self, hidden_size: int, factor: float = 0.75) -> float:
        """`lr`, or its default; the width changes nothing."""
        if self.lr is not None:
            return self.lr
        if self.lora_rank or self.learn_word:
            return 1e-2
        if self.model in AUTOENCODERS:
            return 4e-3
        return 2e-3 if self.init is None else 3e-4


def _require(condition: bool, name: str, legal: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {legal}, got {value}")
