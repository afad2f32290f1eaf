"""Labelled texts, pairs, images and made problems: what is in them, and nothing on both sides of a split."""

import builtins
import io
from types import SimpleNamespace

import pytest
import torch

from fmlab.data import (
    TextPairs,
    answer_of,
    arithmetic,
    cli,
    instructions,
    load,
    load_cifar10,
    load_digits,
    load_parallel,
    load_passages,
)
from fmlab.data.catalogue import CATALOGUE
from fmlab.data.holding_out import held_out, words_only
from fmlab.data.public import articles
from fmlab.data.translations import PLACEHOLDER


def test_the_same_key_is_on_one_side_whatever_the_order():
    keys = [f"text {i % 40}" for i in range(120)]
    out = held_out(keys, 0.25)
    assert 0.25 <= sum(out) / 120 < 0.3
    sides = dict(zip(keys, out, strict=True))
    assert [sides[key] for key in keys] == out
    assert held_out(keys[::-1], 0.25)[::-1] == out
    assert words_only(" A b,\nC! ") == words_only("a B  c")
    with pytest.raises(ValueError, match="too few different"):
        held_out(["a", "a"], 0.5)


def test_docstrings_have_ten_classes_and_none_leaks():
    corpus = load("docstrings")
    assert len(corpus.classes) >= 9  # an installation may lack turtle
    assert all(corpus.count(i) >= 100 for i in range(len(corpus.classes)))
    keys = [words_only(text) for text in corpus.documents]
    assert len(set(keys)) == len(keys)
    train, held = corpus.split()
    assert not set(map(words_only, train.documents)) & set(map(words_only, held.documents))
    assert len(train.documents) + len(held.documents) == len(keys)
    assert set(held.labels) == set(range(len(corpus.classes)))
    place = corpus.documents.index(held.documents[7])
    assert corpus.labels[place] == held.labels[7]
    assert held.card == corpus.card


@pytest.mark.parametrize("name", ["en-fr", "en-zh"])
def test_translations_are_real_pairs_with_their_placeholders(name):
    pytest.importorskip("jupyterlab_language_pack_fr_FR", reason="needs: pip install '.[data]'")
    pairs = load_parallel(name)
    assert len(pairs) > 2000
    assert len(set(pairs)) == len(pairs)
    assert any("%1" in text for text in pairs.firsts)
    for text, translation in pairs:
        assert text
        assert translation
        assert text != translation
        assert "\x04" not in text
        assert sorted(PLACEHOLDER.findall(text)) == sorted(PLACEHOLDER.findall(translation))
    train, held = pairs.split()
    assert not set(map(words_only, train.firsts)) & set(map(words_only, held.firsts))
    ordinary = dict(pairs)["About %1"]
    assert ordinary == {"en-fr": "À propos de %1", "en-zh": "关于 %1"}[name]


