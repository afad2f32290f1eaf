"""What the runs on text have in common: the settings of ours, and those of transformers' Trainer."""

import tempfile
from typing import Any

from fmlab.train import TrainConfig

LR = 1e-4


def our_settings(steps: int, batch: int, length: int) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch_size=batch, seq_len=length, lr=LR, eval_every=0, log_every=0, backend="cpu"
    )


def their_settings(transformers: Any, steps: int, batch: int) -> Any:
    """TrainingArguments: fused AdamW, a cosine, clipping at norm 1, nothing logged or saved."""
    return transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=LR,
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
