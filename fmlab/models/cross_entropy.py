"""Cross-entropy of a linear output layer without ever holding the logits.

At a vocabulary of 50257 the logits of 4 x 256 tokens are 206 MB in fp32, and the usual path keeps three
tensors of that size (logits, log-probabilities, their gradient). Nothing but the sum of the losses and two
gradients is wanted, so a few hundred rows at a time are turned into logits, into probabilities in place,
and at once into their share of both gradients: the gradient of a sum of cross-entropies needs nothing from
the backward pass except one scale. Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009) and Liger
Kernel do the same on GPUs.

Shapes: n rows (tokens), d hidden width, v vocabulary, c rows of one chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.functions import compute_dtype, without_autocast

IGNORE = -100
# Of probabilities held at once. Each chunk passes once over the gradient of the weight, so few are better.
CHUNK_BYTES = 128 * 1024 * 1024
TILE = 4096  # vocabulary rows of a 16-bit product held at once


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Sum over the rows with label != -100 of cross-entropy(hidden @ weight.T + bias, label): a scalar.

    Args:
        hidden: [n,d]. weight: [v,d]. labels: int64 [n], already shifted; -100 marks rows without a target.
        bias: [v] or None.

    The products run in autocast's dtype where autocast is on; softmax and loss are float32 (float64 for
    float64 inputs). All rows ignored gives 0 with zero gradients. Backward may run once.
    Raises ValueError for labels of the wrong shape or, on the CPU, out of range.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy takes hidden [n,d] and labels [n]; "
            f"got hidden {list(hidden.shape)} and labels {list(labels.shape)}"
        )
    trained = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and trained:
        return _GradientInForward.apply(hidden, weight, labels, bias)
    return loss_and_gradients(hidden, weight, labels, bias, (False, False, False))[0]


class _GradientInForward(torch.autograd.Function):
    """Forward: the loss, and the gradients for an upstream gradient of 1. Backward: scale them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        loss, *gradients = loss_and_gradients(hidden, weight, labels, bias, wanted)
        ctx.save_for_backward(*gradients)
        ctx.used = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError(
                "linear_cross_entropy scales its gradients in place, so its backward runs once; "
                "call the model again for a second backward"
            )
        ctx.used = True
        # In place: a scaled copy of d_weight would be one more tensor of the size of the embedding.
        scaled = [None if grad is None else grad.mul_(d_loss) for grad in ctx.saved_tensors]
        return scaled[0], scaled[1], None, scaled[2]


#: (logits [c,v], target [c,1]) -> their gradients, which take over the memory of the logits, and losses [c,1]
Softmax = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    wanted: tuple[bool, bool, bool],
    softmax: Softmax | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The summed loss and, where wanted, its gradients for hidden [n,d], weight [v,d] and bias [v].

    `softmax`: in place of probabilities_minus_target, for a weight that has only a part of the vocabulary.
    """
    softmax = softmax or probabilities_minus_target
    n, v = len(hidden), len(weight)
    want_hidden, want_weight, want_bias = wanted
    dtype = compute_dtype(hidden)
    exact = torch.promote_types(dtype, torch.float32)
    valid_n = labels != IGNORE
    target_n = labels.where(valid_n, 0)
    loss = torch.zeros((), dtype=exact, device=hidden.device)
    # Not filled with zeros: the first chunk overwrites them.
    d_hidden = torch.empty_like(hidden) if want_hidden else None
    d_weight = (torch.empty_like if n else torch.zeros_like)(weight) if want_weight else None
    d_bias = torch.zeros_like(bias) if bias is not None and want_bias else None
    chunks = _slices(n, CHUNK_BYTES // (v * exact.itemsize))
    # A 16-bit product cannot be added to a 32-bit sum directly; it goes through a piece that fits the cache.
    tiles = _slices(v, v if dtype == exact else TILE)
    with without_autocast(hidden):
        x_nd, w_vd = hidden.to(dtype), weight.to(dtype)
        buffer = torch.empty(chunks[0].stop if chunks else 0, v, dtype=exact, device=hidden.device)
        for rows in chunks:
            x_cd, valid_c1, target_c1 = x_nd[rows], valid_n[rows, None], target_n[rows, None]
            logits_cv = buffer[: len(x_cd)]
            for tile in tiles:
                _add_product(logits_cv[:, tile], x_cd, w_vd[tile].T, first=True)
            if bias is not None:
                logits_cv += bias
            d_logits_cv, nll_c1 = softmax(logits_cv, target_c1)
            loss += nll_c1.where(valid_c1, 0).sum()
            if not any(wanted):
                continue
            # The gradient is 0 in rows without a target. Zeroing those rows of the products' other factors
            # is n*d work instead of n*v.
            if d_bias is not None:
                d_bias += valid_c1.to(exact).T.mm(d_logits_cv)[0]
            kept_cd = x_cd * valid_c1
            d_x_cd = torch.empty(kept_cd.shape, dtype=exact, device=hidden.device)
            for tile in tiles:
                d_logits = d_logits_cv[:, tile].to(dtype)
                if d_weight is not None:
                    _add_product(d_weight[tile], d_logits.T, kept_cd, first=rows.start == 0)
                if d_hidden is not None:
                    _add_product(d_x_cd, d_logits, w_vd[tile], first=tile.start == 0)
            if d_hidden is not None:
                torch.mul(d_x_cd, valid_c1, out=d_hidden[rows])
    return loss, d_hidden, d_weight, d_bias


def _slices(n: int, most: int) -> list[slice]:
    """Cut range(n) into the fewest equal slices of at most `most` rows, so that none is a slow left-over."""
    count = -(-n // max(1, most))
    size = -(-n // max(1, count))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)] if n else []


def probabilities_minus_target(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits [c,v]) - one_hot(target [c,1]), the gradient of the loss for the logits, in their
    memory; and the loss, -log softmax at target [c,1].

    log-sum-exp comes from the largest entry m: softmax(m) = exp(m - lse), and it is at least 1/v, so its
    logarithm loses nothing. torch.logsumexp does the same 15 times slower here.
    """
    largest = logits.amax(-1, keepdim=True)
    try:
        target_logit = logits.gather(1, target)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(
            f"a label is outside the vocabulary of {logits.shape[1]}: legal 0..{logits.shape[1] - 1}, and "
            "-100 for no target; check that the tokenizer and the model have the same vocabulary"
        ) from error
    probs = torch.softmax(logits, -1, out=logits)
    lse = largest - probs.amax(-1, keepdim=True).log()
    probs.scatter_add_(1, target, probs.new_full((1, 1), -1.0).expand_as(target))
    return probs, lse - target_logit


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or total = a @ b if `first`; the sum stays in the dtype of `total`."""
    if a.dtype != total.dtype:
        product = a @ b
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)  # not addmm_: torch's FLOP counter knows this form only


def class_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of logits [n,c] for a few classes and labels [n], in fp32 or wider.

    -100 marks rows without a label. Raises ValueError for labels with fractions and, on the CPU, for a label
    that is no class.
    """
    if labels.is_floating_point():
        raise ValueError(f"labels of classes must be whole numbers, got {labels.dtype}")
    try:
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact, labels.long(), ignore_index=IGNORE, reduction="sum")
    except IndexError as error:
        raise ValueError(
            f"a label is not one of the {logits.shape[1]} classes: got {int(labels.min())}.."
            f"{int(labels.max())}, legal is 0..{logits.shape[1] - 1}, and -100 for no label"
        ) from error
