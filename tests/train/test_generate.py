"""Generation: the cache and left padding change nothing, the filters cut what they should."""

import pytest
import torch

from fmlab.data import ByteBPE
from fmlab.models import GPT, GPTConfig
from fmlab.train import generate
from fmlab.train.generate import generate_ids, sample

VOCAB, POSITIONS = 40, 32


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCAB, POSITIONS, 2, 32, 4, init_std=0.3))
    model.train()
    return model


def test_greedy_with_cache_and_left_padding_equals_recomputing_each_row_alone(model):
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    got = generate_ids(model, prompts, end_of_text=VOCAB - 1, max_new_tokens=12, greedy=True)
    assert model.training, "the mode of the model must come back"
    for prompt, new in zip(prompts, got, strict=True):
        row = list(prompt)
        expected = []
        for _ in range(12):
            with torch.no_grad():
                token = int(model(torch.tensor([row])).logits[0, -1].argmax())
            if token == VOCAB - 1:
                break
            row.append(token)
            expected.append(token)
        assert new == expected


def test_a_row_ends_at_the_end_token_and_the_others_go_on(model):
    free = generate_ids(model, [[3], [7]], VOCAB, 10, greedy=True)
    stop = free[0][4]
    assert stop not in free[0][:4]
    ended = generate_ids(model, [[3], [7]], stop, 10, greedy=True)
    assert ended[0] == free[0][:4]
    assert ended[1] == free[1][: free[1].index(stop) if stop in free[1] else None]


def test_the_seed_decides(model):
    def draw(**options):
        return generate_ids(model, [[1], [2]], VOCAB, 20, **options)

    torch.manual_seed(5)
    first = draw(seed=3)
    torch.manual_seed(6)  # the global generator plays no part
    assert draw(seed=3) == first
    assert draw(seed=4) != first
    assert first[0] != first[1]


def test_filters_keep_the_right_tokens():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4000, 1)

    def drawn(**options):
        tokens = sample(logits, torch.Generator().manual_seed(0), **options)
        return torch.bincount(tokens, minlength=4) / len(tokens)

    torch.testing.assert_close(drawn(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn(top_p=0.75), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    assert drawn(top_p=0.01)[0] == 1, "the most likely token always stays"
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(drawn(temperature=0.5), squared / squared.sum(), atol=0.03, rtol=0)
    assert drawn(temperature=1e-3)[0] == 1
    assert drawn(temperature=1e-300)[0] == 1


def test_text_in_text_out():
    tokenizer = ByteBPE.train(["some text to learn from"], 257)
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 24, 1, 16, 2))
    one = generate(model, tokenizer, "ab", max_new_tokens=5, greedy=True)
    assert generate(model, tokenizer, ["ab"], max_new_tokens=5, greedy=True) == [one]
    assert isinstance(generate(model, tokenizer, max_new_tokens=3), str)


def test_rows_of_the_model_without_a_token_are_never_drawn():
    tokenizer = ByteBPE.train(["some text to learn from"], 257)
    model = GPT(GPTConfig(2000, 64, 1, 16, 2))  # a padded vocabulary, all equally likely
    assert max(generate_ids(model, [[1]], 256, max_new_tokens=60)[0]) >= 257
    generate(model, tokenizer, "ab", max_new_tokens=60)
    generate(model, tokenizer, "ab", max_new_tokens=60, greedy=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": 0}, "greedy=True"),
        ({"temperature": -1.0}, "above 0"),
        ({"top_k": 0}, "between 1 and the 40"),
        ({"top_k": 41}, "between 1 and the 40"),
        ({"top_p": 0.0}, "above 0"),
        ({"top_p": 1.5}, "at most 1"),
        ({"greedy": True, "top_k": 3}, "do nothing"),
        ({"max_new_tokens": 32}, "can be at most 31"),
        ({"prompts": [[]]}, "at least one token"),
        ({"prompts": [[40]]}, "another model"),
        ({"prompts": [[-1]]}, "another model"),
    ],
)
def test_silly_values_are_refused(model, options, message):
    prompts = options.pop("prompts", [[1]])
    with pytest.raises(ValueError, match=message):
        generate_ids(model, prompts, VOCAB, **{"max_new_tokens": 4, **options})
