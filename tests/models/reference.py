"""Our model beside the reference implementation's with the same weights: copying, gradients, errors."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fmlab.models.hf import Weight, named_tensors


def roughen(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Move every parameter off 0 and 1, so that biases and norms count in a comparison."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * scale)


def copy_weights(model: nn.Module, twin: nn.Module, weights: Iterable[Weight]) -> None:
    """Give `twin` the weights of `model`; every parameter of both must be named once."""
    weights = list(weights)
    ours, theirs = named_tensors(model), named_tensors(twin)
    with torch.no_grad():
        for weight in weights:
            for name, part in zip(weight.names, weight.split(ours[weight.ours]), strict=True):
                theirs[name].copy_(part)
    copied = {id(theirs[name]) for weight in weights for name in weight.names}
    named = twin.named_parameters(remove_duplicate=False)
    left = [name for name, parameter in named if id(parameter) not in copied]
    assert not left, f"parameters of the reference without a counterpart: {left}"
    buffers = {name for name, _ in model.named_buffers()}
    assert {w.ours for w in weights} - buffers == {name for name, _ in model.named_parameters()}


def gradient_errors(model: nn.Module, twin: nn.Module, weights: Iterable[Weight]) -> dict[str, float]:
    """||ours - theirs|| / ||theirs|| by parameter; over the global norm where theirs is next to nothing.

    A parameter that neither side used is left out; one that a single side used is an error of 1.
    """
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    buffers = dict(model.named_buffers())
    for weight in (w for w in weights if w.ours not in buffers):
        grads = [twin.get_parameter(name).grad for name in weight.names]
        joined = None if any(g is None for g in grads) else weight.join([g for g in grads if g is not None])
        pairs[weight.ours] = (model.get_parameter(weight.ours).grad, joined)
    total = torch.stack([g.norm() for _, g in pairs.values() if g is not None]).norm()
    errors = {}
    for name, (ours, theirs) in pairs.items():
        if ours is None or theirs is None:
            unused = all(g is None or not g.any() for g in (ours, theirs))
            errors |= {} if unused else {name: 1.0}
            continue
        norm = theirs.norm()
        errors[name] = float((ours - theirs).norm() / (norm if norm > 1e-6 * total else total))
    return errors


def assert_same_gradients(
    model: nn.Module, twin: nn.Module, weights: Iterable[Weight], most: float = 1e-5
) -> None:
    """Every parameter of `model` has the gradient of the reference, up to `most`."""
    errors = gradient_errors(model, twin, list(weights))
    assert errors, "no gradient was compared"
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= most, f"{worst}: gradient off by {errors[worst]:.1e}"


def tokens(batch: int, length: int, vocab: int = 101, seed: int = 1) -> Tensor:
    """Random ids [batch, length]."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def shifted(ids: Tensor) -> Tensor:
    """Labels already shifted, none for the last token."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
