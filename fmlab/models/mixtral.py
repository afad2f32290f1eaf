"""Mixtral: a Llama whose feed-forward layers are mixtures of experts (Jiang et al. 2024, arXiv:2401.04088).

With labels it gives, beside `loss_sum`, two sums that keep the experts in use, for the objective to weigh:

    balance_sum    the load-balancing loss of all layers together, times the number of real tokens
    router_z_sum   the squared log-sum-exp of the router's logits (Zoph et al. 2022, arXiv:2202.08906,
                   equation 5), the mean over the layers, summed over the real tokens

Divided by the number of real tokens they are the batch's losses; transformers' `aux_loss` is the first.
`dropped_count` says how many (token, choice) pairs found no seat, in all layers.

Shapes: b batch, l length, d hidden width, e experts.
"""

from dataclasses import dataclass
from typing import cast

from fmlab.models.attention import AttentionCore, sdpa_core
from fmlab.models.base import check_sizes
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.layers import add_residual
from fmlab.models.llama import Llama, LlamaHead, LlamaLayer
from fmlab.models.llama_config import LlamaConfig
from fmlab.models.moe import (
    ExpertCore,
    MixtureOfExperts,
    check_experts,
    count_alone,
    grouped_experts,
    load_balancing_loss,
)
from fmlab.models.plan import Rule, Stream
from fmlab.models.state import State

_ROUTER_TOTALS = ("expert_counts", "expert_probs", "router_z_sum", "dropped_count")

MIXTRAL_PRESETS = {
    "mixtral-8x7b": dict(
        vocab_size=32000,
        max_positions=32768,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        rope_theta=1_000_000.0,
        num_experts=8,
        experts_per_token=2,
    ),
    # Ours, for laptops: as many weights at work for a token as in llama-tiny, four times as many in all.
    "mixtral-tiny": dict(
        vocab_size=4096,
        max_positions=256,
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=176,
        init_std=0.06,
        tie_embeddings=True,
        num_experts=8,
        experts_per_token=2,
    ),
}


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Shape of a Mixtral; `ffn_size` is that of one expert. Raises ValueError for shapes that cannot be.

    Args:
        capacity_factor: of the seats an expert has in training, see fmlab.models.moe; None (as Mixtral was
            trained, and as transformers computes) drops nothing.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_experts", "experts_per_token")
        check_experts(self.num_experts, self.experts_per_token, self.capacity_factor)


class MixtralLayer(LlamaLayer):
    """hidden -> hidden, and what the routers did so far, added up over the layers."""

    reads = (*LlamaLayer.reads, *_ROUTER_TOTALS)
    writes = ("hidden", *_ROUTER_TOTALS)

    def __init__(self, config: LlamaConfig, index: int, attention_core: AttentionCore):
        super().__init__(config, index, attention_core)
        config = cast(MixtralConfig, config)
        self.mlp = MixtureOfExperts(
            config.hidden_size,
            config.ffn_size,
            config.num_experts,
            config.experts_per_token,
            config.capacity_factor,
        )

    def forward(self, state: State) -> State:
        hidden = self.attend(state)
        real = state.get("attention_mask") if state.cache is None else None
        update, routing = self.mlp(self.mlp_norm(hidden), None if real is None else real.bool())
        hidden = add_residual(hidden, update)
        if state.cache is not None:  # a generation has no use for the totals
            return state.updated(hidden=hidden)
        new = (routing.counts_e, routing.probs_e, routing.z_sum, routing.dropped)
        totals = {
            name: state[name] + value if name in state else value
            for name, value in zip(_ROUTER_TOTALS, new, strict=True)
        }
        return state.updated(hidden=hidden, **totals)


class MixtralHead(LlamaHead):
    """LlamaHead, and the routers' totals -> balance_sum, router_z_sum.

    counts_of_all: the choices of experts [e] counted over all ranks that train on one batch; injected, see
    fmlab.parallel.expert.balance.
    """

    reads = (*LlamaHead.reads, *_ROUTER_TOTALS)
    writes = (*LlamaHead.writes, "balance_sum", "router_z_sum")

    def __init__(self, config: LlamaConfig, cross_entropy: CrossEntropy):
        super().__init__(config, cross_entropy)
        self.layers, self.top_k = config.num_layers, cast(MixtralConfig, config).experts_per_token
        self.counts_of_all = count_alone

    def forward(self, state: State) -> State:
        state = super().forward(state)
        if "expert_counts" not in state:
            return state
        counts = self.counts_of_all(state.expert_counts) if self.training else state.expert_counts
        balance = load_balancing_loss(counts, state.expert_probs, self.top_k)
        tokens = counts.sum() / (self.top_k * self.layers)
        return state.updated(balance_sum=balance * tokens, router_z_sum=state.router_z_sum / self.layers)


class Mixtral(Llama):
    """A Mixtral: as Llama, and see the module's docstring for the sums it gives.

    Args:
        expert_core: see fmlab.models.moe.ExpertCore; expert parallelism slips in here.
    """

    CONFIG = MixtralConfig
    PRESETS = MIXTRAL_PRESETS
    LAYER = MixtralLayer
    HEAD = MixtralHead

    def __init__(
        self,
        config: MixtralConfig,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: CrossEntropy = linear_cross_entropy,
        expert_core: ExpertCore = grouped_experts,
    ):
        super().__init__(config, attention_core, cross_entropy)
        for layer in list(self.blocks)[1:-1]:
            cast(MixtureOfExperts, layer.mlp).core = expert_core

    @property
    def depends_on_cut(self) -> str:
        """Why training computes something else when the batch is cut over ranks; "" if it does not."""
        if cast(MixtralConfig, self.config).capacity_factor is None:
            return ""
        return "which tokens find a seat depends on the others of the forward pass; use capacity_factor=None"

    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts it is not sent to ("12.9B of 46.7B")."""
        config = cast(MixtralConfig, self.config)
        idle = config.num_experts - config.experts_per_token
        one_expert = 3 * config.hidden_size * config.ffn_size
        return self.num_parameters() - config.num_layers * idle * one_expert

    def streams(self) -> tuple[Stream, ...]:
        """None: the routers' totals are over all tokens."""
        return ()

    def mlp_rules(self) -> tuple[Rule, ...]:
        """The plan's rules for the second half of a layer."""
        return (
            Rule(r".*\.mlp\.router\.weight", "replicate"),
            Rule(r".*\.mlp\.(gate_up|down)", "expert"),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' MixtralForCausalLM."""
        from fmlab.models.mixtral_hf import MIXTRAL

        return MIXTRAL
