"""What chapter 3.6 shows of a longer run: accuracy by guidance and by sampler, and four ways to teach a word.

    fmlab train vae-nano --steps 600 --batch-size 16 --out runs/vae
    fmlab train sd-tiny --autoencoder runs/vae/model --steps 3000 --batch-size 16 --ema 0.995 --out runs/sd
    python -m fmlab.train.images.study --run runs/sd --vae runs/vae --out FOLDER

The last writes run.json, with curves, hashes and times, and three grids of pictures.
"""

import argparse
import json
import platform
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmlab.data.captioned import CaptionedImages
from fmlab.data.shapes import ShapesDataset, agreement
from fmlab.extras import require
from fmlab.models.diffusion import DDIM, DPMSolver2M, Euler, StableDiffusion
from fmlab.storage import sha256
from fmlab.train.checkpoint import latest, run_state
from fmlab.train.images.config import ImageConfig
from fmlab.train.images.reader import CLASSES, ShapeReader, train_reader
from fmlab.train.images.samples import picture_grid
from fmlab.train.loop import train

SCALES, STEPS = (0.0, 1.0, 2.0, 4.0, 7.5), 10
SAMPLERS = {"DDIM": DDIM, "Euler": Euler, "DPM-Solver++": DPMSolver2M}
COUNTS = (2, 4, 8, 16)
TIMES = 3  # pictures of each caption
WORD, NEW_COLOUR = "x", "magenta"
TUNED_STEPS, TUNED_BATCH = 150, 16
SIZE = 16
SHOWN = ["a red circle", "a small blue square", "a green triangle", "a yellow square", "a small red triangle"]


