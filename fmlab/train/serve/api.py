"""What a client may ask for: the fields of an OpenAI-style completion, checked, and the answers' shapes.

Route and fields: https://platform.openai.com/docs/api-reference/completions
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from fmlab.train.serve.batching import HOTTEST, Request


class BadRequest(ValueError):
    """The client's to put right; `field` names what is wrong, `status` is that of HTTP."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


@dataclass(frozen=True)
class Completion:
    """A checked body of POST /v1/completions."""

    request: Request
    stop: tuple[str, ...]
    stream: bool
    echo: str  # the prompt, if it is to be part of the answer


#: field -> (types, what is legal)
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "max_tokens": ((int,), "a whole number of at least 1"),
    "temperature": ((int, float), f"a number from 0 (the most likely token) to {HOTTEST:g}"),
    "top_p": ((int, float), "a number above 0 and at most 1"),
    "top_k": ((int,), "a whole number of at least 1"),
    "seed": ((int,), "a whole number"),
    "stream": ((bool,), "true or false"),
    "echo": ((bool,), "true or false"),
    "model": ((str,), "a name"),
    "user": ((str,), "a name"),
}
#: fields of the route that we do not offer, with the only values that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (None, {}),
}


def parse_completion(body: bytes, tokenizer: Any) -> Completion:
    """Check the body of a request and encode its prompt. Raises BadRequest that names the field."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number of thousands of digits
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    _check_fields(fields)
    if "prompt" not in fields:
        raise BadRequest("prompt is missing: send a text, or a list of token ids", "prompt")
    text = fields["prompt"]
    temperature = fields.get("temperature", 1.0)
    if not 0 <= temperature <= HOTTEST:
        raise BadRequest(f"temperature must be {_FIELDS['temperature'][1]}, got {temperature}", "temperature")
    request = Request(
        prompt=tuple(_encode(text, tokenizer)),
        max_new_tokens=fields.get("max_tokens", 16),
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_k=fields.get("top_k"),
        top_p=fields.get("top_p"),
        seed=fields.get("seed", time.time_ns()) % 2**63,
    )
    echo = _text(text, tokenizer) if fields.get("echo") else ""
    return Completion(request, _stops(fields.get("stop")), fields.get("stream", False), echo)


def _check_fields(fields: dict[str, Any]) -> None:
    known = {*_FIELDS, *_NEUTRAL, "prompt", "stop"}
    if unknown := sorted(set(fields) - known):
        raise BadRequest(f"unknown field {unknown[0]!r}; legal: {', '.join(sorted(known))}", unknown[0])
    for name, value in fields.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise BadRequest(f"{name}={value!r} is not offered here; leave it out", name)
        if name in _FIELDS and value is not None:
            types, legal = _FIELDS[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise BadRequest(f"{name} must be {legal}, got {value!r}", name)
    for name in [name for name, value in fields.items() if value is None]:
        del fields[name]  # null asks for the default


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, given as text or as ids."""
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = list(prompt)
    elif isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise BadRequest(str(error), "prompt") from error
    else:
        raise BadRequest("prompt must be a text, or a list of token ids; send one a request", "prompt")
    if not ids:
        raise BadRequest("prompt is empty: it must have at least one token", "prompt")
    return ids


def _text(prompt: str | list[int], tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    try:
        text: str = tokenizer.decode(prompt)
    except ValueError as error:
        raise BadRequest(str(error), "prompt") from error
    return text


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop must be a text or a list of texts, none empty", "stop")
    if len(stops) > 4:
        raise BadRequest(f"stop may be at most 4 texts, got {len(stops)}", "stop")
    return tuple(stops)


def answer(
    number: int, model: str, text: str, reason: str | None, usage: tuple[int, int] | None = None
) -> dict[str, Any]:
    """An answer, or a piece of a streamed one. `usage`: tokens of the prompt and of the completion."""
    body: dict[str, Any] = {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
    }
    if usage is not None:
        prompt, new = usage
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return body


def error_body(message: str, field: str | None = None) -> dict[str, Any]:
    """An error in the shape that clients of this route expect."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": None}}
