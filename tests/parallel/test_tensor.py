"""Divided matrices compute what whole ones do; parity finds each way to divide them wrongly."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from fmlab import Ranks
from fmlab.models import (
    BERT,
    T5,
    BERTConfig,
    CausalConvLM,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    ParallelPlan,
    T5Config,
    UNet,
    UNetConfig,
)
from fmlab.models.cross_entropy import class_cross_entropy
from fmlab.objectives import Term
from fmlab.parallel import Layout, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor import ColumnLinear, RowLinear
from tests.parallel import common

multirank = pytest.mark.multirank
SEQUENCE = dict(tensor=2, sequence_parallel=True)
V = common.VOCABULARY


def llama(kv_heads: int = 2, bias: bool = False, kind: type[Llama] = Llama) -> Llama:
    config = LlamaConfig(
        vocab_size=V,
        max_positions=16,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=kv_heads,
        ffn_size=36,
        qkv_bias=bias,
        tie_embeddings=True,
    )
    return kind(config)


def bert() -> BERT:
    return BERT(BERTConfig(V, 16, 2, 16, 2, heads="pretraining"))


def t5(gated: bool = True) -> T5:
    return T5(T5Config(V, num_layers=2, hidden_size=16, num_heads=2, head_size=8, ffn_size=24, gated=gated))


def mixtral() -> Mixtral:
    config = MixtralConfig(
        V, 16, 2, 16, 2, num_kv_heads=1, ffn_size=12, num_experts=4, experts_per_token=2, tie_embeddings=False
    )
    return Mixtral(config)


def unet() -> UNet:
    sizes = dict(norm_groups=4, layers_per_level=1, sample_size=8)
    return UNet(UNetConfig(channels=(8, 16), heads=(2, 2), text_size=12, attention=(True, False), **sizes))


# ---- equal to one device -----------------------------------------------------------------------------------

ON_TWO: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "gpt": (common.gpt, dict(tensor=2), dict(max_grad_norm=0.1)),
    "gpt, sequence": (common.gpt, SEQUENCE, dict(max_grad_norm=0.1, optimizer="adamw")),
    "gpt, untied, ours": (partial(common.gpt, False), {**SEQUENCE, "collectives": "fmlab"}, {}),
    "gpt, fp32": (common.gpt, {**SEQUENCE, "micro_batches": 2}, dict(precision="fp32")),
    "gpt, bf16": (common.gpt, dict(tensor=2), dict(precision="bf16")),
    "gpt, bf16, sequence": (common.gpt, SEQUENCE, dict(precision="bf16")),
    "one key/value head": (partial(llama, 1, True), SEQUENCE, dict(max_grad_norm=0.1)),
    "bert, all heads": (bert, SEQUENCE, dict(max_grad_norm=0.1)),
    "t5": (t5, dict(tensor=2), {}),
    "t5, sequence": (partial(t5, False), SEQUENCE, dict(max_grad_norm=0.1)),
    "mixtral, experts whole": (mixtral, dict(tensor=2), {}),
    "convolutions": (
        partial(CausalConvLM.from_preset, "conv-tiny", vocab_size=V, num_layers=2, hidden_size=16),
        dict(tensor=2),
        {},
    ),
    "unet": (unet, dict(tensor=2), dict(steps=1)),
}


@multirank
@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_equal_one_device(ranks2: Ranks, case: str) -> None:
    build, layout, settings = ON_TWO[case]
    report = parity(build, Layout(**layout), ranks=ranks2, **{"precision": "fp64", **settings})
    report.raise_if_different()
    assert len(report.rows) == len(list(build().named_parameters()))


@multirank
@pytest.mark.parametrize("sequence", [False, True])
def test_fewer_key_value_heads_than_ranks(ranks4: Ranks, sequence: bool) -> None:
    layout = Layout(tensor=4, sequence_parallel=sequence)
    parity(llama, layout, precision="fp64", max_grad_norm=0.1, ranks=ranks4).raise_if_different()


@multirank
def test_beside_data_parallel_ranks(ranks4: Ranks) -> None:
    for precision in ("fp64", "fp32"):
        layout = Layout(data=2, micro_batches=2, **SEQUENCE)
        parity(common.gpt, layout, precision=precision, max_grad_norm=0.1, ranks=ranks4).raise_if_different()


@multirank
def test_lengths_that_the_ranks_do_not_divide_are_padded(ranks4: Ranks) -> None:
    nine, one = common.tokens(3, [2, 9, 5], length=9), common.tokens(2, [1, 1], length=1)
    build, layout = partial(common.gpt, tie_embeddings=False), Layout(data=2, **SEQUENCE)
    batches = [[[nine], [one]], [[one], []]]
    parity(build, layout, batches=batches, precision="fp64", ranks=ranks4).raise_if_different()


class FromLogits:
    """Cross-entropy from the logits, which a model gives where it gets no labels."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Term]:
        logits = model(batch["input_ids"]).logits.flatten(0, 1)
        loss = class_cross_entropy(logits, batch["labels"].flatten())
        return {"logits": Term(loss, self.counts(batch)["logits"])}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": (batch["labels"] != -100).sum()}