def measure(run: Path, vae: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(figures that json can write, grids of pictures by name)."""
    pipeline, reader = StableDiffusion.from_pretrained(run / "model"), train_reader(size=SIZE)
    found: dict[str, Any] = {"ends": _ends(pipeline, reader)}
    print(found, flush=True)
    grids = {}
    captions = list(CLASSES) * TIMES
    found["guidance"] = {str(s): _judged(pipeline, reader, captions, STEPS, s) for s in SCALES}
    grids["guidance"] = _grid([pipeline.generate(SHOWN, STEPS, s, seed=5) for s in SCALES])
    print(found["guidance"], flush=True)
    best = max(SCALES, key=lambda s: found["guidance"][str(s)]["reader"])
    found["guidance used"] = best
    found["samplers"] = {
        name: {str(n): _judged(pipeline, reader, captions, n, best, kind) for n in COUNTS}
        for name, kind in SAMPLERS.items()
    }
    grids["samplers"] = _grid(
        [pipeline.generate(SHOWN, 4, best, seed=5, scheduler=kind) for kind in SAMPLERS.values()]
    )
    print(found["samplers"], flush=True)
    found["word"], grids["word"] = _taught(run / "model", reader, best)
    for name, folder in (("vae", vae), ("sd", run)):
        found[name] = _curve(folder)
    return found, grids


def _ends(pipeline: StableDiffusion, reader: ShapeReader) -> dict[str, float]:
    """The accuracies between which a model's lies."""
    real = ShapesDataset(512, seed=99, size=SIZE, objects=(1,))
    images, shuffled = real.images(), [*real.captions[1:], real.captions[0]]
    assert pipeline.autoencoder is not None
    with torch.no_grad():
        decoded = pipeline.autoencoder.decode(pipeline.autoencoder.encode(images))
    return {
        "real": reader.accuracy(images, real.captions),
        "decoded": reader.accuracy(decoded, real.captions),
        "decoded, by template": agreement(decoded, real.captions),
        "shuffled": reader.accuracy(images, shuffled),
    }


def _judged(
    pipeline: StableDiffusion,
    reader: ShapeReader,
    captions: Sequence[str],
    steps: int,
    guidance: float,
    scheduler: Any = None,
) -> dict[str, float]:
    """Caption accuracy by the classifier and by template, and mean brightness in [-1, 1]."""
    images = 2 * pipeline.generate(captions, steps, guidance, seed=1000, scheduler=scheduler) - 1
    return {
        "reader": reader.accuracy(images, captions),
        "template": agreement(images, list(captions)),
        "brightness": float(images.mean()),
    }


# ---- a new word --------------------------------------------------------------------------------------------


def recoloured(count: int, seed: int, mixed: bool = False) -> CaptionedImages:
    """Circles and squares in a colour that no model here has seen, called "a x circle"; mixed: every other
    picture is an old one with its own caption (prior preservation: Ruiz et al. 2022, arXiv:2208.12242,
    section 3.2, with real pictures in place of drawn ones)."""
    data = ShapesDataset(40 * count, seed, size=SIZE, objects=(1,))
    red = [i for i, c in enumerate(data.captions) if " red " in c and "triangle" not in c][:count]
    images = data.images(red)
    images[:, 2] = images[:, 0]  # blue as red: magenta
    captions = [data.captions[i].replace("red", WORD) for i in red]
    if mixed:
        others = list(range(count))
        images = torch.cat([images, data.images(others)])
        captions += [data.captions[i] for i in others]
    fingerprint = zlib.crc32("\n".join(captions).encode())
    return CaptionedImages("recoloured", SIZE, captions, lambda chosen: images[list(chosen)], fingerprint)


def _as_red(images: Tensor) -> Tensor:
    """Magenta pixels red, and red ones black, so that only what has the new colour is read as red."""
    red, green, blue = (images[:, c] > 0 for c in range(3))
    new, old = red & blue & ~green, red & ~blue & ~green
    images = images.clone()
    images[:, 2] = torch.where(new, -1.0, images[:, 2])
    images[:, 0] = torch.where(old, -1.0, images[:, 0])
    return images


def _taught(folder: Path, reader: ShapeReader, guidance: float) -> tuple[dict[str, Any], Tensor]:
    """For each way to fine-tune: what learns, how often the new word and the old ones are drawn."""
    ways: dict[str, dict[str, Any]] = {
        "all weights": {},
        "all weights, old pictures too": {},
        "LoRA, rank 4": {"lora_rank": 4},
        "the word alone": {"learn_word": WORD},
    }
    asked = [
        f"a {size}{WORD} {shape}" for shape in ("circle", "square", "triangle") for size in ("", "small ")
    ]
    found, drawn = {}, []
    for name, settings in ways.items():
        config = ImageConfig(
            init=str(folder), steps=TUNED_STEPS, batch_size=TUNED_BATCH, ema=0.0, eval_every=0, **settings
        )
        data = recoloured(256, 11, mixed="too" in name), recoloured(32, 12)
        start = time.perf_counter()
        result = train(config, images=data)
        model: Any = result.model
        seconds = time.perf_counter() - start
        prompts = asked * 4
        images = _as_red(2 * model.generate(prompts, STEPS, guidance, seed=2000) - 1)
        known = [p.replace(WORD, "red") for p in prompts]
        seen = [i for i, p in enumerate(prompts) if "triangle" not in p]
        rest = [i for i in range(len(prompts)) if i not in seen]
        found[name] = {
            "new word": agreement(images[seen], [known[i] for i in seen]),
            "new word, unseen shape": agreement(images[rest], [known[i] for i in rest]),
            "old words": _judged(model, reader, list(CLASSES) * 2, STEPS, guidance)["reader"],
            "seconds": seconds,
        }
        drawn.append(model.generate(asked, STEPS, guidance, seed=3))
        print(name, found[name], flush=True)
    return found, _grid(drawn)


# ---- files -------------------------------------------------------------------------------------------------


def _grid(rows: Sequence[Tensor]) -> Tensor:
    return picture_grid(torch.cat(list(rows)), columns=len(rows[0]))


def _curve(folder: Path) -> dict[str, Any]:
    """Losses of a run, averaged over 25 steps, its settings, and the hash of its weights."""
    state = run_state(latest(folder))
    losses = torch.tensor(state.losses)[: len(state.losses) // 25 * 25]
    weights = sorted((folder / "model").rglob("*.safetensors"))
    return {
        "losses": [round(float(x), 4) for x in losses.reshape(-1, 25).mean(1)],
        "steps": state.step,
        "batch size": state.settings["batch_size"],
        "sha256": {str(path.relative_to(folder)): sha256(path) for path in weights},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run", "vae", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    found, grids = measure(given.run, given.vae)
    found["seconds of this study"] = round(time.perf_counter() - start)
    found["machine"] = f"one thread of {platform.machine()}, torch {torch.__version__}"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "run.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, grid in grids.items():
        require("data", "PIL.Image").fromarray(grid.numpy()).save(given.out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
