"""Latent diffusion of a tiny UNet: `fmlab.train` beside a loop as in diffusers' train_text_to_image.py.

Both start from the same folder: they encode pictures, mix in noise, read the captions, predict v, and step
fused AdamW on UNet and text encoder after clipping at norm 1. Neither keeps an average of the weights. Ours
draws each picture's noise from a seed of its own, theirs a batch at once.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fmlab.data.captioned import CaptionedImages, load_captioned
from fmlab.extras import require
from fmlab.models import AutoencoderKL, StableDiffusion
from fmlab.train import train
from fmlab.train.images import ImageConfig
from fmlab.train.images.parts import new_pipeline

STEPS, BATCH = 20, 16
NAME = f"UNet of 1 million, {STEPS} steps of {BATCH} pictures, against diffusers' training script"


def make_run(side: str) -> Callable[[], object]:
    """A run of STEPS steps of one side; data and model are made before."""
    train_set, kept = load_captioned("shapes-one", 16)
    torch.manual_seed(0)
    autoencoder = AutoencoderKL.from_preset("vae-nano").eval().requires_grad_(False)
    autoencoder.measure_scale(train_set.images(range(64)))
    config = ImageConfig(autoencoder="made here", steps=STEPS, batch_size=BATCH)
    pipeline = new_pipeline(config, train_set.captions, autoencoder, None)
    folder = tempfile.TemporaryDirectory()
    pipeline.save_pretrained(folder.name)
    return _ours(folder, (train_set, kept)) if side == "fmlab" else _theirs(folder, train_set)


Folder = tempfile.TemporaryDirectory[str]


def _ours(folder: Folder, data: tuple[CaptionedImages, CaptionedImages]) -> Callable[[], object]:
    config = ImageConfig(
        init=folder.name,
        steps=STEPS,
        batch_size=BATCH,
        ema=0.0,
        lr=1e-4,
        eval_every=0,
        log_every=0,
        backend="cpu",
    )
    model = StableDiffusion.from_pretrained(folder.name)
    return lambda: (train(config, model=model, images=data), folder)


def _theirs(folder: Folder, data: CaptionedImages) -> Callable[[], object]:
    diffusers, transformers = require("hf", "diffusers"), require("hf", "transformers")
    root = Path(folder.name)
    unet = diffusers.UNet2DConditionModel.from_pretrained(root / "unet").train()
    vae = diffusers.AutoencoderKL.from_pretrained(root / "vae").requires_grad_(False)
    text = transformers.CLIPTextModel.from_pretrained(root / "text_encoder").train()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(root / "tokenizer")
    noise = diffusers.DDPMScheduler.from_pretrained(root / "scheduler")
    learned = [*unet.parameters(), *text.parameters()]

    def step(number: int, optimizer: torch.optim.Optimizer) -> float:
        chosen = [(number * BATCH + i) % len(data) for i in range(BATCH)]
        ids = tokenizer(
            [data.captions[i] for i in chosen],
            padding="max_length",
            max_length=text.config.max_position_embeddings,
            return_tensors="pt",
        ).input_ids
        with torch.no_grad():
            clean = vae.encode(data.images(chosen)).latent_dist.mode() * vae.config.scaling_factor
        mixed, t = torch.randn_like(clean), torch.randint(1000, (BATCH,))
        target = noise.get_velocity(clean, mixed, t)
        out = unet(noise.add_noise(clean, mixed, t), t, text(ids).last_hidden_state).sample
        loss = F.mse_loss(out, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def run() -> None:
        optimizer = torch.optim.AdamW(learned, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for number in range(STEPS):
            step(number, optimizer)
            rate.step()

    return run
