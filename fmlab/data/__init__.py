"""Corpora, tokenizers and deterministic sampling."""

from fmlab.data.byte_bpe import ByteBPE, RoBERTaBPE
from fmlab.data.corpora import Corpus, corpus_names, load
from fmlab.data.encoded import Tokens, encode
from fmlab.data.masked import MaskedSampler
from fmlab.data.masking import Masking
from fmlab.data.order import WindowSampler
from fmlab.data.packing import Packed, pack
from fmlab.data.pairs import SentencePairSampler, Sentences, encode_sentences, split_sentences
from fmlab.data.prefix import PrefixSampler
from fmlab.data.rows import check_batch
from fmlab.data.sampler import TokenSampler, evaluation_batches
from fmlab.data.spans import SpanSampler, corrupt, span_lengths, span_mask
from fmlab.data.tokenizer import TextTokenizer
from fmlab.data.unigram import Unigram
from fmlab.data.wordpiece import WordPiece

__all__ = [
    "ByteBPE",
    "Corpus",
    "MaskedSampler",
    "Masking",
    "Packed",
    "PrefixSampler",
    "RoBERTaBPE",
    "SentencePairSampler",
    "Sentences",
    "SpanSampler",
    "TextTokenizer",
    "TokenSampler",
    "Tokens",
    "Unigram",
    "WindowSampler",
    "WordPiece",
    "check_batch",
    "corpus_names",
    "corrupt",
    "encode",
    "encode_sentences",
    "evaluation_batches",
    "load",
    "pack",
    "span_lengths",
    "span_mask",
    "split_sentences",
]
