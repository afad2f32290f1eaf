"""Runs that start from a trained model: longer rows, fine-tuning, distillation; and what is refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fmlab import cli
from fmlab.data import Corpus, LabelledTexts, MaskedSampler, RoBERTaBPE, WordPiece, encode
from fmlab.models import BERT, DistilBERT, RoBERTa
from fmlab.objectives import Distillation
from fmlab.train import TrainConfig, train
from fmlab.train.distil import load_teacher, student_of
from fmlab.train.recipes import recipe_for

SHAPE = dict(vocab_size=300, max_positions=64, num_layers=4, hidden_size=16, num_heads=2, init_std=0.1)
WORDS = {"cat": "purrs and sleeps on the mat", "dog": "barks and runs in the park", "fish": "swims in a pond"}
TEXTS = [f"The {animal} number {i} {does}. " for i in range(60) for animal, does in WORDS.items()]
LEARN = dict(steps=100, lr=5e-3, seq_len=24)
LABELLED = LabelledTexts("animals", TEXTS, "", [i % 3 for i in range(180)], list(WORDS))
PLAIN = Corpus("animals", TEXTS, "")


def config(**changes: Any) -> TrainConfig:
    settings = dict(
        model="bert-tiny", steps=30, batch_size=8, seq_len=16, lr=1e-2, validation=0.3, log_every=0
    )
    return TrainConfig(**(settings | dict(eval_every=0, backend="cpu", objective="masked") | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small BERT that has read about animals."""
    out = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = BERT(BERT.CONFIG(**SHAPE, heads="masked"))
    train(config(steps=60, out=str(out)), model=model, corpus=PLAIN)
    return out / "model"


def test_a_second_phase_with_longer_rows_goes_on_from_the_weights(trained: Path) -> None:
    first = train(config(steps=1, lr=1e-9, seq_len=16, init=str(trained)), corpus=PLAIN)
    longer = train(config(steps=5, seq_len=64, init=str(trained)), corpus=PLAIN)
    before = BERT.from_pretrained(trained, heads="masked")
    for name, p in first.model.named_parameters():
        torch.testing.assert_close(p, before.get_parameter(name), atol=1e-6, rtol=0)
    assert longer.losses[0] < 4.5 < torch.log(torch.tensor(300.0)), "it does not begin at chance"
    assert longer.tokenizer.fingerprint == WordPiece.load(trained).fingerprint
    with pytest.raises(ValueError, match="seq_len 65 is longer than the model's 64 positions"):
        train(config(seq_len=65, init=str(trained)), corpus=PLAIN)


def test_a_student_starts_as_every_other_layer_of_its_teacher() -> None:
    torch.manual_seed(0)
    teacher = BERT(BERT.CONFIG(**SHAPE, heads="masked")).eval()
    student = student_of(teacher).eval()
    assert type(student) is DistilBERT
    assert student.config.num_layers == 2
    for mine, theirs in ((1, 1), (2, 3)):
        for name, tensor in student.blocks[mine].state_dict().items():
            assert torch.equal(tensor, teacher.blocks[theirs].state_dict()[name])
    ids = torch.randint(5, 300, (2, 9))
    hidden = [m.blocks[0](m.prepare(ids))["hidden"] for m in (teacher, student)]
    torch.testing.assert_close(*hidden)  # token type 0 went into the positions
    assert not torch.allclose(teacher(ids)["logits"], student(ids)["logits"], atol=1e-3)
    whole = student_of(teacher, 4).eval()
    torch.testing.assert_close(whole(ids)["logits"], teacher(ids)["logits"])
    with pytest.raises(ValueError, match=r"cannot have 3; legal: 1, 2, 4"):
        student_of(teacher, 3)
    assert type(student_of(RoBERTa(RoBERTa.CONFIG(**SHAPE)))) is RoBERTa


def test_a_student_learns_from_three_losses_and_is_judged_by_its_own(trained: Path) -> None:
    settings = config(model="distilbert-tiny", teacher=str(trained), eval_every=40, steps=40, lr=3e-3)
    objective = recipe_for(settings).objective
    assert isinstance(objective, Distillation)
    assert (objective.hard, objective.soft, objective.hidden, objective.temperature) == (2, 5, 1, 2)
    assert type(train(replace(settings, steps=1), corpus=PLAIN).model) is DistilBERT
    torch.manual_seed(1)
    blank = DistilBERT(DistilBERT.CONFIG(**(SHAPE | dict(num_layers=2))))
    start = copy.deepcopy(blank)

    tokenizer = WordPiece.load(trained)
    result = train(settings, model=blank, tokenizer=tokenizer, corpus=PLAIN)
    batch = MaskedSampler(encode(PLAIN, tokenizer), tokenizer, 16, 64, seed=5).batch(0)
    before, after = (objective(m.eval(), batch) for m in (start, result.model))
    assert set(after) == {"masked", "soft", "hidden"}
    for name in ("soft", "hidden"):
        assert after[name].sum < 0.7 * before[name].sum, name
    assert result.validation[-1][1].loss < 5.7, "the student's own loss, not the sum of eight weights"


