"""Llama and Qwen2 against transformers on random weights; counts, files, plan, inputs."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmlab.models.attention.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
)
from fmlab.models.llama import Llama, LlamaConfig, Qwen2
from fmlab.models.plan import check_plan
from tests.models.llama_reference import SMALL, small_llama, transformers_twin
from tests.models.reference import assert_same_gradients, shifted, tokens

IDS = tokens(3, 33)
VARIANTS: dict[str, tuple[type[Llama], dict[str, Any]]] = {
    "llama 2": (Llama, {"num_kv_heads": 6}),
    "grouped, tied": (Llama, {"tie_embeddings": True}),
    "llama 3.1": (Llama, {"rope_theta": 500_000.0, "rope_scaling": Llama3Scaling(8.0, 16)}),
    "wide heads, one of keys, yarn": (
        Llama,
        {"head_size": 10, "num_kv_heads": 1, "rope_scaling": YarnScaling(3.0, 16)},
    ),
    "linear": (Llama, {"rope_scaling": LinearScaling(2.0)}),
    "dynamic": (Llama, {"rope_scaling": DynamicNTKScaling(3.0, 16)}),
    "qwen 2.5": (Qwen2, {"qkv_bias": True, "tie_embeddings": True, "norm_eps": 1e-6}),
}


def variant(name: str) -> Llama:
    family, overrides = VARIANTS[name]
    return small_llama(family=family, **overrides)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_every_gradient_equal_transformers(name: str) -> None:
    model = variant(name)
    twin = transformers_twin(model)
    torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=0, atol=1e-5)

    labels = shifted(IDS)
    labels[1, 5:20] = -100
    loss = model(IDS, labels=labels).loss_sum / (labels != -100).sum()
    loss.backward()
    unshifted = torch.cat([torch.full_like(IDS[:, :1], -100), labels[:, :-1]], 1)
    twin_loss = twin(IDS, labels=unshifted).loss
    twin_loss.backward()
    assert abs(loss.item() - twin_loss.item()) < 1e-6 * twin_loss.item()
    assert_same_gradients(model, twin, model.hf_format().weights(model.config))


def test_padded_rows_and_packed_documents_equal_transformers() -> None:
    """Left padding with its positions; packed documents against the documents one by one."""
    model = small_llama().eval()
    twin = transformers_twin(model)
    mask = torch.ones_like(IDS)
    mask[0, :7] = mask[2, :20] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = twin(IDS, attention_mask=mask, position_ids=positions).logits
    got = model(IDS, attention_mask=mask).logits
    assert not got.isnan().any()
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)

    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 1, 23]))[None]
    alone = [twin(part).logits for part in IDS[:1].split([9, 1, 23], 1)]
    packed = model(IDS[:1], document_ids=documents).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-5)


def test_the_last_logits_alone_are_those_of_all() -> None:
    model = variant("llama 2")
    assert torch.equal(model(IDS, last=2).logits, model(IDS).logits[:, -2:])


@pytest.mark.parametrize("name", ["grouped, tied", "llama 3.1"])
def test_generated_tokens_equal_transformers(name: str) -> None:
    model = variant(name).eval()
    twin = transformers_twin(model)
    ids = IDS[:, :7]
    expected = twin.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    cache = model.new_cache(batch=3)
    step = ids
    for _ in range(20):
        step = model(step, cache=cache).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_equal_full_recomputation(name: str) -> None:
    """A left-padded prompt, then pieces of several tokens: the cache's offsets turn the new keys rightly."""
    model = variant(name).double().eval()
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    cache = model.new_cache(3, max_length=33)
    pieces = [model(IDS[:, :10], attention_mask=mask[:, :10], cache=cache).logits]
    for start, end in ((10, 11), (11, 30), (30, 33)):
        pieces.append(model(IDS[:, start:end], cache=cache).logits)
    expected = model(IDS, attention_mask=mask).logits
    got = torch.cat(pieces, 1)
    if name == "dynamic":  # the longest row decides in both; the cache was made for exactly that length
        assert cache.max_length == 33
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-12)


def test_bf16_autocast_errs_no_more_than_twice_what_transformers_does() -> None:
    model = small_llama(hidden_size=96, vocab_size=1009)
    twin = transformers_twin(model)
    ids = tokens(3, 40, vocab=1009)
    exact = copy.deepcopy(model).double()(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(ids).logits, twin(ids).logits
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
    loss = model(ids, labels=shifted(ids)).loss_sum
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_training_step_is_captured_as_one_graph() -> None:
    model = small_llama(rope_scaling=Llama3Scaling(8.0, 16), num_layers=1).double()

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=labels).loss_sum

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got = torch.autograd.grad(captured(IDS, shifted(IDS)), list(model.parameters()))
    want = torch.autograd.grad(loss(IDS, shifted(IDS)), list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


# Counted by instantiating the reference architecture; the presets say more.
COUNTS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}


