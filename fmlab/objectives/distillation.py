"""Distillation: a small model learns what a large one answers, not only what is right (Hinton et al. 2015).

Shapes: b batch, l length, n positions with a target, v vocabulary, d hidden width.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmlab.data.batch import IGNORE, Batch
from fmlab.models.t5 import shift_right
from fmlab.objectives.labelled import Seq2SeqLM
from fmlab.objectives.terms import LossTerms, Term, check_weights

# What a model leaves in its State without labels and with them.
_HEADS = {
    "labels": ("logits", "loss_sum"),
    "sentence_labels": ("sentence_logits", "sentence_loss_sum"),
    "class_labels": ("class_logits", "class_loss_sum"),
}
CHUNK_BYTES = 64 * 1024 * 1024  # of fp32 probabilities held at once


class WithLabels(Protocol):
    """An objective that can be distilled: CausalLM, MaskedLM, Seq2SeqLM, PrefixLM."""

    def __call__(self, model: Any, batch: Batch) -> LossTerms: ...
    def counts(self, batch: Batch) -> Mapping[str, Tensor]: ...
    def labels(self, batch: Batch) -> Tensor: ...


class Distillation:
    """The student's own objective plus two terms that pull it to the teacher.

    "soft":   temperature^2 * KL(teacher || student) of the answers, softened by the temperature, at the
              positions that have a target; the square keeps the gradient's size when the temperature changes
    "hidden": 1 - cosine of the last hidden states, at every real token (DistilBERT: Sanh et al. 2019)

    objective:   CausalLM(), MaskedLM(), ...: the hard loss, and where targets are
    teacher:     a model with the same vocabulary; it runs in eval mode and gets no gradients
    temperature: above 1 brings out which wrong answers the teacher finds likely
    hard, soft, hidden: the weights; a term of weight 0 is left out. DistilBERT: hard 2, soft 5, hidden 1,
                 temperature 2
    The student runs once, without labels, so that its logits are held in full.
    """

    def __init__(
        self,
        objective: WithLabels,
        teacher: nn.Module,
        temperature: float = 2.0,
        hard: float = 1.0,
        soft: float = 1.0,
        hidden: float = 0.0,
    ) -> None:
        """Raises ValueError for a temperature or weights that make no sense."""
        check_weights({"hard": hard, "soft": soft, "hidden": hidden})
        if not temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {temperature}; 1 leaves the answers as they are"
            )
        if soft == hidden == 0:
            raise ValueError("soft=0 and hidden=0 leave nothing to learn from the teacher; raise one of them")
        self.objective, self.teacher, self.temperature = objective, teacher, temperature
        self.hard, self.soft, self.hidden = hard, soft, hidden

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run student and teacher and return the objective's terms, "soft" and "hidden".

        Raises ValueError when the two do not have the same vocabulary, or for "hidden", the same width.
        """
        student, labels_bl = _FromLogits(model), self.objective.labels(batch)
        if isinstance(self.objective, Seq2SeqLM):  # without labels a decoder must be told what to read
            batch = {"decoder_input_ids": shift_right(labels_bl), **batch}
        hard = self.objective(student, {**batch, "labels": labels_bl})
        answers = self._ask_teacher(batch)
        counts = self.counts(batch)
        terms = {name: Term(t.sum, t.count, t.weight * self.hard) for name, t in hard.items() if self.hard}
        if self.soft:
            mine, theirs = (s["logits"][labels_bl != IGNORE] for s in (student.state, answers))
            if mine.shape != theirs.shape:
                raise ValueError(
                    f"the student answers with {mine.shape[-1]} tokens, the teacher with {theirs.shape[-1]}; "
                    "both need the same vocabulary"
                )
            loss = soft_loss(mine, theirs, self.temperature)
            terms["soft"] = Term(loss, counts["soft"], self.soft)
        if self.hidden:
            loss = hidden_loss(student.state["hidden"], answers["hidden"], self._real(batch))
            terms["hidden"] = Term(loss, counts["hidden"], self.hidden)
        return terms

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many targets, and for "hidden" how many real tokens, the batch has."""
        counts = dict(self.objective.counts(batch)) if self.hard else {}
        if self.soft:
            counts["soft"] = (self.objective.labels(batch) != IGNORE).sum()
        if self.hidden:
            counts["hidden"] = self._real(batch).sum()
        return counts

    @property
    def judged(self) -> WithLabels:
        """What the student is judged by: its own objective."""
        return self.objective

    def _real(self, batch: Batch) -> Tensor:
        """Which tokens of the stream that ends in `hidden` (the decoder's, if any) are real, bool [b,l]."""
        if isinstance(self.objective, Seq2SeqLM):
            mask, like = batch.get("decoder_attention_mask"), self.objective.labels(batch)
            return like != IGNORE if mask is None else mask.bool()
        mask, like = batch.get("attention_mask"), batch["input_ids"]
        return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()

    @torch.no_grad()
    def _ask_teacher(self, batch: Batch) -> Mapping[str, Tensor]:
        device = batch["input_ids"].device
        if any(parameter.device != device for parameter in self.teacher.parameters()):
            self.teacher.to(device)
        answers: Mapping[str, Tensor] = self.teacher.eval()(**_without_labels(batch))
        return answers

    def __repr__(self) -> str:
        settings = ("temperature", "hard", "soft", "hidden")
        values = ", ".join(f"{name}={getattr(self, name)}" for name in settings)
        return f"Distillation({self.objective!r}, {type(self.teacher).__name__}, {values})"


class _FromLogits:
    """Calls a model without labels and puts the losses that it would have summed beside its logits."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.state: Mapping[str, Tensor] = {}

    def __call__(self, **batch: Tensor) -> Mapping[str, Tensor]:
        self.state = self.model(**_without_labels(batch))
        losses = {
            loss: _cross_entropy(self.state[logits], batch[labels])
            for labels, (logits, loss) in _HEADS.items()
            if labels in batch and logits in self.state
        }
        return {**self.state, **losses}


def _without_labels(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name not in _HEADS}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def soft_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Sum over rows of temperature^2 * KL(softmax(teacher / temperature) || softmax(student / temperature)).

    student, teacher: logits [n,v]. The sum is fp32 (fp64 for fp64); no rows give 0. Only the student gets a
    gradient, temperature * (its probabilities - the teacher's), worked out a few rows at a time together
    with the loss: the usual way holds four tensors of the logits' size, this one holds one.
    """
    loss: Tensor = _SoftLoss.apply(student, teacher, temperature)
    return loss


class _SoftLoss(torch.autograd.Function):
    """Forward: the loss, and its gradient for an upstream gradient of 1. Backward: scale it."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        exact = torch.promote_types(student.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=student.device)
        gradient = torch.empty_like(student)
        rows = max(1, CHUNK_BYTES // (student.shape[-1] * exact.itemsize))
        for start in range(0, len(student), rows):
            chunk = slice(start, start + rows)
            log_p, log_q = (F.log_softmax(x[chunk].to(exact) / temperature, -1) for x in (teacher, student))
            p, q = log_p.exp(), log_q.exp()
            # An answer that the teacher rules out (probability 0) adds nothing, whatever its logarithm.
            loss += torch.where(p > 0, p * (log_p - log_q), 0).sum() * temperature**2
            gradient[chunk] = (q - p) * temperature
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss, None, None


def hidden_loss(student: Tensor, teacher: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Sum over real tokens of 1 - cosine(student, teacher), each [b,l,d]; attention_mask [b,l], 1 real.

    Raises ValueError when the widths differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states of {list(student.shape)} and {list(teacher.shape)} cannot be compared; the "
            "student needs the teacher's width, or hidden=0"
        )
    exact = torch.promote_types(student.dtype, torch.float32)
    distance_bl = 1 - F.cosine_similarity(student.to(exact), teacher.to(exact), dim=-1)
    if attention_mask is not None:
        distance_bl = distance_bl.masked_fill(~attention_mask.bool(), 0)
    return distance_bl.sum()
