"""Measures against scikit-learn and sacrebleu, and over ranks: each sample once, sums before division."""

import pytest
import torch

from fmlab.data import ByteBPE, ExampleSampler, arithmetic, response_examples
from fmlab.models import BERT, GPT, BERTConfig, GPTConfig
from fmlab.train.classify import by_kind, judge_answers, judge_classes, judge_tokens
from fmlab.train.launch import World
from fmlab.train.metrics import BLEU, F1, Accuracy, Calibration, share

COUNT, CLASSES = 22, 4
TEXTS = ["the cat sat on the mat today", "a dog ran over the hill", "", "we saw two birds there at noon"] * 5
WANTED = ["the cat sat on a mat today", "the dog ran over the hill", "rain", "we saw two birds at noon"] * 5


def predictions(count=COUNT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES - 1, (count,), generator=generator)  # the last class never occurs
    probs = (torch.randn(count, CLASSES, generator=generator) * 2).softmax(-1)
    probs[:, -1] = 0
    return probs / probs.sum(-1, keepdim=True), labels


def test_measures_of_classes_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    probs, labels = predictions()
    accuracy, f1 = Accuracy(), F1(CLASSES)
    for measure in (accuracy, f1):
        measure.add(probs.argmax(-1), labels)
        measure.add(torch.zeros(3, dtype=torch.long), torch.full((3,), -100))
    assert accuracy.value == pytest.approx(metrics.accuracy_score(labels, probs.argmax(-1)))
    for average in ("micro", "macro"):
        wanted = metrics.f1_score(labels, probs.argmax(-1), average=average)
        assert getattr(f1, average) == pytest.approx(wanted)
    assert f1.micro == pytest.approx(accuracy.value)
    assert f1.macro != pytest.approx(f1.micro, abs=1e-3)
    with pytest.raises(ValueError, match="legal are 0 to 3"):
        f1.add(torch.tensor([4]), torch.tensor([0]))
    with pytest.raises(ValueError, match="no sample"):
        _ = Accuracy().value


def test_calibration_is_its_definition():
    probs, labels = predictions()
    calibration = Calibration(5)
    calibration.add(probs, labels)
    confidence, right = probs.max(-1).values, probs.argmax(-1) == labels
    error = 0.0
    for i in range(5):
        inside = (confidence > i / 5) & (confidence <= (i + 1) / 5)
        if inside.any():
            gap = right[inside].double().mean() - confidence[inside].double().mean()
            error += float(inside.double().mean() * gap.abs())
    assert calibration.error == pytest.approx(error, abs=1e-6)
    one_hot = torch.nn.functional.one_hot(labels, CLASSES)
    assert calibration.brier == pytest.approx(float(((probs - one_hot) ** 2).sum(-1).mean()), abs=1e-6)
    assert int(calibration.bins[0].sum()) == calibration.count == COUNT
    sure = Calibration()
    sure.add_confidences(torch.ones(10), torch.arange(10) < 7)
    assert (sure.error, sure.overconfidence, sure.brier) == pytest.approx((0.3, 0.3, 0.3))
    edge = Calibration(4)  # bins are closed above: a confidence of exactly 0.5 is in ]0.25, 0.5]
    edge.add_confidences(torch.tensor([0.5]), torch.tensor([True]))
    assert edge.sums[0].tolist() == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="are these logits"):
        Calibration().add(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))


def test_bleu_is_that_of_the_corpus_however_it_is_divided():
    sacrebleu = pytest.importorskip("sacrebleu")
    whole = sacrebleu.corpus_bleu(TEXTS, [WANTED]).score
    parts = [BLEU() for _ in range(3)]
    for rank, part in enumerate(parts):
        mine = share(len(TEXTS), World(rank, 3))
        part.add([TEXTS[i] for i in mine], [WANTED[i] for i in mine])
    mean = sum(part.value for part in parts) / 3
    parts[0] += parts[1]
    parts[0] += parts[2]
    assert parts[0].value == pytest.approx(whole)
    assert mean != pytest.approx(whole, abs=0.1)
    with pytest.raises(ValueError, match="1 answers for 2"):
        parts[0].add(["a"], ["a", "b"])