def test_classes_are_learnt_and_the_folder_runs_in_transformers_pipelines(
    trained: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "classes"
    result = train(config(objective="classes", init=str(trained), out=str(out), **LEARN), corpus=LABELLED)
    assert result.losses[-1] < 0.4 < result.losses[0]
    classify = transformers.pipeline("text-classification", model=str(out / "model"), device="cpu")
    classifier = BERT.from_pretrained(out / "model").eval()
    logits = classifier(**WordPiece.load(out / "model").batch(TEXTS[:30], special=True))["class_logits"]
    found = [one["label"] for one in classify(TEXTS[:30])]
    assert found == [list(WORDS)[place] for place in logits.argmax(-1).tolist()]
    assert sum(label == list(WORDS)[i % 3] for i, label in enumerate(found)) > 15  # chance is 10
    fill = transformers.pipeline("fill-mask", model=str(trained), device="cpu", top_k=300)
    shares = {
        one["token_str"]: one["score"] for one in fill("The dog number 7 barks and [MASK] in the park.")
    }
    ours = BERT.from_pretrained(trained, heads="masked")
    tokenizer = WordPiece.load(trained)
    batch = tokenizer.batch(["The dog number 7 barks and [MASK] in the park."], special=True)
    place = (batch["input_ids"][0] == tokenizer.mask).nonzero().item()
    mine = ours(**batch)["logits"][0, place].softmax(-1)
    best = tokenizer.decode([int(mine.argmax())])
    assert shares[best] == pytest.approx(mine.max().item(), rel=1e-4)
    assert BERT.from_pretrained(out / "model").config.class_names == ("cat", "dog", "fish")


def test_what_does_not_fit_is_refused_before_the_first_step(trained: Path, tmp_path: Path) -> None:
    other = RoBERTaBPE.train(TEXTS, 300)
    other.save(tmp_path / "bpe")
    WordPiece.train(["another text, with other words and pieces"] * 9, 120).save(tmp_path / "wordpiece")
    refused = [
        (dict(init=str(trained), tokenizer=str(tmp_path / "wordpiece")), "the same id would be another word"),
        (dict(init=str(trained), model="roberta-tiny"), "model_type|not a|neither|Byte"),
        (dict(init=str(trained), model="gpt2-tiny", objective=None), "not|neither|byte"),
        (dict(init=str(tmp_path / "nowhere")), "there is no folder"),
        (dict(objective="classes", init=str(trained)), "those of 'animals' have none"),
        (dict(teacher=str(trained)), "makes a DistilBERT, and bert-tiny is a BERT"),
        (
            dict(teacher=str(trained), model="distilbert-tiny", objective="classes"),
            "not trained for objective|teacher answers masked",
        ),
    ]
    for changes, message in refused:
        corpus = PLAIN if not changes.get("teacher") else LABELLED
        with pytest.raises(ValueError, match=message):
            train(config(**changes), corpus=corpus)
    out = tmp_path / "three"
    train(config(objective="classes", init=str(trained), out=str(out), steps=2), corpus=LABELLED)
    two = LabelledTexts("two", TEXTS[:90], "", [i % 2 for i in range(90)], ["odd", "even"])
    with pytest.raises(ValueError, match=r"3 classes apart \(cat, dog, fish\), and two has 2 \(odd, even\)"):
        train(config(objective="classes", init=str(out / "model")), corpus=two)
    wrong = BERT(BERT.CONFIG(**SHAPE, heads="classifier", num_classes=2))
    with pytest.raises(ValueError, match="has 3 classes, and the model tells 2 apart"):
        train(config(objective=None), model=wrong, corpus=LABELLED)
    with pytest.raises(ValueError, match="leave one of them out"):
        train(config(init=str(trained)), model=wrong, corpus=PLAIN)


def test_from_the_shell_in_another_encoding_the_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes("Ein Satz über Züge. ".encode("latin-1") * 50)
    assert cli.main(["train", "bert-tiny", "--corpus", str(text), "--steps", "1", "--log-every", "0"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_the_shell_distils_writes_tensorboard_and_resumes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "animals", tmp_path / "run"
    text.mkdir()
    for i in range(0, len(TEXTS), 30):
        (text / f"{i}.txt").write_text("".join(TEXTS[i : i + 30]))
    command = [
        "train",
        "distilbert-tiny",
        "--teacher",
        str(trained),
        "--corpus",
        str(text),
        "--out",
        str(out),
    ]
    command += ["--seq-len", "16", "--batch-size", "4", "--eval-every", "0", "--log-every", "0"]
    short = [*command, "--steps", "2", "--tensorboard", "--optimizer", "lamb"]
    assert cli.main(short) == 0, capsys.readouterr().err
    resumed = [*command, "--steps", "4", "--resume", "--optimizer", "lamb"]
    assert cli.main(resumed) == 0, capsys.readouterr().err
    assert list((out / "tensorboard").iterdir())
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "distilbert"
    assert load_teacher(out / "model").config.num_layers == 2
    transformers = pytest.importorskip("transformers")  # whose DistilBERT takes no token types
    fill = transformers.pipeline("fill-mask", model=str(out / "model"), device="cpu")
    assert len(fill("The dog [MASK] barks.")) == 5
