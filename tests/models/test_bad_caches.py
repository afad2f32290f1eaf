"""A cache that a failed call has touched, that grows, or that is another model's gives no wrong number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fmlab.models import T5, Llama
from fmlab.models.attention import GrowingKVCache, KVCache, WindowKVCache
from fmlab.models.attention.paged import PagedKVCache, PagePool, PageTable
from fmlab.models.attention.rotary import DynamicNTKScaling
from fmlab.models.base import Model
from fmlab.models.convolutional import CausalConvLM
from fmlab.models.recurrent import RecurrentLM

SHAPE = dict(vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, ffn_size=16)
IDS = torch.arange(3, 23).view(2, 10)


def llama(**overrides: object) -> Llama:
    torch.manual_seed(0)
    shape = SHAPE | {"num_kv_heads": 1, "max_positions": 32} | overrides
    return Llama.from_preset("llama-tiny", **shape).double().eval()


def assert_near(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_padding_of_a_call_that_failed_is_forgotten() -> None:
    model = llama()
    cache = model.new_cache(2, 20)
    with pytest.raises(ValueError, match="outside the embedding"):
        model(IDS[:, :4] + 100, attention_mask=torch.tensor([[0, 0, 0, 1]] * 2), cache=cache)
    parts = [model(IDS[:, :4], cache=cache).logits, model(IDS[:, 4:], cache=cache).logits]
    assert_near(torch.cat(parts, 1), model(IDS).logits)


def test_what_a_failed_call_remembered_of_its_input_is_forgotten() -> None:
    torch.manual_seed(0)
    model = T5.from_preset("t5-tiny", **SHAPE, head_size=8).double().eval()
    cache = model.new_cache(2, 20)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, decoder_input_ids=IDS[:, :3], cache=cache)
    hook.remove()
    other = IDS.flip(1)
    got = model(other, decoder_input_ids=IDS[:, :3], cache=cache).logits
    assert_near(got, model(other, decoder_input_ids=IDS[:, :3]).logits)


def test_a_scaling_by_length_has_one_base_in_caches_that_grow() -> None:
    model = llama(rope_scaling=DynamicNTKScaling(2.0, 8))

    def token_by_token(cache: KVCache | PagedKVCache) -> Tensor:
        steps = [model(ids, cache=cache).logits for ids in (IDS[:, :4], *IDS[:, 4:].split(1, 1))]
        return torch.cat(steps, 1)

    wanted = token_by_token(model.new_cache(2, 32))  # the longest text, at once
    assert_near(token_by_token(GrowingKVCache(2, 2, 1, 8, torch.float64, start=4)), wanted)
    pool = PagePool.for_model(model, pages=64, page_size=4)
    assert_near(token_by_token(PagedKVCache(pool, [PageTable(), PageTable()])), wanted)


@pytest.mark.parametrize("preset", ["lstm-tiny", "conv-tiny"])
def test_a_call_that_was_interrupted_has_not_been(preset: str) -> None:
    cls: type[Model] = RecurrentLM if preset == "lstm-tiny" else CausalConvLM
    torch.manual_seed(0)
    model: Any = cls.from_preset(preset, vocab_size=50, num_layers=2, hidden_size=16).double().eval()
    cache = model.new_cache(2)
    model(IDS[:, :3], cache=cache)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, 3:], cache=cache)
    hook.remove()
    assert_near(model(IDS[:, 3:], cache=cache).logits, model(IDS).logits[:, 3:])


@pytest.mark.parametrize(
    "cache",
    [
        KVCache(1, 2, 1, 20, 8, torch.float64),  # a layer less
        KVCache(2, 2, 2, 20, 8, torch.float64),  # other heads, into which ours would be copied
        KVCache(2, 2, 1, 20, 4, torch.float64),
        KVCache(2, 2, 1, 20, 8, torch.float32),
    ],
)
def test_the_cache_of_another_model_is_refused(cache: KVCache) -> None:
    model: Model = llama()
    with pytest.raises(ValueError, match="make it with the model's new_cache"):
        model(IDS, cache=cache)


def test_a_window_moves_on_only_when_a_call_has_finished() -> None:
    cache, other = (WindowKVCache(1, 1, 1, 4, 2) for _ in range(2))
    key = torch.arange(20.0).view(1, 1, 10, 2)
    for interrupted in (False, True, False):
        for held in (cache, other):
            if held is other and interrupted:
                continue
            held.begin(3, None)
            start = held.length
            got = held.extend(0, key[:, :, start : start + 3], key[:, :, start : start + 3])
            if not interrupted:
                held.finish(3)
                assert torch.equal(got[0][0, 0], key[0, 0, max(0, start - 3) : start + 3])
    assert torch.equal(cache.key, other.key)
