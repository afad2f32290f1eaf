"""Shapes and counts of the presets, initial values, and the tie through everything that could break it."""

import copy
import io
import time

import pytest
import torch

from fmlab.models import GPT
from tests.models.gpt_reference import SMALL, small_gpt, tokens

# Counted by instantiating the reference architectures; tied output matrix counted once.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
}


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert GPT.from_preset(name).num_parameters() == COUNTS[name]


def test_conventions_of_counting() -> None:
    with torch.device("meta"):
        model = GPT.from_preset("gpt2")
        untied = GPT.from_preset("gpt2", tie_embeddings=False)
    assert model.num_parameters(positions=False) == 123_653_376  # the "123.65M" in circulation
    assert model.num_parameters(embeddings=False, positions=False) == 85_056_000
    assert untied.num_parameters() == 124_439_808 + 50257 * 768
    assert untied.num_parameters(embeddings=False) == model.num_parameters(embeddings=False)


def test_the_largest_preset_is_counted_without_memory_in_two_seconds() -> None:
    start = time.process_time()
    with torch.device("meta"):
        GPT.from_preset("gpt3-175b").num_parameters()
    assert time.process_time() - start < 2


def test_a_training_step_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT.from_preset("gpt3-175b")
        ids = torch.zeros(1, 2048, dtype=torch.long)
        model(ids, labels=ids).loss_sum.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2", num_layers=4, hidden_size=256, num_heads=4, vocab_size=4096)
    layer = model.blocks[1]
    std = model.config.init_std
    residual = std / (2 * 4) ** 0.5
    for weight, wanted in [
        (model.blocks[0].tokens.weight, std),
        (model.blocks[0].positions.weight, std),
        (layer.attention.qkv.weight, std),
        (layer.mlp.up.weight, std),
        (layer.attention.output.weight, residual),
        (layer.mlp.down.weight, residual),
    ]:
        assert abs(weight.std().item() / wanted - 1) < 0.02
        assert abs(weight.mean().item()) < 0.04 * wanted
    assert all((p == 0).all() for n, p in model.named_parameters() if n.endswith("bias"))
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("norm.weight"))


def reloaded(model: GPT) -> GPT:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_meta(model: GPT) -> GPT:
    with torch.device("meta"):
        empty = GPT(model.config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    return empty


def assigned(model: GPT) -> GPT:
    with torch.device("meta"):
        empty = GPT(model.config)
    empty.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return empty


MOVES = {
    "deepcopy": copy.deepcopy,
    "bf16 and back": lambda model: model.bfloat16().float(),
    "double": lambda model: model.double(),
    "pickled": reloaded,
    "meta, to_empty, load": from_meta,
    "load with assign": assigned,
    "to meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("move", MOVES)
def test_tied_weights_stay_tied(move: str) -> None:
    model = MOVES[move](small_gpt())
    table = model.blocks[0].tokens.weight
    assert model.blocks[-1].tokens.weight is table
    assert len(list(model.parameters())) == 12 * SMALL.num_layers + 4
    if table.is_meta:
        return
    before = table.detach().clone()
    ids = tokens(2, 8)
    loss = model(ids, labels=ids).loss_sum
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert not torch.equal(model.blocks[-1].tokens.weight, before)
    assert torch.equal(model.blocks[-1].tokens.weight, model.blocks[0].tokens.weight)


def test_untied_weights_stay_apart() -> None:
    model = copy.deepcopy(small_gpt(tie_embeddings=False)).bfloat16().float()
    assert model.blocks[-1].tokens.weight is not model.blocks[0].tokens.weight


def test_wrappers_see_the_tensors_of_a_state() -> None:
    from torch.utils._pytree import tree_leaves, tree_map

    state = small_gpt().prepare(tokens(2, 4))
    state.derived["kept"] = 1
    assert {id(leaf) for leaf in tree_leaves(state)} == {id(tensor) for tensor in state.values()}
    doubled = tree_map(lambda tensor: tensor * 2, state)
    assert torch.equal(doubled.input_ids, state.input_ids * 2)
    assert doubled.derived is state.derived
