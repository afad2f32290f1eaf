"""Training: one loop for one device or many, checkpoints, evaluation, text generation."""

from fmlab.train.beam import Beam, beam_search
from fmlab.train.callbacks import Callback, RunInfo, StepMetrics
from fmlab.train.config import TrainConfig
from fmlab.train.embed import TextEncoder
from fmlab.train.evaluate import Evaluation, evaluate
from fmlab.train.generate import generate
from fmlab.train.loop import TrainResult, train
from fmlab.train.optim import adamw
from fmlab.train.retrieval import Retrieval, Search, nearest, ranks_of
from fmlab.train.schedule import warmup_cosine
from fmlab.train.speculative import Speculation, speculative_ids

__all__ = [
    "Beam",
    "Callback",
    "Evaluation",
    "Retrieval",
    "RunInfo",
    "Search",
    "Speculation",
    "StepMetrics",
    "TextEncoder",
    "TrainConfig",
    "TrainResult",
    "adamw",
    "beam_search",
    "evaluate",
    "generate",
    "nearest",
    "ranks_of",
    "speculative_ids",
    "train",
    "warmup_cosine",
]
