"""Context parallelism: each sequence on several ranks equals one device; and parity finds what breaks it."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fmlab import Ranks
from fmlab.meter import traffic
from fmlab.models import Llama
from fmlab.models.attention import AttentionMask
from fmlab.models.attention.block_sparse import BlockPattern, local_blocks
from fmlab.models.attention.definition import quadratic_core
from fmlab.models.families import family_of
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.context import RingCore, UlyssesCore, tile
from fmlab.parallel.context.cost import ring_bytes, ulysses_bytes
from fmlab.parallel.context.positions import (
    Tile,
    columns_of,
    critical_work,
    indices,
    padded_length,
    tiles,
    work,
)
from fmlab.parallel.context.tile import attend, merge_
from fmlab.parallel.context.ulysses import check_heads
from fmlab.parallel.mesh import Mesh

multirank = pytest.mark.multirank
BALANCES = ("none", "striped", "mirrored")
METHODS = [dict(context_balance=balance) for balance in BALANCES] + [dict(context_method="ulysses")]


# ---- positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", BALANCES)
def test_every_column_and_every_pair_is_on_one_rank(ranks: int, balance: str) -> None:
    length = padded_length(23, ranks, balance)
    held = torch.cat([indices(columns_of(rank, ranks, length, balance)) for rank in range(ranks)])
    assert held.sort().values.tolist() == list(range(length))
    assert sum(work(length, ranks, balance)) == length * (length + 1) // 2
    assert sum(work(length, ranks, balance, causal=False)) == length**2
    assert indices(columns_of(0, ranks, length, balance))[0] == 0  # what row labels are learned from
    for causal in (True, False):
        near = AttentionMask(causal, length, length, window=5).allowed(torch.device("cpu")).sum()
        assert sum(work(length, ranks, balance, causal, window=5)) == near


def test_work_of_four_ranks_under_a_causal_mask() -> None:
    assert work(64, 4, "none") == [136, 392, 648, 904]  # the last: 1.74 times the mean
    assert work(64, 4, "striped") == [496, 512, 528, 544]
    assert work(64, 4, "mirrored") == [520] * 4
    # ranks wait for one another in each step of the ring: only then does balance show in time
    assert [critical_work(64, 4, balance) for balance in BALANCES] == [136 + 3 * 256, 544, 136 + 3 * 128]


def test_neighbours_of_which_all_is_allowed_are_one_product() -> None:
    held = [columns_of(rank, 3, 24, "mirrored") for rank in range(3)]
    causal, free = AttentionMask(True, 24, 24), AttentionMask(False, 24, 24)
    assert tiles(held[1], held[0], causal) == [Tile(slice(0, 8), slice(0, 4), False)]  # all see chunk 0
    assert tiles(held[0], held[1], causal) == [Tile(slice(4, 8), slice(0, 8), False)]  # chunk 5 sees all
    assert tiles(held[0], held[1], free) == [Tile(slice(0, 8), slice(0, 8), False)]
    assert [tile.diagonal for tile in tiles(held[2], held[2], causal)] == [True, False, True]


def test_positions_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"10 columns cannot be divided .* a multiple of 8"):
        columns_of(0, 4, 10, "mirrored")
    with pytest.raises(ValueError, match="legal are none, striped, mirrored"):
        padded_length(10, 4, "zigzag")


def test_parts_of_a_softmax_are_put_together_by_their_sums() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    whole, whole_sum = attend(query, key, value, 0.3)
    mixed, total = torch.zeros_like(whole), torch.full_like(whole_sum, -float("inf"))
    for columns in (slice(4, 6), slice(0, 1), slice(1, 4)):  # in any order
        merge_(mixed, total, *attend(query, key[:, :, columns], value[:, :, columns], 0.3))
    assert torch.allclose(mixed, whole, atol=1e-14)
    assert torch.allclose(total, whole_sum, atol=1e-14)


# ---- the cores ---------------------------------------------------------------------------------------------


def _compare_cores(kind: str, kv_heads: int, value_size: int, parts: dict[str, Any]) -> float:
    """The largest difference from the definition, of this rank's columns: result and gradients."""
    axis = Mesh(Layout(context=dist.get_world_size()).grid()).axis("context")
    torch.manual_seed(3)
    length, b = 12, 2
    query, key, value = (
        torch.randn(b, h, length, k, dtype=torch.float64)
        for h, k in ((4, 8), (kv_heads, 8), (kv_heads, value_size))
    )
    real = torch.ones(b, length, dtype=torch.bool)
    real[1, 9:] = real[0, :2] = False  # so that under a causal mask some queries see nothing
    whole = AttentionMask(queries=length, keys=length, real_keys=real, **parts)
    balance = "none" if kind == "ulysses" else kind
    mine = indices(columns_of(axis.rank, axis.size, length, balance))
    half = AttentionMask(
        queries=length // axis.size, keys=length // axis.size, real_keys=real[:, mine], **parts
    )
    core = UlyssesCore(axis, quadratic_core) if kind == "ulysses" else RingCore(axis, kind)
    # the loss of every rank is a part of one, so its factors must be those of the whole
    leaves = [x[:, :, mine].clone().requires_grad_() for x in (query, key, value)]
    mixed = core(*leaves, half)
    factors = torch.linspace(-1, 1, b * 4 * length * value_size, dtype=torch.float64)
    factors = factors.view(b, 4, length, value_size)
    mixed.backward(factors[:, :, mine])
    wanted = [x.clone().requires_grad_() for x in (query, key, value)]
    right = quadratic_core(*wanted, whole)
    right.backward(factors)
    pairs = [(mixed, right), *zip([x.grad for x in leaves], [x.grad for x in wanted], strict=True)]
    return max(float((a - b[:, :, mine]).abs().max()) for a, b in pairs)


