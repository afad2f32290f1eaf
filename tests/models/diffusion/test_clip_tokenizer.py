"""CLIP's tokenizer gives the rows that transformers' gives, from files of either; long prompts are named."""

import json
from pathlib import Path

import pytest

from fmlab.models.diffusion.clip_tokenizer import END, CLIPTokenizer

TEXTS = ["a small red circle left of a blue square", "an astronaut's horse, on mars! 42 times"] * 20
PROMPTS = [
    "A small RED circle's 12",
    "",
    "héllo — wörld  \n ok<|endoftext|>x",
    "日本語 ½!!??",
    "red circle",
]


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.train(TEXTS, 560)


@pytest.mark.parametrize("pad", [END, "!"])  # Stable Diffusion 1, Stable Diffusion 2
def test_rows_equal_transformers_and_files_go_both_ways(
    tokenizer: CLIPTokenizer, tmp_path: Path, pad: str
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = CLIPTokenizer(tokenizer.vocabulary, tokenizer.merges, pad, max_length=20)
    ours.save(tmp_path / "ours")
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path / "ours")
    long = "horse " * 30
    with pytest.warns(UserWarning, match="left out"):
        rows = ours.batch([*PROMPTS, long], too_long="cut")
    wanted = theirs([*PROMPTS, long], padding="max_length", truncation=True, max_length=20)
    assert rows.tolist() == wanted.input_ids
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        back = CLIPTokenizer.load(tmp_path / folder)
        assert (back.vocabulary, back.merges) == (ours.vocabulary, ours.merges)
        assert (back.pad_token, back.max_length) == (pad, 20)


def test_ids_are_laid_out_as_in_clip(tokenizer: CLIPTokenizer) -> None:
    assert tokenizer.vocab_size <= 560
    assert (tokenizer.bos, tokenizer.eos) == (tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)
    assert tokenizer.decode(tokenizer.encode("A Small red circle, 12")) == "a small red circle , 1 2"


def test_a_long_prompt_is_refused_or_cut_and_what_is_cut_is_named(tokenizer: CLIPTokenizer) -> None:
    short = CLIPTokenizer(tokenizer.vocabulary, tokenizer.merges, max_length=6)
    prompt = "red circle left of a blue square"
    assert len(short.encode(prompt)) == 7
    with pytest.raises(ValueError, match=r"7 tokens and the text encoder room for 4.*'a blue square'"):
        short.batch(["red", prompt])
    with pytest.warns(UserWarning, match="'a blue square'; it is left out"):
        rows = short.batch([prompt], too_long="cut")
    assert rows[0].tolist() == [short.bos, *short.encode("red circle left of"), short.eos]
    with pytest.raises(ValueError, match="'refuse' or 'cut'"):
        short.batch([prompt], too_long="truncate")
    with pytest.raises(ValueError, match="in brackets"):
        short.batch(prompt)


def test_folders_that_hold_no_tokenizer_are_refused(tokenizer: CLIPTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        CLIPTokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    vocabulary = {piece: i for piece, i in tokenizer.vocabulary.items() if piece != END}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="not a CLIP tokenizer"):
        CLIPTokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="at least 514"):
        CLIPTokenizer.train(TEXTS, 300)
