"""GPT against transformers' GPT2LMHeadModel on random weights: logits, loss, every gradient, bf16."""

import copy

import pytest
import torch
from torch import nn

from fmlab.models import GPT
from fmlab.models.gpt_hf import weights
from tests.models.gpt_reference import shifted, small_gpt, tokens, transformers_twin
from tests.models.reference import assert_same_gradients


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_every_gradient_equal_transformers(tied: bool) -> None:
    model = small_gpt(tie_embeddings=tied)
    twin = transformers_twin(model)
    ids = tokens(4, 33)
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0, atol=1e-5)

    labels = shifted(ids)
    labels[1, 5:20] = -100
    loss = model(ids, labels=labels).loss_sum / (labels != -100).sum()
    loss.backward()
    unshifted = torch.cat([torch.full_like(ids[:, :1], -100), labels[:, :-1]], 1)
    twin_loss = twin(ids, labels=unshifted).loss
    twin_loss.backward()
    assert abs(loss.item() - twin_loss.item()) < 1e-6 * twin_loss.item()
    assert_same_gradients(model, twin, weights(model.config))


def test_the_loss_path_equals_the_logits_path() -> None:
    model = small_gpt().double()
    ids, labels = tokens(3, 20), shifted(tokens(3, 20))
    logits = model(ids).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(ids, labels=labels).loss_sum
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_bf16_autocast_errs_no_more_than_twice_what_transformers_does() -> None:
    model = small_gpt(hidden_size=96, num_heads=4, vocab_size=1009)
    twin = transformers_twin(model)
    ids = tokens(4, 40, vocab=1009)
    labels = shifted(ids)

    def ours(m: GPT) -> tuple[float, dict[str, torch.Tensor]]:
        loss = m(ids, labels=labels).loss_sum / (labels != -100).sum()
        loss.backward()
        return loss.item(), {n: p.grad for n, p in m.named_parameters()}

    def theirs(m: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
        loss = m(ids, labels=ids).loss
        loss.backward()
        grads = {}
        for weight in weights(model.config):
            grad = m.get_parameter(weight.theirs).grad
            grads[weight.ours] = grad.T if weight.transposed else grad
        return loss.item(), grads

    loss, exact = ours(copy.deepcopy(model).double())
    with torch.autocast("cpu", torch.bfloat16):
        our_loss, our_grads = ours(model)
        their_loss, their_grads = theirs(twin)
    assert all(grad.dtype == torch.float32 for grad in our_grads.values())
    assert abs(our_loss - loss) <= 2 * abs(their_loss - loss) + 1e-4 * loss
    for name, reference in exact.items():
        ours_off = (our_grads[name] - reference).norm() / reference.norm()
        theirs_off = (their_grads[name] - reference).norm() / reference.norm()
        assert ours_off <= 2 * theirs_off, (name, float(ours_off), float(theirs_off))


def test_generated_tokens_equal_transformers() -> None:
    model = small_gpt(tie_embeddings=False).eval()  # tied, so small a model repeats one token for ever
    twin = transformers_twin(model).eval()
    ids = tokens(2, 7)
    expected = twin.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    cache = model.new_cache(batch=2)
    with torch.no_grad():
        step = ids
        for _ in range(12):
            step = model(step, cache=cache).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
    assert torch.equal(ids, expected)
    assert len(ids[:, 7:].unique()) > 4


def test_a_training_step_is_captured_as_one_graph() -> None:
    model = small_gpt().double()
    ids = tokens(2, 16)

    def loss(batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(batch, labels=labels).loss_sum

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got = torch.autograd.grad(captured(ids, shifted(ids)), list(model.parameters()))
    want = torch.autograd.grad(loss(ids, shifted(ids)), list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
