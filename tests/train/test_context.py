"""What a decoder makes of its context: loss by position, and a rule that only the context tells."""

import math

import pytest
import torch
from torch import Tensor

from fmlab.models import GPT, GPTConfig
from fmlab.train import ShiftTask, accuracy_by_shots, loss_by_position


class Copies:
    """Puts all probability but a little on the answer that the row's first example implies."""

    training = False

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def __call__(self, ids: Tensor) -> dict[str, Tensor]:
        rule = (ids[:, 1] - ids[:, 0]) % self.modulus
        answer = (ids + rule[:, None]) % self.modulus + self.modulus
        answer[:, 0] = self.modulus  # nothing was read yet: always the same guess
        return {"logits": 9.0 * torch.nn.functional.one_hot(answer, 2 * self.modulus)}


def test_one_example_tells_the_rule() -> None:
    task = ShiftTask(modulus=5, questions=6)
    batch = task.batch(2000, seed=1)
    found = accuracy_by_shots(Copies(5), batch)
    assert found[0].item() == pytest.approx(1 / 5, abs=0.04)
    assert found[1:].tolist() == [1.0] * 5
    x, y = batch["input_ids"][:, 0::2], batch["input_ids"][:, 1::2]
    assert (((y - x) % 5) == ((y - x) % 5)[:, :1]).all()
    assert (y >= 5).all()
    # A copier knows what it has seen: 1 - (4/5)^n of the questions, and guesses the rest.
    expected = [1 - (4 / 5) ** (n + 1) for n in range(6)]
    assert task.copied(batch).tolist() == pytest.approx(expected, abs=0.04)


def test_a_small_gpt_learns_to_read_the_rule() -> None:
    task = ShiftTask(modulus=3, questions=4)
    model, losses = task.learn(steps=200)
    assert losses[0] > math.log(3)
    found = accuracy_by_shots(model, task.batch(500, seed=9))
    assert found[0] < 0.5
    assert found[1:].min() > 0.9


def test_loss_by_position_adds_up_to_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(11, 8, 1, 8, 2)).train()
    ids = torch.randint(11, (6, 9))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
    batch["labels"][2:, 3] = -100
    loss, count = loss_by_position(model, [{k: v[:2] for k, v in batch.items()}, batch])
    assert count.tolist() == [8, 8, 8, 4, 8, 8, 8, 8]
    whole = model(**batch)["loss_sum"] + model(**{k: v[:2] for k, v in batch.items()})["loss_sum"]
    assert (loss * count).sum().item() == pytest.approx(whole.item(), rel=1e-5)
    assert model.training


def test_what_cannot_be_compared_is_refused() -> None:
    model = GPT(GPTConfig(11, 8, 1, 8, 2))
    rows = [torch.zeros(1, length, dtype=torch.long) for length in (4, 5)]
    with pytest.raises(ValueError, match="give one length"):
        loss_by_position(model, [{"input_ids": row, "labels": row} for row in rows])
    with pytest.raises(ValueError, match="no batch"):
        loss_by_position(model, [])
    labels = torch.tensor([[1, -100], [-100, 1]])
    with pytest.raises(ValueError, match="same places"):
        accuracy_by_shots(model, {"input_ids": labels.abs() % 11, "labels": labels})
    with pytest.raises(ValueError, match="modulus must be at least 2"):
        ShiftTask(modulus=1)
