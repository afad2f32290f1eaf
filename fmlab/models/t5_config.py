"""T5's config, and its published shapes as data: a preset is the keyword arguments of a T5Config.

T5: Raffel et al. 2020, arXiv:1910.10683, section 3.7; shapes of the released checkpoints (t5x, t5_1_0/*.gin).
The heads of 3b and 11b are together 4 and 16 times as wide as the stream.

T5 v1.1: released_checkpoints.md of the paper's repository (t5x, t5_1_1/*.gin): gated GELU instead of ReLU, an
output matrix of its own, other widths. There are no v1.1 sizes called 3b and 11b; xl and xxl stand for them.
"""

from dataclasses import dataclass
from typing import Any

from fmlab.models.attention.t5_buckets import relative_buckets
from fmlab.models.base import check_dropout, check_sizes


@dataclass(frozen=True)
class T5Config:
    """Shape of a T5. Raises ValueError for shapes that cannot be.

    Args:
        num_layers, num_decoder_layers: of the encoder and the decoder (None: as many).
        num_heads, head_size: together they need not be `hidden_size`.
        gated: GELU-gated feed-forward (v1.1) instead of ReLU.
        tie_embeddings: the output matrix is the token embedding, and what it multiplies is scaled by
            hidden_size^-0.5 (not so in v1.1).
        num_buckets, max_distance: of the relative positions; from max_distance on all are alike.
        init_factor: multiplies all initial weights.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    num_decoder_layers: int | None = None
    gated: bool = False
    tie_embeddings: bool = True
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0
    norm_eps: float = 1e-6
    init_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.num_decoder_layers is None:
            object.__setattr__(self, "num_decoder_layers", self.num_layers)
        check_sizes(self, "vocab_size", "num_layers", "num_decoder_layers", "hidden_size", "num_heads")
        check_sizes(self, "head_size", "ffn_size", "num_buckets", "max_distance")
        check_dropout(self, "dropout")
        for bidirectional in (True, False):
            relative_buckets(1, 1, bidirectional, self.num_buckets, self.max_distance)  # raises if it cannot

    @property
    def decoder_layers(self) -> int:
        return self.num_decoder_layers or self.num_layers

    @property
    def decoder_start(self) -> int:
        """Index of the first block of the decoder, its embedding."""
        return self.num_layers + 2


def _t5(layers: int, hidden: int, ffn: int, heads: int, head_size: int = 64) -> dict[str, Any]:
    return dict(
        vocab_size=32128,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        head_size=head_size,
    )


def _v1_1(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _t5(layers, hidden, ffn, heads) | dict(gated=True, tie_embeddings=False)


T5_PRESETS: dict[str, dict[str, Any]] = {
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "t5-3b": _t5(24, 1024, 16384, 32, 128),
    "t5-11b": _t5(24, 1024, 65536, 128, 128),
    "t5-v1.1-small": _v1_1(8, 512, 1024, 6),
    "t5-v1.1-base": _v1_1(12, 768, 2048, 12),
    "t5-v1.1-large": _v1_1(24, 1024, 2816, 16),
    "t5-v1.1-xl": _v1_1(24, 2048, 5120, 32),
    "t5-v1.1-xxl": _v1_1(24, 4096, 10240, 64),
    # Ours, for laptops: trains on two cores in a minute.
    "t5-tiny": _t5(2, 128, 512, 4, 32) | dict(vocab_size=4096),
    # For some thousands of short pairs: a small vocabulary, so that each piece is met often, and dropout.
    "t5-mini": _t5(3, 128, 512, 4, 32) | dict(vocab_size=2048, dropout=0.1),
}
