"""Shapes of CLIP's towers, and which prompts and images they can read."""

from dataclasses import dataclass

from torch import Tensor

from fmlab.models.base import check_heads, check_sizes
from fmlab.models.inputs import check_values

ACTIVATIONS = ("quick_gelu", "gelu")


def _check_tower(config: "CLIPTextConfig | CLIPVisionConfig") -> None:
    if config.ffn_size is None:
        object.__setattr__(config, "ffn_size", 4 * config.hidden_size)
    check_sizes(config, "num_layers", "hidden_size", "num_heads", "ffn_size")
    check_heads(config.hidden_size, config.num_heads)
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation={config.activation!r}: legal are {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class CLIPTextConfig:
    """Shape of a text tower. `ffn_size` None means 4 * hidden_size.

    Args:
        eos_token_id: the end-of-text token, whose first place in a row is pooled. With 2, which old
            checkpoints say by mistake, the row's largest id is pooled: in CLIP's vocabulary that is it.
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int | None = None
    activation: str = "quick_gelu"
    eos_token_id: int = 49407
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "max_positions")
        _check_tower(self)
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(
                f"eos_token_id={self.eos_token_id} is outside the vocabulary: legal 0..{self.vocab_size - 1}"
            )


@dataclass(frozen=True)
class CLIPVisionConfig:
    """Shape of an image tower for square images of `image_size` pixels, cut into patches of `patch_size`."""

    image_size: int
    patch_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int | None = None
    channels: int = 3
    activation: str = "quick_gelu"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, "image_size", "patch_size", "channels")
        _check_tower(self)
        if self.image_size % self.patch_size:
            legal = [p for p in range(1, self.image_size + 1) if self.image_size % p == 0]
            raise ValueError(
                f"patches of {self.patch_size} do not divide an image of {self.image_size} pixels: the rest "
                f"would never be seen; legal patch_size: {legal}"
            )

    @property
    def patches(self) -> int:
        """n: how many patches an image has."""
        return (self.image_size // self.patch_size) ** 2


def check_text(config: CLIPTextConfig, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ValueError for prompts that a text tower cannot read."""
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids must be [batch, length] with a token at least, got shape {list(input_ids.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    given = {} if attention_mask is None else {"attention_mask": attention_mask}
    check_values({"input_ids": input_ids, **given})
    if input_ids.shape[1] > config.max_positions:
        raise ValueError(
            f"a prompt of {input_ids.shape[1]} tokens is longer than the text encoder's "
            f"{config.max_positions} positions; shorten it, and keep its end-of-text token"
        )


def check_images(config: CLIPVisionConfig, pixel_values: Tensor) -> None:
    """Raise ValueError for images that an image tower cannot see."""
    size = config.image_size
    wanted = [config.channels, size, size]
    if pixel_values.dim() != 4 or not pixel_values.numel() or list(pixel_values.shape[1:]) != wanted:
        raise ValueError(
            f"pixel_values must be [batch, {config.channels} channels, {size}, {size}], "
            f"got {list(pixel_values.shape)}; resize or crop the images, and give all channels"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values must be normalised numbers with a fraction, got {pixel_values.dtype}")
