"""Model families, each one readable file, equal in numbers to the reference implementations."""

from fmlab.models.bert import BERT, BERTConfig
from fmlab.models.clip import CLIP, CLIPConfig
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig
from fmlab.models.clip_text import CLIPText
from fmlab.models.clip_vision import CLIPVision
from fmlab.models.convolutional import CausalConvLM
from fmlab.models.diffusion import (
    AutoencoderConfig,
    AutoencoderKL,
    DiT,
    DiTConfig,
    StableDiffusion,
    UNet,
    UNetConfig,
)
from fmlab.models.distilbert import DistilBERT, DistilBERTConfig
from fmlab.models.drafted_plan import DraftedPlan, draft_plan
from fmlab.models.gpt import GPT, GPTConfig
from fmlab.models.llama import Llama, LlamaConfig, Qwen2
from fmlab.models.mixtral import Mixtral, MixtralConfig
from fmlab.models.plan import ParallelPlan, Rule, Stream, check_plan
from fmlab.models.recurrent import RecurrentLM
from fmlab.models.resnet import ResNet
from fmlab.models.roberta import RoBERTa, RoBERTaConfig
from fmlab.models.state import Block, State
from fmlab.models.t5 import T5, T5Config, shift_right
from fmlab.models.vision_language import VisionLanguage, VisionLanguageConfig

__all__ = [
    "BERT",
    "CLIP",
    "GPT",
    "T5",
    "AutoencoderConfig",
    "AutoencoderKL",
    "BERTConfig",
    "Block",
    "CLIPConfig",
    "CLIPText",
    "CLIPTextConfig",
    "CLIPVision",
    "CLIPVisionConfig",
    "CausalConvLM",
    "DiT",
    "DiTConfig",
    "DistilBERT",
    "DistilBERTConfig",
    "DraftedPlan",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "Mixtral",
    "MixtralConfig",
    "ParallelPlan",
    "Qwen2",
    "RecurrentLM",
    "ResNet",
    "RoBERTa",
    "RoBERTaConfig",
    "Rule",
    "StableDiffusion",
    "State",
    "Stream",
    "T5Config",
    "UNet",
    "UNetConfig",
    "VisionLanguage",
    "VisionLanguageConfig",
    "check_plan",
    "draft_plan",
    "shift_right",
]
