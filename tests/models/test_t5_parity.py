"""T5 and T5 v1.1 against transformers on random weights: logits, loss, every gradient, generation."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import T5, shift_right
from fmlab.models.attention import sdpa_core
from fmlab.models.t5_hf import weights
from tests.models.reference import assert_same_gradients, tokens
from tests.models.t5_reference import VERSIONS, batch, padded, small_t5, transformers_twin


def mean_loss(model: T5, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss_sum / (inputs["labels"] != -100).sum()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_logits_loss_and_every_gradient_equal_transformers(version: str, padding: str) -> None:
    model = small_t5(**VERSIONS[version])
    twin = transformers_twin(model)
    inputs = batch()
    if padding != "none":
        inputs["attention_mask"] = padded(inputs["input_ids"], padding)
    if padding == "right":
        inputs["decoder_attention_mask"] = padded(inputs["labels"])
    theirs = twin(**inputs)
    read = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**read, decoder_input_ids=shift_right(inputs["labels"])).logits
    torch.testing.assert_close(logits, theirs.logits, rtol=0, atol=1e-5)
    loss = mean_loss(model, inputs)
    assert abs(loss.item() - theirs.loss.item()) < 1e-6 * theirs.loss.item()
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, twin, weights(model.config))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_loss_path_equals_the_logits_path(version: str) -> None:
    model, inputs = small_t5(**VERSIONS[version]).double(), batch()
    labels = inputs["labels"]
    logits = model(inputs["input_ids"], decoder_input_ids=shift_right(labels)).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = model(**inputs).loss_sum
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    got, want = (torch.autograd.grad(total, list(model.parameters())) for total in (loss, expected))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pad", [False, True])
def test_greedy_generation_equals_transformers(version: str, pad: bool) -> None:
    model = small_t5(**VERSIONS[version]).eval()
    twin = transformers_twin(model).eval()
    ids = tokens(3, 9)
    mask = padded(ids) if pad else None
    expected = twin.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    cache = model.new_cache(batch=3, max_length=12)
    step = got = torch.zeros(3, 1, dtype=torch.long)
    source: dict[str, Tensor | None] = {"input_ids": ids, "attention_mask": mask}
    for _ in range(12):
        step = model(**source, decoder_input_ids=step, cache=cache).logits[:, -1:].argmax(-1)
        got, source = torch.cat([got, step], 1), {"input_ids": None}
    assert torch.equal(got, expected)


def test_bf16_autocast_errs_no_more_than_twice_what_transformers_does() -> None:
    """Root mean squares over several models: a single loss may be right by chance."""
    losses, grads = [], []
    for seed in range(4):
        model = small_t5(seed, hidden_size=96, head_size=32, ffn_size=200, vocab_size=1009)
        twin, inputs = transformers_twin(model), batch()
        exact = copy.deepcopy(model).double()
        loss = mean_loss(exact, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            our_loss, their_loss = mean_loss(model, inputs), twin(**inputs).loss
        for total in (loss, our_loss, their_loss):
            total.backward()
        losses.append(((our_loss - loss).detach() ** 2, (their_loss - loss).detach() ** 2))
        for weight in weights(model.config):
            reference, ours = exact.get_parameter(weight.ours).grad, model.get_parameter(weight.ours).grad
            theirs = weight.join([twin.get_parameter(name).grad for name in weight.names])
            assert ours.dtype == torch.float32
            off = [((grad - reference).norm() / reference.norm()) ** 2 for grad in (ours, theirs)]
            grads.append((weight.ours, *off))
    assert sum(ours for ours, _ in losses) <= 4 * sum(theirs for _, theirs in losses)
    for name in {name for name, _, _ in grads}:
        ours, theirs = (sum(row[i] for row in grads if row[0] == name) for i in (1, 2))
        assert ours <= 4 * theirs, (name, float(ours) ** 0.5 / 2, float(theirs) ** 0.5 / 2)


def test_a_training_step_is_captured_as_one_graph() -> None:
    model = small_t5().double()
    inputs = batch() | {"attention_mask": padded(batch()["input_ids"])}

    def loss(**inputs: Tensor) -> Tensor:
        return model(**inputs).loss_sum

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got, want = (torch.autograd.grad(f(**inputs), list(model.parameters())) for f in (captured, loss))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_positions_bias_self_attention_only_and_scores_are_not_divided() -> None:
    seen: list[tuple[bool, float | None, Tensor | None]] = []

    def core(q, k, v, mask, dropout, *, scale=None, bias=None):  # type: ignore[no-untyped-def]
        seen.append((mask.causal, scale, bias))
        return sdpa_core(q, k, v, mask, dropout, scale=scale, bias=bias)

    model = T5(small_t5().config, attention_core=core)
    model(**batch())
    encoder, decoder, cross = seen[:3], seen[3::2], seen[4::2]
    assert [causal for causal, _, _ in seen] == [False] * 3 + [True, False] * 2
    assert all(scale == 1.0 for _, scale, _ in seen)
    # one table a stack, in its first layer, and none between the two texts
    assert all(bias is encoder[0][2] for _, _, bias in encoder)
    assert all(bias is decoder[0][2] for _, _, bias in decoder)
    assert all(bias is None for _, _, bias in cross)
    tables = [name for name, _ in model.named_parameters() if "position_bias" in name]
    assert tables == ["blocks.1.position_bias.weight", "blocks.6.position_bias.weight"]
