"""A run small enough for tests: 2 layers, 300 tokens, a corpus of counting sentences."""

from functools import cache
from typing import Any

import torch

from fmlab.backends import get_backend
from fmlab.data import ByteBPE, Corpus
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.train import TrainConfig, TrainResult, adamw, train

VOCAB, POSITIONS, SEQ = 300, 32, 16


def tiny_corpus() -> Corpus:
    lines = [f"item {i} comes before item {i + 1}, and after item {i - 1}.\n" for i in range(200)]
    return Corpus("tiny", ["".join(lines[i : i + 10]) for i in range(0, 200, 10)], "")


@cache
def tiny_tokenizer() -> ByteBPE:
    return ByteBPE.train(tiny_corpus().documents, VOCAB)


def tiny_model(seed: int = 0, dropout: float = 0.0, vocab_size: int = VOCAB) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size, POSITIONS, 2, 32, 2, dropout=dropout))


def tiny_config(**changes: Any) -> TrainConfig:
    settings = dict(steps=10, batch_size=8, seq_len=SEQ, warmup=2, lr=1e-2, validation=0.2, log_every=0)
    return TrainConfig(**(settings | {"eval_every": 0, "backend": "cpu"} | changes))


def tiny_engine(model: Any = None) -> Engine:
    """An engine on one device, as the loop makes it."""
    model = model or tiny_model()
    return parallelize(model, Layout(), CausalLM(), adamw(1e-2, (0.9, 0.95), 0.1), backend=get_backend("cpu"))


def tiny_train(dropout: float = 0.0, callbacks: tuple = (), model: Any = None, **changes: Any) -> TrainResult:
    return train(
        tiny_config(**changes),
        model=model or tiny_model(dropout=dropout),
        tokenizer=tiny_tokenizer(),
        corpus=tiny_corpus(),
        callbacks=callbacks,
    )
