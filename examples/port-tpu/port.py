"""Train a small GPT and evaluate it by few programs: python port.py --device cpu | sim:tpu-v5e | tpu.

Training is fmlab.train's loop, whose rows have one length. Evaluation is where shapes multiply: sentences
are scored padded to two lengths, and text is written with a cache of fixed shapes, all tokens by one program.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fmlab.backends import get_backend
from fmlab.data import LengthBuckets, TextTokenizer, load
from fmlab.parallel import Layout
from fmlab.train import TrainConfig, train
from fmlab.train.generate import generate

BUCKETS = LengthBuckets((16, 32))
PROMPTS = ["The with statement", "A list is", "Return the number of"]


def config(device: str, steps: int, out: Path | None = None) -> TrainConfig:
    """fp32 sums, bf16 products; a checkpoint at the end."""
    layout = Layout(precision="bf16")
    return TrainConfig(
        "gpt2-tiny",
        steps=steps,
        batch_size=4,
        seq_len=64,
        eval_every=0,
        log_every=0,
        backend=device,
        layout=layout,
        out=None if out is None else str(out),
    )


def scored(model: Any, tokenizer: TextTokenizer, device: str, sentences: int = 24) -> tuple[float, int]:
    """Loss of a token over sentences of the manual, each padded to a bucket, and how many shapes they had."""
    backend, shapes = get_backend(device), set()
    lines = (line.strip() for text in load("python-docs").documents for line in text.splitlines())
    texts = [line for line in lines if line.endswith(".") and len(line) > 20][:sentences]
    loss, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)[: BUCKETS.lengths[-1] + 1]])
        batch = BUCKETS.pad({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        batch.pop("attention_mask", None)  # a causal model does not need it
        shapes.add(batch["input_ids"].shape)
        with torch.no_grad(), backend.step(), backend.autocast("bf16"):
            summed = model(**backend.to_device(batch))["loss_sum"]
        loss, count = loss + summed.item(), count + ids.shape[1] - 1
    return loss / count, len(shapes)


def run(device: str, steps: int = 10, out: Path | None = None) -> dict[str, Any]:
    """Train and evaluate; a report of plain numbers."""
    result = train(config(device, steps, out))
    model = get_backend(device).to_device(result.model).eval()
    loss, shapes = scored(model, result.tokenizer, device)
    options = dict(max_new_tokens=12, greedy=True, static_shapes=True, length=8)
    with get_backend(device).autocast("bf16"):
        written = [generate(model, result.tokenizer, prompt, **options) for prompt in PROMPTS]
    return {
        "device": device,
        "losses": result.losses,
        "seconds": result.step_seconds,
        "modelled": result.modelled_seconds,
        "evaluation": loss,
        "shapes": shapes,
        "written": written,
    }


def refused(cpu: dict[str, Any], chip: dict[str, Any], tolerance: float = 0.01) -> list[str]:
    """What speaks against the port: training losses, the evaluation, shapes. Text is for the eye: in bf16 two
    tokens may be equally likely."""
    found = []
    for step, (here, there) in enumerate(zip(cpu["losses"], chip["losses"], strict=True), 1):
        if not abs(there - here) <= tolerance * abs(here):
            found.append(f"step {step}: loss {there:.4f}, {here:.4f} on the CPU")
            break
    here, there = cpu["evaluation"], chip["evaluation"]
    if not abs(there - here) <= tolerance * abs(here):
        found.append(f"evaluation: {there:.4f}, {here:.4f} on the CPU")
    if chip["shapes"] > len(BUCKETS.lengths):
        found.append(f"{chip['shapes']} shapes, and the buckets make {len(BUCKETS.lengths)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("--against", type=Path, help="the CPU's report, to be accepted or refused by")
    args = parser.parse_args()
    found = run(args.device, args.steps)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found))
    if args.against:
        speaks_against = refused(json.loads(args.against.read_text()), found)
        raise SystemExit("\n".join(speaks_against) if speaks_against else 0)


if __name__ == "__main__":
    main()
