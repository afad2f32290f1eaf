"""Cross-entropy over a vocabulary, fused: the table of probabilities is never stored.

A program walks over the tiles of one token's logits and keeps two numbers, the largest so far and the sum of
exp(logit - largest) (the online softmax of Milakov and Gimelshein 2018, 1805.02867). What is kept for the
backward pass is one number a token, the log-sum-exp: from it each probability is made again, and the
gradient, probability - 1 at the target, is stored directly.

Shapes: logits [tokens, vocab], targets [tokens], losses [tokens].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel

IGNORED = -100  # a target that counts for nothing, as in torch
TILE = 1024  # logits of a tile


@kernel
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, logsumexp_ptr, VOCAB, ignored, TILE: tl.constexpr
):
    # region cross-entropy
    token = tl.program_id(0)
    target = tl.load(targets_ptr + token)
    best = -float("inf")
    total = 0.0
    for start in range(0, VOCAB, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + token * VOCAB + at, mask=at < VOCAB, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(best, tl.max(x, axis=0))
        total = total * tl.exp(best - larger) + tl.sum(tl.exp(x - larger), axis=0)
        best = larger
    logsumexp = best + tl.log(total)
    known = (target >= 0) & (target < VOCAB)  # another target gives nan, so that it cannot go unseen
    right = tl.load(logits_ptr + token * VOCAB + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + token, tl.where(target == ignored, 0.0, logsumexp - right))
    tl.store(logsumexp_ptr + token, logsumexp)
    # endregion


@kernel
def cross_entropy_backward_kernel(
    logits_ptr, targets_ptr, logsumexp_ptr, dlosses_ptr, dlogits_ptr, VOCAB, ignored, TILE: tl.constexpr
):
    token = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    target = tl.load(targets_ptr + token)
    x = tl.load(logits_ptr + token * VOCAB + at, mask=at < VOCAB, other=-float("inf")).to(tl.float32)
    probability = tl.exp(x - tl.load(logsumexp_ptr + token))
    pull = tl.where(target == ignored, 0.0, tl.load(dlosses_ptr + token))
    d_x = pull * (probability - tl.where(at == target, 1.0, 0.0))
    tl.store(dlogits_ptr + token * VOCAB + at, d_x, mask=at < VOCAB)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """The loss of each token [tokens] in nats, in fp32, with gradients; 0 where the target is ignored.

    Add the losses and divide by the number of targets that count, once: no mean is taken here.

    Raises ValueError for shapes that do not fit, targets that are not int64, and, on the CPU, a target
    outside the vocabulary; on a GPU such a token's loss is nan.
    """
    checks.same_kind(logits=logits)
    if logits.ndim != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits are {list(logits.shape)}; give [tokens, vocab], with at least one word")
    checks.shape("targets", targets, logits.shape[:1], "[tokens]")
    if targets.dtype != torch.int64 or targets.device != logits.device:
        raise ValueError(
            f"targets are {targets.dtype} on {targets.device}; give int64 on {logits.device}, as the logits"
        )
    if not targets.is_cuda:  # on a GPU, looking would make the host wait
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= logits.shape[1]))]
        if wrong.numel():
            raise ValueError(
                f"target {int(wrong[0])} is not in a vocabulary of {logits.shape[1]:,} words, nor is it "
                f"ignore_index={ignore_index}"
            )
    losses: Tensor = _FusedCrossEntropy.apply(logits, targets, ignore_index)
    return losses


class _FusedCrossEntropy(torch.autograd.Function):
    """Forward: log-sum-exp minus the target's logit. Backward: probability minus 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        logits, targets = logits.contiguous(), targets.contiguous()
        tokens, vocab = logits.shape
        losses, logsumexp = (logits.new_empty(tokens, dtype=torch.float32) for _ in range(2))
        if tokens:
            cross_entropy_kernel[(tokens,)](logits, targets, losses, logsumexp, vocab, ignore_index, TILE)
        ctx.save_for_backward(logits, targets, logsumexp)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, logsumexp = ctx.saved_tensors
        tokens, vocab = logits.shape
        d_logits = torch.empty_like(logits)
        if tokens:
            cross_entropy_backward_kernel[tokens, triton.cdiv(vocab, TILE)](
                logits, targets, logsumexp, d_losses.contiguous(), d_logits, vocab, ctx.ignore_index, TILE
            )
        return d_logits, None, None
