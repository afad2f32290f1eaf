"""Corpora: real text, stable validation split, the learner's own files, hub sets read from local files."""

import builtins
import json
import sys

import pytest

from fmlab.data import Corpus, cli, corpora, corpus_names
from fmlab.data.catalogue import CATALOGUE
from fmlab.storage import StorageError


def test_python_docs_is_clean_english_without_duplicates():
    corpus = corpora.load("python-docs")
    assert len(corpus.documents) > 150
    assert 300_000 < corpus.num_characters < 1_000_000
    assert len(set(corpus.documents)) == len(corpus.documents)
    assert any("The standard type hierarchy" in text for text in corpus.documents)
    assert not any("\n\n\n" in text for text in corpus.documents)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in corpus.card
    assert corpus.fingerprint in repr(corpus)


@pytest.mark.parametrize("name", corpus_names())
def test_every_corpus_has_a_card_with_its_terms(name):
    corpus = corpora.load(name)
    assert "**Terms**" in corpus.card
    assert "{python}" not in corpus.card


def test_split_is_by_document_stable_and_disjoint():
    corpus = corpora.load("python-docs")
    train, held_out = corpus.split(0.1)
    assert 0.09 < held_out.num_characters / corpus.num_characters < 0.25
    assert sorted(train.documents + held_out.documents) == sorted(corpus.documents)
    reordered = Corpus("x", corpus.documents[::-1], "")
    assert set(reordered.split(0.1)[1].documents) == set(held_out.documents)


def test_one_document_is_cut_at_a_line_and_tiny_ones_are_refused():
    text = "".join(f"line {i}\n" for i in range(100))
    train, held_out = Corpus("x", [text], "").split(0.1)
    assert train.documents[0] + held_out.documents[0] == text
    assert held_out.documents[0].startswith("line 9")
    with pytest.raises(ValueError, match="too small"):
        Corpus("x", ["no line break"], "").split(0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Corpus("x", [text], "").split(1.0)


def test_fingerprint_sees_order_and_borders():
    prints = {Corpus("x", docs, "").fingerprint for docs in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}
    assert len(prints) == 4


def test_own_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub" / "a.md").write_text("third é")
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    assert corpora.load(str(tmp_path)).documents == ["second", "third é"]
    assert corpora.load(str(tmp_path / "b.txt")).documents == ["second"]
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        corpora.load(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text in"):
        corpora.load(str(tmp_path / "empty"))


def test_unknown_corpus_lists_the_legal_ones():
    with pytest.raises(ValueError, match=r"legal: python-docs, python-source.*did you mean 'python-docs'"):
        corpora.load("pyton-docs")


def test_hub_sets_load_through_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs: pip install '.[hf]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert corpora.load(f"hub:{tmp_path / 'set'}").documents == ["one", "two"]
    with pytest.raises(ValueError, match=r"no column 'body'; legal: text"):
        corpora.load(f"hub:{tmp_path / 'set'}", column="body")


def test_hub_set_offline_and_without_the_package(monkeypatch):
    class Offline:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(ConnectionError, match=r"no route to host.*python-docs"):
        corpora.load("hub:Salesforce/wikitext:wikitext-2-raw-v1")
    monkeypatch.delitem(sys.modules, "datasets")
    real_import = builtins.__import__

    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'", name="datasets")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr("fmlab.extras.import_module", lambda name: no_datasets(name))
    with pytest.raises(ImportError, match=r"pip install '\.\[hf\]'"):
        corpora.load("hub:x/y")


def test_the_command_lists_shows_trains_and_refuses(tmp_path, capsys):
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(entry.name in listed for entry in CATALOGUE)
    assert cli.main(["stats", "python-docs", "--vocab-size", "512"]) == 0
    assert "characters a token" in capsys.readouterr().out
    assert cli.main(["tokenizer", str(tmp_path / "tok"), "--vocab-size", "300"]) == 0
    assert (tmp_path / "tok" / "tokenizer.json").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write to"):
        cli.main(["tokenizer", str(tmp_path / "file" / "tok")])
    with pytest.raises(ValueError, match="legal: python-docs"):
        cli.main(["stats", "nothing-like-it"])
