"""Corpora, tokenizers and deterministic sampling."""

from fmlab.data.buckets import LengthBuckets, choose_buckets, signatures
from fmlab.data.by_length import ByLengthSampler
from fmlab.data.byte_bpe import ByteBPE, RoBERTaBPE
from fmlab.data.corpora import corpus_names, load
from fmlab.data.corpus import Corpus
from fmlab.data.encoded import Tokens, encode
from fmlab.data.examples import (
    ExampleSampler,
    class_examples,
    response_examples,
    seq2seq_examples,
    text_to_text_examples,
)
from fmlab.data.images import LabelledImages, load_cifar10, load_digits
from fmlab.data.labelled import LabelledTexts
from fmlab.data.masked import MaskedSampler
from fmlab.data.masking import Masking
from fmlab.data.order import WindowSampler
from fmlab.data.packing import Packed, pack
from fmlab.data.pairs import SentencePairSampler, Sentences, encode_sentences, split_sentences
from fmlab.data.passages import load_passages
from fmlab.data.prefix import PrefixSampler
from fmlab.data.problems import answer_of, arithmetic, instructions
from fmlab.data.rows import check_batch
from fmlab.data.sampler import TokenSampler, evaluation_batches
from fmlab.data.spans import SpanSampler, corrupt, span_lengths, span_mask
from fmlab.data.text_pairs import TextPairs
from fmlab.data.text_to_text import TextToText, short_pairs, text_to_text_tasks
from fmlab.data.tokenizer import TextTokenizer
from fmlab.data.translations import load_parallel
from fmlab.data.unigram import Unigram
from fmlab.data.wordpiece import WordPiece

__all__ = [
    "ByLengthSampler",
    "ByteBPE",
    "Corpus",
    "ExampleSampler",
    "LabelledImages",
    "LabelledTexts",
    "LengthBuckets",
    "MaskedSampler",
    "Masking",
    "Packed",
    "PrefixSampler",
    "RoBERTaBPE",
    "SentencePairSampler",
    "Sentences",
    "SpanSampler",
    "TextPairs",
    "TextToText",
    "TextTokenizer",
    "TokenSampler",
    "Tokens",
    "Unigram",
    "WindowSampler",
    "WordPiece",
    "answer_of",
    "arithmetic",
    "check_batch",
    "choose_buckets",
    "class_examples",
    "corpus_names",
    "corrupt",
    "encode",
    "encode_sentences",
    "evaluation_batches",
    "instructions",
    "load",
    "load_cifar10",
    "load_digits",
    "load_parallel",
    "load_passages",
    "pack",
    "response_examples",
    "seq2seq_examples",
    "short_pairs",
    "signatures",
    "span_lengths",
    "span_mask",
    "split_sentences",
    "text_to_text_examples",
    "text_to_text_tasks",
]