def test_languages_that_are_not_there(monkeypatch):
    with pytest.raises(ValueError, match="legal: en-fr, en-zh"):
        load_parallel("en-de")
    real = builtins.__import__

    def absent(name):
        if name.startswith("jupyterlab_language_pack"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr("fmlab.extras.import_module", absent)
    with pytest.raises(ImportError, match=r"pip install '\.\[data\]'"):
        load_parallel("en-fr")


def test_digits():
    pytest.importorskip("sklearn", reason="needs: pip install '.[data]'")
    digits = load_digits()
    assert digits.images.shape == (1797, 1, 8, 8)
    assert digits.images.dtype == torch.float32
    assert (digits.images.min(), digits.images.max()) == (-1, 1)
    assert digits.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    train, held = digits.split()
    assert len(train) + len(held) == 1797
    assert not {image.numpy().tobytes() for image in train.images} & {
        i.numpy().tobytes() for i in held.images
    }


def test_passages_have_titles_and_texts():
    passages = load_passages()
    assert len(passages) > 150
    assert len(set(passages.seconds)) == len(passages)
    text = dict(passages)['The "assert" statement']
    assert text.startswith("Assert statements are a convenient way")
    assert not any(set(title) <= set('*=-~^"') for title in passages.firsts)


@pytest.mark.parametrize("steps", [False, True])
def test_sums_are_right_and_steps_change_only_the_answer(steps):
    problems = arithmetic(500, seed=3, steps=steps, digits=3, terms=5)
    assert len(set(problems.firsts)) == 500
    assert problems.firsts == arithmetic(500, seed=3, steps=not steps, digits=3, terms=5).firsts
    assert problems.firsts != arithmetic(500, seed=4, digits=3, terms=5).firsts
    for problem, answer in problems:
        right = eval(problem.removesuffix(" = ?"))
        assert answer_of(answer) == right
        *worked, last = answer.removesuffix(".").split(". ")
        assert last == f"The answer is {right}"
        assert len(worked) == (4 if steps else 0)
        for step in worked:
            left, _, result = step.partition(" = ")
            assert eval(left) == int(result) >= 0
    assert answer_of("no number") is None
    assert answer_of("The answer is 3. The answer is -4.") == -4
    with pytest.raises(ValueError, match=r"hardly more than .* wanted 2000"):
        arithmetic(2000, digits=1, terms=2)
    with pytest.raises(ValueError, match="at least 1 and terms 2"):
        arithmetic(5, terms=1)


def test_instructions_are_answered_rightly_and_tasks_can_be_kept_back():
    pairs = instructions(600, seed=1)
    assert instructions(600, seed=1) == pairs
    assert len(set(pairs.firsts)) == 600
    assert len(set(pairs.kinds)) == 10
    for (text, answer), kind in zip(pairs, pairs.kinds, strict=True):
        numbers = [int(n) for n in text.strip(".?").partition(": ")[2].split(", ") if n.isdigit()]
        if kind == "reverse":
            assert answer[::-1] in text
        if kind == "sort" and numbers:
            assert answer == ", ".join(map(str, sorted(numbers)))
        if kind == "length":
            assert any(len(word) == int(answer) for word in text.strip(".?").split())
    few = instructions(100, tasks=["sort", "even"])
    assert set(few.kinds) == {"sort", "even"}
    with pytest.raises(ValueError, match=r"unknown tasks \['sing'\]; legal: reverse"):
        instructions(10, tasks=["sing"])
    with pytest.raises(ValueError, match="hardly more than 94"):
        instructions(200, tasks=["first"])


def test_pairs_split_by_the_first_text_and_keep_their_kinds():
    pairs = TextPairs("x", ["A.", "a", "b", "?", "!"] * 10, list("vwxyz") * 10, "", list("12345") * 10)
    train, held = pairs.split(0.3)
    assert not set(map(words_only, train.firsts)) & set(map(words_only, held.firsts)) - {""}
    assert len(train) + len(held) == 50
    assert all(
        dict(zip(pairs.seconds, pairs.kinds, strict=True))[s] == k
        for s, k in zip(held.seconds, held.kinds, strict=True)
    )
    assert pairs.fingerprint != train.fingerprint


def parquet(folder, **columns):
    datasets = pytest.importorskip("datasets", reason="needs: pip install '.[hf]'")
    folder.mkdir()
    datasets.Dataset.from_dict(columns).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return str(folder)


def test_public_texts_load_from_local_copies_of_the_same_format(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [
        "",
        " = Valkyria = \n",
        "",
        " one \n",
        " = = Plot = = \n",
        " two \n",
        "",
        " = Second = \n",
        " x \n",
    ]
    wikitext = load("wikitext-2", folder=parquet(tmp_path / "wiki", text=lines))
    assert wikitext.documents == [" = Valkyria = \n one \n = = Plot = = \n two \n", " = Second = \n x \n"]
    assert "Creative Commons" in wikitext.card
    shakespeare = load("tiny-shakespeare", folder=parquet(tmp_path / "s", text=["First Citizen:\nBefore\n"]))
    assert shakespeare.documents == ["First Citizen:\nBefore\n"]
    assert articles([" no title \n", " = A = \n"]) == [" no title \n", " = A = \n"]
    with pytest.raises(ValueError, match="no column 'text'"):
        load("wikitext-2", folder=parquet(tmp_path / "w", line=["x"]))


def test_cifar10_loads_from_a_local_copy_of_the_same_format(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs: pip install '.[hf]'")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    buffers = [io.BytesIO() for _ in range(3)]
    for i, buffer in enumerate(buffers):
        image.new("RGB", (32, 32), (255, 0, 51 * i)).save(buffer, "PNG")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["airplane", "automobile"])}
    )
    rows = {"img": [{"bytes": b.getvalue(), "path": None} for b in buffers], "label": [0, 1, 1]}
    (tmp_path / "cifar").mkdir()
    table = datasets.Dataset.from_dict(rows, features)
    table.to_parquet(str(tmp_path / "cifar" / "train-00000-of-00001.parquet"))
    images = load_cifar10(folder=str(tmp_path / "cifar"))
    assert images.images.shape == (3, 3, 32, 32)
    expected = torch.tensor([[1, -1, 0.4 * i - 1] for i in range(3)])
    torch.testing.assert_close(images.images[:, :, 0, 0], expected)
    assert images.labels.tolist() == [0, 1, 1]
    assert images.classes == ["airplane", "automobile"]


def test_public_sets_ask_the_hub_for_the_right_thing(monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((*args, options))
        raise ConnectionError("no route to host")

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for ask in (lambda: load("wikitext-2", "test"), lambda: load("tiny-shakespeare"), load_cifar10):
        with pytest.raises(ConnectionError, match=r"no route to host.*python-docs"):
            ask()
    assert calls == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", {"split": "test"}),
        ("karpathy/tiny_shakespeare", None, {"split": "train", "revision": "refs/convert/parquet"}),
        ("uoft-cs/cifar10", None, {"split": "train"}),
    ]


def test_every_set_has_a_card_with_its_terms(capsys):
    for entry in CATALOGUE:
        assert cli.main(["card", entry.name]) == 0
        text = capsys.readouterr().out
        assert all(
            f"**{part}**" in text for part in ("What", "Source", "Size", "Terms", "Good for", "Not for")
        )
    with pytest.raises(ValueError, match="no card for 'x'; legal: python-docs"):
        cli.main(["card", "x"])


def test_a_question_in_other_words_can_be_kept_on_one_side():
    asked = instructions(60, tasks=["reverse"])
    leaked = {}
    for by in (None, lambda _, answer: answer):
        train, held = asked.split(0.25, by=by)
        leaked[by is None] = len(set(train.seconds) & set(held.seconds))
        assert len(train) + len(held) == 60
    assert leaked[True] > 0
    assert leaked[False] == 0
