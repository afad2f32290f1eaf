"""Generation with a cache: tokens per second, ours against transformers' `generate`, at batch 1 and 8.

Both sides have the same random weights and prompts, decode greedily, and write the same tokens, which is
checked. Shapes: GPT-2 124M and llama-tiny.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from fmlab.bench import Result, interleaved
from fmlab.extras import require
from fmlab.models import GPT, Llama
from fmlab.models.base import Model
from fmlab.train.generate import generate_ids

PROMPT, NEW = 32, 64  # tokens
BATCHES = (1, 8)


def reference(model: Model) -> Any:
    """transformers' model with the weights of `model`."""
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def models() -> dict[str, Model]:
    """By name: GPT-2 124M, and llama-tiny with room for the text."""
    torch.manual_seed(0)
    return {
        "GPT-2 124M": GPT.from_preset("gpt2").eval(),
        "llama-tiny": Llama.from_preset("llama-tiny").eval(),
    }


def run(quick: bool) -> Iterator[Result]:
    """Tokens per second of each shape and batch, as a ratio to transformers in the same run."""
    for name, model in models().items():
        twin = reference(model)
        for batch in BATCHES:
            yield _compare(name, model, twin, batch, quick)


def _compare(name: str, model: Model, twin: Any, batch: int, quick: bool) -> Result:
    vocab_size = model.config.vocab_size
    prompts = torch.randint(0, vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    rows = prompts.tolist()
    mask = torch.ones_like(prompts)

    def ours() -> list[list[int]]:
        # nobody's token ends the text, so that both sides always write all NEW tokens
        return generate_ids(model, rows, end_of_text=vocab_size, max_new_tokens=NEW, greedy=True)

    def theirs() -> list[list[int]]:
        with torch.no_grad():
            ids = twin.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return ids[:, PROMPT:].tolist()

    if ours() != theirs():
        raise RuntimeError(f"{name}, batch {batch}: the two sides wrote different tokens")
    pairs = 3 if quick else 10
    ratio = interleaved(ours, theirs, pairs=pairs * (1 if name.startswith("GPT") else 3), warmup=1)
    speed = batch * NEW / ratio.seconds_a
    detail = f"{speed:.0f} tokens/s after a prompt of {PROMPT}; {ratio}"
    return Result(f"{name}, batch {batch}: generation", ratio.median, "x", ">= 1.0", detail=detail)
