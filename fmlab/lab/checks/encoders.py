"""Checkers of notebook 3.3."""

import torch

from fmlab.lab.exercises import Answer, NotYet, exercise
from fmlab.objectives import soft_loss


def _allowed(documents: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    same = documents[:, :, None] == documents[:, None, :]
    return same & real[:, None, :]


@exercise("3.3.1", "who sees whom in a packed row", returns=torch.Tensor)
def packed_mask(answer: Answer) -> str:
    cases = [
        ([[0, 0, 1, 1, 1, 2]], [[1, 1, 1, 1, 1, 0]]),
        ([[0, 0, 0], [0, 1, 1]], [[1, 1, 1], [1, 1, 0]]),
        ([[3, 3, 7, 7]], [[1, 1, 1, 1]]),
    ]
    for numbers, given in cases:
        documents, real = torch.tensor(numbers), torch.tensor(given).bool()
        got, right = answer(documents.clone(), real.clone()), _allowed(documents, real)
        if got.shape != right.shape:
            raise NotYet(f"got the shape {list(got.shape)}", f"return [b, l, l], here {list(right.shape)}")
        if got.dtype != torch.bool:
            raise NotYet(f"got {got.dtype}", "return bool: True where a query may see a key")
        if torch.equal(got, right):
            continue
        what = f"wrong for documents {numbers}, real {given}"
        if torch.equal(got, right.transpose(1, 2)):
            raise NotYet(
                what, "padding is hidden as a key (the last dim), not as a query", "real[:, None, :]"
            )
        causal = torch.ones_like(right[0]).tril()
        if torch.equal(got, right & causal):
            raise NotYet(what, "an encoder looks in both directions: nothing is causal here")
        if torch.equal(got, (documents[:, :, None] == documents[:, None, :])):
            raise NotYet(what, "padding must be hidden too: use `real`", "and it with real[:, None, :]")
        if torch.equal(got, real[:, None, :].expand_as(right)):
            raise NotYet(what, "two documents of a row see each other: compare their numbers")
        raise NotYet(what, "a query sees a key if both have the same document and the key is real")
    return "three packed rows"


@exercise("3.3.2", "the teacher's answers, softened", returns=torch.Tensor)
def distil_loss(answer: Answer) -> str:
    generator = torch.Generator().manual_seed(0)
    for temperature in (1.0, 2.0, 4.0):
        student, teacher = (torch.randn(5, 7, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
        right = soft_loss(student, teacher, temperature) / 5
        got = answer(student.clone(), teacher.clone(), temperature).double()
        if got.dim():
            raise NotYet(f"got the shape {list(got.shape)}", "return one number: the mean over rows")
        if torch.isclose(got, right, rtol=1e-5):
            continue
        what = f"got {got.item():.4f} at temperature {temperature:g}, expected {right.item():.4f}"
        if torch.isclose(got, right / temperature**2, rtol=1e-5):
            raise NotYet(
                what,
                "softened gradients shrink by the temperature squared: what gives them back?",
                "times temperature ** 2",
            )
        if torch.isclose(got, soft_loss(teacher, student, temperature) / 5, rtol=1e-5):
            raise NotYet(
                what, "which of the two is the truth? The divergence is from the teacher", "sum p_teacher · …"
            )
        if torch.isclose(got, right / 7, rtol=1e-5):
            raise NotYet(
                what, "sum over the vocabulary, then take the mean over rows", "not over 5 x 7 numbers"
            )
        if torch.isclose(got, soft_loss(student, teacher, 1.0) / 5, rtol=1e-5):
            raise NotYet(what, "divide both sides' logits by the temperature before the softmax")
        raise NotYet(
            what, "KL(teacher || student) of logits / temperature", "sum p · (log p - log q) · temperature²"
        )
    return "temperatures 1, 2 and 4"


@exercise("3.3.3", "a share of the norm", returns=torch.Tensor)
def lamb_step(answer: Answer) -> str:
    generator = torch.Generator().manual_seed(1)
    weight, update = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    zero = torch.zeros_like(weight)
    cases = [
        ("a matrix", weight, update),
        ("a larger one", 9 * weight, update),
        ("a table of zeros", zero, update),
    ]
    cases.append(("a step of zeros", weight, zero))
    for name, w, u in cases:
        decayed = u + 0.1 * w
        ratio = w.norm() / decayed.norm() if w.norm() > 0 and decayed.norm() > 0 else torch.tensor(1.0)
        right = w - 0.02 * ratio * decayed
        got = answer(w.clone(), u.clone(), 0.02, 0.1)
        if not torch.isfinite(got).all():
            raise NotYet(f"got a number that is not finite for {name}", "the share is 1 where a norm is 0")
        if torch.allclose(got, right):
            continue
        what = f"wrong for {name}"
        if torch.allclose(got, w):
            raise NotYet(what, "weights that are 0 must move too: there the share is 1")
        if torch.allclose(got, w - 0.02 * decayed):
            raise NotYet(what, "scale the step to the length of the weight", "times ‖weight‖ / ‖step‖")
        if torch.allclose(got, w - 0.02 * (w.norm() / u.norm() * u + 0.1 * w)):
            raise NotYet(what, "the decay belongs to the step before its norm is taken")
        if torch.allclose(got, w - 0.02 * decayed / decayed.norm()):
            raise NotYet(what, "the step becomes as long as a share of the WEIGHT, not of length 1")
        raise NotYet(what, "step = update + decay · weight; then weight - lr · ‖weight‖ / ‖step‖ · step")
    return "matrices, a table of zeros, a step of zeros"
