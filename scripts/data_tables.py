"""Write the tables of docs/data.md from the package itself.

Run it inside .venv after a change of the data sets, samplers or tokenizers; with --check it only says whether
they agree.
"""

import re
import sys
from pathlib import Path

import made

from fmlab import data, objectives
from fmlab.data.card import card
from fmlab.data.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "data.md"
TOKENIZERS = {
    "ByteBPE": "GPT, Llama",
    "RoBERTaBPE": "RoBERTa",
    "WordPiece": "BERT, DistilBERT",
    "Unigram": "T5",
}
# (batch maker, objective, models, what a batch holds besides input_ids)
TRAINING = [
    ("TokenSampler", "CausalLM", "GPT, Llama", "labels; packed: document_ids"),
    ("PrefixSampler", "PrefixLM", "GPT, Llama", "labels, prefix_lengths"),
    ("MaskedSampler", "MaskedLM", "BERT, RoBERTa, DistilBERT", "labels"),
    ("SentencePairSampler", "MaskedLM", "BERT", "labels, token_type_ids, attention_mask, sentence_labels"),
    ("SpanSampler", "Seq2SeqLM", "T5", "labels"),
    ("ExampleSampler", "Classification", "BERT, RoBERTa, DistilBERT", "class_labels, attention_mask"),
    ("ExampleSampler", "Seq2SeqLM", "T5", "labels, attention_mask"),
    ("ByLengthSampler", "Seq2SeqLM", "T5", "labels, attention_mask; rows of about one length"),
    ("ExampleSampler", "CausalLM", "GPT, Llama", "labels (of the response only), attention_mask"),
]


def first_sentence(text: str) -> str:
    """The first sentence of a paragraph."""
    return re.split(r"\.\s", text, maxsplit=1)[0].rstrip(".")


def sets() -> str:
    rows = ["| Name | Kind | Load it with | Needs | Terms |", "|---|---|---|---|---|"]
    for entry in CATALOGUE:
        text = " ".join(card(entry.name).split())
        terms = re.split(r" - \*\*", text.partition("**Terms**: ")[2])[0]
        extra = re.search(r"extra `(\w+)`", text)
        needs = f"extra `{extra[1]}`" if extra else ""
        needs += ", a connection or a copy" if entry.online else ""
        rows.append(f"| {entry.name} | {entry.kind} | `{entry.call}` | {needs} | {first_sentence(terms)} |")
    return "\n".join(rows)


def tokenizers() -> str:
    rows = ["| Class | For | Special tokens | A row; a pair |", "|---|---|---|---|"]
    for name, models in TOKENIZERS.items():
        kind = getattr(data, name)
        before, between, after = ([kind.SPECIAL[part] for part in parts] for parts in kind.FRAME)
        one, two = " ".join([*before, "a", *after]), " ".join([*before, "a", *between, "b", *after])
        special = " ".join(f"`{token}`" for token in kind.SPECIAL.values())
        special = special.replace("|", "\\|")  # else it would end the cell
        rows.append(f"| `{name}` | {models} | {special} | `{one}`; `{two}` |")
    return "\n".join(rows)


def training() -> str:
    rows = ["| Batches | Objective | Models | Besides input_ids a batch has |", "|---|---|---|---|"]
    for maker, objective, models, names in TRAINING:
        assert hasattr(data, maker)
        assert hasattr(objectives, objective)
        rows.append(f"| `{maker}` | `{objective}` | {models} | {names} |")
    return "\n".join(rows)


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {"sets": sets(), "tokenizers": tokenizers(), "training": training()}
    return made.filled(text, parts, "data_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "data_tables.py", sys.argv[1:]))
