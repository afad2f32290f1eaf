"""Mixture of experts: routing against its definition, Mixtral against transformers, capacity, plan, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmlab.models.hf import Weight
from fmlab.models.llama_hf import stream_weights
from fmlab.models.mixtral import Mixtral, MixtralConfig
from fmlab.models.moe import MixtureOfExperts, dense_experts, grouped_experts, load_balancing_loss, route
from fmlab.models.plan import check_plan
from tests.models.llama_reference import SMALL
from tests.models.reference import assert_same_gradients, copy_weights, roughen, shifted, tokens

IDS = tokens(3, 21)
MASK = torch.ones_like(IDS)
MASK[0, :6] = MASK[2, :13] = 0


def small_mixtral(**overrides: Any) -> Mixtral:
    torch.manual_seed(0)
    model = Mixtral(MixtralConfig(**(SMALL | {"num_experts": 5, "experts_per_token": 2} | overrides)))
    roughen(model, scale=0.2)
    return model


def in_memory(config: MixtralConfig) -> list[Weight]:
    """Our names beside those of transformers' modules, which stack the experts as we do; its files do not."""
    pairs = stream_weights(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}.mlp", f"model.layers.{i}.mlp"
        pairs += [
            Weight(f"{ours}.router.weight", f"{theirs}.gate.weight"),
            Weight(f"{ours}.gate_up", f"{theirs}.experts.gate_up_proj"),
            Weight(f"{ours}.down", f"{theirs}.experts.down_proj"),
        ]
    return pairs


def transformers_twin(model: Mixtral) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = model.hf_format().to_fields(model.config)
    fields |= {"router_aux_loss_coef": 0.3, "output_router_logits": True}
    for name in ("architectures", "model_type"):
        del fields[name]
    twin = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))
    copy_weights(model, twin, in_memory(model.config))
    return twin


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"num_experts": 8, "experts_per_token": 3}], ids=["5x2", "8x3"])
def test_logits_losses_and_every_gradient_equal_transformers(overrides: dict, padded: bool) -> None:
    model = small_mixtral(**overrides)
    twin = transformers_twin(model)
    mask = MASK if padded else None
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    labels = shifted(IDS)
    if mask is not None:
        labels[mask == 0] = -100
    unshifted = torch.cat([torch.full_like(IDS[:, :1], -100), labels[:, :-1]], 1)
    expected = twin(IDS, attention_mask=mask, position_ids=positions, labels=unshifted)
    logits = model(IDS, attention_mask=mask).logits
    real = MASK.bool() if padded else torch.ones_like(IDS, dtype=torch.bool)
    torch.testing.assert_close(logits[real], expected.logits[real], rtol=0, atol=1e-5)

    state = model(IDS, labels=labels, attention_mask=mask)
    balance = state.balance_sum / real.sum()
    torch.testing.assert_close(balance, expected.aux_loss, rtol=1e-6, atol=0)
    loss = state.loss_sum / (labels != -100).sum() + 0.3 * balance
    torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
    loss.backward()
    expected.loss.backward()
    assert_same_gradients(model, twin, in_memory(model.config))
    assert state.dropped_count == 0


def test_the_balance_loss_is_transformers_and_top_k_if_all_is_even() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(40, 6)
    real = torch.arange(40) % 3 > 0
    routing = route(logits, 2, real)
    expected = modeling.load_balancing_loss_func((logits,), 6, 2, real.long()[None])
    torch.testing.assert_close(load_balancing_loss(routing.counts_e, routing.probs_e, 2), expected)
    even = torch.full((6,), 10.0)
    assert load_balancing_loss(2 * even, even, 2).item() == pytest.approx(2.0)
    crowded = torch.tensor([60.0, 60.0, 0, 0, 0, 0])
    assert load_balancing_loss(crowded, crowded / 2, 2).item() == pytest.approx(6.0)


def test_the_z_loss_is_its_definition() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([True] * 5 + [False] * 2)
    z_sum = route(logits, 1, real).z_sum
    torch.testing.assert_close(z_sum, logits[:5].exp().sum(-1).log().square().sum())
    model = small_mixtral()
    total = 0.0
    with torch.no_grad():
        state = model.prepare(IDS)
        for block in list(model.blocks)[:-1]:
            if hasattr(block, "mlp"):
                inner = block.mlp_norm(block.attend(state))
                total += block.mlp.router(inner).logsumexp(-1).square().sum() / 3
            state = block(state)
    torch.testing.assert_close(model(IDS).router_z_sum.detach(), total, rtol=1e-5, atol=0)


