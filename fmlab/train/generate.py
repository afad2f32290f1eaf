"""Text from a language model, token by token, with a cache of keys and values.

Decoders continue their prompts; encoder-decoders (T5) answer them. Beams are in fmlab.train.beam, a small
model that guesses ahead for a large one is in fmlab.train.speculative.

Shapes: b prompts, l length, v vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fmlab.data.tokenizer import TextTokenizer
from fmlab.train.decode import check_prompts, evaluating, has_encoder, open_stream


@overload
def generate(model: Any, tokenizer: TextTokenizer, prompt: str = "", **options: Any) -> str: ...
@overload
def generate(model: Any, tokenizer: TextTokenizer, prompt: Sequence[str], **options: Any) -> list[str]: ...
def generate(
    model: Any,
    tokenizer: TextTokenizer,
    prompt: str | Sequence[str] = "",
    *,
    stop: str | Sequence[str] = (),
    **options: Any,
) -> str | list[str]:
    """Continue a prompt, or each of several; returns what was added, without the prompt.

    prompt: "" starts a new document.
    stop:   a text ends before the first of these strings; none of them may be empty.
    options: those of `generate_ids`.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(stops):
        raise ValueError("an empty stop string would end every text before it begins")
    ids = [prompt_ids(model, tokenizer, text) for text in prompts]
    options.setdefault("num_tokens", min(tokenizer.vocab_size, model.config.vocab_size))
    if stops:
        options["stopped"] = _stop_finder(tokenizer, stops)
    rows = generate_ids(model, ids, tokenizer.end_of_text, **options)
    texts = [_cut(tokenizer.decode(row), stops) for row in rows]
    return texts[0] if isinstance(prompt, str) else texts


def prompt_ids(model: Any, tokenizer: TextTokenizer, text: str) -> list[int]:
    """What a model reads as a prompt: a decoder the text, an encoder its family's special tokens too."""
    ids = tokenizer.encode(text)
    return tokenizer.frame(ids)[0] if has_encoder(model) else ids or [tokenizer.end_of_text]


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
    repetition_penalty: float = 1.0,
    stopped: Callable[[list[int]], bool] | None = None,
    static_shapes: bool = False,
    length: int | None = None,
) -> list[list[int]]:
    """Token ids that continue each prompt (or answer it), up to and without `end_of_text`.

    greedy:      always the most likely token; the next three then have nothing to do and are refused
    temperature: divides the logits; below 1 is safer, above 1 is wilder
    top_k:       draw from the k most likely tokens only
    top_p:       draw from the fewest tokens whose probabilities add up to at least p (Holtzman et al. 2020)
    seed:        the same prompts and seed give the same text
    num_tokens:  draw ids below this one only: a model may have more rows than its tokenizer has tokens
    repetition_penalty: above 1, makes tokens less likely that stand in the text already, prompt included:
                 divides their logits if positive and multiplies them if negative (Keskar et al. 2019,
                 arXiv:1909.05858, section 4.1, as transformers has it)
    stopped:     asked with a row's new tokens after each; True ends the row, its last token kept
    static_shapes: every token by one and the same program, for devices that compile each shape anew (TPU,
                 Trainium, XLA); decoders only
    length:      with static_shapes: prompts are padded to it, on the left, so that they share a program

    Raises ValueError for values out of range, an empty prompt, and more tokens than the model has positions.
    """
    vocab_size = model.config.vocab_size if num_tokens is None else num_tokens
    check_prompts(prompts, max_new_tokens, model)
    check_options(temperature, top_k, top_p, greedy, vocab_size, repetition_penalty)
    generator = torch.Generator().manual_seed(seed)
    new: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    with evaluating(model):
        stream = open_stream(model, prompts, max_new_tokens, static_shapes, length)
        logits_bv = stream.start()[:, :vocab_size]
        penalty = None
        if repetition_penalty != 1.0:
            seen = [[]] * len(prompts) if has_encoder(model) else prompts
            penalty = RepetitionPenalty(repetition_penalty, seen, logits_bv)
        for count in range(max_new_tokens):
            if penalty is not None:
                logits_bv = penalty(logits_bv)
            if greedy:
                next_b = likeliest(logits_bv)
            else:
                next_b = sample(logits_bv.float().cpu(), generator, temperature, top_k, top_p)
            tokens = next_b.tolist()
            for row in sorted(open_rows):
                if tokens[row] == end_of_text:
                    open_rows.remove(row)
                    continue
                new[row].append(tokens[row])
                if stopped is not None and stopped(new[row]):
                    open_rows.remove(row)
            if not open_rows or count == max_new_tokens - 1:
                break
            if penalty is not None:
                penalty.note(next_b)
            logits_bv = stream.step(next_b)[:, :vocab_size]
    return new


def likeliest(logits_bv: Tensor) -> Tensor:
    """The most likely token of each row, [b]; the first of several."""
    if logits_bv.device.type == "cpu" and logits_bv.dtype.itemsize >= 4:
        return torch.from_numpy(logits_bv.numpy().argmax(-1))  # 20 times as fast as torch's at 50257 tokens
    return logits_bv.argmax(-1)


def probabilities(
    logits_bv: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that `sample` draws from, [b, v]: unlikely tokens cut away, the rest rescaled."""
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
    return logits_bv.softmax(-1)


def sample(
    logits_bv: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one token a row, [b], from logits [b, v], after cutting away the unlikely ones."""
    chances = probabilities(logits_bv, temperature, top_k, top_p)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


class RepetitionPenalty:
    """Logits with the tokens that were seen made less likely; see `generate_ids`."""

    def __init__(self, penalty: float, prompts: Sequence[Sequence[int]], like: Tensor):
        self.penalty = penalty
        self.seen_bv = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        for row, prompt in enumerate(prompts):
            self.seen_bv[row, [token for token in prompt if token < like.shape[1]]] = True

    def note(self, tokens_b: Tensor) -> None:
        """These were written."""
        self.seen_bv[torch.arange(len(tokens_b)), tokens_b.to(self.seen_bv.device)] = True

    def __call__(self, logits_bv: Tensor) -> Tensor:
        less = torch.where(logits_bv < 0, logits_bv * self.penalty, logits_bv / self.penalty)
        return torch.where(self.seen_bv, less, logits_bv)


def _stop_finder(tokenizer: TextTokenizer, stops: Sequence[str]) -> Callable[[list[int]], bool]:
    """Whether the text of some ids holds a stop string, if the last token completed it."""
    most = max(len(stop.encode()) for stop in stops) + 4  # tokens that can hold it: each is a byte at least

    def holds_one(ids: list[int]) -> bool:
        text = tokenizer.decode(ids)
        return any(stop in text for stop in stops)

    def stopped(ids: list[int]) -> bool:
        # the tail decoded alone may read differently, so what is found there is looked up in the whole
        return holds_one(ids[-most:]) and holds_one(ids)

    return stopped


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def check_options(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    vocab_size: int,
    repetition_penalty: float = 1.0,
) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be above 0, got {temperature}; for the most likely token use greedy=True"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be between 1 and the {vocab_size} tokens there are, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty must be above 0, got {repetition_penalty}; 1 changes nothing")
    if greedy and (temperature != 1.0 or top_k is not None or top_p is not None):
        raise ValueError(
            "greedy takes the most likely token: temperature, top_k and top_p do nothing with it"
        )
