"""Corpora, tokenizers and deterministic sampling."""

from fmlab.data.corpora import Corpus, corpus_names, load
from fmlab.data.encoded import Tokens, encode
from fmlab.data.sampler import TokenSampler, evaluation_batches
from fmlab.data.tokenizer import ByteBPE

__all__ = [
    "ByteBPE",
    "Corpus",
    "TokenSampler",
    "Tokens",
    "corpus_names",
    "encode",
    "evaluation_batches",
    "load",
]
