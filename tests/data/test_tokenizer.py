"""Byte-level BPE: every string comes back, the alphabet is 256, the files are those of GPT-2."""

import shutil
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from fmlab.data import ByteBPE, Corpus, cache, corpora, encode
from fmlab.data.byte_bpe import END_OF_TEXT

TEXTS = corpora.load("python-docs").documents[:40]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def bpe():
    return ByteBPE.train(TEXTS, 600)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(alphabet=f" \n\tdef{END_OF_TEXT}éß\u00a0😀\u0301\x00\x7f"))
@example("  two leading spaces")
@example(" ?")
@example("e\u0301 é \u00a1\u00ff Ġ Ċ")
@example("\r\n\n  😀‍👩‍👧 \ufeff")
@example(f"a{END_OF_TEXT}b {END_OF_TEXT}")
def test_every_string_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    plain = bpe.encode(text, special=False)
    assert bpe.decode(plain) == text
    assert bpe.end_of_text not in plain


def test_the_alphabet_is_the_256_bytes():
    smallest = ByteBPE.train(["aa"], 257)
    assert smallest.vocab_size == 257
    assert len(smallest.encode("é")) == 2
    assert smallest.encode("é") == smallest.encode("é😀")[:2]
    every = "".join(map(chr, range(0x250)))
    assert len(set(smallest.encode(every))) <= 256
    with pytest.raises(ValueError, match="at least 257"):
        ByteBPE.train(["aa"], 256)
    with pytest.raises(ValueError, match="at most 16,777,216"):
        ByteBPE.train(["aa"], 2**40)
    with pytest.raises(ValueError, match="no text"):
        ByteBPE.train([], 300)


def test_the_special_token_inside_text_is_one_piece(bpe):
    assert bpe.encode(f"a{END_OF_TEXT}b") == [*bpe.encode("a"), bpe.end_of_text, *bpe.encode("b")]
    assert bpe.pieces(f"a{END_OF_TEXT}b") == ["a", END_OF_TEXT, "b"]


def test_training_is_deterministic_and_depends_on_the_text(bpe):
    assert ByteBPE.train(TEXTS, 600).to_json() == bpe.to_json()
    assert ByteBPE.train(TEXTS[1:], 600).to_json() != bpe.to_json()


def test_bad_ids_and_half_surrogates_are_refused(bpe):
    with pytest.raises(ValueError, match="no such token: 600; legal: 0 to 599"):
        bpe.decode([600])
    with pytest.raises(ValueError, match="surrogate pair at position 1"):
        bpe.encode("a\ud800")


def test_saved_and_gpt2_style_files_load(bpe, tmp_path):
    text = "  The quick é " + END_OF_TEXT
    again = ByteBPE.load(bpe.save(tmp_path / "tok"))
    assert again.encode(text) == bpe.encode(text)
    assert again.fingerprint == bpe.fingerprint
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    Tokenizer.from_str(bpe.to_json()).model.save(str(gpt2))  # vocab.json and merges.txt
    loaded = ByteBPE.load(gpt2)
    assert loaded.encode(text) == bpe.encode(text)
    assert loaded.vocab_size == bpe.vocab_size


def test_transformers_reads_our_file_and_agrees(bpe, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    theirs = transformers.AutoTokenizer.from_pretrained(str(bpe.save(tmp_path / "tok")))
    text = f" Hello , é  {END_OF_TEXT}x ?"
    assert theirs(text)["input_ids"] == bpe.encode(text)
    assert theirs.decode(bpe.encode(text)) == text
    assert theirs.decode(bpe.encode(" ?")) == " ?"  # no clean-up that removes spaces
    assert theirs.eos_token_id == bpe.end_of_text


def test_what_is_no_byte_level_tokenizer_is_refused(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ValueError, match="not a byte-level tokenizer"):
        ByteBPE.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="does not hold a tokenizer"):
        ByteBPE.load(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match=r"neither tokenizer\.json"):
        ByteBPE.load(tmp_path)


def test_encoding_a_corpus_marks_its_documents_and_uses_the_cache(bpe, monkeypatch):
    corpus = Corpus("x", ["first", f"se{END_OF_TEXT}cond", "third"], "")
    tokens = encode(corpus, bpe)
    assert tokens.num_documents == 3
    for i, document in enumerate(corpus.documents):
        *inside, last = tokens.ids[tokens.borders[i] : tokens.borders[i + 1]]
        assert last == bpe.end_of_text
        assert bpe.decode(inside) == document
    assert (tokens.ids == bpe.end_of_text).sum() == 3, "text must not be able to end a document"
    monkeypatch.setattr(bpe, "encode_batch", None)  # from here on only the cache can answer
    again = encode(corpus, bpe)
    assert (again.ids == tokens.ids).all()
    assert again.fingerprint == tokens.fingerprint


def test_a_damaged_cache_is_made_again_and_an_unwritable_one_is_done_without(tmp_path, monkeypatch):
    first = ByteBPE.train_cached(TEXTS, 300)
    (file,) = (tmp_path / "cache").glob("tokenizer-*")
    file.write_text("{")
    with pytest.warns(UserWarning, match="is damaged"):
        assert ByteBPE.train_cached(TEXTS, 300).to_json() == first.to_json()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ByteBPE.train_cached(TEXTS, 300).to_json() == first.to_json()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="without a cache"):
        assert ByteBPE.train_cached(TEXTS, 300).to_json() == first.to_json()
