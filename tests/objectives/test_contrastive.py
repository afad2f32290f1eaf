"""The contrastive loss: right on one device, and over ranks equal to one device with the whole batch."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import Ranks
from fmlab.models import CLIP, CLIPConfig, CLIPTextConfig, CLIPVisionConfig, State
from fmlab.objectives import Contrastive, gather_rows, total_loss
from fmlab.parallel import Layout, parity

CONFIG = CLIPConfig(
    CLIPTextConfig(31, 6, num_layers=1, hidden_size=12, num_heads=2, eos_token_id=30),
    CLIPVisionConfig(8, 4, num_layers=1, hidden_size=16, num_heads=2),
    projection_size=7,
)


def small() -> CLIP:
    return CLIP(CONFIG)


def pairs(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(30, (rows, 6), generator=generator)
    ids[torch.arange(rows), torch.randint(1, 6, (rows,), generator=generator)] = 30
    return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator), "input_ids": ids}


def embeddings(images: Tensor, texts: Tensor, scale: float = 1 / 0.07) -> Any:
    """A model that ignores its batch."""
    state = State(image_embeddings=images, text_embeddings=texts, logit_scale=torch.tensor(scale))
    return lambda **batch: state


def loss(terms: Any) -> Tensor:
    return total_loss(terms, {name: term.count for name, term in terms.items()})


def test_identical_features_give_the_logarithm_of_the_batch_size() -> None:
    same = nn.functional.normalize(torch.ones(8, 5), dim=-1)
    terms = Contrastive()(embeddings(same, same), pairs(8))
    assert {name: int(term.count) for name, term in terms.items()} == {"image_to_text": 8, "text_to_image": 8}
    assert {name: int(n) for name, n in Contrastive().counts(pairs(8)).items()} == {
        "image_to_text": 8,
        "text_to_image": 8,
    }
    assert abs(loss(terms).item() - 2.0794415) < 1e-6


def test_the_total_is_the_average_of_both_directions() -> None:
    generator = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits = 3.0 * images @ texts.T
    rows, columns = logits.log_softmax(1).diagonal(), logits.log_softmax(0).diagonal()
    expected = -(rows.mean() + columns.mean()) / 2
    got = loss(Contrastive()(embeddings(images, texts, 3.0), pairs(6)))
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=0)  # the scale was given in fp32
    assert not torch.isclose(rows.mean(), columns.mean())


def test_under_autocast_the_products_stay_in_fp32() -> None:
    images, texts = (nn.functional.normalize(torch.randn(16, 64), dim=-1) for _ in range(2))
    exact = loss(Contrastive()(embeddings(images, texts, 100.0), pairs(16)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(Contrastive()(embeddings(images, texts, 100.0), pairs(16))), exact)


@pytest.mark.multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_two_ranks_equal_one_device_with_the_whole_batch(ranks2: Ranks, engine: str, precision: str) -> None:
    batches = [pairs(8, seed) for seed in range(2)]
    report = parity(small, Layout(data=2), engine, batches, precision, ranks=ranks2, objective=Contrastive())
    report.raise_if_different()
    assert len(report.rows) == len(list(small().named_parameters()))
    assert report.targets == (8, 8)  # four pairs each, in two directions


@pytest.mark.multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_four_ranks_with_uneven_batches_equal_one_device(ranks4: Ranks, engine: str) -> None:
    by_rank = [[pairs(rows, seed)] for seed, rows in enumerate((3, 1, 5, 2))]
    report = parity(
        small, Layout(data=4), engine, [by_rank, by_rank], "fp64", ranks=ranks4, objective=Contrastive()
    )
    report.raise_if_different()
    assert report.targets == (6, 2, 10, 4)


class WithoutGradients(Contrastive):
    """Wrong: what other ranks make of our rows is lost."""

    def across(self, group: Any) -> "WithoutGradients":
        return WithoutGradients(group)

    def gather(self, images_be: Tensor, texts_be: Tensor) -> tuple[Tensor, Tensor, int]:
        images, texts, first = super().gather(images_be, texts_be)
        return (images, texts, first) if self.group is None else (images.detach(), texts.detach(), first)


@pytest.mark.multirank
def test_a_gather_that_drops_gradients_is_found_though_its_loss_is_right(ranks2: Ranks) -> None:
    layout, wrong = Layout(data=2), WithoutGradients()
    report = parity(small, layout, batches=[pairs(8)], precision="fp64", ranks=ranks2, objective=wrong)
    assert report.loss.ok
    assert not report.grad_norm.ok
    assert len(report.different) == len(report.rows) - 1  # of the scale alone every rank has its whole share
    assert report.worst.gradient.error > 0.1


def gathered(sizes: list[int]) -> tuple[Tensor, Tensor, int]:
    rank = dist.get_rank()
    rows = (torch.arange(sizes[rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    everything, first = gather_rows(rows)
    (everything * (rank + 1)).sum().backward()
    assert rows.grad is not None
    return everything.detach(), rows.grad, first


@pytest.mark.multirank
def test_gathered_rows_get_back_the_gradients_of_all_ranks(ranks4: Ranks) -> None:
    sizes = [2, 0, 3, 1]
    results = ranks4.run(gathered, sizes)
    expected = torch.cat([torch.arange(n * 2.0).view(-1, 2) + 100 * rank for rank, n in enumerate(sizes)])
    for rank, (everything, grad, first) in enumerate(results):
        assert torch.equal(everything, expected)
        assert torch.equal(grad, torch.full((sizes[rank], 2), 10.0))  # 1 + 2 + 3 + 4
        assert first == sum(sizes[:rank])


@pytest.mark.multirank
def test_micro_batches_and_ranks_without_pairs_are_refused_with_the_reason(ranks2: Ranks) -> None:
    layout, objective = Layout(data=2, micro_batches=2), Contrastive()
    with pytest.raises(ValueError, match="micro_batches=2: Contrastive compares each sample with all others"):
        parity(small, layout, batches=[pairs(8)], ranks=ranks2, objective=objective)

    def step(batches: list[list[dict[str, Tensor]]]) -> str:
        from fmlab.parallel import parallelize

        torch.manual_seed(0)
        sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
        engine = parallelize(small(), Layout(data=2), Contrastive(), sgd)
        try:
            engine.step(batches[dist.get_rank()])
        except ValueError as error:
            return str(error)
        finally:
            engine.close()
        return "ran"

    for uneven in ([[pairs(3)], []], [[pairs(3), pairs(2)], [pairs(2)]], [[pairs(3)], [pairs(0)]]):
        answers = ranks2.run(step, uneven)
        assert all("each rank needs one micro-batch with rows" in answer for answer in answers), answers
    assert ranks2.run(step, [[pairs(3)], [pairs(1)]]) == ["ran", "ran"]


def test_batches_that_cannot_be_compared_are_refused() -> None:
    one, two = torch.ones(1, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="one pair has nothing to tell it from"):
        Contrastive()(embeddings(one, one), pairs(1))
    with pytest.raises(ValueError, match=r"pair up row by row, got \[2, 4\] and \[1, 4\]"):
        Contrastive()(embeddings(two, one), pairs(2))
    assert math.isfinite(loss(Contrastive()(embeddings(two, two), pairs(2))).item())
