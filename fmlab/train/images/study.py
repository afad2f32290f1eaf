"""What chapter 3.6 shows of a longer run: accuracy by guidance and by sampler, and four ways to teach a word.

    fmlab train vae-nano --steps 600 --batch-size 16 --out runs/vae
    fmlab train sd-tiny --autoencoder runs/vae/model --steps 1200 --batch-size 16 --ema 0.995 --out runs/sd
    python -m fmlab.train.images.study --run runs/sd --vae runs/vae --out FOLDER

The last writes run.json, with curves, hashes and times, and three grids of pictures.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmlab.data.shapes import ShapesDataset, agreement
from fmlab.extras import require
from fmlab.models.diffusion import DDIM, DPMSolver2M, Euler, StableDiffusion
from fmlab.storage import sha256
from fmlab.train.checkpoint import latest, run_state
from fmlab.train.images.new_word import SIZE, bars, share_of_bars, teach
from fmlab.train.images.reader import CLASSES, ShapeReader, train_reader
from fmlab.train.images.samples import picture_grid

SCALES, STEPS = (0.0, 1.0, 2.0, 4.0, 7.5), 10
SAMPLERS = {"DDIM": DDIM, "Euler": Euler, "DPM-Solver++": DPMSolver2M}
COUNTS = (1, 2, 4, 8)
TIMES = 2  # pictures of each caption
SHOWN = ["a red circle", "a small blue square", "a green triangle", "a yellow square", "a small red triangle"]


def measure(run: Path, vae: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(figures that json can write, grids of pictures by name)."""
    pipeline, reader = StableDiffusion.from_pretrained(run / "model"), train_reader(500, SIZE)
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
    found["word"], drawn = teach(run / "model", reader, best, STEPS)
    grids["word"] = _grid(drawn)
    for name, folder in (("vae", vae), ("sd", run)):
        found[name] = _curve(folder)
    return found, grids


def _ends(pipeline: StableDiffusion, reader: ShapeReader) -> dict[str, float]:
    """The accuracies between which a model's lies."""
    real = ShapesDataset(512, seed=99, size=SIZE, objects=(1,))
    images, shuffled = real.images(), [*real.captions[1:], real.captions[0]]
    magenta = images[[i for i, caption in enumerate(real.captions) if " red " in caption]]
    magenta[:, 2] = magenta[:, 0]  # a colour that the autoencoder has never seen
    new = bars(128, 3)

    @torch.no_grad()
    def through(pictures: Tensor) -> Tensor:
        assert pipeline.autoencoder is not None
        return pipeline.autoencoder.decode(pipeline.autoencoder.encode(pictures))

    decoded = through(images)
    return {
        "blue of magenta, decoded": float(through(magenta)[:, 2][magenta[:, 0] > 0].mean()),
        "bars, decoded": share_of_bars(through(new.images(range(128))), new.captions),
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
    found["command"] = "\n".join(line.strip() for line in (__doc__ or "").splitlines() if line[:4] == " " * 4)
    found["shown"] = SHOWN
    found["machine"] = f"one thread of {platform.machine()}, torch {torch.__version__}"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "run.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, grid in grids.items():
        require("data", "PIL.Image").fromarray(grid.numpy()).save(given.out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
