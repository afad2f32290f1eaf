"""Which text belongs to which image? Symmetric InfoNCE over all pairs of a batch.

Oord et al. 2018, arXiv:1807.03748; as CLIP has it, Radford et al. 2021, arXiv:2103.00020, section 2.3.

Shapes: b pairs of this rank, B pairs of the whole batch, e width of the embeddings.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.objectives.gather import gather_rows
from fmlab.objectives.terms import LossTerms, Term


class Contrastive:
    """Cross-entropy of each image over all texts of the batch, and of each text over all images.

    Two terms, "image_to_text" and "text_to_image", of weight 1/2, so that the total is the paper's average of
    both. The model is called as model(**batch) and returns image_embeddings and text_embeddings [b,e] and the
    factor logit_scale []. Where all embeddings are equal, the loss is ln B.

    Args:
        group: the ranks that share the batch; each computes the losses of its own rows, over everybody's, and
            gets the gradients that others have for its rows, so that the sum over ranks of losses and of
            gradients is what one device makes of the whole batch. None: the batch is here. The engines of
            fmlab.parallel set it; in a loop of your own pass torch.distributed.group.WORLD.
    """

    names = ("image_to_text", "text_to_image")
    #: Engines run the batch in one piece: see `across` and Engine.
    whole_batch = True

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def across(self, group: Any) -> "Contrastive":
        """The same objective over the pairs of all ranks of `group`."""
        return Contrastive(group)

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return both terms, with the sums over this rank's rows.

        Raises ValueError when images and texts do not pair up, or there is one pair only.
        """
        state = model(**batch)
        images_be, texts_be = state["image_embeddings"], state["text_embeddings"]
        if images_be.shape != texts_be.shape:
            raise ValueError(
                f"image and text embeddings pair up row by row, got {list(images_be.shape)} and "
                f"{list(texts_be.shape)}"
            )
        all_images_be, all_texts_be, first = self.gather(images_be, texts_be)
        if len(all_images_be) < 2:
            raise ValueError("a batch of one pair has nothing to tell it from; use a larger global batch")
        target_b = torch.arange(first, first + len(images_be), device=images_be.device)
        count = torch.tensor(len(images_be), device=images_be.device)
        terms = {}
        for name, own, other in zip(
            self.names, (images_be, texts_be), (all_texts_be, all_images_be), strict=True
        ):
            with torch.autocast(own.device.type, enabled=False):  # 16 bits are too coarse for such logits
                logits = state["logit_scale"] * own @ other.T
            loss = F.cross_entropy(logits, target_b, reduction="sum")
            terms[name] = Term(loss, count, weight=0.5)
        return terms

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many pairs the batch has, for each direction: no forward pass is needed."""
        return {name: torch.tensor(len(batch["pixel_values"])) for name in self.names}

    def gather(self, images_be: Tensor, texts_be: Tensor) -> tuple[Tensor, Tensor, int]:
        """Images and texts of all ranks [B,e], and the number of our first pair."""
        if self.group is None or dist.get_world_size(self.group) == 1:
            return images_be, texts_be, 0
        both, first = gather_rows(torch.cat([images_be, texts_be], 1), self.group)  # one message for both
        images, texts = both.chunk(2, 1)
        return images, texts, first
