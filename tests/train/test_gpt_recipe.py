"""A GPT from the shell's recipe to transformers: resumed, logged, exported, and run in its pipeline."""

import json
from pathlib import Path

import pytest

from fmlab.train.__main__ import main
from tests.train.tiny_run import tiny_train


def test_a_model_trained_here_writes_the_same_text_in_transformers_pipeline(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    result = tiny_train(out=str(tmp_path), steps=30)
    write = transformers.pipeline("text-generation", model=str(tmp_path / "model"), device="cpu")
    (found,) = write("item 3", max_new_tokens=12, do_sample=False, return_full_text=False)
    assert found["generated_text"] == result.generate("item 3", max_new_tokens=12, greedy=True)
    assert len(found["generated_text"]) > 4


def test_the_recipe_from_the_shell_resumes_and_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "text").mkdir()
    for i in range(20):
        text = "".join(f"item {j} comes before item {j + 1}.\n" for j in range(20 * i, 20 * i + 20))
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    out = tmp_path / "run"
    settings = f"gpt2-tiny --corpus {tmp_path / 'text'} --batch-size 2 --seq-len 16 --warmup 1 --log-every 0"
    settings += f" --validation 0.2 --eval-every 0 --backend cpu --tensorboard --out {out} --steps"
    assert not main([*settings.split(), "2"])
    assert not main([*settings.split(), "4", "--resume"])
    assert list((out / "tensorboard").glob("events*"))
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "gpt2"
    with pytest.raises(ValueError, match="has done 4 steps already"):
        main([*settings.split(), "4", "--resume"])
