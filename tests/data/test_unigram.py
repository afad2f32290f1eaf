"""Unigram pieces: T5's special ids and sentinels, ids of transformers, what a round trip keeps."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fmlab.data import ByteBPE, Unigram, cache, corpora

TEXTS = corpora.load("python-docs").documents[:40]
LETTERS = "".join(sorted(c for c in set("".join(TEXTS)) if c.isascii()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def ours():
    return Unigram.train(TEXTS, 700, sentinels=20)


def test_special_ids_and_sentinels_are_where_t5_has_them(ours):
    assert (ours.pad, ours.eos, ours.unk, ours.end_of_text) == (0, 1, 2, 1)
    assert ours.vocab_size == 700
    assert ours.sentinels == list(range(699, 679, -1))
    assert ours.lowest_sentinel == 680
    assert ours.encode("<extra_id_0> x <extra_id_19>")[:: len(ours.encode("x")) + 1] == [699, 680]
    assert ours.special_ids == {0, 1, 2, *range(680, 700)}
    assert "20 sentinels" in repr(ours)


def test_transformers_reads_our_folder_and_gives_the_same_ids(ours, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    folder = str(ours.save(tmp_path / "tok"))
    texts = [*TEXTS[:10], "a  b <extra_id_3>. The quick</s> x", "", "ünknown 😀"]
    exact = transformers.AutoTokenizer.from_pretrained(folder)
    t5 = transformers.T5TokenizerFast.from_pretrained(folder, extra_ids=20)
    for text in texts:
        for theirs in (exact, t5):
            assert theirs(text)["input_ids"] == ours.frame(ours.encode(text))[0]
    pair = exact("a", "b")["input_ids"]
    assert pair == ours.batch(["a"], ["b"])["input_ids"][0].tolist()
    assert exact("ﬁ")["input_ids"] == ours.frame(ours.encode("fi"))[0]
    assert t5.convert_tokens_to_ids("<extra_id_0>") == ours.sentinels[0]
    assert Unigram.load(folder).fingerprint == ours.fingerprint


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=LETTERS + "\t\u00a0"))
@example("  two  spaces ")
@example(" .")
@example("ﬁ ﬂ")
@example("a</s> <pad><extra_id_0>")
def test_a_round_trip_loses_only_white_space_and_compatibility_forms(ours, text):
    kept = " ".join(unicodedata.normalize("NFKC", text).split())
    assert ours.decode(ours.encode(text, special=False)) == kept


def test_unknown_characters_are_unk_and_special_text_can_be_plain(ours):
    assert all(ours.unk in ours.encode("😀", special) for special in (True, False))
    assert "<unk>" in ours.decode(ours.encode("😀"))
    assert not ours.special_ids & set(ours.encode("a</s> <extra_id_0>", special=False))
    assert ours.decode([*ours.encode("a b"), ours.eos], skip_special=True) == "a b"


def test_training_twice_gives_the_same_pieces_and_scores(ours):
    for _ in range(2):  # the library alone gives other scores at each call
        assert Unigram.train(TEXTS, 700, sentinels=20).to_json() == ours.to_json()
    assert Unigram.train_cached(TEXTS, 700, sentinels=20).to_json() == ours.to_json()


def test_frequent_words_are_one_piece(ours):
    assert ours.pieces("the of in") == ["▁the", "▁of", "▁in"]
    assert ours.starts_word()[ours.encode("the definitions of")].sum() == 3


def test_what_is_no_unigram_or_too_small_is_refused(tmp_path):
    ByteBPE.train(TEXTS, 300).save(tmp_path / "bpe")
    with pytest.raises(ValueError, match="not a Unigram tokenizer but BPE"):
        Unigram.load(tmp_path / "bpe")
    with pytest.raises(ValueError, match="at least 104"):
        Unigram.train(TEXTS, 103)
    with pytest.raises(ValueError, match=r"257 different characters .*legal: vocab_size above 270"):
        Unigram.train(["".join(map(chr, range(0x4E00, 0x4F00)))], 120, sentinels=10)
