"""Text from tokens as they come: only what can no longer change is handed out."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character


class TextStream:
    """The text of a growing list of tokens, in pieces, cut at the first of the `stop` strings.

    A character may be spread over several tokens, and a stop string over several pieces: what might still
    become either is held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.tokens: list[int] = []
        self.text = ""  # handed out so far
        self.stopped = False

    def push(self, token: int) -> str:
        """The piece of text that is certain after one more token; "" if there is none."""
        self.tokens.append(token)
        whole = self.tokenizer.decode(self.tokens)
        return self._hand_out(whole, final=False)

    def finish(self) -> str:
        """What was held back, when no token follows."""
        return "" if self.stopped else self._hand_out(self.tokenizer.decode(self.tokens), final=True)

    def _hand_out(self, whole: str, final: bool) -> str:
        found = [whole.find(stop) for stop in self.stop if stop in whole]
        if found:
            self.stopped, certain = True, whole[: min(found)]
        elif final:
            certain = whole
        else:
            certain = whole.rstrip(REPLACEMENT)
            certain = certain[: len(certain) - self._could_be_stop(certain)]
        piece = certain[len(self.text) :]
        self.text += piece
        return piece

    def _could_be_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        lengths = [n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)
