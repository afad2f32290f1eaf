"""CLIP's text tower alone: the text encoder of Stable Diffusion (transformers' CLIPTextModel)."""

from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, sdpa_core
from fmlab.models.base import Model
from fmlab.models.clip_config import CLIPTextConfig, check_text
from fmlab.models.clip_presets import TEXT_PRESETS
from fmlab.models.clip_towers import reset_tower, text_tower, tower_rules
from fmlab.models.hf import HFFormat
from fmlab.models.plan import ParallelPlan
from fmlab.models.state import State


class CLIPText(Model):
    """A text encoder: `model(input_ids)` gives `text_hidden` [b,l,d] and `text_pooled` [b,d]."""

    CONFIG = CLIPTextConfig
    PRESETS = TEXT_PRESETS
    TOKEN_TABLES = (r"blocks\.0\.tokens\.weight",)
    POSITION_TABLES = (r"blocks\.0\.positions\.weight",)

    def __init__(self, config: CLIPTextConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: CLIPTextConfig = config
        self.blocks = nn.ModuleList(text_tower(config, attention_core))
        self.finish()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, skip_layers: int = 0) -> State:
        """Run the blocks.

        Args:
            input_ids: [b,l]. attention_mask: [b,l], 1 real, 0 padding. Stable Diffusion gives none: its
                padding is read like any other token.
            skip_layers: how many of the last layers to leave out before the final norm ("clip skip"; with 1,
                a model of 24 layers is the one of 23 that Stable Diffusion 2 ships).

        Returns a State with `text_hidden` [b,l,d], after the final norm, and `text_pooled` [b,d].
        """
        if not 0 <= skip_layers < self.config.num_layers:
            raise ValueError(f"skip_layers={skip_layers}: legal are 0..{self.config.num_layers - 1}")
        state = self.prepare(input_ids, attention_mask)
        last = self.config.num_layers - skip_layers
        for block in (*self.blocks[: last + 1], self.blocks[-1]):
            state = block(state)
        return state

    def prepare(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> State:
        """Check a batch and make the State that the first block reads. Raises ValueError with the reason."""
        check_text(self.config, input_ids, attention_mask)
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        return State(given, input_ids=input_ids)

    def reset_parameters(self) -> None:
        """Fill all weights anew; see clip_towers.reset_tower."""
        reset_tower(self.blocks, self.config.num_layers)  # type: ignore[arg-type]

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        return ParallelPlan(tower_rules(self.config), (), tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' CLIPTextModel."""
        from fmlab.models.clip_hf import TEXT_FORMAT

        return TEXT_FORMAT
