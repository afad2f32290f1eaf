"""Measures of quality as sums that can be added up: over batches, over ranks, each sample counted once.

A mean of the ranks' means is wrong as soon as they hold different numbers of samples, and an F1 or a BLEU is
no mean at all. So every measure here is a vector of sums; the vectors of all ranks are added, and only then
is anything divided. Rows that merely fill up a rank's last batch carry the label -100 and add nothing.

    accuracy = Accuracy()
    for batch in sampler.evaluation():
        accuracy.add(predictions, batch["class_labels"])
    accuracy.over(world)          # every rank calls it; now it covers all of them
    accuracy.value

Perplexity is in fmlab.train.evaluate, recall of a search in fmlab.train.retrieval; built the same way.

Shapes: n samples, c classes, m bins.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE
from fmlab.extras import require
from fmlab.train.launch import World

S = TypeVar("S", bound="Sums")


class Sums:
    """A measure: `sums` in fp64, which may be added to those of the same measure of other samples."""

    def __init__(self, *shape: int) -> None:
        self.sums = torch.zeros(shape, dtype=torch.float64)

    def __iadd__(self: S, other: S) -> S:
        """Take in what another one has seen."""
        self.sums += other.sums
        return self

    def over(self: S, world: World, device: torch.device | str = "cpu") -> S:
        """Take in what the other ranks have seen; every rank calls it, once.

        device: that the ranks communicate from
        """
        self.sums = world.sum(self.sums.to(device)).cpu()
        return self

    def _some(self, count: float) -> float:
        if not count:
            raise ValueError(f"{type(self).__name__} has seen no sample: there is nothing to measure")
        return count


class Accuracy(Sums):
    """The part that is right: of classes, tokens, or texts that must match exactly."""

    def __init__(self) -> None:
        super().__init__(2)  # right, all

    def add(self, predicted_n: Tensor, labels_n: Tensor) -> None:
        """Labels of -100 do not count."""
        predicted_n, labels_n = _pairs(predicted_n, labels_n)
        self.sums += torch.tensor([(predicted_n == labels_n).sum(), len(labels_n)], dtype=torch.float64)

    def add_texts(self, answers: Sequence[str], wanted: Sequence[str]) -> None:
        """Exact match: a text counts if it is what was wanted, white space around it aside."""
        _as_many(answers, wanted)
        right = sum(a.strip() == w.strip() for a, w in zip(answers, wanted, strict=True))
        self.sums += torch.tensor([right, len(wanted)], dtype=torch.float64)

    @property
    def count(self) -> int:
        return int(self.sums[1])

    @property
    def value(self) -> float:
        """From 0 to 1. Raises ValueError when no sample was seen."""
        return float(self.sums[0] / self._some(self.sums[1].item()))

    def __str__(self) -> str:
        return f"{self.value:.1%} of {self.count:,}"


class F1(Sums):
    """2PR / (P + R) of precision P and recall R, for each of c classes.

    micro: from the sums over all classes (equal to the accuracy, if every sample has one class)
    macro: the mean over the classes that occur, in labels or predictions; rare ones weigh as much
    """

    def __init__(self, classes: int) -> None:
        super().__init__(3, classes)  # right, predicted, labelled

    def add(self, predicted_n: Tensor, labels_n: Tensor) -> None:
        """Labels of -100 do not count. Raises ValueError for classes out of range."""
        predicted_n, labels_n = _pairs(predicted_n, labels_n)
        classes = self.sums.shape[1]
        for what, numbers in (("prediction", predicted_n), ("label", labels_n)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
                raise ValueError(
                    f"a {what} is not one of the {classes} classes: legal are 0 to {classes - 1}"
                )
        right_n = labels_n[predicted_n == labels_n]
        for row, numbers in enumerate((right_n, predicted_n, labels_n)):
            self.sums[row] += torch.bincount(numbers, minlength=classes)

    @property
    def by_class(self) -> Tensor:
        """[c]; nan for a class that does not occur."""
        right_c, predicted_c, labelled_c = self.sums
        return 2 * right_c / (predicted_c + labelled_c)

    @property
    def micro(self) -> float:
        return float(2 * self.sums[0].sum() / self._some(self.sums[1:].sum().item()))

    @property
    def macro(self) -> float:
        self._some(self.sums[1:].sum().item())
        return float(self.by_class.nanmean())


class Calibration(Sums):
    """Is what the model is 80% sure of right in 80% of the cases? (Guo et al. 2017, arXiv:1706.04599.)

    Samples go into bins of equal width by their confidence, the probability of the predicted class.

    error: expected calibration error, the mean over samples of |accuracy - confidence| of their bin
    brier: mean over samples of the squared distance between the probabilities and the truth (Brier 1950),
           from 0 to 2; given `add` saw whole distributions
    """

    def __init__(self, bins: int = 15) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        super().__init__(4, bins)  # samples, confidence, right, squared distances

    def add(self, probabilities_nc: Tensor, labels_n: Tensor) -> None:
        """Labels of -100 do not count. Raises ValueError for rows that do not add up to 1."""
        keep_n = labels_n != IGNORE
        probs_nc, labels_n = probabilities_nc[keep_n].double().cpu(), labels_n[keep_n].cpu()
        if not len(labels_n):
            return
        if not torch.allclose(probs_nc.sum(-1), torch.ones(()).double(), atol=1e-3):
            raise ValueError(
                "probabilities must add up to 1 in each row; are these logits? take their softmax"
            )
        confidence_n, predicted_n = probs_nc.max(-1)
        brier_n = (probs_nc**2).sum(-1) - 2 * probs_nc.gather(1, labels_n[:, None])[:, 0] + 1
        self._count(confidence_n, predicted_n == labels_n, brier_n)

    def add_confidences(self, confidence_n: Tensor, right_n: Tensor) -> None:
        """From the confidence in each answer and whether it was right; the Brier score is then that of
        right against wrong, from 0 to 1."""
        confidence_n, right_n = confidence_n.double().cpu(), right_n.cpu()
        self._count(confidence_n, right_n, (confidence_n - right_n.double()) ** 2)

    def _count(self, confidence_n: Tensor, right_n: Tensor, brier_n: Tensor) -> None:
        bins = self.sums.shape[1]
        # Bins are open below and closed above, as in the paper: ]0, 1/m], ]1/m, 2/m], ...
        place_n = (confidence_n * bins).ceil().long().clamp(1, bins) - 1
        values = (torch.ones_like(confidence_n), confidence_n, right_n.double(), brier_n)
        for row, values_n in enumerate(values):
            self.sums[row] += torch.bincount(place_n, values_n, bins)

    @property
    def count(self) -> int:
        return int(self.sums[0].sum())

    @property
    def bins(self) -> tuple[Tensor, Tensor, Tensor]:
        """(samples, mean confidence, accuracy) of each bin, [m]; nan where there is no sample."""
        return self.sums[0], self.sums[1] / self.sums[0], self.sums[2] / self.sums[0]

    @property
    def error(self) -> float:
        gaps = (self.sums[1] - self.sums[2]).abs().sum()  # of sums: n * |accuracy - confidence|
        return float(gaps / self._some(self.sums[0].sum().item()))

    @property
    def overconfidence(self) -> float:
        """Mean confidence less accuracy: above 0 is too sure."""
        return float((self.sums[1] - self.sums[2]).sum() / self._some(self.sums[0].sum().item()))

    @property
    def brier(self) -> float:
        return float(self.sums[3].sum() / self._some(self.sums[0].sum().item()))


class BLEU(Sums):
    """BLEU of a whole corpus (Papineni et al. 2002) as sacrebleu computes it (Post 2018), from 0 to 100.

    The n-grams and lengths of all texts are added up, then divided: a mean over texts, or over ranks, is
    another number. Needs the extra `data`.

    tokenize: how sacrebleu cuts words: None for its default, "zh" for Chinese, "char"
    """

    def __init__(self, tokenize: str | None = None) -> None:
        super().__init__(2 + 2 * 4)  # lengths of answers and of references; n-grams that match; n-grams
        self.metric: Any = require("data", "sacrebleu.metrics").BLEU(tokenize=tokenize)

    def add(self, answers: Sequence[str], wanted: Sequence[str]) -> None:
        """Each answer with the one text that was wanted."""
        _as_many(answers, wanted)
        if answers:
            score = self.metric.corpus_score(list(answers), [list(wanted)])
            sums = [score.sys_len, score.ref_len, *score.counts, *score.totals]
            self.sums += torch.tensor(sums, dtype=torch.float64)

    @property
    def value(self) -> float:
        self._some(self.sums[1].item())
        answers, wanted, *ngrams = self.sums.long().tolist()
        score = self.metric.compute_bleu(ngrams[:4], ngrams[4:], answers, wanted, smooth_method="exp")
        return float(score.score)


def share(count: int, world: World | None = None) -> range:
    """This rank's samples of `count`: together the ranks have each once, and none twice.

    For what is measured sample by sample, such as generated texts; nothing needs to be filled up then.
    """
    world = world or World()
    return range(world.rank, count, world.size)


def _pairs(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both flat and on the CPU, without the labels of -100."""
    if predicted.shape != labels.shape:
        raise ValueError(
            f"{list(predicted.shape)} predictions for {list(labels.shape)} labels; give one for each"
        )
    keep = labels != IGNORE
    return predicted[keep].cpu(), labels[keep].cpu()


def _as_many(answers: Sequence[str], wanted: Sequence[str]) -> None:
    if len(answers) != len(wanted):
        raise ValueError(f"{len(answers)} answers for {len(wanted)} texts that are wanted; give one for each")
