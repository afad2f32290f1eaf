"""Settings in a file: read back as they were written, and nothing in it is ignored."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fmlab import cli
from fmlab.parallel import Layout
from fmlab.train import TrainConfig, read_config
from fmlab.train.__main__ import config_from
from fmlab.train.config_file import config_text

LAYOUT = Layout(
    data=4,
    tensor=2,
    pipeline=3,
    micro_batches=6,
    stage_cuts=(2, 5),
    zero=1,
    bucket_mb=12.5,
    recompute="budget",
    activation_budget=0.5,
    axis_order=("data", *(axis for axis in Layout().axis_order if axis != "data")),
)
CONFIG = TrainConfig(
    model="llama-tiny",
    corpus='a "quoted" folder/été',
    lr=3e-4,
    warmup=0,
    pack_documents=True,
    out="runs/one",
    layout=LAYOUT,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    for config in (CONFIG, TrainConfig()):
        toml.write_text(config_text(config), encoding="utf-8")
        assert read_config(toml) == config
    (tmp_path / "run.json").write_text(json.dumps(asdict(CONFIG)))
    assert read_config(tmp_path / "run.json") == CONFIG


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "step = 5", "'step' is not a setting of fmlab train; did you mean 'steps'"),
        ("a.toml", "[layout]\ntensors = 2", "'tensors' is not a setting of a layout; did you mean 'tensor'"),
        ("a.toml", "data = 2", "'data' is not a setting of fmlab train"),  # it belongs to the layout
        ("a.toml", "steps = '5'", "steps must be a whole number, got '5'"),
        ("a.toml", "[layout]\ndata = 1.5", "whole number"),
        ("a.toml", "layout = 3", "layout is a table"),
        ("a.toml", "steps = ", "is no TOML"),
        ("a.json", "[1]", "names and values are wanted, not list"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[" * 100_000, "too deep to read"),
        ("a.toml", "a = " + "[" * 3000, "too deep to read"),
        ("a.toml", "lr = 1" + "0" * 400, "lr must be above 0 and finite, got inf"),
        ("a.json", '{"batch_size": 1' + "0" * 20 + "}", "batch_size must be a whole number below 2**63"),
        ("a.yaml", "steps: 5", "ends with .toml or .json"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name) as raised:
        read_config(tmp_path / name)
    assert says in str(raised.value)


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config_text(CONFIG), encoding="utf-8")
    assert config_from(["--config", str(path)]) == CONFIG
    found = config_from([f"--config={path}", "--steps", "7", "--no-pack-documents", "--tensor", "1"])
    assert (found.model, found.steps, found.pack_documents) == ("llama-tiny", 7, False)
    assert (found.layout.tensor, found.layout.stage_cuts) == (1, (2, 5))
    assert config_from(["gpt2", "--config", str(path)]).model == "gpt2"
    assert config_from(["gpt2"]) == TrainConfig(model="gpt2")


def test_a_file_that_is_not_there_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["train", "--config", str(tmp_path / "none.toml")]) == 2
    error = capsys.readouterr().err
    assert "none.toml" in error
    assert len(error.splitlines()) == 1
