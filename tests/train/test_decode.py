"""Generation by every kind of model, Llama and encoder-decoder too; penalties and stop strings."""

import pytest
import torch

from fmlab.data import ByteBPE
from fmlab.models import GPT, T5, GPTConfig, T5Config
from fmlab.models.attention.rotary import Llama3Scaling
from fmlab.train.decode import open_stream
from fmlab.train.generate import generate, generate_ids
from tests.models.gpt_reference import small_gpt
from tests.models.gpt_reference import transformers_twin as gpt_twin
from tests.models.llama_reference import small_llama
from tests.models.llama_reference import transformers_twin as llama_twin
from tests.models.reference import copy_weights, roughen, tokens

IDS = tokens(3, 7)
PROMPTS = [[5, 17, 3, 88, 12], [9], [2, 41, 6]]
NOBODY = 101  # no token's id: nothing ends


def small_t5() -> T5:
    torch.manual_seed(0)
    model = T5(T5Config(101, 2, 24, 3, 8, 40))
    roughen(model)
    with torch.no_grad():  # or every answer is one token over and over
        model.get_parameter("blocks.0.tokens.weight").mul_(0.1)
    return model


def t5_twin(model: T5) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    form = T5.hf_format()
    fields = form.to_fields(model.config)
    fields = {k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
    twin = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields)).eval()
    copy_weights(model, twin, form.weights(model.config))
    return twin


def test_llama_goes_on_from_prompts_of_different_lengths_as_from_each_alone() -> None:
    model = small_llama(seed=1, rope_theta=500_000.0, rope_scaling=Llama3Scaling(8.0, 16)).double()
    together = generate_ids(model, PROMPTS, NOBODY, 15, greedy=True)
    assert together == [generate_ids(model, [p], NOBODY, 15, greedy=True)[0] for p in PROMPTS]
    twin = llama_twin(model).double()
    for prompt, got in zip(PROMPTS, together, strict=True):
        ids = twin.generate(
            torch.tensor([prompt]), max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert got == ids[0, len(prompt) :].tolist()


def test_t5_answers_as_transformers_does_and_encodes_each_prompt_once() -> None:
    model = small_t5()
    twin = t5_twin(model)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in PROMPTS])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in PROMPTS])
    eos = 61  # which this model writes in two of the three answers
    want = twin.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=eos)
    encoded = []
    hook = model.blocks[1].register_forward_hook(lambda *_: encoded.append(1))
    got = generate_ids(model, PROMPTS, eos, 12, greedy=True)
    hook.remove()
    assert encoded == [1]
    for ours, theirs in zip(got, want[:, 1:].tolist(), strict=True):
        assert ours == (theirs[: theirs.index(eos)] if eos in theirs else theirs)
    assert [len(row) for row in got] == [2, 3, 12]
    assert generate_ids(model, PROMPTS, eos, 12, seed=1) != generate_ids(model, PROMPTS, eos, 12, seed=2)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_equals_transformers(penalty: float) -> None:
    model = small_gpt(tie_embeddings=False).eval()
    twin = gpt_twin(model).eval()
    want = twin.generate(
        IDS,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=penalty,
    )[:, 7:].tolist()
    assert generate_ids(model, IDS.tolist(), NOBODY, 20, greedy=True, repetition_penalty=penalty) == want
    assert generate_ids(model, IDS.tolist(), NOBODY, 20, greedy=True) != want
    padded = generate_ids(model, [[1, 2, 3], [4]], 0, 9, greedy=True, repetition_penalty=penalty)
    alone = generate_ids(model, [[4]], 0, 9, greedy=True, repetition_penalty=penalty)
    assert padded[1] == alone[0], "padding is not a text"


def test_a_text_ends_before_its_first_stop_string() -> None:
    tokenizer = ByteBPE.train(["some text to learn from"], 257)
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 64, 1, 16, 2, init_std=0.4))
    free = generate(model, tokenizer, ["ab", "c"], max_new_tokens=40, seed=3)
    stop = free[0][5:7]
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    cut = generate(model, tokenizer, ["ab", "c"], max_new_tokens=40, seed=3, stop=["never this", stop])
    assert cut == [text.split(stop)[0] for text in free]
    calls.clear()
    assert generate(model, tokenizer, "ab", max_new_tokens=40, seed=3, stop=" ") is not None
    with pytest.raises(ValueError, match="empty stop string"):
        generate(model, tokenizer, "ab", stop="")


def test_a_stream_forgets_and_chooses_rows() -> None:
    model = small_gpt().double().eval()
    with torch.no_grad():
        stream = open_stream(model, IDS.tolist(), 8)
        stream.start()
        first = stream.read(IDS[:, :3])
        stream.crop(7)
        torch.testing.assert_close(stream.read(IDS[:, :3]), first, rtol=0, atol=1e-12)
        stream.crop(7)
        stream.select(torch.tensor([2, 0]))
        torch.testing.assert_close(stream.read(IDS[[2, 0], :3]), first[[2, 0]], rtol=0, atol=1e-12)


def test_a_penalty_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition_penalty must be above 0"):
        generate_ids(small_gpt(), [[1]], 0, 2, repetition_penalty=0.0)
