"""Counts of the presets, initial values, ties and other heads; bad input."""

import copy
import pickle

import pytest
import torch

from fmlab.models import BERT, BERTConfig, DistilBERT, DistilBERTConfig, RoBERTa, RoBERTaConfig
from tests.models.bert_reference import PAD, labels_for, padded_batch, small
from tests.models.reference import tokens

# Counted by instantiating the reference architectures; the tied output matrix counted once.
COUNTS = {
    (BERT, "bert-base-uncased", "pooled"): 109_482_240,
    (BERT, "bert-base-uncased", "masked"): 109_514_298,
    (BERT, "bert-base-uncased", "pretraining"): 110_106_428,
    (BERT, "bert-base-cased", "pooled"): 108_310_272,
    (BERT, "bert-base-cased", "masked"): 108_340_804,
    (BERT, "bert-base-cased", "pretraining"): 108_932_934,
    (BERT, "bert-large-uncased", "pooled"): 335_141_888,
    (BERT, "bert-large-uncased", "masked"): 335_174_458,
    (BERT, "bert-large-uncased", "pretraining"): 336_226_108,
    (BERT, "minilm-l6-h384", "pooled"): 22_713_216,
    (RoBERTa, "roberta-base", "pooled"): 124_645_632,
    (RoBERTa, "roberta-base", "masked"): 124_697_433,
    (RoBERTa, "roberta-large", "pooled"): 355_359_744,
    (RoBERTa, "roberta-large", "masked"): 355_412_057,
    (RoBERTa, "distilroberta-base", "pooled"): 82_118_400,
    (RoBERTa, "distilroberta-base", "masked"): 82_170_201,
    (DistilBERT, "distilbert-base-uncased", "encoder"): 66_362_880,
    (DistilBERT, "distilbert-base-uncased", "masked"): 66_985_530,
}


def test_presets_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        counted = {
            (m, name, heads): m.from_preset(name, heads=heads).num_parameters() for m, name, heads in COUNTS
        }
    assert counted == COUNTS


def test_conventions_of_counting() -> None:
    with torch.device("meta"):
        model = BERT.from_preset("bert-base-uncased", heads="pooled")
    assert model.num_parameters(embeddings=False) == 109_482_240 - 30522 * 768
    assert model.num_parameters(positions=False) == 109_482_240 - 512 * 768


def test_a_training_step_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = BERT.from_preset("bert-large-uncased")
        ids, rows = torch.zeros(2, 512, dtype=torch.long), torch.zeros(2, dtype=torch.long)
        state = model(ids, labels=ids, sentence_labels=rows)
        (state.loss_sum + state.sentence_loss_sum).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("model", [BERT, RoBERTa, DistilBERT])
def test_initial_weights(model: type[BERT]) -> None:
    torch.manual_seed(0)
    shape = dict(vocab_size=1024, max_positions=128, num_layers=1, hidden_size=192, num_heads=4)
    made = model(model.CONFIG(**shape))
    truncated = 0.8796 if model is BERT else 1.0  # deviation of a normal cut at two of its own
    for name, weight in made.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (weight == float(name.endswith("weight"))).all()
        elif weight.numel() > 10_000:
            assert abs(weight.std() / (0.02 * truncated) - 1) < 0.02, name
            assert (weight.abs().max() <= 0.04) == (model is BERT), name
    assert not made.blocks[0].tokens.weight[made.config.pad_token].any()
    assert (not made.blocks[0].positions.weight[1].any()) == (model is RoBERTa)


MOVES = {
    "deepcopy": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "double": lambda model: model.double(),
    "loaded with assign": lambda model: (
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) and model
    ),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("heads", ["masked", "pretraining"])
def test_tied_weights_stay_tied(heads: str, move: str) -> None:
    model = MOVES[move](small("bert", heads))
    assert model.blocks[-1].tokens.weight is model.blocks[0].tokens.weight
    batch = padded_batch("bert")
    model(**batch, **labels_for(model, batch)).loss_sum.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert torch.equal(model.blocks[-1].tokens.weight, model.blocks[0].tokens.weight)


def test_positions_of_roberta_begin_after_the_padding_id_and_skip_padding() -> None:
    model = small("roberta")
    ids = torch.tensor([[1, 1, 7, 8, 9], [7, 8, 1, 1, 1]])  # padded on the left and on the right
    assert model.positions(ids).tolist() == [[1, 1, 2, 3, 4], [2, 3, 1, 1, 1]]
    assert small("bert").positions(ids).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert model.config.max_length == 46  # of 48
    model(tokens(1, 46).clamp(min=2))
    with pytest.raises(ValueError, match="47 tokens is longer than the model's 46 positions"):
        model(tokens(1, 47))


