"""Stable Diffusion in diffusers' folder layout, in and out.

model_index.json                            the class of each part
unet/  vae/  text_encoder/                  config.json and weights
tokenizer/                                  vocab.json, merges.txt, tokenizer_config.json
scheduler/                                  scheduler_config.json
"""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmlab.models.clip_text import CLIPText
from fmlab.models.diffusion.autoencoder import AutoencoderKL
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.models.diffusion.schedulers import DDIM, DDPM, DPMSolver2M, Euler, Scheduler
from fmlab.models.diffusion.unet import UNet
from fmlab.models.hf import find_folder

if TYPE_CHECKING:
    from fmlab.models.diffusion.pipeline import StableDiffusion

PIPELINE = "StableDiffusionPipeline"
#: The files of a repository that are needed; others hold the same weights again in other formats.
HUB_FILES = [
    "model_index.json",
    "scheduler/*.json",
    "tokenizer/*",
    "*/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
]
_SCHEDULERS: dict[str, type[Scheduler]] = {cls.THEIRS: cls for cls in (DDPM, DDIM, Euler, DPMSolver2M)}
_PARTS = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
}
_LEFT_OUT = ("safety_checker", "image_encoder")


def load(source: str | Path) -> "StableDiffusion":
    """A pipeline, in eval mode, from a folder or hub repository; strict about each part.

    A scheduler that we have not is replaced by DDIM on the same noise schedule, with a warning. The safety
    checker and the image encoder are not loaded, also with a warning. Raises ValueError for what is missing
    or is of another pipeline.
    """
    from fmlab.models.diffusion.pipeline import StableDiffusion

    folder = find_folder(source, HUB_FILES)
    index = _read(folder / "model_index.json")
    if index.get("_class_name") != PIPELINE:
        raise ValueError(f"{folder} holds a {index.get('_class_name')!r}; {PIPELINE!r} is needed here")
    for part, (_, name) in _PARTS.items():
        found = (index.get(part) or [None, None])[1]
        if found not in (name, f"{name}Fast"):
            raise ValueError(f"the {part} in {folder} is a {found!r}; {name!r} is needed here")
    if left_out := [part for part in _LEFT_OUT if (index.get(part) or [None])[0] is not None]:
        warnings.warn(f"not loaded from {folder}: {', '.join(left_out)}", stacklevel=3)
    return StableDiffusion(
        UNet.from_pretrained(folder / "unet"),
        CLIPText.from_pretrained(folder / "text_encoder"),
        AutoencoderKL.from_pretrained(folder / "vae"),
        load_scheduler(folder / "scheduler"),
        CLIPTokenizer.load(folder / "tokenizer"),
    ).eval()


def load_scheduler(folder: str | Path) -> Scheduler:
    """The scheduler of scheduler_config.json; DDIM, with a warning, for a method that we have not."""
    fields = _read(Path(folder) / "scheduler_config.json")
    name = str(fields.get("_class_name"))
    if name not in _SCHEDULERS:
        warnings.warn(
            f"{name} is not one of our schedulers ({', '.join(_SCHEDULERS)}); using DDIM on the same noise "
            "schedule, so images will differ from that method's",
            stacklevel=3,
        )
        fields = {"clip_sample": False} | fields  # others do not clip, DDIM does if nothing is said
    return _SCHEDULERS.get(name, DDIM).from_fields(fields)


def save(pipeline: "StableDiffusion", folder: str | Path) -> None:
    """Write the layout; model_index.json comes last, so that a folder that has one is complete.

    Raises ValueError for a pipeline without autoencoder or tokenizer, which diffusers could not use.
    """
    if pipeline.autoencoder is None or pipeline.tokenizer is None:
        missing = "autoencoder" if pipeline.autoencoder is None else "tokenizer"
        raise ValueError(f"diffusers' layout needs an {missing}; save the parts one by one instead")
    folder = Path(folder)
    pipeline.unet.save_pretrained(folder / "unet")
    pipeline.autoencoder.save_pretrained(folder / "vae")
    pipeline.text_encoder.save_pretrained(folder / "text_encoder")
    pipeline.tokenizer.save(folder / "tokenizer")
    _write(folder / "scheduler" / "scheduler_config.json", pipeline.scheduler.to_fields())
    index: dict[str, Any] = {"_class_name": PIPELINE, "requires_safety_checker": False}
    index |= {part: [None, None] for part in (*_LEFT_OUT, "feature_extractor")}
    index |= {part: list(where) for part, where in _PARTS.items()}
    index["scheduler"] = ["diffusers", pipeline.scheduler.THEIRS]
    _write(folder / "model_index.json", index)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; a pipeline's folder has one") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return fields


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
