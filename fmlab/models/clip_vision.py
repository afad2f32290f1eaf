"""CLIP's image tower alone (transformers' CLIPVisionModel): the eyes of LLaVA."""

from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, sdpa_core
from fmlab.models.base import Model
from fmlab.models.clip_config import CLIPVisionConfig, check_images
from fmlab.models.clip_presets import VISION_PRESETS
from fmlab.models.clip_towers import image_tower, reset_tower, tower_rules
from fmlab.models.hf import HFFormat
from fmlab.models.plan import ParallelPlan
from fmlab.models.state import State


class CLIPVision(Model):
    """An image encoder: `model(pixel_values)` gives `image_hidden` [b,s,d] and `image_pooled` [b,d].

    s is one more than the number of patches: the class token comes first.
    """

    CONFIG = CLIPVisionConfig
    PRESETS = VISION_PRESETS
    POSITION_TABLES = (r"blocks\.0\.positions\.weight",)

    def __init__(self, config: CLIPVisionConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: CLIPVisionConfig = config
        self.blocks = nn.ModuleList(image_tower(config, attention_core))
        self.finish()

    def forward(self, pixel_values: Tensor) -> State:
        """Run the blocks on normalised images [b,c,image_size,image_size].

        Returns a State with `image_hidden` [b,s,d], not normed, and `image_pooled` [b,d], the normed class
        token.
        """
        state = self.prepare(pixel_values)
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(self, pixel_values: Tensor) -> State:
        """Check a batch and make the State that the first block reads. Raises ValueError with the reason."""
        check_images(self.config, pixel_values)
        return State(pixel_values=pixel_values)

    def reset_parameters(self) -> None:
        """Fill all weights anew; see clip_towers.reset_tower."""
        reset_tower(self.blocks, self.config.num_layers)  # type: ignore[arg-type]

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        return ParallelPlan(tower_rules(self.config), (), tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' CLIPVisionModel."""
        from fmlab.models.clip_hf import VISION_FORMAT

        return VISION_FORMAT
