"""Every family trains with its own tokenizer, batches and loss; what does not fit is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from fmlab import Ranks
from fmlab.data import ByteBPE, Corpus, RoBERTaBPE, TextPairs, TextToText, Unigram, WordPiece
from fmlab.models import BERT, GPT, T5, RoBERTa
from fmlab.models.families import TEXT_FAMILIES, family_of, longest_row, preset_names
from fmlab.objectives.choice import OBJECTIVES, objective_names, objective_of
from fmlab.train import TrainConfig, train
from fmlab.train.callbacks import Callback, StepMetrics
from fmlab.train.launch import World
from fmlab.train.recipes import recipe_for
from fmlab.train.samples import fill_masks, sample_of

SHAPE = dict(vocab_size=400, num_layers=1, hidden_size=16, num_heads=2)
POSITIONS = dict(max_positions=40)


def corpus() -> Corpus:
    lines = [f"Item {i} comes before item {i + 1}. It stands after item {i - 1}!\n" for i in range(300)]
    return Corpus("tiny", ["".join(lines[i : i + 10]) for i in range(0, 300, 10)], "")


def config(**changes: Any) -> TrainConfig:
    settings = dict(steps=3, batch_size=4, seq_len=32, warmup=1, lr=1e-2, validation=0.3, log_every=0)
    return TrainConfig(**(settings | dict(eval_every=3, eval_batches=2, backend="cpu") | changes))


def paired() -> TextToText:
    """Forty texts that are to be written backwards."""
    firsts = [f"item {n} before item {n + 1}" for n in range(40)]
    pairs = TextPairs("backwards", firsts, [" ".join(text.split()[::-1]) for text in firsts], "")
    return TextToText(pairs.name, pairs.documents, "", pairs)


#: model, its objectives, its tokenizer
SMALL: dict[str, tuple[Any, Any]] = {
    "gpt": (lambda: GPT(GPT.CONFIG(**SHAPE, **POSITIONS)), ByteBPE),
    "bert": (lambda: BERT(BERT.CONFIG(**SHAPE, **POSITIONS)), WordPiece),
    "roberta": (lambda: RoBERTa(RoBERTa.CONFIG(**SHAPE, **POSITIONS)), RoBERTaBPE),
    "t5": (lambda: T5(T5.CONFIG(**SHAPE, head_size=8, ffn_size=32)), Unigram),
}
RUNS = [
    (name, objective)
    for name, (build, _) in SMALL.items()
    for objective in objective_names(type(build()))
    if objective != "classes"  # tests/train/test_start.py
]


@pytest.mark.parametrize(("family", "objective"), RUNS)
def test_each_family_learns_from_each_of_its_objectives(family: str, objective: str) -> None:
    build, tokenizer = SMALL[family]
    torch.manual_seed(0)
    texts = paired() if objective == "text-to-text" else corpus()
    result = train(config(objective=objective, steps=12), model=build(), corpus=texts)
    assert type(result.tokenizer) is tokenizer
    assert result.objective == objective
    assert min(result.losses[-3:]) < result.losses[0]
    assert result.validation[-1][1].count > 0
    if objective != "sentence-order":  # shows what "next-sentence" shows
        assert sample_of(objective, result.model, result.tokenizer)


def test_padding_is_no_speed() -> None:
    torch.manual_seed(0)
    seen: list[StepMetrics] = []

    class Watch(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            seen.append(metrics)

    settings = config(objective="text-to-text", steps=3)
    result = train(settings, model=SMALL["t5"][0](), corpus=paired(), callbacks=[Watch()])
    lengths = [len(result.tokenizer.encode(text)) + 1 for text in paired().documents[1::2]]  # and the end
    assert all(4 * min(lengths) <= count <= 4 * max(lengths) for count in result.step_items)
    rate = sum(result.step_items[1:]) / sum(result.step_seconds[1:])
    assert result.tokens_per_second == pytest.approx(rate)
    assert seen[0].tokens_per_second == pytest.approx(result.step_items[0] / result.step_seconds[0])
    assert "targets/s" in str(result)
    assert "tokens/s" in str(train(config(steps=1, warmup=0), model=SMALL["gpt"][0](), corpus=corpus()))


def test_the_second_task_of_bert_counts_in_loss_and_evaluation() -> None:
    torch.manual_seed(0)
    model = BERT(BERT.CONFIG(**SHAPE, **POSITIONS))
    before = model.blocks[-2].output.weight.detach().clone()
    result = train(config(), model=model, corpus=corpus())
    assert not torch.equal(result.model.blocks[-2].output.weight, before)
    assert result.losses[0] > 6  # ln 400 of a masked token and ln 2 of a pair
    assert abs(result.losses[0] - (torch.log(torch.tensor(400.0)) + 0.6931)) < 0.5


@pytest.mark.multirank
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_ranks_count_each_target_once_and_end_with_the_same_weights(ranks2: Ranks, family: str) -> None:
    def run() -> tuple[list[float], float, int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        result = train(config(layout=layout), model=build(), corpus=corpus())
        evaluation = result.validation[-1][1]
        weights = {name: p.detach() for name, p in result.model.named_parameters()}
        return result.losses, evaluation.loss, evaluation.count, weights

    build, layout = SMALL[family][0], config().layout
    losses, loss, count, weights = run()
    for other in ranks2.run(run):
        torch.testing.assert_close(other[0], losses, rtol=1e-5, atol=1e-6)
        assert abs(other[1] - loss) < 1e-5 * loss
        assert other[2] == count
        torch.testing.assert_close(other[3], weights, rtol=1e-3, atol=1e-5)


def test_presets_lead_to_their_family_tokenizer_and_heads() -> None:
    for name, family, tokenizer, heads, objective in (
        ("gpt2-tiny", "GPT", ByteBPE, None, "causal"),
        ("llama-tiny", "Llama", ByteBPE, None, "causal"),
        ("mixtral-tiny", "Mixtral", ByteBPE, None, "experts"),
        ("bert-tiny", "BERT", WordPiece, "pretraining", "next-sentence"),
        ("roberta-base", "RoBERTa", RoBERTaBPE, "masked", "masked"),
        ("distilbert-tiny", "DistilBERT", WordPiece, "masked", "masked"),
        ("t5-tiny", "T5", Unigram, None, "span"),
    ):
        recipe = recipe_for(TrainConfig(model=name))
        assert recipe.family.__name__ == family
        assert recipe.tokenizer is tokenizer
        assert getattr(recipe.shape, "heads", None) == heads
        assert recipe.name == objective
    assert recipe_for(TrainConfig(model="roberta-base")).lr_factor < recipe_for(TrainConfig()).lr_factor
    assert recipe_for(TrainConfig(model="bert-tiny", objective="masked")).shape.heads == "masked"
    assert len(set(preset_names())) == len(preset_names())  # no name means two things
    for family in TEXT_FAMILIES:
        assert set(objective_names(family)) <= set(OBJECTIVES)
        assert family_of(family.presets()[0]) is family


def test_the_longest_row_is_what_the_family_says() -> None:
    with torch.device("meta"):
        assert longest_row(RoBERTa.from_preset("roberta-base").config) == 512
        assert longest_row(GPT.from_preset("gpt2").config) == 1024
        assert longest_row(T5.from_preset("t5-small").config) is None


def test_masks_are_filled_with_words_and_nothing_else_changes() -> None:
    tokenizer = WordPiece.train(corpus().documents, 200)
    torch.manual_seed(0)
    model = BERT(BERT.CONFIG(**(SHAPE | dict(vocab_size=300)), **POSITIONS))
    text = fill_masks(model, tokenizer, "item 1 [MASK] before item [MASK] .")
    assert text.startswith("item 1 ")
    assert " before item " in text
    assert "[" not in text
    assert model.training
    with pytest.raises(ValueError, match=r"there is no \[MASK\] in what"):
        fill_masks(model, tokenizer, "item 1")
    with pytest.raises(ValueError, match="ByteBPE has no mask token"):
        fill_masks(model, ByteBPE.train(corpus().documents, 300), "item")


REFUSED = {
    "preset": (dict(model="bert-tyni"), "Did you mean 'bert-tiny'"),
    "objective of another family": (
        dict(model="gpt2-tiny", objective="masked"),
        "a GPT is not trained for objective 'masked'; legal: causal, prefix",
    ),
    "packing that does nothing": (
        dict(model="bert-tiny", pack_documents=True),
        "pack_documents does nothing for objective 'next-sentence'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_what_is_legal(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        recipe_for(TrainConfig(**settings))


def test_models_and_tokenizers_that_do_not_fit_are_refused() -> None:
    pooled = BERT(BERT.CONFIG(**SHAPE, **POSITIONS, heads="pooled"))
    with pytest.raises(ValueError, match="heads='pooled' cannot be trained for any of next-sentence"):
        train(config(), model=pooled, corpus=corpus())
    with pytest.raises(ValueError, match="heads='pooled' cannot be trained"):
        objective_of(pooled)
    with pytest.raises(ValueError, match="a BERT reads text by WordPiece, not by ByteBPE"):
        train(
            config(),
            model=SMALL["bert"][0](),
            corpus=corpus(),
            tokenizer=ByteBPE.train(corpus().documents, 300),
        )
    with pytest.raises(ValueError, match="pads with id 0 and the model takes 7 for padding"):
        train(config(), model=BERT(BERT.CONFIG(**SHAPE, **POSITIONS, pad_token=7)), corpus=corpus())
    with pytest.raises(ValueError, match=r"seq_len 32 is longer than the model's 28 positions"):
        train(config(), model=RoBERTa(RoBERTa.CONFIG(**SHAPE, max_positions=30)), corpus=corpus())
    recipe, short = recipe_for(config(), SMALL["roberta"][0]()), Corpus("held out", ["one."], "")
    tokenizer = RoBERTaBPE.train(corpus().documents, 400)
    with pytest.raises(ValueError, match=r"held out: .*; or keep more of the text"):
        recipe.evaluation(short, tokenizer, config(), World())


class WithoutDocuments(nn.Module):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def test_packing_for_a_model_that_cannot_keep_documents_apart_is_refused() -> None:
    model = WithoutDocuments()
    model.config = SMALL["gpt"][0]().config
    assert recipe_for(TrainConfig(), model).name == "causal"  # a class that is none of ours
    with pytest.raises(ValueError, match="a WithoutDocuments cannot keep packed documents apart"):
        recipe_for(TrainConfig(pack_documents=True), model)
