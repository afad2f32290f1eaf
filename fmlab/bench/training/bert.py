"""Masked-token training of a small BERT: `fmlab.train` beside transformers' Trainer with its collator.

Both draw new masks for every batch, step fused AdamW and clip at norm 1. transformers turns every position
into logits, ours those with a label.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from fmlab.data import Corpus, WordPiece, load
from fmlab.extras import require
from fmlab.models import BERT
from fmlab.train import TrainConfig, train

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
    config = TrainConfig(
        steps=STEPS, batch_size=BATCH, seq_len=LENGTH, lr=1e-4, eval_every=0, log_every=0, backend="cpu"
    )
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
    settings = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-4,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    collator = transformers.DataCollatorForLanguageModeling(fast, mlm_probability=0.15)

    def run() -> None:
        trainer = transformers.Trainer(model, settings, data_collator=collator, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()

    return run
