"""Masked-token training of a small BERT: `fmlab.train` beside transformers' Trainer with its collator.

Both draw new masks for every batch, step fused AdamW and clip at norm 1. transformers turns every position
into logits, ours those with a label.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from fmlab.bench.training.sides import our_settings, their_settings
from fmlab.data import Corpus, WordPiece, load
from fmlab.extras import require
from fmlab.models import BERT
from fmlab.train import train

STEPS, BATCH, LENGTH = 20, 16, 64
SHAPE: dict[str, Any] = dict(vocab_size=4096, max_positions=256, num_layers=4, hidden_size=256, num_heads=4)
NAME = f"BERT, 4 layers of 256, {STEPS} steps of {BATCH} x {LENGTH}, against transformers' Trainer"


def make_run(side: str) -> Callable[[], object]:
    """A run of STEPS steps of one side, from new weights; data and model are made before."""
    corpus = load("python-docs")
    tokenizer = WordPiece.train_cached(corpus.documents, SHAPE["vocab_size"])
    return _ours(corpus, tokenizer) if side == "fmlab" else _theirs(corpus, tokenizer)


def _ours(corpus: Corpus, tokenizer: WordPiece) -> Callable[[], object]:
    model = BERT(BERT.CONFIG(**SHAPE, heads="masked"))
    config = our_settings(STEPS, BATCH, LENGTH)
    return lambda: train(config, model=model, tokenizer=tokenizer, corpus=corpus)


def _theirs(corpus: Corpus, tokenizer: WordPiece) -> Callable[[], object]:
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=SHAPE["vocab_size"],
            max_position_embeddings=SHAPE["max_positions"],
            num_hidden_layers=SHAPE["num_layers"],
            hidden_size=SHAPE["hidden_size"],
            num_attention_heads=SHAPE["num_heads"],
            intermediate_size=4 * SHAPE["hidden_size"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        fast = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [i for row in tokenizer.encode_batch(corpus.documents, special=False) for i in row]
    room = LENGTH - 2
    rows = [tokenizer.frame(ids[i : i + room])[0] for i in range(0, len(ids) - room, room)]
    data = [
        {"input_ids": torch.tensor(row), "attention_mask": torch.ones(LENGTH, dtype=torch.long)}
        for row in rows
    ]
    settings = their_settings(transformers, STEPS, BATCH)
    collator = transformers.DataCollatorForLanguageModeling(fast, mlm_probability=0.15)

    def run() -> None:
        trainer = transformers.Trainer(model, settings, data_collator=collator, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()

    return run
