"""Counts, initial values, ties, files and the plan of T5; cached equals uncached; bad input is refused."""

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fmlab.models import T5, T5Config, check_plan, shift_right
from fmlab.models.state import live_names
from tests.models.reference import tokens
from tests.models.t5_reference import SMALL, VERSIONS, batch, padded, small_t5

# Counted from the published shapes, the shared table once; those of v1.1 with their own output matrix.
COUNTS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,  # transformers 5.24 makes 60,511,616 of it: it ties the output matrix
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = T5.from_preset(name)
        assert model.num_parameters() == COUNTS[name]
        tables = 1 if model.config.tie_embeddings else 2
        without = COUNTS[name] - tables * 32128 * model.config.hidden_size
        assert model.num_parameters(embeddings=False) == without


def test_a_training_step_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = T5.from_preset("t5-11b")
        ids = torch.zeros(1, 512, dtype=torch.long)
        model(ids, labels=ids[:, :114]).loss_sum.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    overrides = dict(hidden_size=256, head_size=64, num_heads=8, ffn_size=1024, num_layers=1, vocab_size=2048)
    model = T5.from_preset("t5-v1.1-small", num_decoder_layers=1, **overrides)
    query, key, value = model.blocks[1].attention.qkv.weight.chunk(3)
    decoder, cross_key_value = model.blocks[4], model.blocks[4].cross.key_value.weight
    for weight, wanted in [
        (query, 0.0078125),  # (256 * 64) ** -0.5: what the scores are not divided by
        (decoder.cross.query.weight, 0.0078125),
        (key, 0.0625),
        (value, 0.0625),
        (cross_key_value, 0.0625),
        (decoder.attention.output.weight, (8 * 64) ** -0.5),
        (decoder.cross.output.weight, (8 * 64) ** -0.5),
        (decoder.mlp.gate_up.weight, 0.0625),
        (decoder.mlp.down.weight, 1024**-0.5),
        (model.blocks[0].tokens.weight, 1.0),
        (model.blocks[-1].tokens.weight, 0.0625),  # transformers has 1 here: a first loss of 90
    ]:
        assert abs(weight.std().item() / wanted - 1) < 0.02
        assert abs(weight.mean().item()) < 0.02 * wanted
    assert abs(decoder.position_bias.weight.std().item() / 0.0625 - 1) < 0.2  # 256 numbers
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)


@pytest.mark.parametrize(
    ("preset", "scale", "least", "most"),
    [
        ("t5-small", None, 10.377, 11.3),  # ln 32128 = 10.377; transformers' first loss is 11.06
        ("t5-v1.1-small", None, 10.377, 11.3),
        ("t5-small", 1.0, 120, 180),  # without the factor; 139.6 and 157 were seen
    ],
)
def test_the_first_loss_is_near_ln_v(preset: str, scale: float | None, least: float, most: float) -> None:
    torch.manual_seed(0)
    model = T5.from_preset(preset)
    model.head.scale = model.head.scale if scale is None else scale
    with torch.no_grad():
        labels = tokens(2, 24, vocab=32128)
        loss = model(tokens(2, 32, vocab=32128), labels=labels).loss_sum / labels.numel()
    assert least < loss < most


def test_labels_are_shifted_with_the_start_token() -> None:
    labels = torch.tensor([[5, 6, 7, 1], [8, 1, -100, -100]])
    assert shift_right(labels).tolist() == [[0, 5, 6, 7], [0, 8, 1, 0]]


# ---- ties ----------------------------------------------------------------------------------------------