def test_presets_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert {name: Llama.from_preset(name).num_parameters() for name in COUNTS} == COUNTS
        assert Qwen2.from_preset("qwen2.5-0.5b").num_parameters() == 494_032_768
        model = Llama.from_preset("llama3.1-8b")
        assert model.num_parameters(embeddings=False) == 8_030_261_248 - 2 * 128256 * 4096
        model = Llama.from_preset("llama3.1-405b", num_layers=2)
        ids = torch.zeros(1, 4096, dtype=torch.long)
        model(ids, labels=ids).loss_sum.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_queries_keys_and_values_are_cut_at_their_own_widths() -> None:
    """With fewer key/value heads the three are not alike: equal thirds of 128 rows would not raise."""
    model = small_llama(hidden_size=64, num_heads=4, num_kv_heads=2)
    widths = {
        name: len(part)
        for weight in model.hf_format().weights(model.config)
        for name, part in zip(weight.names, weight.split(model.get_parameter(weight.ours)), strict=True)
    }
    assert [widths[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"] == [64, 32, 32]


def test_only_what_writes_into_the_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(101, 48, 12, 96, 4, 256))
    stds = {name: p.std().item() for name, p in model.named_parameters() if "blocks.5" in name}
    for name in ("query", "key_value"):
        assert stds[f"blocks.5.attention.{name}.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.5.mlp.gate_up.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.5.attention.output.weight"] == pytest.approx(0.0040825, rel=0.05)
    assert stds["blocks.5.mlp.down.weight"] == pytest.approx(0.0040825, rel=0.05)


def test_copies_through_meta_and_pickle_keep_the_tie_and_the_frequencies() -> None:
    model = small_llama(tie_embeddings=True).eval()
    expected = model(IDS).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.device("meta"):
        moved = Llama(model.config)
    moved.to_empty(device="cpu")
    moved.load_state_dict(model.state_dict())
    for twin in (torch.load(buffer, weights_only=False), copy.deepcopy(model), moved):
        assert twin.head.tokens.weight is twin.embedding.tokens.weight
        assert torch.equal(twin(IDS).logits, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_loads_what_we_save_and_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = variant(name).eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    torch.testing.assert_close(twin.eval()(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    again = type(model).from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_older_files_with_rope_scaling_and_frequencies_load(tmp_path: Path) -> None:
    model = variant("llama 3.1").eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]  # transformers before 5 has rope_theta and rope_scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(3)}
    save_file(load_file(tmp_path / "model.safetensors") | buffers, tmp_path / "model.safetensors")
    again = Llama.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["grouped, tied", "qwen 2.5"])
def test_the_plan_holds(name: str, packed: bool) -> None:
    model = variant(name)
    labels = shifted(IDS)
    check_plan(model, {"input_ids": IDS})
    more = {"document_ids": IDS // 30} if packed else {"attention_mask": (IDS > 20).long()}
    check_plan(model, {"input_ids": IDS, "labels": labels, **more})


MODEL = small_llama()
BAD = {
    "heads": (lambda: LlamaConfig(10, 10, 1, 768, 7, 8), r"legal: \[1, 2, 3, 4, 6"),
    "groups": (
        lambda: LlamaConfig(**(SMALL | {"num_kv_heads": 4})),
        r"divide num_heads=6; legal: \[1, 2, 3, 6\]",
    ),
    "odd heads": (lambda: LlamaConfig(10, 10, 1, 9, 3, 8), "even head width, got 3"),
    "too long": (lambda: MODEL(tokens(1, 49)), "49 tokens is longer than the model's 48 positions"),
    "too long a document": (
        lambda: MODEL(tokens(1, 60), document_ids=torch.zeros(1, 60, dtype=torch.long)),
        "position 59 is beyond the model's 48",
    ),
    "positions": (lambda: MODEL(IDS, position_ids=IDS + 48), "beyond the model's 48 positions"),
    "labels' shape": (lambda: MODEL(IDS, labels=IDS[:, 1:]), r"labels must have the shape"),
    "token id": (lambda: MODEL(torch.full((1, 3), 101)), "got 101..101, legal is 0..100"),
    "label id": (lambda: MODEL(IDS, labels=torch.full_like(IDS, 101)), "outside the vocabulary of 101"),
    "last": (lambda: MODEL(IDS, last=0), "at least 1 token, got 0"),
    "last and labels": (lambda: MODEL(IDS, labels=IDS, last=1), "does nothing with labels"),
    "cache's length": (lambda: MODEL.new_cache(1, 49), "exceeds the model's 48 positions"),
    "cache's batch": (lambda: MODEL(IDS, cache=MODEL.new_cache(2)), "for a batch of 2, got 3"),
    "memory": (lambda: Llama.from_preset("llama3.1-405b"), "take 1623.4 GB .* meta device"),
    "biases": (
        lambda: small_llama(qkv_bias=True).save_pretrained("nowhere"),
        "save the model as a Qwen2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


FOREIGN = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
    "biases": ({"attention_bias": True}, "attention_bias=True; only False"),
    "rope type": ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    "rope setting": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
        r"linear rotary scaling in config.json sets \['beta_fast'\]",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_settings_that_we_do_not_compute_are_refused(case: str, tmp_path: Path) -> None:
    change, message = FOREIGN[case]
    MODEL.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(tmp_path)
