"""Mixture of experts: a feed-forward layer of which each token uses a few parts.

A router gives every token to its `top_k` most likely experts and mixes their outputs by the probabilities of
just those (Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, arXiv:2006.16668; Fedus et al. 2021,
arXiv:2101.03961; the mixing as in Mixtral, Jiang et al. 2024, arXiv:2401.04088, section 2.1).

What depends on the rest of the batch, and so on how a batch is cut:

- With a capacity, which tokens an expert has no seat for. They are counted, and go on unchanged through the
  residual. Capacity acts in training only: in eval mode nothing is dropped, so that a text's logits do not
  depend on its neighbours and cached generation equals recomputation.
- The balance loss, a product of two means over the batch: that of a batch is not the mean of those of its
  halves. It is taken over what one forward pass sees, as everybody does.

Shapes: n tokens, d hidden width, e experts, k experts of one token, f an expert's inner width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.functions import linear, without_autocast
from fmlab.models.layers import Activation, Linear


class Routing(NamedTuple):
    """Who goes where. An expert number of e in `expert_nk` is nobody: no seat was left, or padding."""

    expert_nk: Tensor  # int64
    weight_nk: Tensor  # fp32; the k of a token add up to 1 before any is dropped
    counts_e: Tensor  # fp32: how many (token, choice) pairs chose each expert, dropped ones included
    probs_e: Tensor  # fp32: the probabilities of each expert, summed over the tokens; differentiable
    z_sum: Tensor  # fp32 scalar: the squared log-sum-exp of the logits, summed over the tokens
    dropped: Tensor  # fp32 scalar: how many pairs found no seat


class ExpertCore(Protocol):
    """Run the experts; injected, so that expert parallelism (send, compute, send back) slips in."""

    def __call__(
        self, x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
    ) -> Tensor:
        """Weighted sum over its experts of each token, [n,d].

        Args:
            x: [n,d]. expert, weight: [n,k], see Routing. gate_up: [e,2f,d]. down: [e,d,f].
        """


def route(
    logits: Tensor, top_k: int, real: Tensor | None = None, capacity_factor: float | None = None
) -> Routing:
    """Choose experts from the router's logits [n,e].

    Args:
        real: bool [n], False for padding, which takes no seat and is in no sum.
        capacity_factor: an expert has ceil(factor * real tokens * k / e) seats, first choices before second
            ones, then in the order of the tokens (Lepikhin et al. 2020, algorithm 1). None for no limit.
    """
    n, e = logits.shape
    probs_ne = logits.softmax(-1)
    top_nk, expert_nk = probs_ne.topk(top_k, -1)
    weight_nk = top_nk / top_nk.sum(-1, keepdim=True)
    real_n = torch.ones(n, dtype=torch.bool, device=logits.device) if real is None else real
    chosen_nke = F.one_hot(expert_nk, e) * real_n[:, None, None]
    dropped = probs_ne.new_zeros(())
    if capacity_factor is not None:
        seats = (capacity_factor * top_k / e * real_n.sum()).ceil()
        queue_kne = chosen_nke.transpose(0, 1)
        place_kne = queue_kne.flatten(0, 1).cumsum(0).view_as(queue_kne)  # 1 for the first in the queue
        seated_nk = (place_kne <= seats).transpose(0, 1).gather(-1, expert_nk[..., None])[..., 0]
        dropped = (real_n[:, None] & ~seated_nk).sum().to(probs_ne.dtype)
        expert_nk = expert_nk.where(real_n[:, None] & seated_nk, e)
    z_n = logits.logsumexp(-1).square()
    return Routing(
        expert_nk,
        weight_nk,
        chosen_nke.sum((0, 1)).to(probs_ne.dtype),
        (probs_ne * real_n[:, None]).sum(0),
        (z_n * real_n).sum(),
        dropped,
    )


def load_balancing_loss(counts: Tensor, probs: Tensor, top_k: int) -> Tensor:
    """e * sum over the experts of (share of the choices * mean probability): top_k if all is even, up to e.

    Args:
        counts, probs: [e], summed over tokens (and layers), as in Routing.

    Fedus et al. 2021, equations 4-6, for top_k choices, as transformers' `load_balancing_loss_func` has it:
    shares of the top_k choices add up to top_k. Gradients flow through `probs` alone.
    """
    rows = (counts.sum() / top_k).clamp(min=1)
    return len(counts) * (counts / rows * (probs / rows)).sum()


def count_alone(counts: Tensor) -> Tensor:
    """How often each expert was chosen [e], on one device: what it has counted itself."""
    return counts


def grouped_experts(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """Tokens sorted by expert, one product for each; see ExpertCore.

    How many tokens each expert has is read on the host. A captured graph cannot do so: there every expert
    sees every token, with weight 0 where it was not chosen, the same sum at e/k times the cost.
    """
    if torch.compiler.is_compiling():
        return dense_experts(x, expert, weight, gate_up, down, activation)
    e, k = len(gate_up), expert.shape[1]
    pair = expert.flatten().argsort(stable=True)
    if x.device.type == "meta":
        counts = [len(pair) // e + (i < len(pair) % e) for i in range(e)]  # shapes only: as if all were even
    else:
        counts = expert.flatten().bincount(minlength=e)[:e].tolist()
    pair = pair[: sum(counts)]  # what has nobody comes last
    token = pair // k
    mixed = run_experts(x[token], counts, gate_up, down, activation)
    weighted = mixed * weight.flatten()[pair, None]
    return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def run_experts(
    rows: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """Rows [m,d], sorted by expert, `counts` of them for each -> what their experts make of them, [m,d]."""
    mixed = []
    # unbind, not an index for each expert: one gradient of the stack instead of e
    for x, w_in, w_out in zip(rows.split(list(counts)), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = linear(x, w_in).chunk(2, -1)
        mixed.append(linear(activation(gate) * up, w_out))
    return torch.cat(mixed)


def dense_experts(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """Every expert on every token, with static shapes; see ExpertCore."""
    e = len(gate_up)
    share_ne = weight.new_zeros(len(x), e + 1).scatter(1, expert, weight)[:, :e]
    gate, up = torch.einsum("nd,eod->eno", x, gate_up).chunk(2, -1)
    out_end = torch.einsum("enf,edf->end", activation(gate) * up, down)
    return torch.einsum("end,ne->nd", out_end, share_ne.to(out_end.dtype)).to(x.dtype)


class MixtureOfExperts(nn.Module):
    """x [...,d] -> (mixed [...,d], Routing): gated experts, no biases.

    Raises ValueError for more choices than experts and a capacity that seats nobody.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        capacity_factor: float | None = None,
        activation: Activation = F.silu,
        core: ExpertCore = grouped_experts,
    ):
        super().__init__()
        check_experts(num_experts, top_k, capacity_factor)
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.activation, self.core = activation, core
        self.router = Linear(hidden_size, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Routing]:
        """`real`: bool of x's leading dims, False for padding."""
        x_nd = x.flatten(0, -2)
        with without_autocast(x):  # in 16 bits, close decisions would be rounding (Fedus et al., section 2.4)
            exact = torch.promote_types(x.dtype, torch.float32)
            logits_ne = F.linear(x_nd.to(exact), self.router.weight.to(exact))
        real_n = None if real is None else real.flatten()
        routing = route(logits_ne, self.top_k, real_n, self.capacity_factor if self.training else None)
        mixed = self.core(
            x_nd, routing.expert_nk, routing.weight_nk, self.gate_up, self.down, self.activation
        )
        return mixed.view_as(x), routing


def check_experts(num_experts: int, top_k: int, capacity_factor: float | None) -> None:
    """Raise ValueError for more choices than experts and a capacity that seats nobody."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"experts_per_token must be between 1 and the {num_experts} experts, got {top_k}")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ValueError(
            f"capacity_factor must be above 0, got {capacity_factor}; None means that nothing is ever dropped"
        )
