"""Load on a local server: clients that ask, and what they waited for.

Open loop: requests arrive at random times at a given mean rate, whether the server keeps up or not (arrivals
that wait for answers would hide a queue that grows).
"""

import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What one client saw: when it asked and when each piece came, in seconds from the start of the load."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    new_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds from asking to the first piece of text (time to first token)."""
        return self.pieces[0] - self.asked

    @property
    def between(self) -> float:
        """Mean seconds between two pieces after the first (time per output token)."""
        return (self.pieces[-1] - self.pieces[0]) / max(len(self.pieces) - 1, 1)


@dataclass(frozen=True)
class LoadReport:
    """The answers of a load. Times are seconds; p50 and p95 over the requests that were answered."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(answer.error is not None for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests over the time from the first question to the last answer."""
        return sum(answer.new_tokens for answer in self.answers) / self.seconds

    def first(self, quantile: float) -> float:
        """Time to the first token below which this share of the requests stayed."""
        return _quantile([a.first for a in self.answers if a.pieces], quantile)

    def between(self, quantile: float) -> float:
        """Time per later token below which this share of the requests stayed."""
        return _quantile([a.between for a in self.answers if len(a.pieces) > 1], quantile)

    def __str__(self) -> str:
        return (
            f"{len(self.answers)} requests, {self.failed} failed, {self.tokens_per_second:.0f} tokens/s; "
            f"first token {1e3 * self.first(0.5):.0f} ms (p95 {1e3 * self.first(0.95):.0f}), "
            f"then {1e3 * self.between(0.5):.1f} ms a token (p95 {1e3 * self.between(0.95):.1f})"
        )


def run_load(
    url: str, bodies: Sequence[dict[str, Any]], rate: float | None = None, seed: int = 0, timeout: float = 120
) -> LoadReport:
    """Send each body to the completions route of a server on this machine, one thread each.

    rate: mean requests a second, at exponential intervals drawn from `seed`; None sends all at once.
    Raises ValueError for a rate that is not above 0.
    """
    if rate is not None and not rate > 0:
        raise ValueError(f"rate must be above 0 requests a second, got {rate}")
    draw = random.Random(seed)
    start, due, threads, answers = time.perf_counter(), 0.0, [], []
    for body in bodies:
        if rate is not None:
            due += draw.expovariate(rate)
            time.sleep(max(0.0, start + due - time.perf_counter()))
        answer = Answer(time.perf_counter() - start)
        threads.append(threading.Thread(target=_ask, args=(url, body, answer, start, timeout)))
        answers.append(answer)
        threads[-1].start()
    for thread in threads:
        thread.join()
    return LoadReport(tuple(answers), time.perf_counter() - start)


def _ask(url: str, body: dict[str, Any], answer: Answer, start: float, timeout: float) -> None:
    """Ask for a streamed completion and note when its pieces come."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as lines:
            for line in lines:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    answer.error = piece["error"]["message"]
                    return
                answer.pieces.append(time.perf_counter() - start)
                answer.text += piece["choices"][0]["text"]
                answer.new_tokens = piece.get("usage", {}).get("completion_tokens", 0)
    except urllib.error.HTTPError as error:
        answer.error = f"{error.code}: {json.loads(error.read())['error']['message']}"
    except OSError as error:
        answer.error = str(error)


def _quantile(values: list[float], quantile: float) -> float:
    if not values:
        return float("nan")
    if len(values) == 1:
        return values[0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[min(98, max(0, round(100 * quantile) - 1))]
