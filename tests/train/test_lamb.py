"""LAMB, and AdamW in proportion: the formulas, the same steps under every layout, refusals without norms."""

from functools import partial

import pytest
import torch

from fmlab import Ranks
from fmlab.parallel import Layout, parallelize
from fmlab.train import TrainConfig, lamb, scaled_adamw
from tests.train.test_layouts import on_rank, same
from tests.train.tiny_run import tiny_config, tiny_model

SETTINGS = dict(steps=4, warmup=1, eval_every=4, optimizer="lamb", lr=0.05)
SCALED = SETTINGS | dict(optimizer="scaled-adamw", lr=0.02)


def by_formula(weight, gradients, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, decay=0.1, scaled=True):
    """You et al. 2019, algorithm 2, with phi(z) = z, in Python's own numbers."""
    w, n = [float(x) for x in weight], len(weight)
    m, v = [0.0] * n, [0.0] * n
    for t, gradient in enumerate(gradients, 1):
        m = [beta1 * a + (1 - beta1) * float(g) for a, g in zip(m, gradient, strict=True)]
        v = [beta2 * a + (1 - beta2) * float(g) ** 2 for a, g in zip(v, gradient, strict=True)]
        r = [(a / (1 - beta1**t)) / ((b / (1 - beta2**t)) ** 0.5 + eps) for a, b in zip(m, v, strict=True)]
        u = [a + (decay if scaled else 0) * x for a, x in zip(r, w, strict=True)]
        ratio = (sum(x * x for x in w) / sum(x * x for x in u)) ** 0.5 if scaled else 1.0
        w = [x - lr * ratio * a for x, a in zip(w, u, strict=True)]
    return torch.tensor(w, dtype=torch.float64)


def test_three_steps_are_those_of_the_papers_algorithm() -> None:
    torch.manual_seed(0)
    matrix, vector, zero = (
        torch.nn.Parameter(torch.randn(*s, dtype=torch.float64)) for s in ((2, 3), (4,), (2, 2))
    )
    zero.data.zero_()
    start = [p.detach().clone() for p in (matrix, vector)]
    gradients = [
        [torch.randn(p.shape, dtype=torch.float64) for p in (matrix, vector, zero)] for _ in range(3)
    ]
    optimizer = lamb(0.1, (0.9, 0.99), 0.1)([("matrix", matrix), ("vector", vector), ("zero", zero)])
    for number, given in enumerate(gradients):
        for p, gradient in zip((matrix, vector, zero), given, strict=True):
            p.grad = gradient
        optimizer.step()
        if number == 0:  # a table that starts at 0 has no share to move by: Adam's own step
            assert zero.detach().abs().mean().item() == pytest.approx(0.1, rel=1e-3)
    of = lambda i: [given[i].flatten() for given in gradients]  # noqa: E731
    torch.testing.assert_close(matrix.detach().flatten(), by_formula(start[0].flatten(), of(0)))
    torch.testing.assert_close(vector.detach(), by_formula(start[1], of(1), scaled=False))


def test_scaled_adamw_is_adamw_at_a_rate_for_each_tensor() -> None:
    torch.manual_seed(0)
    shapes = {"large": (3, 4), "small": (4,), "zero": (2, 2)}
    weights = {
        name: torch.randn(shape, dtype=torch.float64) * {"large": 5.0, "small": 0.1, "zero": 0.0}[name]
        for name, shape in shapes.items()
    }
    mine = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
    torchs = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
    optimizer = scaled_adamw(0.02, (0.9, 0.99))(mine.items())
    peers = {p: torch.optim.AdamW([p], betas=(0.9, 0.99), weight_decay=0.0) for p in torchs.values()}
    for _ in range(3):
        for name in shapes:
            gradient = torch.randn(shapes[name], dtype=torch.float64)
            mine[name].grad, torchs[name].grad = gradient, gradient.clone()
            size = torchs[name].detach().square().mean().sqrt().item()
            peers[torchs[name]].param_groups[0]["lr"] = 0.02 * max(1e-3, size)
            peers[torchs[name]].step()
        optimizer.step()
    for name, p in torchs.items():
        torch.testing.assert_close(mine[name].detach(), p.detach())
    assert not mine["zero"].detach().eq(0).any()


@pytest.fixture(scope="module")
def one_scaled():
    return on_rank(tiny_config(**SCALED))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "layout",
    [Layout(data=2, zero=3), Layout(tensor=2), Layout(pipeline=2, micro_batches=4)],
    ids=["zero3", "tensor", "pipeline"],
)
def test_a_divided_parameter_moves_in_proportion_to_the_whole(
    ranks2: Ranks, one_scaled, layout: Layout
) -> None:
    for found in ranks2.run(on_rank, tiny_config(**SCALED, layout=layout), timeout=90):
        same(found, one_scaled)


@pytest.fixture(scope="module")
def one():
    return on_rank(tiny_config(**SETTINGS))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2),
        Layout(data=2, zero=1),
        Layout(data=2, zero=3, micro_batches=2),
        Layout(data=2, fsdp=True),
        Layout(tensor=2, sequence_parallel=True),
        Layout(pipeline=2, micro_batches=4),
    ],
    ids=["ddp", "zero1", "zero3", "fsdp", "tensor", "pipeline"],
)
def test_divided_parameters_move_by_the_norm_of_the_whole(ranks2: Ranks, one, layout: Layout) -> None:
    for found in ranks2.run(on_rank, tiny_config(**SETTINGS, layout=layout), timeout=90):
        same(found, one)


@pytest.mark.multirank
def test_a_share_of_a_pieces_own_norm_would_be_seen(ranks2: Ranks, one) -> None:
    def wrong(config):
        from fmlab.parallel.ledger import Ledger
        from fmlab.train.lamb_step import whole_norms

        right, Ledger.norms = Ledger.norms, lambda self, *tables: whole_norms(*tables)
        try:
            return on_rank(config)
        finally:
            Ledger.norms = right

    found = ranks2.run(wrong, tiny_config(**SETTINGS, layout=Layout(data=2, zero=3)), timeout=90)[0]
    with pytest.raises(AssertionError):
        same(found, one)


def test_a_run_resumes_bit_for_bit(tmp_path) -> None:
    whole = on_rank(tiny_config(**SETTINGS))[0]
    on_rank(tiny_config(**(SETTINGS | dict(steps=4)), out=str(tmp_path), save_every=2, keep=2))
    import shutil

    shutil.rmtree(tmp_path / "steps" / "000004")
    resumed = on_rank(tiny_config(**SETTINGS, out=str(tmp_path), resume=True))[0]
    assert resumed == whole


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must be adamw or lamb or scaled-adamw, got 'sgd'"):
        TrainConfig(optimizer="sgd")
    with pytest.raises(ValueError, match=r"numbers='bf16-kahan' writes AdamW's updates"):
        TrainConfig(optimizer="lamb", numbers="bf16-kahan")
    with pytest.raises(ValueError, match="must be at least 0"):
        lamb(lr=-1)
    assert TrainConfig(optimizer="lamb").lr_for(768) == TrainConfig(optimizer="lamb").lr_for(64)


@pytest.mark.multirank
def test_other_engines_have_no_norms_of_whole_parameters(ranks2: Ranks) -> None:
    from fmlab.objectives import CausalLM

    def make(layout):
        return parallelize(tiny_model(), layout, CausalLM(), lamb(), engine="torch")

    with pytest.raises(Exception, match="norms of whole parameters"):
        ranks2.run(partial(make, Layout(data=2, fsdp=True)))
