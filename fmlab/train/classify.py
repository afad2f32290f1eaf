"""What a model gets right and how sure it is: of classes, of tokens, of whole answers; over any ranks.

Shapes: b batch, l length, c classes, v vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.text_pairs import TextPairs
from fmlab.data.tokenizer import TextTokenizer
from fmlab.train.decode import evaluating
from fmlab.train.generate import generate
from fmlab.train.launch import World
from fmlab.train.metrics import F1, Accuracy, Calibration, share


@dataclass(frozen=True)
class Judged:
    """Accuracy and calibration of the predictions of all ranks; F1 for classes, None for tokens."""

    accuracy: Accuracy
    calibration: Calibration
    f1: F1 | None = None

    def __str__(self) -> str:
        f1 = "" if self.f1 is None else f", F1 {self.f1.micro:.3f} micro {self.f1.macro:.3f} macro"
        return f"accuracy {self.accuracy}, calibration error {self.calibration.error:.3f}{f1}"


def judge_classes(model: Any, batches: Iterable[Batch], world: World | None = None, bins: int = 15) -> Judged:
    """Of a classifier, on batches with "class_labels" [b]; every rank calls it with its own batches.

    Raises ValueError for batches without them, and when no row has a label.
    """
    f1: F1 | None = None
    accuracy, calibration = Accuracy(), Calibration(bins)
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            rest, labels_b = _without(batch, "class_labels")
            logits_bc = model(**_on(rest, device))["class_logits"].float().cpu()
            f1 = f1 or F1(logits_bc.shape[1])
            accuracy.add(logits_bc.argmax(-1), labels_b)
            f1.add(logits_bc.argmax(-1), labels_b)
            calibration.add(logits_bc.softmax(-1), labels_b)
    return _over(world, device, accuracy, calibration, f1)


def judge_tokens(
    model: Any,
    batches: Iterable[Batch],
    world: World | None = None,
    bins: int = 15,
    temperature: float = 1.0,
) -> Judged:
    """Of a language model's next (or masked) token, on batches with "labels" [b,l], where they are not -100.

    temperature: divides the logits; found on other data, it corrects confidences without changing an answer
                 (Guo et al. 2017, section 4.2)
    Raises ValueError for batches without labels, and when there is no target.
    """
    accuracy, calibration = Accuracy(), Calibration(bins)
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            rest, labels_bl = _without(batch, "labels")
            keep_bl = labels_bl != IGNORE
            logits_nv = model(**_on(rest, device))["logits"].cpu()[keep_bl].float() / temperature
            accuracy.add(logits_nv.argmax(-1), labels_bl[keep_bl])
            calibration.add(logits_nv.softmax(-1), labels_bl[keep_bl])
    return _over(world, device, accuracy, calibration, None)


def judge_answers(
    model: Any,
    tokenizer: TextTokenizer,
    pairs: TextPairs,
    template: str = "{}\n",
    world: World | None = None,
    batch_size: int = 64,
    **options: Any,
) -> Accuracy:
    """Exact match of the text a model generates for each prompt with the one that is wanted.

    Each rank answers its share; every rank calls it.

    template: what the prompts are written in, as in training
    options:  those of `generate`; by default the most likely token each time
    """
    world = world or World()
    options = {"greedy": True} | options
    accuracy = Accuracy()
    mine = list(share(len(pairs), world))
    for first in range(0, len(mine), batch_size):
        part = pairs.take(mine[first : first + batch_size])
        answers = generate(model, tokenizer, [template.format(text) for text in part.firsts], **options)
        accuracy.add_texts(answers, part.seconds)
    return accuracy.over(world, next(model.parameters()).device)


def by_kind(pairs: TextPairs) -> dict[str, TextPairs]:
    """The pairs of each kind, in alphabetical order. Raises ValueError when they have no kinds."""
    if not pairs.kinds:
        raise ValueError(f"{pairs!r} has no kinds to tell apart")
    places = {
        kind: [i for i, other in enumerate(pairs.kinds) if other == kind] for kind in sorted(set(pairs.kinds))
    }
    return {kind: pairs.take(numbers, kind) for kind, numbers in places.items()}


def _without(batch: Batch, name: str) -> tuple[Batch, Tensor]:
    if name not in batch:
        raise ValueError(f"judging needs {name!r} in the batch, which has {sorted(batch)}")
    return {other: tensor for other, tensor in batch.items() if other != name}, batch[name]


def _on(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _over(
    world: World | None,
    device: torch.device,
    accuracy: Accuracy,
    calibration: Calibration,
    f1: F1 | None,
) -> Judged:
    world = world or World()
    measures: Sequence[Any] = [m for m in (accuracy, calibration, f1) if m is not None]
    for measure in measures:
        measure.over(world, device)
    accuracy.value  # noqa: B018  # raises when there was nothing
    return Judged(accuracy, calibration, f1)