@multirank
@pytest.mark.parametrize("layout", [dict(tensor=2), SEQUENCE], ids=["tensor", "sequence"])
def test_losses_of_logits(ranks2: Ranks, layout: dict[str, Any]) -> None:
    report = parity(common.gpt, Layout(**layout), objective=FromLogits(), precision="fp64", ranks=ranks2)
    report.raise_if_different()


# ---- what breaks -------------------------------------------------------------------------------------------


class Mute(Axis):
    """Hears and says nothing: what this rank has is taken for the sum."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis.name, axis.ranks, axis.rank, axis.group, axis.ours)

    def all_reduce_(self, tensor: Tensor, async_op: bool = False, op: str = "sum") -> Any:
        return None if async_op else tensor


def _muted(engine: Composed, kind: type[nn.Module]) -> None:
    for module in engine.model.modules():
        if isinstance(module, kind):
            module.axis = Mute(module.axis)


class WithoutTheSumOfF(Composed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _muted(self, ColumnLinear)


class WithoutG(Composed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _muted(self, RowLinear)


class BiasOnEveryRank(Composed):
    """Each rank adds the bias of a row matrix to its part of the sum."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, RowLinear) and module.bias is not None:
                more, product = module.axis.size - 1, module.product
                module.product = lambda x, p=product, m=module, n=more: p(x) + n * m.bias


class NormsNotSummed(Composed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, entry in self.ledger.entries.items():
            self.ledger.entries[name] = replace(entry, partial=())


class EqualHalves(Llama):
    """Cuts keys-above-values in the middle: one rank gets all keys, the other all values."""

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        rules = [replace(r, parts=1) if "key_value" in r.pattern else r for r in plan.rules]
        return replace(plan, rules=tuple(rules))


BROKEN: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    # loss right, all gradients below the last layer's second half wrong
    "f": (common.gpt, WithoutTheSumOfF, dict(tensor=2), "blocks.0.tokens.weight"),
    "g": (common.gpt, WithoutG, dict(tensor=2), "loss"),
    "bias": (common.gpt, BiasOnEveryRank, dict(tensor=2), "blocks.1.mlp.down.bias"),
    "norms": (common.gpt, NormsNotSummed, SEQUENCE, "blocks.1.attention_norm.weight"),
    "thirds": (partial(llama, kind=EqualHalves), "fmlab", dict(tensor=2), "loss"),
}


@multirank
@pytest.mark.parametrize("fault", BROKEN)
def test_every_broken_division_is_found(ranks2: Ranks, fault: str) -> None:
    build, engine, layout, what = BROKEN[fault]
    report = parity(build, Layout(**layout), engine, precision="fp64", steps=1, ranks=ranks2)
    assert not report.ok
    wrong = {row.name for row in report.rows if not row.gradient.ok}
    if what == "loss":
        assert not report.loss.ok
    else:
        assert report.loss.ok
        assert what in wrong
    if fault == "f":
        assert not {n for n in wrong if n.startswith("blocks.4.")}  # behind the last f all is well
    if fault == "bias":
        assert all(name.endswith(("attention.output.bias", "mlp.down.bias")) for name in wrong)
        factors = {round(row.gradient.factor, 9) for row in report.rows if row.name in wrong}
        assert factors == {2.0}
