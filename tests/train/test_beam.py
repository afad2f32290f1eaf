"""Beam search against transformers', for both kinds of models, and against the best of all texts."""

import itertools
import math
from typing import Any

import pytest
import torch

from fmlab.models import T5, T5Config
from fmlab.train.beam import Beam, beam_search
from tests.models.gpt_reference import small_gpt
from tests.models.gpt_reference import transformers_twin as gpt_twin
from tests.models.llama_reference import small_llama
from tests.models.llama_reference import transformers_twin as llama_twin
from tests.models.reference import copy_weights, roughen

VOCAB = 11
EOS = {"gpt": 3, "llama": 8, "t5": 8}  # tokens that these models write now and then
PROMPTS = [[5, 1, 3, 8], [9, 2, 4, 6]]


def expected(twin: Any, eos: int, start: int, **options: Any) -> list[list[Beam]]:
    ids = twin.generate(
        torch.tensor(PROMPTS),
        attention_mask=torch.ones(2, 4, dtype=torch.long),
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        num_return_sequences=options["num_beams"],
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    beams = []
    for row, score in zip(ids.sequences[:, start:].tolist(), ids.sequences_scores.tolist(), strict=True):
        end = row.index(eos) if eos in row else None
        beams.append(Beam(row[:end], score))
    count = options["num_beams"]
    return [beams[i : i + count] for i in range(0, len(beams), count)]


def assert_same(got: list[list[Beam]], want: list[list[Beam]], length: int) -> None:
    for ours, theirs in zip(got, want, strict=True):
        theirs = [beam for beam in theirs if beam.score > -1e8]  # they fill up with what never finished
        assert [beam.ids for beam in ours] == [beam.ids[:length] for beam in theirs]
        scores = [beam.score for beam in ours], [beam.score for beam in theirs]
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_beams_of_decoders_equal_transformers(
    family: str, length_penalty: float, early_stopping: bool | str
) -> None:
    model = (small_gpt if family == "gpt" else small_llama)(vocab_size=VOCAB).eval()
    twin = gpt_twin(model).eval() if family == "gpt" else llama_twin(model)
    eos = EOS[family]
    got = beam_search(model, PROMPTS, eos, 12, 3, length_penalty, early_stopping)
    options = dict(num_beams=3, length_penalty=length_penalty, early_stopping=early_stopping)
    want = expected(twin, eos, 4, max_new_tokens=12, **options)
    assert_same(got, want, 12)
    assert any(len(beam.ids) < 12 for row in got for beam in row), "no text ended by itself"


def test_beams_of_t5_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = T5Config(VOCAB, 2, 24, 3, 8, 40)
    model = T5(config)
    roughen(model)
    model.eval()
    form = T5.hf_format()
    fields = {k: v for k, v in form.to_fields(config).items() if k not in ("architectures", "model_type")}
    twin = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields)).eval()
    copy_weights(model, twin, form.weights(config))
    got = beam_search(model, PROMPTS, EOS["t5"], 10, 3)
    assert_same(got, expected(twin, EOS["t5"], 1, num_beams=3, max_new_tokens=10), 10)
    assert any(len(beam.ids) < 10 for row in got for beam in row), "no text ended by itself"


def test_with_as_many_beams_as_beginnings_the_best_text_of_all_is_found() -> None:
    model = small_gpt(vocab_size=8, max_positions=8).double().eval()
    prompt = [3, 1]
    logprob: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(8), repeat=2):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0].log_softmax(-1)
        first, second = logits[1, text[0]].item(), logits[2, text[1]].item()
        if text[0] == 7:
            logprob[()] = first
        else:
            logprob[text[:-1] if text[-1] == 7 else text] = first + second
    best = max(logprob, key=lambda text: logprob[text])
    assert len(logprob) == 1 + 7 * 8
    found = beam_search(model, [prompt], 7, 2, beams=4, length_penalty=0.0)[0][0]
    assert tuple(found.ids) == best
    assert math.isclose(found.score, logprob[best], abs_tol=1e-5)


BAD = {
    "one beam": ({"beams": 1}, r"generate_ids\(greedy=True\)"),
    "many": ({"beams": 51}, "between 2 and 50"),
    "stopping": ({"early_stopping": "maybe"}, "True, False or"),
    "length": ({"max_new_tokens": 45}, "can be at most 44"),
}


@pytest.mark.parametrize("case", BAD)
def test_silly_values_are_refused(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        beam_search(small_gpt(), PROMPTS, 7, **{"max_new_tokens": 9, **options})