def _errors(kind: str) -> dict[tuple[Any, ...], float]:
    return {
        (kv_heads, value_size, *parts): _compare_cores(kind, kv_heads, value_size, parts)
        for kv_heads, value_size in ((4, 8), (2, 8), (1, 8), (2, 6))  # other widths: not torch's kernel
        for parts in (
            {"causal": True},
            {"causal": False},
            {"causal": True, "window": 4},
            {"causal": True, "blocks": BlockPattern(local_blocks(4, 1), 3)},
        )
    }


@multirank
@pytest.mark.parametrize("kind", [*BALANCES, "ulysses"])
def test_cores_equal_the_definition(ranks2: Ranks, kind: str) -> None:
    for errors in ranks2.run(_errors, kind):
        assert max(errors.values()) < 1e-13, errors


def test_ulysses_needs_heads_that_can_be_divided() -> None:
    check_heads(8, 2, 4)  # each key/value head on two ranks
    with pytest.raises(ValueError, match=r"cannot divide 12 query heads and 4 .* legal are \[1, 2, 4, 12\]"):
        check_heads(12, 4, 3)


# ---- parity ------------------------------------------------------------------------------------------------


def build(preset: str, **config: Any) -> Any:
    return family_of(preset).from_preset(preset, vocab_size=131, num_layers=2, hidden_size=32, **config)


