"""Recomputation gives the gradients that keeping everything gives, bit for bit, for the bytes it promises."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmlab import Ranks
from fmlab.meter import flops, saved_activations
from fmlab.models import GPT, GPTConfig
from fmlab.models.families import family_of
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Engine, Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.recompute import LayerAgain, LayerCost, choose, compute_again, recomputed
from fmlab.parallel.recompute.conditions import Conditions
from tests.parallel import common

multirank = pytest.mark.multirank


def gpt(dropout: float = 0.2, layers: int = 3) -> GPT:
    return GPT(
        GPTConfig(
            vocab_size=131,
            max_positions=24,
            num_layers=layers,
            hidden_size=16,
            num_heads=2,
            dropout=dropout,
        )
    )


def family(name: str, **config: Any) -> nn.Module:
    model: nn.Module = family_of(name).from_preset(name, vocab_size=131, num_layers=2, **config)
    return model


MODELS = {
    "gpt": gpt,
    "llama": partial(family, "llama-tiny"),
    "mixtral": partial(family, "mixtral-tiny"),
}
HOW: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "budget", "activation_budget": 0.6},
]


def engine_of(model: nn.Module, **layout: Any) -> Engine:
    """One device; the composed engine also where nothing is composed, so that all draw the same masks."""
    return parallelize(
        model,
        Layout(**layout),
        objective_of(model),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        Composed,
    )


def two_steps(model: nn.Module, **layout: Any) -> tuple[list[float], dict[str, torch.Tensor], Engine]:
    engine = engine_of(copy.deepcopy(model), **layout)
    batch = common.tokens(4, [12, 3, 4, 5])
    losses = [engine.step([batch]).loss for _ in range(2)]
    return losses, engine.full_grads(), engine


@pytest.mark.filterwarnings("ignore:recompute='selective' frees nothing")
@pytest.mark.parametrize(
    ("name", "precision"), [("gpt", "fp32"), ("gpt", "bf16"), ("llama", "bf16"), ("mixtral", "fp32")]
)
def test_bitwise_the_gradients_without(name: str, precision: str) -> None:
    model = MODELS[name]()
    losses, gradients, _ = two_steps(model, precision=precision)
    for how in HOW:
        again = two_steps(model, precision=precision, **how)
        assert again[0] == losses
        assert all(torch.equal(gradient, again[1][key]) for key, gradient in gradients.items())


def test_without_the_random_state_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x.grad = None
        torch.manual_seed(0)
        compute_again(lambda y: F.dropout(y, 0.5).square(), x).sum().backward()
        assert x.grad is not None
        return x.grad

    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    F.dropout(x, 0.5).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(run(x), x.grad)
    kept, after = x.grad, torch.rand(1)
    torch.manual_seed(0)
    F.dropout(x, 0.5)
    assert torch.equal(torch.rand(1), after)  # the second run took no random numbers from what follows
    monkeypatch.setattr(Conditions, "again", lambda self: torch.enable_grad())
    assert not torch.equal(run(x), kept)


def test_as_torch_does_it() -> None:
    model, batch = gpt(), common.tokens(4, [12, 3, 4, 5])
    found = []
    for how in (compute_again, partial(checkpoint, use_reentrant=False)):
        ours = copy.deepcopy(model)
        for block in list(ours.blocks)[1:-1]:
            block.forward = partial(how, block.forward)
        torch.manual_seed(1)
        with flops() as work:
            ours(**batch).loss_sum.backward()
        found.append((work.total, [p.grad for p in ours.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_what_is_kept() -> None:
    model, batch = gpt(), common.tokens(4, [12, 3, 4, 5])
    x = model.blocks[0](model.prepare(batch["input_ids"]))
    inputs = {id(t): t.nbytes for t in x.values()}
    with saved_activations(model) as kept:
        compute_again(model.blocks[1], x)
    assert kept.live == 0  # all let go of, for nobody has the result
    with saved_activations(model) as kept:
        result = compute_again(model.blocks[1], x)
        assert kept.live == sum(inputs.values())
    result.hidden.sum().backward()
    assert kept.live == 0


@pytest.mark.filterwarnings("ignore:recompute='selective' frees nothing")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_operations_of_full_and_selective(dropout: float) -> None:
    b, length, d, f, layers = 4, 12, 16, 64, 3
    batch = common.tokens(b, [12, 3, 4, 5], length=length)
    model = gpt(dropout, layers)

    def count(**layout: Any) -> int:
        engine = engine_of(copy.deepcopy(model), **layout)
        engine.step([batch])
        with flops() as work:
            engine.step([batch])
        return work.total

    products, pairs = 2 * b * length * d * (4 * d + 2 * f), 2 * b * length**2 * d
    # Behind the last product nothing is saved, unless a mask is: then it is not computed again.
    last = 0 if dropout else 2 * b * length * d * f
    assert count(recompute="full") - count() == layers * (products + 2 * pairs - last)
    extra = layers * pairs if dropout else 0  # of tables the scores, not their product with the values
    assert count(recompute="selective") - count() == extra


def test_selective_says_when_it_frees_nothing() -> None:
    with pytest.warns(UserWarning, match="frees nothing here: this attention keeps 384 bytes"):
        two_steps(gpt(0.0), recompute="selective")


def test_what_changed_in_between_is_found() -> None:
    x, factors = torch.ones(3, requires_grad=True), [2.0, 3.0]

    def unsteady(y: torch.Tensor) -> torch.Tensor:
        for _ in range(len(factors)):
            y = y.exp()
        return y

    loss = compute_again(unsteady, x).sum()
    factors.pop()
    with pytest.raises(RuntimeError, match=r"unsteady saved 2 tensors .* and 1 when"):
        loss.backward()
    y = x * 1
    loss = compute_again(torch.exp, y).sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_twice_through_one_graph() -> None:
    x = torch.rand(5, requires_grad=True)
    y = compute_again(lambda x: x.exp().sin(), x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])


# ---- by budget ---------------------------------------------------------------------------------------------


def test_choice_of_layers() -> None:
    layers = {1: LayerCost(100, 10, 500), 2: LayerCost(100, 10, 500), 3: LayerCost(60, 10, 500)}
    assert choose(layers, 10_000) == [1, 2, 3]
    assert choose(layers, 1.0) == [1, 2, 3]
    assert choose(layers, 80) == [3]  # the most operations for a byte
    assert choose(layers, 30) == []
    assert choose(layers, 175) == [2, 3]  # of equal layers the last
    with pytest.raises(ValueError, match=r"allows 20 bytes, and what goes into the layers is 30 .* 0\.115"):
        choose(layers, 20)


def test_a_budget_is_kept_and_used() -> None:
    model, batch = gpt(), common.tokens(4, [12, 3, 4, 5])
    peaks = {}
    for share in (0.2, 0.5, 0.75, 1.0):
        engine = engine_of(model, recompute="budget", activation_budget=share)
        assert recomputed(engine.model) == [1, 2, 3]
        engine.step([batch])
        with saved_activations(engine.model) as kept:
            engine.step([batch])
        peaks[share] = kept.peak
        assert recomputed(engine.model) == {0.2: [1, 2, 3], 0.5: [1, 2], 0.75: [1], 1.0: []}[share]
        engine.close()
        assert recomputed(model) == []
        assert "forward" not in vars(model.blocks[1])
    assert sorted(peaks.values()) == list(peaks.values())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"recompute": "budget"}, "needs activation_budget: bytes"),
        ({"recompute": "full", "activation_budget": 0.5}, "does nothing without recompute='budget'"),
        ({"recompute": "budget", "activation_budget": 1.5}, "a share from 0.0 to 1.0 as a float"),
        ({"recompute": "budget", "activation_budget": 1}, "1024 at least"),
        ({"recompute": "some"}, "legal are none, selective, full, budget"),
    ],
)
def test_bad_layouts(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**layout)


def test_models_without_layers_or_attention() -> None:
    for recompute, message in (("full", "has no layers to compute again"), ("selective", "has no attention")):
        with pytest.raises(ValueError, match=message):
            parallelize(
                common.Branches(),
                Layout(recompute=recompute),
                common.Classify(),
                lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            )


# ---- with other strategies --------------------------------------------------------------------------------


@multirank
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "micro_batches": 2, "recompute": "full"},
        {"data": 2, "recompute": "selective"},
        {"data": 2, "micro_batches": 2, "recompute": "budget", "activation_budget": 0.5},
        {"tensor": 2, "sequence_parallel": True, "recompute": "full"},
        {"tensor": 2, "recompute": "selective"},
        {"data": 2, "zero": 3, "recompute": "full"},
        {"data": 2, "fsdp": True, "recompute": "full"},
        {"pipeline": 2, "micro_batches": 3, "recompute": "full"},
        {"pipeline": 2, "micro_batches": 2, "recompute": "budget", "activation_budget": 0.6},
    ],
    ids=str,
)
def test_parity_with_dropout(ranks2: Ranks, layout: dict[str, Any]) -> None:
    parity(gpt, Layout(**layout), precision="fp64", ranks=ranks2, max_grad_norm=0.1).raise_if_different()


@multirank
def test_parity_of_two_streams(ranks2: Ranks) -> None:
    model = partial(family, "t5-tiny", dropout=0.1)
    layout = Layout(tensor=2, recompute="full")
    parity(model, layout, precision="fp64", ranks=ranks2).raise_if_different()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recompute='selective' frees nothing")
@pytest.mark.parametrize("how", HOW[:2], ids=["full", "selective"])
def test_a_compiled_model_has_the_gradients_of_an_eager_one(how: dict[str, Any]) -> None:
    """With dropout, under autocast: each works beside torch.compile alone, and all at once."""
    batch = common.tokens(2, [12, 5])

    def gradients(compile: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gpt(dropout=0.2, layers=2)
        objective = objective_of(model)
        engine_of(model, **how)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compile(lambda: next(iter(objective(model, batch).values())).sum)()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(lambda run: run)
    found = gradients(lambda run: torch.compile(run, backend="aot_eager"))
    assert len(expected) == len(found) > 10
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_graph_that_must_be_whole_refuses_recomputation_with_the_reason() -> None:
    layer = LayerAgain(torch.sin)
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="recomputation stands in no compiled graph"):
        compiled(torch.ones(3, requires_grad=True))