def test_three_ranks_share_22_samples_without_counting_one_twice():
    probs, labels = predictions()
    examples = [{"input_ids": [i + 1], "class_labels": int(label)} for i, label in enumerate(labels)]
    whole, together = F1(CLASSES), F1(CLASSES)
    whole.add(probs.argmax(-1), labels)
    padded = 0
    for rank in range(3):
        mine = F1(CLASSES)
        for batch in ExampleSampler(examples, 0, 6, rank=rank, world_size=3).evaluation():
            rows = (batch["input_ids"][:, 0] - 1).clamp(min=0)
            padded += int((batch["class_labels"] == -100).sum())
            mine.add(probs.argmax(-1)[rows], batch["class_labels"])
        together += mine
    assert padded == 2  # 4 batches of 6 hold 24 rows
    assert torch.equal(together.sums, whole.sums)
    assert sorted(i for rank in range(3) for i in share(COUNT, World(rank, 3))) == list(range(COUNT))


def judged(_):
    """Measures of this world's ranks, each with its share of an odd number of samples."""
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
    torch.manual_seed(0)
    pairs = arithmetic(23, digits=1, terms=2)
    tokenizer = ByteBPE.train(pairs.documents, 260)
    gpt = GPT(GPTConfig(tokenizer.vocab_size, 64, 2, 32, 2))
    sampler = ExampleSampler(
        response_examples(pairs, tokenizer), tokenizer.pad, 4, rank=world.rank, world_size=world.size
    )
    of_tokens = judge_tokens(gpt, sampler.evaluation(), world)
    answers = judge_answers(gpt, tokenizer, pairs, world=world, max_new_tokens=2)
    rows = [{"input_ids": [1 + i, 2], "class_labels": i % 3} for i in range(23)]
    bert = BERT(BERTConfig(30, 8, 1, 16, 2, heads="classifier", num_classes=3))
    classes = ExampleSampler(rows, 0, 4, rank=world.rank, world_size=world.size)
    of_classes = judge_classes(bert, classes.evaluation(), world)
    measures = (of_tokens.accuracy, of_tokens.calibration, answers, of_classes.accuracy)
    return [measure.sums for measure in (*measures, of_classes.calibration, of_classes.f1)]


@pytest.mark.multirank
def test_ranks_measure_what_one_device_measures(ranks2):
    alone = judged(None)
    assert (
        alone[0][1] == sum(len(a) + 1 for a in arithmetic(23, digits=1, terms=2).seconds) or alone[0][1] > 23
    )
    assert [int(alone[2][1]), int(alone[3][1])] == [23, 23]
    for theirs in ranks2.run(judged, None):
        for mine, sums in zip(alone, theirs, strict=True):
            torch.testing.assert_close(sums, mine, atol=1e-6, rtol=1e-6)


def test_a_perfect_model_is_judged_perfect():
    """Judging reads the logits at the labels' places: a table of the right answers gets everything."""
    pairs = arithmetic(9, digits=1, terms=2)
    tokenizer = ByteBPE.train(pairs.documents, 260)
    examples = response_examples(pairs, tokenizer)

    class Knows(torch.nn.Linear):
        def forward(self, input_ids, attention_mask=None):
            logits = torch.zeros(*input_ids.shape, tokenizer.vocab_size)
            for row, ids in enumerate(input_ids.tolist()):
                for example in examples:
                    if example["input_ids"] == ids[: len(example["input_ids"])]:
                        for place, label in enumerate(example["labels"]):
                            logits[row, place, max(label, 0)] = 50.0
            return {"logits": logits}

    result = judge_tokens(Knows(1, 1), ExampleSampler(examples, tokenizer.pad, 4).evaluation())
    assert result.accuracy.value == 1
    assert result.calibration.error < 1e-6
    cooler = judge_tokens(
        Knows(1, 1), ExampleSampler(examples, tokenizer.pad, 4).evaluation(), temperature=20.0
    )
    assert (cooler.accuracy.value, cooler.calibration.overconfidence < -0.1) == (1, True)
    with pytest.raises(ValueError, match="has no kinds"):
        by_kind(pairs)
