"""Next-token training of a small GPT: `fmlab.train` beside transformers' Trainer with GPT2LMHeadModel.

Both read the same text in rows of one length, step fused AdamW and clip at norm 1. transformers gets the rows
cut in advance and labels equal to its inputs, as its own example for causal models has it.
"""

from collections.abc import Callable
from typing import Any

import torch

from fmlab.bench.training.sides import our_settings, their_settings
from fmlab.data import ByteBPE, Corpus, encode, load
from fmlab.extras import require
from fmlab.models import GPT
from fmlab.train import train

STEPS, BATCH, LENGTH = 20, 8, 128
SHAPE: dict[str, Any] = dict(vocab_size=4096, max_positions=256, num_layers=4, hidden_size=256, num_heads=4)
NAME = f"GPT, 4 layers of 256, {STEPS} steps of {BATCH} x {LENGTH}, against transformers' Trainer"


def make_run(side: str) -> Callable[[], object]:
    """A run of STEPS steps of one side, from new weights; data and model are made before."""
    corpus = load("python-docs")
    tokenizer = ByteBPE.train_cached(corpus.documents, SHAPE["vocab_size"])
    return _ours(corpus, tokenizer) if side == "fmlab" else _theirs(corpus, tokenizer)


def _ours(corpus: Corpus, tokenizer: ByteBPE) -> Callable[[], object]:
    model = GPT(GPT.CONFIG(**SHAPE))
    config = our_settings(STEPS, BATCH, LENGTH)
    return lambda: train(config, model=model, tokenizer=tokenizer, corpus=corpus)


def _theirs(corpus: Corpus, tokenizer: ByteBPE) -> Callable[[], object]:
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=SHAPE["vocab_size"],
            n_positions=SHAPE["max_positions"],
            n_layer=SHAPE["num_layers"],
            n_embd=SHAPE["hidden_size"],
            n_head=SHAPE["num_heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    ids = torch.from_numpy(encode(corpus, tokenizer).ids).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    data = [{"input_ids": row, "labels": row} for row in rows]  # it shifts them itself
    settings = their_settings(transformers, STEPS, BATCH)
    return lambda: transformers.Trainer(model, settings, train_dataset=data).train()
