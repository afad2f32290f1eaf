"""`fmlab data`: list the data sets, read a card, look at a corpus, train a tokenizer on one."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from fmlab.data import ByteBPE, corpora
from fmlab.data.card import card
from fmlab.data.catalogue import CATALOGUE, describe
from fmlab.storage import check_writable


@dataclass
class List:
    """List the data sets, and how each is loaded."""

    def run(self) -> None:
        for entry in CATALOGUE:
            print(f"{entry.name:16} {entry.call:22} {describe(entry)}")
        print("also: the path of a text file or folder, and hub:owner/set for a set of the Hugging Face hub")


@dataclass
class Card:
    """Show where a data set comes from, under which terms, and what it is good for."""

    name: tyro.conf.Positional[str]
    """A name from `fmlab data list`."""

    def run(self) -> None:
        names = [entry.name for entry in CATALOGUE]
        if self.name not in names:
            raise ValueError(f"there is no card for {self.name!r}; legal: {', '.join(names)}")
        print(card(self.name))


@dataclass
class Stats:
    """Show the card and the size of a corpus, and how a tokenizer cuts it."""

    corpus: tyro.conf.Positional[str] = "python-docs"
    """A name from `fmlab data list`, a text file or folder, or hub:owner/set."""
    vocab_size: int = 4096
    """Tokens of the tokenizer that is trained on it."""

    def run(self) -> None:
        corpus = corpora.load(self.corpus)
        train, validation = corpus.split()
        tokenizer = ByteBPE.train_cached(train.documents, self.vocab_size)
        print(corpus.card)
        print(f"{corpus!r}")
        for part in (train, validation):
            count = sum(map(len, tokenizer.encode_batch(part.documents, special=False)))
            print(
                f"{part.name}: {len(part.documents):,} documents, {count:,} tokens, "
                f"{part.num_characters / count:.2f} characters a token"
            )


@dataclass
class Tokenizer:
    """Train a byte-level BPE on the training part of a corpus and write tokenizer.json."""

    out: tyro.conf.Positional[str]
    """The folder to write into."""
    corpus: str = "python-docs"
    """A name from `fmlab data list`, a text file or folder, or hub:owner/set."""
    vocab_size: int = 4096
    """How many tokens, with the 256 bytes and <|endoftext|>."""

    def run(self) -> None:
        check_writable(self.out)
        train, _ = corpora.load(self.corpus).split()
        tokenizer = ByteBPE.train(train.documents, self.vocab_size)
        print(f"{tokenizer!r} written to {tokenizer.save(self.out)}/tokenizer.json")


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Card, tyro.conf.subcommand("card")]
    | Annotated[Stats, tyro.conf.subcommand("stats")]
    | Annotated[Tokenizer, tyro.conf.subcommand("tokenizer")]
)


def main(argv: list[str] | None = None) -> int:
    """Run `fmlab data …`. Raises ValueError, OSError or ImportError for what the user can put right."""
    command = tyro.cli(Command, args=argv, prog="fmlab data", description=__doc__)
    command.run()
    return 0
