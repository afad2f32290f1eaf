"""Text from a language model, token by token, with a cache of keys and values.

Shapes: b prompts, l length, v vocabulary.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fmlab.data import ByteBPE


@overload
def generate(model: Any, tokenizer: ByteBPE, prompt: str = "", **options: Any) -> str: ...
@overload
def generate(model: Any, tokenizer: ByteBPE, prompt: Sequence[str], **options: Any) -> list[str]: ...
def generate(
    model: Any, tokenizer: ByteBPE, prompt: str | Sequence[str] = "", **options: Any
) -> str | list[str]:
    """Continue a prompt, or each of several; returns what was added, without the prompt.

    prompt: "" starts a new document.
    options: those of `generate_ids`.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    ids = [tokenizer.encode(text) or [tokenizer.end_of_text] for text in prompts]
    options.setdefault("num_tokens", min(tokenizer.vocab_size, model.config.vocab_size))
    texts = [tokenizer.decode(row) for row in generate_ids(model, ids, tokenizer.end_of_text, **options)]
    return texts[0] if isinstance(prompt, str) else texts


@torch.no_grad()
def generate_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    end_of_text: int,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    seed: int = 0,
    num_tokens: int | None = None,
) -> list[list[int]]:
    """Token ids that continue each prompt, up to and without `end_of_text`.

    greedy:      always the most likely token; the next three then have nothing to do and are refused
    temperature: divides the logits; below 1 is safer, above 1 is wilder
    top_k:       draw from the k most likely tokens only
    top_p:       draw from the fewest tokens whose probabilities add up to at least p (Holtzman et al. 2020)
    seed:        the same prompts and seed give the same text
    num_tokens:  draw ids below this one only: a model may have more rows than its tokenizer has tokens

    Raises ValueError for values out of range, an empty prompt, and more tokens than the model has positions.
    """
    vocab_size = model.config.vocab_size if num_tokens is None else num_tokens
    _check_options(max_new_tokens, temperature, top_k, top_p, greedy, vocab_size)
    _check_prompts(prompts, max_new_tokens, model.config)
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        input_ids_bl, mask_bl = _left_padded(prompts, end_of_text)
        total = input_ids_bl.shape[1] + max_new_tokens
        cache = model.new_cache(len(prompts), total)
        generator = torch.Generator().manual_seed(seed)
        new: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        padded = bool((mask_bl == 0).any())
        mask = mask_bl.to(device) if padded else None
        state = model(input_ids_bl.to(device), attention_mask=mask, cache=cache)
        for count in range(max_new_tokens):
            logits_bv = state["logits"][:, -1, :vocab_size].float().cpu()
            if greedy:
                next_b = logits_bv.argmax(-1)
            else:
                next_b = sample(logits_bv, generator, temperature, top_k, top_p)
            for row in sorted(open_rows):
                token = int(next_b[row])
                if token == end_of_text:
                    open_rows.remove(row)
                else:
                    new[row].append(token)
            if not open_rows or count == max_new_tokens - 1:
                break
            state = model(next_b[:, None].to(device), cache=cache)
        return new
    finally:
        model.train(was_training)


def sample(
    logits_bv: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one token a row, [b], from logits [b, v], after cutting away the unlikely ones."""
    # At most 0, so that a low temperature cannot overflow; one that fp32 cannot hold would be 0.
    logits_bv = (logits_bv - logits_bv.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is not None:
        kth = logits_bv.topk(min(top_k, logits_bv.shape[-1]), dim=-1).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < kth, float("-inf"))
    if top_p is not None:
        ordered, index = logits_bv.softmax(-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of all more likely tokens
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits_bv = logits_bv.masked_fill(cut, float("-inf"))
    return torch.multinomial(logits_bv.softmax(-1), 1, generator=generator)[:, 0]


def _left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask), [b, l]: prompts end in the same column, where the next tokens go."""
    length = max(map(len, prompts))
    ids = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def _check_options(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    vocab_size: int,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be above 0, got {temperature}; for the most likely token use greedy=True"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be between 1 and the {vocab_size} tokens there are, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if greedy and (temperature != 1.0 or top_k is not None or top_p is not None):
        raise ValueError(
            "greedy takes the most likely token: temperature, top_k and top_p do nothing with it"
        )


def _check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: Any) -> None:
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token; to start a document use end_of_text")
    strangers = [token for prompt in prompts for token in prompt if not 0 <= token < config.vocab_size]
    if strangers:
        raise ValueError(
            f"token {strangers[0]} is not one of the model's {config.vocab_size}: "
            "this is another model's tokenizer"
        )
    room = config.max_positions - max(map(len, prompts))
    if max_new_tokens > room:
        raise ValueError(
            f"the longest prompt has {max(map(len, prompts))} tokens and the model {config.max_positions} "
            f"positions: max_new_tokens can be at most {max(room, 0)}, got {max_new_tokens}"
        )
