"""Training: one loop for one device or many, checkpoints, evaluation, text generation."""

from fmlab.train.adapt import Trained, fine_tune, freeze, only_train
from fmlab.train.adapt_prefix import PrefixTuned
from fmlab.train.adapt_prompt import PromptTuned
from fmlab.train.bad_steps import BadStepError
from fmlab.train.beam import Beam, beam_search
from fmlab.train.callbacks import Callback, RunInfo, StepMetrics
from fmlab.train.classify import Judged, by_kind, judge_answers, judge_classes, judge_tokens
from fmlab.train.config import TrainConfig
from fmlab.train.config_file import read_config
from fmlab.train.context import loss_by_position
from fmlab.train.embed import TextEncoder
from fmlab.train.evaluate import Evaluation, evaluate
from fmlab.train.few_shot import ShiftTask, accuracy_by_shots
from fmlab.train.generate import generate
from fmlab.train.instruct import instruction_examples, packed_examples
from fmlab.train.lamb_step import LAMB
from fmlab.train.loop import TrainResult, train
from fmlab.train.lora import LoRA, add_lora, merge_lora, remove_lora, unmerge_lora
from fmlab.train.lora_files import load_lora, save_lora
from fmlab.train.metrics import BLEU, F1, Accuracy, Calibration, share
from fmlab.train.ngram import KneserNey
from fmlab.train.optim import adamw, lamb, scaled_adamw
from fmlab.train.retrieval import Retrieval, Search, nearest, ranks_of
from fmlab.train.scaling import ScalingLaw, bootstrap, fit_law, interval
from fmlab.train.schedule import warmup_cosine
from fmlab.train.speculative import Speculation, speculative_ids
from fmlab.train.whole import whole_model

__all__ = [
    "BLEU",
    "F1",
    "LAMB",
    "Accuracy",
    "BadStepError",
    "Beam",
    "Calibration",
    "Callback",
    "Evaluation",
    "Judged",
    "KneserNey",
    "LoRA",
    "PrefixTuned",
    "PromptTuned",
    "Retrieval",
    "RunInfo",
    "ScalingLaw",
    "Search",
    "ShiftTask",
    "Speculation",
    "StepMetrics",
    "TextEncoder",
    "TrainConfig",
    "TrainResult",
    "Trained",
    "accuracy_by_shots",
    "adamw",
    "add_lora",
    "beam_search",
    "bootstrap",
    "by_kind",
    "evaluate",
    "fine_tune",
    "fit_law",
    "freeze",
    "generate",
    "instruction_examples",
    "interval",
    "judge_answers",
    "judge_classes",
    "judge_tokens",
    "lamb",
    "load_lora",
    "loss_by_position",
    "merge_lora",
    "nearest",
    "only_train",
    "packed_examples",
    "ranks_of",
    "read_config",
    "remove_lora",
    "save_lora",
    "scaled_adamw",
    "share",
    "speculative_ids",
    "train",
    "unmerge_lora",
    "warmup_cosine",
    "whole_model",
]
