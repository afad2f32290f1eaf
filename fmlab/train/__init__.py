"""Training: one loop for one device or many, checkpoints, evaluation, text generation."""

from fmlab.train.callbacks import Callback, RunInfo, StepMetrics
from fmlab.train.config import TrainConfig
from fmlab.train.embed import TextEncoder
from fmlab.train.evaluate import Evaluation, evaluate
from fmlab.train.generate import generate
from fmlab.train.loop import TrainResult, train
from fmlab.train.optim import adamw
from fmlab.train.retrieval import Retrieval, Search, nearest, ranks_of
from fmlab.train.schedule import warmup_cosine

__all__ = [
    "Callback",
    "Evaluation",
    "Retrieval",
    "RunInfo",
    "Search",
    "StepMetrics",
    "TextEncoder",
    "TrainConfig",
    "TrainResult",
    "adamw",
    "evaluate",
    "generate",
    "nearest",
    "ranks_of",
    "train",
    "warmup_cosine",
]