def test_other_heads_keep_the_encoder_and_the_heads_that_both_have() -> None:
    model = small("bert", "pretraining").double().eval()
    batch = padded_batch("bert")
    classifier = model.with_heads("classifier", num_classes=7)
    assert torch.equal(model(**batch).pooled, classifier(**batch).pooled)
    assert classifier(**batch).class_logits.shape == (4, 7)
    assert not classifier.training
    masked = classifier.with_heads("masked")
    assert not torch.equal(masked.blocks[-1].dense.weight, model.blocks[-1].dense.weight)
    assert torch.equal(masked.blocks[-1].tokens.weight, model.blocks[0].tokens.weight)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight.zero_()
    assert classifier.blocks[1].mlp.up.weight.any()  # a copy


IDS = tokens(2, 9)
ROWS = torch.tensor([0, 1])
BAD = {
    "ids of one dim": (lambda: small()(IDS[0]), r"input_ids must be \[batch, length\]"),
    "shape of labels": (lambda: small()(IDS, labels=IDS[:, 1:]), r"labels must have the shape \[2, 9\]"),
    "shape of rows": (
        lambda: small("bert", "pretraining")(IDS, sentence_labels=IDS),
        r"sentence_labels must have the shape \[2\], got \[2, 9\]",
    ),
    "too long": (lambda: small()(tokens(1, 49)), "49 tokens is longer than the model's 48 positions"),
    "token out of range": (lambda: small()(IDS + 100), "outside the embedding of 101 rows"),
    "token type out of range": (lambda: small()(IDS, token_type_ids=IDS), "outside the embedding of 2 rows"),
    "label out of range": (lambda: small()(IDS, labels=IDS + 100), "outside the vocabulary of 101"),
    "sentence label out of range": (
        lambda: small("bert", "pretraining")(IDS, sentence_labels=ROWS + 1),
        r"not one of the 2 classes: got 1\.\.2, legal is 0\.\.1",
    ),
    "class out of range": (
        lambda: small("roberta", "classifier")(IDS, class_labels=ROWS + 4),
        "not one of the 5 classes",
    ),
    "labels without a head": (
        lambda: small("bert", "pooled")(IDS, labels=IDS),
        "labels need a BERT with heads='masked' or 'pretraining', this one has 'pooled'; with_heads",
    ),
    "sentences for RoBERTa": (
        lambda: small("roberta")(IDS, sentence_labels=ROWS),
        "sentence_labels need a RoBERTa with heads=none",
    ),
    "types for DistilBERT": (lambda: small("distilbert")(IDS, token_type_ids=IDS * 0), "has no token types"),
    "unknown heads": (
        lambda: small("roberta", "pretraining"),
        "not one of encoder, pooled, masked, classifier",
    ),
    "heads that do not divide": (lambda: small(num_heads=5), "does not divide hidden_size=24; legal"),
    "padding id": (lambda: small(pad_token=101), r"pad_token must be None or in 0\.\.100"),
    "RoBERTa without padding": (
        lambda: small("roberta", pad_token=None),
        "counts positions from its pad_token",
    ),
    "RoBERTa without room": (lambda: small("roberta", max_positions=2), "leaves no position"),
    "epsilon of DistilBERT": (lambda: small("distilbert", norm_eps=1e-5), "has norm_eps=1e-12, got 1e-05"),
    "one class": (lambda: small(num_classes=1), "num_classes must be at least 2"),
    "no token types": (lambda: small(token_types=0), "token_types must be at least 1"),
    "unknown preset": (lambda: BERT.from_preset("bert-base"), "Did you mean 'bert-base-"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_norm_epsilons_are_the_families_own() -> None:
    shape = dict(vocab_size=9, max_positions=9, num_layers=1, hidden_size=2, num_heads=1)
    found = {c: c(**shape).norm_eps for c in (BERTConfig, RoBERTaConfig, DistilBERTConfig)}
    assert found == {BERTConfig: 1e-12, RoBERTaConfig: 1e-5, DistilBERTConfig: 1e-12}
    # which is no detail: of a vector as small as an epsilon's root, the two make different things
    for config, wanted in ((BERTConfig, 1.0), (RoBERTaConfig, 0.3015)):
        norm = torch.nn.LayerNorm(2, config(**shape).norm_eps)
        assert abs(norm(torch.tensor([1e-3, -1e-3]))[0].item() - wanted) < 1e-4
    assert abs(small().blocks[1].mlp.activation(torch.ones(())).item() - 0.841345) < 1e-6  # erf, not tanh


def test_padding_ids_learn_nothing_from_being_looked_up() -> None:
    for family, pad in PAD.items():
        model = small(family, "encoder")
        ids = tokens(2, 9).clamp(min=2)
        ids[:, 3] = pad
        model(ids).hidden.square().sum().backward()
        assert not model.blocks[0].tokens.weight.grad[pad].any()
        assert model.blocks[0].tokens.weight.grad[ids[0, 0]].any()
