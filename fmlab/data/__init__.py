"""Corpora, tokenizers and deterministic sampling."""

from fmlab.data.byte_bpe import ByteBPE, RoBERTaBPE
from fmlab.data.corpora import Corpus, corpus_names, load
from fmlab.data.encoded import Tokens, encode
from fmlab.data.sampler import TokenSampler, evaluation_batches
from fmlab.data.tokenizer import TextTokenizer
from fmlab.data.unigram import Unigram
from fmlab.data.wordpiece import WordPiece

__all__ = [
    "ByteBPE",
    "Corpus",
    "RoBERTaBPE",
    "TextTokenizer",
    "TokenSampler",
    "Tokens",
    "Unigram",
    "WordPiece",
    "corpus_names",
    "encode",
    "evaluation_batches",
    "load",
]