def by_hand(layer: MixtureOfExperts, x: torch.Tensor, real: torch.Tensor, seats: int) -> tuple:
    """Seat after seat, as a reader of the paper would: all first choices, then all second ones."""
    probs = layer.router(x).softmax(-1)
    top, expert = probs.topk(layer.top_k, -1)
    out, dropped, taken = torch.zeros_like(x), 0, [0] * len(layer.down)
    for choice in range(layer.top_k):
        for token in range(len(x)):
            if not real[token]:
                continue
            e = int(expert[token, choice])
            if taken[e] == seats:
                dropped += 1
                continue
            taken[e] += 1
            gate, up = (layer.gate_up[e] @ x[token]).chunk(2)
            out[token] += (
                top[token, choice] / top[token].sum() * (layer.down[e] @ (layer.activation(gate) * up))
            )
    return out, dropped


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 4.0])
def test_tokens_without_a_seat_are_counted_and_pass_through(factor: float) -> None:
    layer = MixtureOfExperts(8, 12, 4, 2, capacity_factor=factor)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.double()
    x = torch.randn(23, 8, dtype=torch.float64)
    real = torch.arange(23) % 5 != 0
    seats = -int(-factor * 2 * int(real.sum()) // 4)
    expected, dropped = by_hand(layer, x, real, seats)
    mixed, routing = layer(x, real)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)
    assert routing.dropped == dropped
    assert (dropped > 0) == (factor < 4)
    nobody = (routing.expert_nk == 4).all(-1)
    assert not mixed[nobody].any(), "a token without any seat adds nothing to the residual"

    layer.eval()
    assert layer(x, real)[1].dropped == 0


def test_every_way_to_run_the_experts_gives_the_same_sums_and_gradients() -> None:
    x = torch.randn(19, 8, dtype=torch.float64, requires_grad=True)
    gate_up = torch.randn(5, 12, 8, dtype=torch.float64, requires_grad=True)
    down = torch.randn(5, 8, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(19, 2, dtype=torch.float64, requires_grad=True)
    expert = torch.stack([torch.randperm(5)[:2] for _ in range(19)])
    expert[expert == 3] = 5  # expert 3 has no token, and some pairs have nobody
    results = []
    for core in (grouped_experts, dense_experts):
        out = core(x, expert, weight, gate_up, down, torch.tanh)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weight, gate_up, down))])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_generated_tokens_equal_transformers_and_capacity_does_not_touch_them() -> None:
    model = small_mixtral(capacity_factor=0.5).eval()
    twin = transformers_twin(small_mixtral()).eval()
    ids = IDS[:, :7]
    expected = twin.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    cache = model.new_cache(batch=3)
    step = ids
    for _ in range(12):
        step = model(step, cache=cache).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
    assert torch.equal(ids, expected)
    model.train()
    assert model(IDS).dropped_count > 0


def test_a_training_step_is_captured_as_one_graph() -> None:
    model = small_mixtral(capacity_factor=1.0, num_layers=1).double()

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        state = model(ids, labels=labels)
        return state.loss_sum + state.balance_sum + state.router_z_sum

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got = torch.autograd.grad(captured(IDS, shifted(IDS)), list(model.parameters()))
    want = torch.autograd.grad(loss(IDS, shifted(IDS)), list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_the_published_shape_has_the_published_numbers_and_trains_on_meta() -> None:
    with torch.device("meta"):
        model = Mixtral.from_preset("mixtral-8x7b")
        assert model.num_parameters() == 46_702_792_704
        assert model.num_active_parameters() == 12_879_925_248
        model = Mixtral.from_preset("mixtral-8x7b", num_layers=2)
        ids = torch.zeros(1, 64, dtype=torch.long)
        model(ids, labels=ids).loss_sum.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_bf16_autocast_trains_and_routes_as_fp32_does() -> None:
    model = small_mixtral()
    with torch.autocast("cpu", torch.bfloat16):
        state = model(IDS, labels=shifted(IDS))
        (state.loss_sum + state.balance_sum).backward()
    exact = model(IDS, labels=shifted(IDS))
    torch.testing.assert_close(state.loss_sum, exact.loss_sum, rtol=0.02, atol=0)
    assert state.balance_sum.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save_and_back(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_mixtral(tie_embeddings=tied).eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    torch.testing.assert_close(twin.eval()(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    again = Mixtral.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_the_plan_holds() -> None:
    model = small_mixtral(num_experts=4, tie_embeddings=True)
    check_plan(model, {"input_ids": IDS})
    check_plan(model, {"input_ids": IDS, "labels": shifted(IDS), "attention_mask": MASK})
    check_plan(model, {"input_ids": IDS, "labels": shifted(IDS), "document_ids": IDS // 30})
    rule = model.parallel_plan().rule("blocks.1.mlp.gate_up")
    assert rule.degrees(model.get_parameter("blocks.1.mlp.gate_up").shape, 8) == [1, 2, 4]


BAD = {
    "choices": (lambda: small_mixtral(experts_per_token=6), "between 1 and the 5 experts, got 6"),
    "no seats": (lambda: small_mixtral(capacity_factor=0.0), "None means that nothing is ever dropped"),
    "no experts": (lambda: small_mixtral(num_experts=0), "num_experts must be at least 1"),
    "capacity in a file": (
        lambda: small_mixtral(capacity_factor=1.0).save_pretrained("nowhere"),
        "never drops a token",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
