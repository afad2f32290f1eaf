"""Write the tables of docs/models.md from the package itself: presets and their exact counts.

Run it inside .venv after a change of the models; with --check it only says whether they agree.
"""

import sys
from pathlib import Path

import made
import torch

from fmlab import models

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "models.md"
#: class -> (equal to, paper)
FAMILIES = {
    "RecurrentLM": ("torch.nn's RNN, LSTM, GRU", "Hochreiter and Schmidhuber 1997; arXiv:1406.1078"),
    "CausalConvLM": ("a model of torch.nn.Conv1d", "arXiv:1609.03499, arXiv:1612.08083"),
    "ResNet": ("transformers ResNetForImageClassification", "arXiv:1512.03385"),
    "BERT": ("transformers BertForPreTraining and others", "arXiv:1810.04805"),
    "RoBERTa": ("transformers RobertaForMaskedLM and others", "arXiv:1907.11692"),
    "DistilBERT": ("transformers DistilBertForMaskedLM and others", "arXiv:1910.01108"),
    "GPT": ("transformers GPT2LMHeadModel", "Radford et al. 2019; arXiv:2005.14165"),
    "Llama": ("transformers LlamaForCausalLM", "arXiv:2307.09288, arXiv:2407.21783"),
    "Qwen2": ("transformers Qwen2ForCausalLM", "arXiv:2412.15115"),
    "Mixtral": ("transformers MixtralForCausalLM", "arXiv:2401.04088"),
    "T5": ("transformers T5ForConditionalGeneration; v1.1: the paper's", "arXiv:1910.10683"),
    "CLIP": ("transformers CLIPModel", "arXiv:2103.00020"),
    "CLIPText": ("transformers CLIPTextModel", "arXiv:2103.00020"),
    "CLIPVision": ("transformers CLIPVisionModel", "arXiv:2103.00020"),
    "VisionLanguage": ("transformers LlavaForConditionalGeneration", "arXiv:2304.08485"),
    "UNet": ("diffusers UNet2DConditionModel", "arXiv:2112.10752"),
    "AutoencoderKL": ("diffusers AutoencoderKL", "arXiv:2112.10752"),
    "DiT": ("diffusers DiTTransformer2DModel", "arXiv:2212.09748"),
}


def families() -> str:
    rows = ["| Class | Equal to | Paper |", "|---|---|---|"]
    rows += [f"| `{name}` | {twin} | {paper} |" for name, (twin, paper) in FAMILIES.items()]
    return "\n".join(rows)


def presets() -> str:
    rows = ["| Class | Preset | Parameters |", "|---|---|---:|"]
    for name in FAMILIES:
        family = getattr(models, name)
        for preset in family.presets():
            with torch.device("meta"):
                count = family.from_preset(preset).num_parameters()
            rows.append(f"| `{name}` | {preset} | {count:,} |")
    return "\n".join(rows)


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {"families": families(), "presets": presets()}
    return made.filled(text, parts, "model_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "model_tables.py", sys.argv[1:]))
