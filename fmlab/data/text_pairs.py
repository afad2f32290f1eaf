"""Pairs of texts: sentence and translation, question and answer, title and section."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fmlab.data.corpus import fingerprint
from fmlab.data.holding_out import held_out, words_only


@dataclass(frozen=True)
class TextPairs:
    """firsts[i] belongs to seconds[i]. `card` says in Markdown where they come from and under which terms.

    kinds: of each pair, if there are several (the tasks of a set of instructions)
    """

    name: str
    firsts: list[str]
    seconds: list[str]
    card: str
    kinds: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(zip(self.firsts, self.seconds, strict=True))

    @property
    def documents(self) -> list[str]:
        """All texts, as for training a tokenizer."""
        return [text for pair in self for text in pair]

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change with any change of the texts or their order."""
        return fingerprint(self.documents)

    def split(
        self, validation: float = 0.1, by: Callable[[str, str], str] | None = None
    ) -> tuple["TextPairs", "TextPairs"]:
        """Two parts, for training and for validation.

        by: (first, second) -> what the pair is about; pairs with the same are on the same side. As it
            stands, first texts that differ only in case, punctuation or white space are. The same question
            in other words needs it: answered in training, it is no test.

        Raises ValueError when `validation` is not between 0 and 1 or there are too few pairs.
        """
        # Texts of signs alone (an arithmetic problem has digits) must not all count as one.
        out = held_out([by(*pair) if by else words_only(pair[0]) or pair[0] for pair in self], validation)
        return (
            self.take([i for i, is_out in enumerate(out) if not is_out]),
            self.take([i for i, is_out in enumerate(out) if is_out], f"{self.name} (validation)"),
        )

    def take(self, places: Sequence[int], name: str | None = None) -> "TextPairs":
        """The pairs at these places."""
        firsts, seconds = [self.firsts[i] for i in places], [self.seconds[i] for i in places]
        kinds = [self.kinds[i] for i in places] if self.kinds else []
        return TextPairs(name or self.name, firsts, seconds, self.card, kinds)

    def __repr__(self) -> str:
        kinds = f", {len(set(self.kinds))} kinds" if self.kinds else ""
        return f"TextPairs({self.name!r}, {len(self):,} pairs{kinds}, fingerprint {self.fingerprint})"
