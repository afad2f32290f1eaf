"""What is checked and counted before a tokenizer is trained."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer

LARGEST = 2**24  # tokens; the trainers set memory aside for all of them, and published ones have 2**18


def check_vocab_size(vocab_size: int, smallest: int, what: str) -> None:
    """Raise ValueError when a vocabulary would be smaller than the `smallest` that holds `what`, or larger
    than any that is of use."""
    if not smallest <= vocab_size <= LARGEST:
        raise ValueError(
            f"vocab_size must be at least {smallest} ({what}) and at most {LARGEST:,}, got {vocab_size}"
        )


def training_texts(texts: Iterable[str]) -> list[str]:
    """The texts as a list. Raises ValueError when there are none, or UTF-8 cannot write one."""
    checked = [encodable(text) for text in texts]
    if not any(checked):
        raise ValueError("no text to train a tokenizer on")
    return checked


def count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs, cut by the tokenizer's own normalizer and pre-tokenizer."""
    words: Counter[str] = Counter()
    for text in texts:
        cut = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        words.update(word for word, _ in cut)
    return words


def encodable(text: str) -> str:
    """`text` itself. Raises ValueError when it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds half of a surrogate pair at position {error.start}, which is not Unicode text; "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from error
    return text
