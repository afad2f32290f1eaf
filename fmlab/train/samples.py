"""What a model that was just trained can do: a line to read at the end of a run."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmlab.data import TextTokenizer
from fmlab.data.text_to_text import PREFIXES
from fmlab.data.translations import LANGUAGES
from fmlab.models.families import longest_row
from fmlab.train.embed import taken
from fmlab.train.generate import generate

PROMPT = 'The "with" statement'


def fill_masks(model: Any, tokenizer: TextTokenizer, text: str) -> str:
    """The text with each mask token ([MASK] or <mask>) replaced by the model's most likely token. What is
    longer than the model can read is cut off.

    Raises ValueError for a tokenizer without a mask token, and a text without one.
    """
    return _fill(model, tokenizer, text)[0]


@torch.no_grad()
def _fill(model: Any, tokenizer: TextTokenizer, text: str) -> tuple[str, list[float]]:
    """The filled text, and the probability that the model gave to each token that it put in.

    Raises ValueError for a tokenizer without a mask token, and a text without one.
    """
    mask = getattr(tokenizer, "mask", None)
    if mask is None:
        raise ValueError(f"{type(tokenizer).__name__} has no mask token; models that fill masks have one")
    batch = taken(tokenizer.batch([text], max_length=longest_row(model.config), special=True), model)
    masked_bl = batch["input_ids"] == mask
    if not masked_bl.any():
        raise ValueError(f"there is no {tokenizer.SPECIAL['mask']} in what the model can read of the text")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    logits_blv = model(**{name: tensor.to(device) for name, tensor in batch.items()})["logits"].cpu()
    model.train(was_training)
    logits_blv = logits_blv[..., : tokenizer.vocab_size].float()
    logits_blv[..., sorted(tokenizer.special_ids)] = float("-inf")  # never a target of the training either
    share_bl, best_bl = logits_blv.softmax(-1).max(-1)
    filled_bl = torch.where(masked_bl, best_bl, batch["input_ids"])
    filled = tokenizer.decode(filled_bl[0].tolist(), skip_special=True).strip()
    return filled, share_bl[masked_bl].tolist()


def _continued(model: Any, tokenizer: TextTokenizer) -> str:
    room = (longest_row(model.config) or 256) - len(tokenizer.encode(PROMPT))
    if room < 1:
        return f"The model has too few positions to go on after {PROMPT!r}"
    text = generate(model, tokenizer, PROMPT, max_new_tokens=min(80, room), temperature=0.7, top_p=0.9)
    return f"A sample after {PROMPT!r}:\n{PROMPT}{text}"


def _filled(model: Any, tokenizer: TextTokenizer) -> str:
    mask = tokenizer.SPECIAL["mask"]
    text = f'The "with" {mask} is used to {mask} the execution of a block.'
    filled, shares = _fill(model, tokenizer, text)
    given = " and ".join(f"{100 * share:.0f} %" for share in shares)
    note = f"(It gave these tokens a probability of {given}; where it is not sure, frequent ones win.)"
    return f"Masks filled in {text!r}:\n{filled}\n{note}"


def _answered(model: Any, tokenizer: TextTokenizer) -> str:
    text = 'The "with" statement is <extra_id_0> to wrap the execution of a <extra_id_1>.'
    answer = generate(model, tokenizer, text, max_new_tokens=24, greedy=True)
    return f"What is missing in {text!r}:\n{answer}"


def _translated(model: Any, tokenizer: TextTokenizer) -> str:
    texts = [f"{PREFIXES[name]}Restart the kernel" for name in LANGUAGES]
    answers = generate(model, tokenizer, texts, max_new_tokens=24, greedy=True)
    return "\n".join(f"{text!r} is answered:\n{answer}" for text, answer in zip(texts, answers, strict=True))


@torch.no_grad()
def _classified(model: Any, tokenizer: TextTokenizer) -> str:
    text = "Send the request to the server and return its answer, with the status line and all headers."
    batch = taken(tokenizer.batch([text], max_length=longest_row(model.config), special=True), model)
    device = next(model.parameters()).device
    logits_c = model.eval()(**{name: tensor.to(device) for name, tensor in batch.items()})["class_logits"][0]
    best, names = int(logits_c.argmax()), model.config.class_names
    share = float(logits_c.float().softmax(-1)[best])
    return f"The class of {text!r}:\n{names[best] if names else best} ({100 * share:.0f} % sure)"


_SAMPLES: Mapping[str, Callable[[Any, TextTokenizer], str]] = {
    "causal": _continued,
    "experts": _continued,
    "prefix": _continued,
    "masked": _filled,
    "next-sentence": _filled,
    "sentence-order": _filled,
    "classes": _classified,
    "span": _answered,
    "text-to-text": _translated,
}


def sample_of(objective: str, model: Any, tokenizer: TextTokenizer) -> str:
    """A title and what the model makes of a sentence from the manual, as its objective taught it."""
    return _SAMPLES[objective](model, tokenizer)
