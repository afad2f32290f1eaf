"""Checkers of notebook 1.1."""

from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.1.1", "one step of a GRU")
def gru_step(answer: Answer) -> str:
    import torch

    for batch, inputs, width in ((1, 3, 4), (5, 2, 3), (4, 4, 4)):
        torch.manual_seed(width)
        cell = torch.nn.GRUCell(inputs, width)
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.normal_()
            x, h = torch.randn(batch, inputs), torch.randn(batch, width)
            weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            right = cell(x, h)
            got = answer(x, h, *(w.detach().clone() for w in weights))
            _same_shape(got, right)
            if torch.allclose(got, right, atol=1e-5):
                continue
            what = f"off by up to {(got - right).abs().max().item():.2g} from torch.nn.GRUCell"
            _gru_hints(what, got, x, h, weights)
    return "3 shapes, equal to torch.nn.GRUCell"


def _gru_hints(what: str, got: Any, x: Any, h: Any, weights: Any) -> None:
    """Raise NotYet with the hint for the mistake that gives these numbers."""
    import torch

    w_x, w_h, b_x, b_h = weights
    width = h.shape[-1]
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (x @ w_x.T + b_x).chunk(3, -1), (h @ w_h.T + b_h).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    inside = torch.tanh(x_n + (r * h) @ w_h[2 * width :].T + b_h[2 * width :])
    n_swapped = torch.tanh(x_n + z * h_n)
    mistakes = {
        "which of the two does z keep, and which does it let in?": (1 - z) * h + z * n,
        "r scales the product U h with its bias, not h before the product": z * h + (1 - z) * inside,
        "look at the order of the gates: r, then z, then n": r * h + (1 - r) * n_swapped,
    }
    for hint, wrong in mistakes.items():
        if torch.allclose(got, wrong, atol=1e-5):
            raise NotYet(what, hint, "next = z * h + (1 - z) * tanh(W x + b + r * (U h + b'))")
    raise NotYet(
        what, "try it with one row and all biases 0, then with them", "each of the two products has its bias"
    )


@exercise("1.1.2", "the last state of each direction")
def last_states(answer: Answer) -> str:
    import torch

    for batch, length, width in ((4, 6, 3), (1, 5, 2), (3, 1, 4)):
        generator = torch.Generator().manual_seed(length)
        outputs = torch.randn(batch, length, 2 * width, generator=generator)
        lengths = torch.randint(1, length + 1, (batch,), generator=generator)
        lengths[0] = max(1, length - 2)
        rows = torch.arange(batch)
        forward, backward = outputs[rows, lengths - 1, :width], outputs[:, 0, width:]
        got = answer(outputs.clone(), lengths.clone())
        right = torch.cat([forward, backward], -1)
        _same_shape(got, right)
        if torch.equal(got, right):
            continue
        what = f"wrong for {batch} rows of lengths {lengths.tolist()} padded to {length}"
        if torch.equal(got, torch.cat([backward, forward], -1)):
            raise NotYet(what, "the forward half comes first")
        if not torch.equal(got[:, width:], backward):
            raise NotYet(
                what,
                "the backward direction ends where?",
                "it reads from the last token to the first: its last state stands at position 0",
            )
        if torch.equal(got[:, :width], outputs[:, -1, :width]):
            raise NotYet(what, "the last position of a short row is padding", "use lengths")
        raise NotYet(what, "positions are counted from 0", "the last token stands at lengths - 1")
    return "3 batches, every row"


@exercise("1.1.3", "how deep must a convolution be", returns=int)
def layers_needed(answer: Answer) -> str:
    for distance, kernel in ((1, 2), (2, 3), (20, 3), (15, 3), (31, 3), (100, 5), (255, 2), (256, 2), (0, 3)):
        right = 0
        while (kernel - 1) * (2**right - 1) < distance:
            right += 1
        got = answer(distance, kernel)
        if got == right:
            continue
        what = f"got {got}, the fewest are {right}, for distance {distance} and {kernel} taps"
        field = (kernel - 1) * (2**got - 1) if got < 64 else 0
        if field == distance - 1:
            raise NotYet(what, "distance counts positions back: the token itself is at distance 0")
        if got > right:
            raise NotYet(what, "the layers add up: each reaches on from where the one below it ended")
        raise NotYet(
            what, "count the spaces between the taps", "k taps have k - 1 spaces, each of 2^layer positions"
        )
    return "9 pairs of distance and kernel"


def _same_shape(got: Any, right: Any) -> None:
    if tuple(getattr(got, "shape", ())) != tuple(right.shape):
        raise NotYet(
            f"got shape {tuple(getattr(got, 'shape', ()))}, expected {tuple(right.shape)}", "check the dims"
        )
