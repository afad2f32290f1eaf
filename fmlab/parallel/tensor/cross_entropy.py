"""Cross-entropy over a vocabulary that is divided among ranks; no rank ever holds all logits.

Each rank has the logits of its own words. The softmax needs three numbers of a token from all ranks: the
largest logit, the sum of the exponentials and the target's logit, whatever the vocabulary (Shoeybi et al.
2019, section 3). The rows of an odd vocabulary are padded to an even division; a padded word has a logit of
-inf, so neither a probability nor a gradient.

Shapes: n tokens, c tokens of a chunk, d hidden width, w = ceil(v / t) words of one rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.cross_entropy import IGNORE, loss_and_gradients
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor.sequence import Positions


class VocabParallelCrossEntropy:
    """In place of linear_cross_entropy: (hidden [n,d], weight [w,d], labels [n], bias [w]) -> loss sum, the
    same on all ranks. With `positions` hidden is this rank's [n/t,d], and labels are those of all ranks in
    turn."""

    def __init__(self, axis: Axis, vocabulary: int, positions: Positions | None = None) -> None:
        self.axis, self.vocabulary, self.positions = axis, vocabulary, positions

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        """Raises ValueError for labels of the wrong shape or, on the CPU, out of range."""
        parts = 1 if self.positions is None else self.axis.size
        if hidden.dim() != 2 or len(labels) != parts * len(hidden):
            raise ValueError(
                f"cross-entropy takes hidden [n,d] and labels [{parts if parts > 1 else ''}n]; got hidden "
                f"{list(hidden.shape)} and labels {list(labels.shape)}"
            )
        self._check(labels)
        loss: Tensor = _VocabParallel.apply(hidden, weight, labels, bias, self)
        return loss

    def _check(self, labels: Tensor) -> None:
        if labels.device.type != "cpu" or not labels.numel():
            return
        found = labels[labels != IGNORE]
        if found.numel() and not (int(found.min()) >= 0 and int(found.max()) < self.vocabulary):
            raise ValueError(
                f"a label is outside the vocabulary of {self.vocabulary}: legal 0..{self.vocabulary - 1}, "
                "and -100 for no target; check that the tokenizer and the model have the same vocabulary"
            )

    # region softmax
    def probabilities_minus_target(self, logits_cw: Tensor, target_c1: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of each token's loss for this rank's logits, in their memory, and the losses [c,1]."""
        words = logits_cw.shape[1]
        start = self.axis.rank * words
        logits_cw[:, max(0, self.vocabulary - start) :] = float("-inf")  # padded words
        here_c1 = target_c1 - start
        mine_c1 = (here_c1 >= 0) & (here_c1 < words)
        here_c1 = here_c1.where(mine_c1, 0)
        largest_c1 = self.axis.all_reduce_(logits_cw.amax(-1, keepdim=True), op="max")
        target_logit_c1 = logits_cw.gather(1, here_c1).sub_(largest_c1).where(mine_c1, 0)
        exp_cw = logits_cw.sub_(largest_c1).exp_()
        sums_c2 = torch.cat([exp_cw.sum(-1, keepdim=True), target_logit_c1], 1)
        total_c1, target_logit_c1 = self.axis.all_reduce_(sums_c2).chunk(2, 1)
        probs_cw = exp_cw.div_(total_c1)
        probs_cw.scatter_add_(1, here_c1, -mine_c1.to(probs_cw.dtype))
        return probs_cw, total_c1.log() - target_logit_c1

    # endregion


class _VocabParallel(torch.autograd.Function):
    """Forward: the loss, and the gradients for an upstream gradient of 1. Backward: scale them; f's sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        loss_of: VocabParallelCrossEntropy,
    ) -> Tensor:
        rows = hidden if loss_of.positions is None else loss_of.axis.all_gather(hidden)
        need = ctx.needs_input_grad
        wanted = (need[0], need[1], need[3])
        softmax = loss_of.probabilities_minus_target
        loss, *gradients = loss_and_gradients(rows, weight, labels, bias, wanted, softmax)
        ctx.save_for_backward(*gradients)
        ctx.loss_of, ctx.used = loss_of, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("this loss scales its gradients in place, so its backward runs once")
        ctx.used = True
        d_hidden, d_weight, d_bias = (
            None if gradient is None else gradient.mul_(d_loss) for gradient in ctx.saved_tensors
        )
        if d_hidden is not None:
            axis = ctx.loss_of.axis
            whole = ctx.loss_of.positions is None
            d_hidden = axis.all_reduce_(d_hidden) if whole else axis.reduce_scatter(d_hidden)
        return d_hidden, d_weight, None, d_bias, None
