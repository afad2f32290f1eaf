"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): W x becomes W x + (alpha / r) B A x.

W is frozen; A [r,i] and B [o,r] learn. B starts at 0, so that the adapted model starts as the base, bit for
bit. Afterwards the product can be added to W: the merged model costs nothing extra to run.

Matrices that lie in one fused matrix here count as themselves: `qkv` as query, key and value, `key_value` as
key and value, `gate_up` as gate and up. Each that is asked for gets its own A and B.

Shapes: i inputs and o outputs of a matrix, r rank.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.functions import linear
from fmlab.models.layers import Linear
from fmlab.train.adapt import Trained, only_train, shown

#: What lies in a fused matrix, in order, in equal parts.
FUSED = {"qkv": ("query", "key", "value"), "key_value": ("key", "value"), "gate_up": ("gate", "up")}
#: Matrices whose weight is read by the module around them, so that an update here would do nothing: a router
#: of experts (in fp32), the projections around a UNet's transformers (matrices or 1x1 convolutions).
READ_OUTSIDE = ("router", "enter", "leave")
ADAPTERS = r".*\.lora_[ab]\..*"


@dataclass(frozen=True)
class LoRA:
    """Which matrices get an update, and of what rank.

    rank:    of each update
    alpha:   the update is scaled by alpha / rank; None for twice the rank
    targets: patterns (re.fullmatch) of the matrices, such as "blocks.3.mlp.down"; by default all queries and
             values, as the paper has it (section 5.1)
    dropout: of the updates' inputs, while training

    Raises ValueError for values out of range.
    """

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = (r".*attention\.(query|value)",)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2.0 * self.rank)
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not self.scale > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def scale(self) -> float:
        return (self.alpha or 0.0) / self.rank

    def chosen(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Module -> its parts that are adapted. Raises ValueError for a pattern that matches nothing, or that
        matches a matrix which is too small, or one that others read by themselves."""
        names = matrices(model)
        chosen: dict[str, list[str]] = {}
        for pattern in self.targets:
            matched = [name for name in names if re.fullmatch(pattern, name)]
            if not matched:
                raise ValueError(f"no matrix is called {pattern!r}; there are {shown(names)}")
            for name in matched:
                module, part = names[name]
                if part not in chosen.setdefault(module, []):
                    chosen[module].append(part)
        for module, parts in chosen.items():
            _check(self, model, module)
            order = parts_of(module)
            chosen[module] = [part for part in order if part in parts]
        return {module: tuple(parts) for module, parts in chosen.items()}

    def parameters(self, model: nn.Module) -> int:
        """How many parameters learn: r * (i + o) for each matrix. Counted from shapes: works on meta."""
        count = 0
        for module, parts in self.chosen(model).items():
            outputs, inputs = model.get_parameter(f"{module}.weight").shape
            count += len(parts) * self.rank * (inputs + outputs // len(parts_of(module)))
        return count


class LoRALinear(Linear):
    """A linear layer with low-rank updates. `weight` and `bias` are those of the layer it replaces."""

    def __init__(self, base: Linear, module: str, parts: tuple[str, ...], lora: LoRA):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.order, self.scale, self.dropout = parts_of(module), lora.scale, lora.dropout
        outputs = base.weight.shape[0] // len(self.order)
        new = base.weight.new_empty
        self.lora_a = nn.ParameterDict({p: nn.Parameter(new(lora.rank, base.in_features)) for p in parts})
        self.lora_b = nn.ParameterDict({p: nn.Parameter(new(outputs, lora.rank)) for p in parts})
        self.unmerged: Tensor | None = None  # the base's weight, while it is merged

    def forward(self, x: Tensor) -> Tensor:
        return self._adapted(x, super().forward(x))

    def product(self, x: Tensor) -> Tensor:
        return self._adapted(x, super().product(x))

    # region adapted
    def _adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """y [...,o] with the updates of x [...,i]; on a rank with part of the rows, theirs."""
        if self.unmerged is not None:
            return y
        x = F.dropout(x, self.dropout, self.training)
        pieces = list(y.chunk(len(self.order), -1))
        for place, part in enumerate(self.order):
            if part in self.lora_a:
                update = linear(linear(x, self.lora_a[part]), self.lora_b[part])
                pieces[place] = pieces[place] + self.scale * update
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def delta(self) -> Tensor:
        """What merging adds to the weight, [o,i]."""
        updates = torch.zeros_like(self.weight)
        for place, part in enumerate(self.order):
            if part in self.lora_a:
                rows = updates.chunk(len(self.order))[place]
                rows += self.scale * self.lora_b[part] @ self.lora_a[part]
        return updates

    # endregion


@torch.no_grad()
def add_lora(model: nn.Module, lora: LoRA | None = None, seed: int = 0) -> Trained:
    """Freeze the model and give its chosen matrices low-rank updates, in place; what learns.

    A is uniform in +-1 / sqrt(i), as the authors' code has it (the paper: Gaussian); B is 0. Parameters are
    named after the layer: `blocks.1.attention.qkv.lora_a.query`.

    seed: of A; every rank passes the same

    Raises ValueError for a model that has updates already, or as `LoRA.chosen` does.
    """
    lora = lora or LoRA()
    if any(True for _ in lora_layers(model)):
        raise ValueError("the model has low-rank updates already; merge_lora or remove_lora them first")
    generator = torch.Generator().manual_seed(seed)
    for module, parts in lora.chosen(model).items():
        base = model.get_submodule(module)
        assert isinstance(base, Linear)
        layer = LoRALinear(base, module, parts, lora).train(base.training)
        for part in parts:
            bound = 1 / math.sqrt(base.in_features)
            start = torch.empty(layer.lora_a[part].shape).uniform_(-bound, bound, generator=generator)
            layer.lora_a[part].copy_(start)
            layer.lora_b[part].zero_()
        replace(model, module, layer)
    return only_train(model, ADAPTERS)


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the updates to the weights, which then do all the work; nothing learns meanwhile.

    A copy of each weight is kept, so that `unmerge_lora` gives back exactly what was there: in floating point
    W + D - D is not W.
    """
    for _, layer in _layers(model):
        if layer.unmerged is None:
            layer.unmerged = layer.weight.detach().clone()
            layer.weight.add_(layer.delta())
    _let_learn(model, False)


@torch.no_grad()
def unmerge_lora(model: nn.Module) -> None:
    """Take the updates out of the weights again, bit for bit."""
    for _, layer in _layers(model):
        if layer.unmerged is not None:
            layer.weight.copy_(layer.unmerged)
            layer.unmerged = None
    _let_learn(model, True)


def remove_lora(model: nn.Module) -> None:
    """Put plain layers back: with the updates in their weights if merged, without them if not.

    After merge_lora and this, the model is one of its family, to be saved or trained as any other.
    """
    for module, layer in list(_layers(model)):
        plain = Linear.__new__(Linear)
        nn.Module.__init__(plain)
        plain.in_features, plain.out_features = layer.in_features, layer.out_features
        plain.weight, plain.bias = layer.weight, layer.bias
        replace(model, module, plain.train(layer.training))
    only_train(model)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers and their names."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def matrices(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Name of each matrix that can be adapted -> (module, part); a fused module gives several."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            for part in parts_of(name):
                found[f"{name.rpartition('.')[0]}.{part}".lstrip(".")] = (name, part)
    return found


def parts_of(module: str) -> tuple[str, ...]:
    """The matrices in the module of this name."""
    leaf = module.rpartition(".")[2]
    return FUSED.get(leaf, (leaf,))


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _layers(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    layers = list(lora_layers(model))
    if not layers:
        raise ValueError("the model has no low-rank updates; add_lora gives it some")
    return layers


def _let_learn(model: nn.Module, learn: bool) -> None:
    for _, layer in lora_layers(model):
        for parameter in (*layer.lora_a.values(), *layer.lora_b.values()):
            parameter.requires_grad_(learn)


def _check(lora: LoRA, model: nn.Module, module: str) -> None:
    outputs, inputs = model.get_parameter(f"{module}.weight").shape
    least = min(inputs, outputs // len(parts_of(module)))
    if lora.rank > least:
        raise ValueError(
            f"rank {lora.rank} is more than the matrix {module} has, {least}: train it whole (only_train), "
            f"or choose a rank of 1 to {least}"
        )
    if module.rpartition(".")[2] in READ_OUTSIDE:
        raise ValueError(f"{module} is read by the module around it and cannot be adapted; leave it out")
    if any(re.fullmatch(pattern, f"{module}.weight") for pattern in getattr(model, "TOKEN_TABLES", ())):
        raise ValueError(
            f"{module} is the output matrix, which the loss reads itself (and which may be the token "
            "embedding): it cannot be adapted; name the matrices of the layers"
        )
