"""The shape of a Llama, and the published ones. A preset is the keyword arguments of a LlamaConfig.

Llama 2: Touvron et al. 2023, arXiv:2307.09288. Llama 3.1: Dubey et al. 2024, arXiv:2407.21783, Table 3; its
rotary scaling is that of the released checkpoints. Qwen2.5: arXiv:2412.15115 and its released config.

Counts of Llama 2 in circulation are larger by 64 for each layer (6,738,417,664 for 7B): they include a
buffer of rotary frequencies that older checkpoints held. Here nothing but parameters is counted.
"""

from dataclasses import dataclass
from typing import Any

from fmlab.models.attention.rotary import Llama3Scaling, RopeScaling, Rotary
from fmlab.models.base import check_heads, check_sizes


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama. Raises ValueError for shapes that cannot be.

    Args:
        num_kv_heads: None for as many as there are query heads; else a divisor of that number.
        head_size: None for hidden_size // num_heads.
        rope_scaling: see fmlab.models.attention.rotary; `max_positions` is what can be used WITH it.
        qkv_bias: biases on queries, keys and values (Qwen2).
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_size is None:
            check_sizes(self, "hidden_size", "num_heads")
            check_heads(self.hidden_size, self.num_heads)
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        check_sizes(self, "vocab_size", "max_positions", "num_layers", "hidden_size", "num_heads", "ffn_size")
        check_sizes(self, "num_kv_heads", "head_size")
        if self.num_heads % self.kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; legal: {legal}"
            )
        self.rotary  # noqa: B018  # raises for a head width that cannot be turned

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """head_size as a number."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.head_width, self.rope_theta, self.rope_scaling)


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return dict(
        vocab_size=32000,
        max_positions=4096,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
    )


def _llama31(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return _llama2(layers, hidden, heads, 8, ffn) | dict(
        vocab_size=128256,
        max_positions=131072,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    )


LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3.1-8b": _llama31(32, 4096, 32, 14336),
    "llama3.1-70b": _llama31(80, 8192, 64, 28672),
    "llama3.1-405b": _llama31(126, 16384, 128, 53248),
    # Ours, for laptops: trains on two cores in a minute; init_std as of gpt2-tiny, for the same reason.
    "llama-tiny": dict(
        vocab_size=4096,
        max_positions=256,
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=352,
        init_std=0.06,
        tie_embeddings=True,
    ),
}

QWEN_PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": dict(
        vocab_size=151936,
        max_positions=32768,
        num_layers=24,
        hidden_size=896,
        num_heads=14,
        num_kv_heads=2,
        ffn_size=4864,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
    ),
}
