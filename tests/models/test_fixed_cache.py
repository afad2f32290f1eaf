"""Generation by one program: the cache of fixed shapes gives the same text as the plain one."""

import pytest
import torch

from fmlab.models import GPT, T5, Llama, Mixtral
from fmlab.models.attention import FixedKVCache, GrowingKVCache
from fmlab.train.decode import evaluating, open_stream

PROMPTS = [[5, 6, 7], [9, 3, 8, 2, 11]]
SMALL = dict(vocab_size=61, max_positions=32, num_layers=2, hidden_size=32, num_heads=4)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT.from_preset("gpt2-tiny", **SMALL).double()


@pytest.mark.parametrize("family", [(GPT, "gpt2-tiny"), (Llama, "llama-tiny"), (Mixtral, "mixtral-tiny")])
@pytest.mark.parametrize("length", [None, 9])
def test_every_logit_is_that_of_the_plain_cache(family, length) -> None:
    torch.manual_seed(1)
    model = family[0].from_preset(family[1]).double()
    plain = open_stream(model, PROMPTS, 4)
    fixed = open_stream(model, PROMPTS, 4, static_shapes=True, length=length)
    with evaluating(model):
        torch.testing.assert_close(fixed.start(), plain.start(), rtol=0, atol=1e-12)
        for tokens in ([1, 2], [3, 4], [5, 6], [7, 8]):
            here, there = (stream.step(torch.tensor(tokens)) for stream in (fixed, plain))
            torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def test_a_cut_cache_goes_on_as_if_the_cut_had_never_been() -> None:
    model = gpt()
    with evaluating(model):
        stream = open_stream(model, PROMPTS, 4, static_shapes=True)
        stream.start()
        right = stream.step(torch.tensor([1, 2]))
        stream.step(torch.tensor([3, 4]))
        stream.crop(5)
        torch.testing.assert_close(stream.step(torch.tensor([1, 2])), right, rtol=0, atol=1e-12)
        stream.select(torch.tensor([1, 1]))
        assert stream.step(torch.tensor([3, 3])).std(0).max() == 0


def test_what_it_cannot_do_is_refused() -> None:
    model = gpt()
    stream = open_stream(model, PROMPTS, 1, static_shapes=True)
    with evaluating(model):
        stream.start()
        with pytest.raises(ValueError, match="one token a row after the prompt, got 2"):
            stream.read(torch.tensor([[1, 2], [3, 4]]))
        stream.step(torch.tensor([1, 2]))
        with pytest.raises(ValueError, match="holds 6 of at most 6 tokens"):
            stream.step(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="has an encoder"):
        open_stream(T5.from_preset("t5-tiny"), PROMPTS, 4, static_shapes=True)
    with pytest.raises(ValueError, match="length=4 is shorter than the longest prompt, 5 tokens"):
        open_stream(model, PROMPTS, 4, static_shapes=True, length=4)
    with pytest.raises(ValueError, match="give static_shapes=True too"):
        open_stream(model, PROMPTS, 4, length=8)
    with pytest.raises(ValueError, match="this model has a GrowingKVCache"):
        FixedKVCache.like(GrowingKVCache(1, 1, 1, 4))