def padded_batch(seed: int, documents: bool, masked: bool = False) -> dict[str, Tensor]:
    """Rows of 13 tokens, which no rank count divides: padded on both sides, one of them almost empty."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(131, (4, 13), generator=generator)}
    real = torch.ones(4, 13, dtype=torch.long)
    real[0, :2] = real[1, 9:] = real[2, 11:] = real[3, 1:] = 0
    batch["attention_mask"] = real
    if documents:  # a number that comes back is another document
        batch["document_ids"] = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 2, 2, 2, 0, 0]).expand(4, -1)
    if masked:
        hidden = torch.rand(4, 13, generator=generator) > 0.3
        batch["labels"] = batch["input_ids"].masked_fill(hidden, -100)
        batch["sentence_labels"] = torch.tensor([0, 1, -100, 1])
    return batch


@multirank
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(method.values()))
@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny", "bert-tiny"])
def test_two_ranks_with_padding_and_documents(ranks2: Ranks, preset: str, method: dict[str, str]) -> None:
    masked = preset == "bert-tiny"
    batches = [padded_batch(seed, documents=not masked, masked=masked) for seed in (0, 1)]
    layout = Layout(context=2, **method)  # type: ignore[arg-type]
    report = parity(
        partial(build, preset), layout, batches=batches, precision="fp64", max_grad_norm=0.1, ranks=ranks2
    )
    report.raise_if_different()
    assert len(report.rows) == len(list(build(preset).named_parameters()))


@multirank
def test_four_ranks(ranks4: Ranks) -> None:
    rows = [padded_batch(0, True), padded_batch(1, True)]
    for method in ({}, {"context_method": "ulysses"}):  # one place of the data axis has no rows
        layout = Layout(data=2, context=2, zero=3, **method)
        parity(partial(build, "gpt2-tiny"), layout, batches=[[rows, []]], ranks=ranks4).raise_if_different()
    llama = partial(build, "llama-tiny")  # 2 key/value heads: fewer than ranks
    for layout, precision in (
        (Layout(context=4), "fp32"),
        (Layout(context=4, context_balance="striped", collectives="fmlab"), "fp64"),
        (Layout(context=4, context_method="ulysses"), "fp64"),
        (Layout(context=2, data=2, micro_batches=2, context_balance="none"), "fp64"),
        (Layout(context=2, data=2, context_method="ulysses"), "bf16"),
        (Layout(context=2, tensor=2, sequence_parallel=True), "fp64"),
        (Layout(context=2, data=2, zero=3), "fp64"),
        (Layout(context=2, pipeline=2, micro_batches=2), "fp64"),
    ):
        parity(llama, layout, precision=precision, ranks=ranks4).raise_if_different()


@multirank
@pytest.mark.parametrize("method", METHODS[1:], ids=lambda method: "-".join(method.values()))
def test_dropout_drops_what_one_device_drops(ranks4: Ranks, method: dict[str, str]) -> None:
    layout = Layout(context=2, tensor=2, **method)  # type: ignore[arg-type]
    parity(
        partial(build, "gpt2-tiny", dropout=0.2), layout, precision="fp64", ranks=ranks4
    ).raise_if_different()


def _torchs_ring() -> float:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    torch.manual_seed(0)
    axis = Mesh(Layout(context=2).grid()).axis("context")
    mine = indices(columns_of(axis.rank, 2, 16, "none"))
    query, key, value = (torch.randn(2, 4, 16, 8)[:, :, mine].contiguous() for _ in range(3))
    _attention._cp_options.enable_load_balance = False
    theirs, *_ = _attention._templated_ring_attention(
        dist.group.WORLD, 2, tile._fused, query, key, value, is_causal=True
    )
    ours = RingCore(axis, "none")(query, key, value, AttentionMask(True, 8, 8))
    return float((theirs - ours).abs().max())


@multirank
def test_torchs_own_ring_agrees(ranks2: Ranks) -> None:
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention  # noqa: F401
    except ImportError:
        pytest.skip("this torch has its ring elsewhere")
    assert max(ranks2.run(_torchs_ring)) < 1e-6


def _step_traffic(method: dict[str, Any]) -> dict[str, int]:
    model = Llama.from_preset("llama-tiny", vocab_size=131, num_layers=2)
    engine = parallelize(
        model, Layout(context=2, **method), CausalLM(), lambda named: torch.optim.SGD([p for _, p in named])
    )
    tokens = torch.randint(131, (3, 16), generator=torch.Generator().manual_seed(0))
    engine.step([{"input_ids": tokens}])
    with traffic() as sent:
        engine.step([{"input_ids": tokens}])
    engine.close()
    return {op: sent.bytes(op) for op in ("send", "recv", "all_to_all")}


@multirank
def test_what_is_sent_is_what_the_formulas_say(ranks2: Ranks) -> None:
    config = Llama.CONFIG(**(Llama.PRESETS["llama-tiny"] | {"num_layers": 2}))
    heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_width
    assert kv_heads < heads
    for balance in BALANCES:
        expected = 2 * ring_bytes(3, 8, kv_heads, width, 2, 4)["total"]
        for sent in ranks2.run(_step_traffic, {"context_balance": balance}):
            assert sent == {"send": expected, "recv": expected, "all_to_all": 0}
    expected = 2 * ulysses_bytes(3, 8, heads, kv_heads, width, 2, 4)["total"]
    for sent in ranks2.run(_step_traffic, {"context_method": "ulysses"}):
        assert sent == {"send": 0, "recv": 0, "all_to_all": expected}
