"""A small training step of each family, in fp64: a module that gives outputs and a loss, and its inputs."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import BERT, CLIP, GPT, T5, ResNet
from fmlab.models.diffusion import UNet
from tests.models.reference import roughen


class Step(nn.Module):
    """(model, a function of its result) -> the loss, and a tensor of the model's."""

    def __init__(self, model: nn.Module, loss: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(self.model(**inputs))


def ids(*shape: int, most: int = 64, seed: int = 0) -> Tensor:
    return torch.randint(4, most, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["loss_sum"], state["hidden"]


def logits(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["logits"].square().mean(), state["logits"]


def contrast(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores = state["logit_scale"] * state["image_embeddings"] @ state["text_embeddings"].T
    return F.cross_entropy(scores, torch.arange(len(scores))), scores


def classes(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(state["class_logits"], torch.tensor([1, 0])), state["class_logits"]


def denoised(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["sample"].square().mean(), state["sample"]


def _gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    model = GPT.from_preset("gpt2-tiny", num_layers=2, hidden_size=16, num_heads=2, vocab_size=64)
    return Step(model, summed), dict(input_ids=ids(2, 6), labels=ids(2, 6, seed=1))


def _bert() -> tuple[nn.Module, dict[str, Tensor]]:
    model = BERT.from_preset("bert-tiny", num_layers=1, hidden_size=16, num_heads=2, vocab_size=64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    return Step(model, logits), dict(input_ids=ids(2, 6), attention_mask=mask)


def _t5() -> tuple[nn.Module, dict[str, Tensor]]:
    model = T5.from_preset("t5-tiny", num_layers=1, hidden_size=16, num_heads=2, head_size=8, vocab_size=64)
    return Step(model, summed), dict(input_ids=ids(2, 6), labels=ids(2, 5, seed=1))


def _clip() -> tuple[nn.Module, dict[str, Tensor]]:
    texts = ids(2, 8)
    texts[:, -1] = 3
    config = CLIP.PRESETS["clip-tiny"]
    towers = {name: replace(config[name], num_layers=1, hidden_size=16) for name in ("text", "vision")}
    return Step(CLIP.from_preset("clip-tiny", **towers), contrast), dict(
        pixel_values=noise(2, 3, 32, 32), input_ids=texts
    )


def _unet() -> tuple[nn.Module, dict[str, Tensor]]:
    model = UNet.from_preset(
        "unet-tiny", channels=(8,), attention=(True,), heads=(2,), text_size=12, norm_groups=4
    )
    given = dict(sample=noise(2, 3, 8, 8), timestep=torch.tensor([981, 3]))
    return Step(model, denoised), given | dict(encoder_hidden_states=noise(2, 5, 12))


def _resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    return Step(ResNet.from_preset("resnet-tiny"), classes), dict(pixel_values=noise(2, 1, 16, 16))


FAMILIES = {"gpt": _gpt, "bert": _bert, "t5": _t5, "clip": _clip, "unet": _unet, "resnet": _resnet}


def step(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module and its inputs; no parameter is 0 or 1."""
    torch.manual_seed(0)
    module, inputs = FAMILIES[family]()
    roughen(module)
    return module.double().eval(), inputs
