"""Train a classifier of docstrings on any device: python train.py --device cpu | sim:trn2-lnc2 | neuron.

The device appears in one place, the name given to get_backend. A static-shape compiler asks for the rest:
rows are padded to three lengths, the last partial batch is left out, nothing in the step reads a number of
the device, and the optimizer is made after the move.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.backends import get_backend
from fmlab.backends.preflight import signatures
from fmlab.data import LengthBuckets, load

ROWS, WIDTH, BUCKETS = 16, 128, LengthBuckets((64, 128, 256))


class Classifier(nn.Module):
    """Bytes [b,l] and their padding mask [b,l] -> logits [b,classes]: an encoder, the mean of tokens."""

    def __init__(self, classes: int, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(BUCKETS.lengths[-1], width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bytes(input_ids) + self.positions.weight[: input_ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=attention_mask == 0)
        real = attention_mask[..., None].to(hidden.dtype)
        logits: Tensor = self.head((hidden * real).sum(1) / real.sum(1))
        return logits


def batches(seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Rows of like length together, padded to a bucket; an epoch has three shapes."""
    texts = load("docstrings")
    rows = [
        (list(text.encode()[: BUCKETS.lengths[-1]]), label)
        for text, label in zip(texts.documents, texts.labels, strict=True)
    ]
    by_bucket: dict[int, list[Any]] = {length: [] for length in BUCKETS.lengths}
    for row in rows:
        by_bucket[BUCKETS.bucket(len(row[0]))].append(row)
    draw = torch.Generator().manual_seed(seed)
    whole = []
    for length, members in by_bucket.items():
        order = torch.randperm(len(members), generator=draw).tolist()
        for start in range(0, len(order) - ROWS + 1, ROWS):  # the last partial batch is left out
            whole.append((length, [members[i] for i in order[start : start + ROWS]]))
    for at in torch.randperm(len(whole), generator=draw).tolist():
        length, members = whole[at]
        ids = torch.zeros(ROWS, length, dtype=torch.long)
        mask = torch.zeros(ROWS, length, dtype=torch.long)
        for i, (row, _) in enumerate(members):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        yield {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.tensor([label for _, label in members]),
        }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the rows, in fp32 whatever the products run in."""
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]).float(), batch["labels"])


def build() -> Classifier:
    torch.manual_seed(0)
    return Classifier(classes=len(load("docstrings").classes))


def program() -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    """What `fmlab preflight train:program --chip trn2` watches: the model, an epoch of batches, the loss."""
    return build(), list(batches()), loss


def train(device: str, steps: int, compiled: bool = False, profile: Path | None = None) -> dict[str, Any]:
    """Losses and seconds of each step, and what an acceptance needs to know beside them."""
    backend = get_backend(device)
    model = backend.to_device(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after the move
    forward = backend.compile(loss) if compiled else loss
    found: dict[str, Any] = {"device": device, "losses": [], "seconds": []}
    modelled = backend.modelled_seconds()
    seen = []
    with torch.profiler.profile() if profile else nullcontext() as watched:
        for _, batch in zip(range(steps), batches(), strict=False):
            started = time.perf_counter()
            seen.append(batch)
            with backend.step():
                moved = backend.to_device(batch)
                with backend.autocast("bf16"):
                    value = forward(model, moved)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            found["losses"].append(value.item())  # a host read, after the step
            found["seconds"].append(time.perf_counter() - started)
    if profile:
        watched.export_chrome_trace(str(profile))
    if modelled is not None:
        found["modelled seconds of a step"] = ((backend.modelled_seconds() or 0.0) - modelled) / steps
    found["shapes"] = signatures(seen).compilations
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="by the device's own compiler")
    parser.add_argument(
        "--cache", type=Path, help="file of compiled programs: read if it is there, then written"
    )
    parser.add_argument("--profile", type=Path, help="write a trace for ui.perfetto.dev")
    parser.add_argument("--out", type=Path, help="write the report here, for accept.py")
    args = parser.parse_args()
    if args.cache and not args.compile:
        parser.error("--cache keeps what --compile makes: give both")
    if args.cache and args.cache.exists():
        torch.compiler.load_cache_artifacts(args.cache.read_bytes())
    found = train(args.device, args.steps, args.compile, args.profile)
    if args.cache and (artifacts := torch.compiler.save_cache_artifacts()):
        args.cache.write_bytes(artifacts[0])
    print(json.dumps(found | {"losses": found["losses"][-3:], "seconds": found["seconds"][-3:]}))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
