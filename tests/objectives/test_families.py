"""Masked, span, prefix and distilled losses: terms by hand, nothing to learn is zero, ranks agree."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fmlab.data import pack
from fmlab.models import BERT, GPT, T5, BERTConfig, GPTConfig, T5Config
from fmlab.objectives import (
    CausalLM,
    Classification,
    Distillation,
    MaskedLM,
    PrefixLM,
    Seq2SeqLM,
    soft_loss,
    total_loss,
)
from fmlab.parallel import Layout, parity

VOCAB = 67


def gpt(layers=2):
    return GPT(GPTConfig(vocab_size=VOCAB, max_positions=24, num_layers=layers, hidden_size=16, num_heads=2))


def bert(heads="pretraining", layers=2):
    shape = dict(vocab_size=VOCAB, max_positions=24, num_layers=layers, hidden_size=16, num_heads=2)
    return BERT(BERTConfig(**shape, heads=heads, num_classes=3))


def t5(layers=2):
    shape = dict(vocab_size=VOCAB, num_layers=layers, hidden_size=16, num_heads=2, head_size=8, ffn_size=32)
    return T5(T5Config(**shape))


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


def ids(rows=8, length=12, seed=0):
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def thinned(labels):
    """Row i keeps its first i + 1 labels, so that ranks and micro-batches differ."""
    rows, length = labels.shape
    return labels.masked_fill(torch.arange(length) > torch.arange(rows)[:, None], -100)


SENTENCES = torch.tensor([0, 1, 1, 0, 1, -100, -100, -100])
PREFIXES = torch.tensor([1, 3, 11, 2, 5, 7, 4, 12])


def cases():
    """name -> (objective, model builder, batch): each objective with a model of its family."""
    masked = {"input_ids": ids(), "labels": thinned(ids(seed=1))}
    output = thinned(ids(length=9, seed=2))
    span = {"input_ids": ids(), "labels": output, "attention_mask": (ids() > 9).long()}
    span["attention_mask"][:, 0] = 1
    teacher_gpt, teacher_bert, teacher_t5 = (seeded(partial(b, layers=3), 7) for b in (gpt, bert, t5))
    return {
        "masked": (MaskedLM(), partial(bert, "masked"), masked),
        "masked and sentence": (MaskedLM(sentence=0.5), bert, masked | {"sentence_labels": SENTENCES}),
        "class": (
            Classification(),
            partial(bert, "classifier"),
            {"input_ids": ids(), "class_labels": torch.tensor([0, 1, 2, -100, 2, -100, 0, -100])},
        ),
        "span": (Seq2SeqLM(), t5, span),
        "prefix": (PrefixLM(), gpt, {"input_ids": ids(), "prefix_lengths": PREFIXES}),
        "distilled gpt": (
            Distillation(CausalLM(), teacher_gpt, hidden=0.5),
            gpt,
            {"input_ids": ids(), "labels": thinned(ids(seed=3))},
        ),
        "distilled bert": (
            Distillation(MaskedLM(), teacher_bert, 3.0, hard=2.0, soft=5.0, hidden=1.0),
            bert,
            masked | {"sentence_labels": SENTENCES, "attention_mask": span["attention_mask"]},
        ),
        "distilled t5": (Distillation(Seq2SeqLM(), teacher_t5, hard=0.0), t5, span),
    }


CASES = cases()


@pytest.mark.multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_unequal_micro_batches_equal_one_device(ranks2, name, engine):
    objective, build, batch = CASES[name]
    layout = Layout(data=2, micro_batches=2)
    steps = [batch]
    report = parity(build, layout, engine, steps, "fp64", ranks=ranks2, objective=objective)
    report.raise_if_different()
    assert len(set(report.targets)) == 2, "the ranks must differ in their counts for this to prove anything"


@pytest.mark.parametrize("name", CASES)
def test_counts_agree_with_the_terms_and_need_no_forward(name):
    objective, build, batch = CASES[name]
    terms, counts = objective(seeded(build), batch), objective.counts(batch)
    assert {n: int(t.count) for n, t in terms.items()} == {n: int(c) for n, c in counts.items()}
    assert all(term.sum.dtype == torch.float32 and term.sum.shape == () for term in terms.values())


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_ignored_labels_gives_zero_loss_and_zero_gradients(name):
    objective, build, batch = CASES[name]
    for key in ("labels", "sentence_labels", "class_labels"):
        if key in batch or (name == "prefix" and key == "labels"):
            like = batch.get(key, batch["input_ids"])
            batch = batch | {key: torch.full_like(like, -100)}
    if isinstance(objective, Distillation) and objective.hidden:  # every real token is a target of that term
        objective = Distillation(objective.objective, objective.teacher)
    model = seeded(build)
    terms = objective(model, batch)
    assert all(int(term.count) == 0 for term in terms.values())
    loss = total_loss(terms, objective.counts(batch))
    loss.backward()
    assert loss.item() == 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all((g == 0).all() for g in gradients)


def test_masked_and_sentence_terms_are_the_cross_entropies():
    objective, build, batch = CASES["masked and sentence"]
    model = seeded(build)
    terms = objective(model, batch)
    answers = model(batch["input_ids"])
    masked = F.cross_entropy(answers["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    sentence = F.cross_entropy(answers["sentence_logits"], SENTENCES, reduction="sum")
    torch.testing.assert_close(terms["masked"].sum, masked)
    torch.testing.assert_close(terms["sentence"].sum, sentence)
    assert (int(terms["sentence"].count), terms["sentence"].weight) == (5, 0.5)
    assert set(objective(seeded(partial(bert, "masked")), CASES["masked"][2])) == {"masked"}


def test_prefix_targets_lie_behind_the_prefix_and_the_prefix_sees_itself():
    batch = {"input_ids": ids(2, 6), "prefix_lengths": torch.tensor([1, 4])}
    labels = PrefixLM().labels(batch)
    after = batch["input_ids"]
    assert labels[0].tolist() == [*after[0, 1:].tolist(), -100]
    assert labels[1].tolist() == [-100, -100, -100, *after[1, 4:].tolist(), -100]
    assert int(PrefixLM().counts(batch)["prefix"]) == 7
    model, changed = seeded(gpt), batch["input_ids"].clone()
    changed[1, 3] += 1  # the prefix's last token reaches its first position, but not row 0's
    changed[0, 3] += 1
    seen = [model(i, prefix_lengths=batch["prefix_lengths"]).logits for i in (batch["input_ids"], changed)]
    assert torch.equal(seen[0][0, :3], seen[1][0, :3])
    assert not torch.equal(seen[0][1, 0], seen[1][1, 0])


def test_packed_documents_have_the_loss_and_the_gradients_of_each_alone():
    documents = [ids(1, n, seed=n)[0].tolist() for n in (9, 5, 12, 2, 7, 3, 3)]
    packed, model = pack(documents, 16, pad=0), seeded(gpt).double()
    together = CausalLM()(model, packed.batch)["causal"]
    together.sum.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = [CausalLM()(model, {"input_ids": torch.tensor([d])})["causal"] for d in documents]
    sum(term.sum for term in alone).backward()
    torch.testing.assert_close(together.sum, sum(term.sum for term in alone))
    assert int(together.count) == sum(int(term.count) for term in alone) == 41 - 7
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    assert len(packed.rows) == 3 < len(documents)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_the_soft_loss_and_its_gradient_are_those_of_torch(temperature, monkeypatch):
    monkeypatch.setattr("fmlab.objectives.distillation.CHUNK_BYTES", 3 * 11 * 8)  # three rows at a time
    torch.manual_seed(0)
    teacher = torch.randn(10, 11, dtype=torch.float64)
    student = torch.randn(10, 11, dtype=torch.float64, requires_grad=True)
    ours = soft_loss(student, teacher, temperature)
    (gradient,) = torch.autograd.grad(3 * ours, student)
    p, q = (F.log_softmax(x / temperature, -1) for x in (teacher, student))
    theirs = F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * theirs, student)[0])
    never = teacher.index_fill(1, torch.tensor([0]), -torch.inf)
    assert soft_loss(student, never, temperature).isfinite()
    assert soft_loss(student, student.detach(), temperature).item() == pytest.approx(0, abs=1e-12)
    assert soft_loss(student[:0], teacher[:0], temperature).item() == 0


def test_a_distilled_step_is_distilberts_and_leaves_the_teacher_alone():
    """Against the three losses of DistilBERT's script, written with torch's own, on the labelled tokens."""
    objective, build, batch = CASES["distilled bert"]
    student, teacher = seeded(build), objective.teacher.train()
    terms = objective(student, batch)
    loss = total_loss(terms, objective.counts(batch))
    loss.backward()
    assert not teacher.training
    assert all(p.grad is None for p in teacher.parameters())

    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    mine, theirs = seeded(build)(**inputs), teacher(**inputs)
    at, real = batch["labels"] != -100, batch["attention_mask"].bool()
    soft = F.kl_div(
        F.log_softmax(mine["logits"][at] / 3, -1),
        F.softmax(theirs["logits"][at] / 3, -1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(mine["logits"][at], batch["labels"][at])
    sentence = F.cross_entropy(mine["sentence_logits"], SENTENCES)
    a, b = mine["hidden"][real], theirs["hidden"][real]
    hidden = F.cosine_embedding_loss(a, b, a.new_ones(len(a)))
    torch.testing.assert_close(loss, 5 * 9 * soft + 2 * (hard + sentence) + hidden)
    assert set(terms) == {"masked", "sentence", "soft", "hidden"}


def test_what_makes_no_sense_is_refused():
    teacher = seeded(partial(gpt, layers=1))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        Distillation(CausalLM(), teacher, temperature=0)
    with pytest.raises(ValueError, match="nothing to learn from the teacher"):
        Distillation(CausalLM(), teacher, soft=0)
    with pytest.raises(ValueError, match=r"0 or more, got \{'soft': -1"):
        Distillation(CausalLM(), teacher, soft=-1)
    with pytest.raises(ValueError, match=r"0 or more, got \{'sentence': -1"):
        MaskedLM(sentence=-1)
    batch = {"input_ids": ids()}
    with pytest.raises(ValueError, match=r"MaskedLM needs 'labels' .*MaskedSampler"):
        MaskedLM()(bert(), batch)
    with pytest.raises(ValueError, match=r"needs 'prefix_lengths'.*CausalLM trains without"):
        PrefixLM().counts(batch)
    shape = dict(max_positions=24, num_layers=1, num_heads=2)
    other = GPT(GPTConfig(vocab_size=50, hidden_size=16, **shape))
    with pytest.raises(ValueError, match="67 tokens, the teacher with 50"):
        Distillation(CausalLM(), other)(gpt(), {"input_ids": ids() % 50})
    wide = GPT(GPTConfig(vocab_size=VOCAB, hidden_size=32, **shape))
    with pytest.raises(ValueError, match="needs the teacher's width, or hidden=0"):
        Distillation(CausalLM(), wide, hidden=1)(gpt(), batch)
    with pytest.raises(ValueError, match=r"label .*outside the vocabulary of 67"):
        MaskedLM()(bert(), batch | {"labels": ids() + VOCAB})
    assert "temperature=2.0" in repr(Distillation(CausalLM(), teacher))
    assert repr(MaskedLM()) == "MaskedLM(masked: 1, sentence: 1)"
