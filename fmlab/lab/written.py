"""What chapter 1.13 compiles: a GPT layer as one writes it down, and small models of other kinds beside
it."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import BERT, GPT, T5, ResNet


# region norm
def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the last dim, step by step."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias


# endregion


class WrittenLayer(nn.Module):
    """x [b,l,d] -> [b,l,d]: a pre-norm GPT layer without a fused operator in it."""

    def __init__(self, width: int = 256, heads: int = 4):
        super().__init__()
        self.heads = heads
        names = ("query", "key", "value", "output")
        self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.weights = nn.ParameterList([1 + 0.1 * torch.randn(width) for _ in range(2)])
        self.biases = nn.ParameterList([0.1 * torch.randn(width) for _ in range(2)])

    # region forward
    def forward(self, x: Tensor) -> Tensor:
        b, length, d = x.shape
        normed = norm(x, self.weights[0], self.biases[0])
        parts = [self.attention[name](normed) for name in ("query", "key", "value")]
        q, k, v = (part.view(b, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + self.attention["output"](mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm(x, self.weights[1], self.biases[1]))))

    # endregion


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU of x [..., d] + bias [d] as one operator of a graph; what a fused kernel computes."""
    return F.gelu(x + bias, approximate=approximate)


def loss_and_gradients(model: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """The sum of squares of model(x), and the gradients of all parameters one after the other in a vector."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Reads(nn.Module):
    """A model whose result is one tensor of its State."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, **inputs: Tensor) -> Tensor:
        result: Tensor = self.model(**inputs)[self.name]
        return result


Given = tuple[nn.Module, dict[str, Tensor]]


def _ids(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape) % 60 + 4


def _layer() -> Given:
    return WrittenLayer(), dict(x=torch.randn(2, 128, 256))


def _gpt() -> Given:
    model = GPT.from_preset("gpt2-tiny", num_layers=1)
    return Reads(model, "loss_sum"), dict(input_ids=_ids(2, 32), labels=_ids(2, 32))


def _bert() -> Given:
    model = BERT.from_preset("bert-tiny", num_layers=1)
    return Reads(model, "logits"), dict(input_ids=_ids(2, 32))


def _t5() -> Given:
    model = T5.from_preset("t5-tiny", num_layers=1)
    return Reads(model, "loss_sum"), dict(input_ids=_ids(2, 32), labels=_ids(2, 16))


def _resnet() -> Given:
    return Reads(ResNet.from_preset("resnet-tiny"), "class_logits"), dict(
        pixel_values=torch.randn(2, 1, 16, 16)
    )


#: Name -> a function that makes the model and its inputs, always with the same numbers.
MODELS: dict[str, Callable[[], Given]] = {
    "GPT layer, written out": _layer,
    "GPT, 1 layer and loss": _gpt,
    "BERT, 1 layer": _bert,
    "T5, 1 + 1 layers": _t5,
    "ResNet, small": _resnet,
}


def given(name: str) -> Given:
    """One of MODELS in eval mode, and its inputs. ValueError for another name."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; legal are: {', '.join(MODELS)}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
    return model.eval(), inputs