def reloaded(model: T5) -> T5:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_meta(model: T5) -> T5:
    with torch.device("meta"):
        empty = T5(model.config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    return empty


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("move", [copy.deepcopy, reloaded, from_meta, lambda model: model.double()])
def test_tied_weights_stay_tied(move, version: str) -> None:  # type: ignore[no-untyped-def]
    model = move(small_t5(**VERSIONS[version]))
    first, second, head = (model.blocks[i].tokens.weight for i in (0, SMALL.decoder_start, -1))
    assert first is second
    assert (first is head) == model.config.tie_embeddings
    model(**batch()).loss_sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_transformers_loads_what_we_save_and_back(tmp_path: Path, version: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_t5(**VERSIONS[version]).eval()
    model.save_pretrained(tmp_path / "ours")
    family = transformers.T5ForConditionalGeneration
    twin, report = family.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    # Loaded, v1.1 is untied (with a warning): its two matrices are in the file and differ.
    assert (twin.lm_head.weight is twin.shared.weight) == model.config.tie_embeddings
    inputs = batch()
    loss = model(**inputs).loss_sum / (inputs["labels"] != -100).sum()
    torch.testing.assert_close(twin.eval()(**inputs).loss, loss, rtol=1e-6, atol=0)

    twin.save_pretrained(tmp_path / "theirs")
    again = T5.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    for (name, a), (_, b) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_files_with_copies_of_the_table_and_a_bias_of_cross_attention_load(tmp_path: Path) -> None:
    small_t5().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded, inputs = T5.from_pretrained(tmp_path), batch()
    assert torch.equal(loaded(**inputs).loss_sum, small_t5().eval()(**inputs).loss_sum)


def test_a_feed_forward_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    small_t5().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"feed_forward_proj": "gated-silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="feed_forward_proj='gated-silu'; supported are relu, gated-gelu"):
        T5.from_pretrained(tmp_path)


# ---- plan ----------------------------------------------------------------------------------------------

INPUTS = batch()
READ = {"input_ids": INPUTS["input_ids"], "decoder_input_ids": tokens(3, 5)}
BATCHES = {
    "loss": INPUTS,
    "logits": READ,
    "padded input": INPUTS | {"attention_mask": padded(INPUTS["input_ids"])},
    "padded output": READ | {"decoder_attention_mask": padded(READ["decoder_input_ids"], "left")},
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_plan_holds(name: str, version: str) -> None:
    check_plan(small_t5(**VERSIONS[version]), BATCHES[name])


def test_live_names_are_what_a_pipeline_sends() -> None:
    blocks = list(small_t5().blocks)
    rest = ["decoder_input_ids", "decoder_attention_mask", "labels"]
    assert live_names(blocks, 1) == ["encoder_hidden", "attention_mask", *rest]
    assert live_names(blocks, 2) == ["encoder_hidden", "attention_mask", "encoder_bias", *rest]
    decoder = ["hidden", "decoder_attention_mask", "encoder_hidden", "attention_mask"]
    assert sorted(live_names(blocks, 6)) == sorted([*decoder, "labels"])
    assert sorted(live_names(blocks, 7)) == sorted([*decoder, "decoder_bias", "labels"])
    assert live_names(blocks, 8) == ["hidden", "labels"]


# ---- cache ---------------------------------------------------------------------------------------------

MODEL = small_t5().double().eval()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_cached_logits_equal_full_recomputation(steps: list[int], pad_input: bool, pad_output: bool) -> None:
    """An output fed in pieces of any length, longer in all than the last bucket of the positions."""
    ids = tokens(2, 9)
    pieces = [tokens(2, n, seed=50 + i) for i, n in enumerate(steps)]
    mask = padded(ids) if pad_input else None
    whole = torch.cat(pieces, 1)
    whole_mask = torch.ones_like(whole)
    if pad_output and steps[0] > 2:
        whole_mask[1, :2] = 0
    expected = MODEL(
        ids, attention_mask=mask, decoder_input_ids=whole, decoder_attention_mask=whole_mask
    ).logits
    cache = MODEL.new_cache(2, max_length=sum(steps))
    source: dict[str, Tensor | None] = {"input_ids": ids, "attention_mask": mask}
    got, begin = [], 0
    for piece in pieces:
        real = whole_mask[:, begin : begin + piece.shape[1]]
        got.append(MODEL(**source, decoder_input_ids=piece, decoder_attention_mask=real, cache=cache).logits)
        source, begin = {"input_ids": None}, begin + piece.shape[1]
    torch.testing.assert_close(
        torch.cat(got, 1)[whole_mask.bool()], expected[whole_mask.bool()], rtol=0, atol=1e-12
    )


def test_the_encoder_runs_once_and_nothing_can_be_differentiated() -> None:
    runs: list[int] = []
    hook = MODEL.blocks[1].register_forward_hook(lambda *_: runs.append(1))
    cache, ids, step = MODEL.new_cache(2), tokens(2, 9), tokens(2, 1)
    logits = [MODEL(ids, decoder_input_ids=step, cache=cache).logits]
    logits += [MODEL(None, decoder_input_ids=step, cache=cache).logits for _ in range(3)]
    hook.remove()
    assert len(runs) == 1
    assert not any(tensor.requires_grad for tensor in logits)


def test_dropout_acts_in_training_only() -> None:
    model = small_t5(dropout=0.5)
    assert model(**INPUTS).loss_sum != model(**INPUTS).loss_sum
    assert model.eval()(**INPUTS).loss_sum == model(**INPUTS).loss_sum


# ---- bad input -----------------------------------------------------------------------------------------

ids = tokens(2, 6)


def encoded():  # type: ignore[no-untyped-def]
    cache = MODEL.new_cache(2, 8)
    MODEL(ids, decoder_input_ids=ids[:, :1], cache=cache)
    return cache


BAD = {
    "no output": (lambda: MODEL(ids), "give labels .* or decoder_input_ids"),
    "no input": (lambda: MODEL(None, labels=ids), "input_ids is needed"),
    "input twice": (lambda: MODEL(ids, labels=ids, cache=encoded()), "input_ids would do nothing"),
    "rows": (lambda: MODEL(ids, labels=tokens(3, 6)), "2 inputs and 3 outputs"),
    "mask of the input": (
        lambda: MODEL(ids, labels=ids[:, :4], attention_mask=ids[:, :4]),
        r"attention_mask must have the shape of input_ids, \[2, 6\], got \[2, 4\]",
    ),
    "mask of the output": (
        lambda: MODEL(ids, labels=ids[:, :4], decoder_attention_mask=ids),
        r"decoder_attention_mask must have the shape of decoder_input_ids, \[2, 4\]",
    ),
    "labels' shape": (
        lambda: MODEL(ids, labels=ids, decoder_input_ids=ids[:, 1:]),
        "labels must have the shape",
    ),
    "one-dimensional ids": (lambda: MODEL(ids[0], labels=ids), r"input_ids must be \[batch, length\]"),
    "no token": (
        lambda: MODEL(ids, decoder_input_ids=ids[:, :0]),
        "decoder_input_ids must be .* with a token",
    ),
    "token id": (lambda: MODEL(ids + 100, labels=ids), "legal is 0..100"),
    "label id": (lambda: MODEL(ids, labels=torch.full_like(ids, 101)), "101"),
    "cache's batch": (
        lambda: MODEL(ids, decoder_input_ids=ids, cache=MODEL.new_cache(3)),
        "for a batch of 3, got 2 rows",
    ),
    "cache full": (
        lambda: MODEL(ids, decoder_input_ids=ids, cache=MODEL.new_cache(2, 5)),
        "cannot take 6 more",
    ),
    "buckets": (lambda: small_t5(num_buckets=7), "num_buckets=7 .* even"),
    "distance": (lambda: small_t5(max_distance=4), "max_distance=4 leaves nothing"),
    "layers": (lambda: small_t5(num_decoder_layers=0), "num_decoder_layers must be at least 1"),
    "dropout": (lambda: small_t5(dropout=1.0), r"dropout must be in \[0, 1\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_config_of_a_released_v1_1_checkpoint_is_read() -> None:
    from fmlab.models.t5_hf import from_hf_config, to_hf_config

    released = {
        "d_ff": 1024, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "model_type": "t5",
        "layer_norm_epsilon": 1e-06, "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8,
        "pad_token_id": 0, "relative_attention_num_buckets": 32, "tie_word_embeddings": False,
        "vocab_size": 32128,
    }  # fmt: skip
    with torch.device("meta"):
        small = T5.from_preset("t5-v1.1-small", dropout=0.1).config
    assert from_hf_config(released) == small
    assert from_hf_config(to_hf_config(small)) == small
    assert isinstance(small, T5Config)
