"""What every model has besides its mathematics: ties that last, counting, presets, files."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import psutil
import torch
from torch import Tensor, nn

from fmlab.models.hf import HFFormat
from fmlab.models.plan import ParallelPlan
from fmlab.models.presets import find_preset

M = TypeVar("M", bound="Model")


def _retie(model: nn.Module, _: object) -> None:  # a function of the module, so that models can be pickled
    cast(Model, model).tie()


class Model(nn.Module):
    """A list of blocks with a config; a family derives from it and says how its forward loops over them.

    A subclass sets `config` and `blocks`, then calls `finish()` at the end of its `__init__`.
    """

    #: The dataclass of the family's shapes.
    CONFIG: ClassVar[type]
    #: name -> keyword arguments of CONFIG, for from_preset.
    PRESETS: ClassVar[Mapping[str, dict[str, Any]]]
    #: Patterns (re.fullmatch) of parameters that hold token and position vectors, for num_parameters.
    TOKEN_TABLES: ClassVar[tuple[str, ...]] = ()
    POSITION_TABLES: ClassVar[tuple[str, ...]] = ()

    config: Any
    blocks: nn.ModuleList

    # ---- for a family to say -------------------------------------------------------------------------------

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameter names that are one parameter; the first name is its owner."""
        return ()

    def reset_parameters(self) -> None:
        """Fill all weights anew, as the family's paper or reference code does."""
        raise NotImplementedError

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        raise NotImplementedError

    @classmethod
    def hf_format(cls) -> HFFormat:
        """How the family is written in Hugging Face's format."""
        raise NotImplementedError

    # ---- ties ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Tie what is tied, keep it so, and fill the weights: the last line of a family's `__init__`."""
        self.tie()
        self.register_load_state_dict_post_hook(_retie)
        self.reset_parameters()

    def tie(self) -> None:
        """Make the parameters of each group in `ties()` one and the same again.

        torch quietly breaks ties: moving to another device type, `to_empty` and load_state_dict(assign=True)
        give each module a parameter of its own. We re-tie after each of them.
        """
        for owner, *others in self.ties():
            parameter = self.get_parameter(owner)
            for name in others:
                module, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(module), leaf, parameter)

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        super()._apply(fn, recurse)
        self.tie()
        return self

    # ---- counting, presets, files --------------------------------------------------------------------------

    def num_parameters(self, embeddings: bool = True, positions: bool = True) -> int:
        """Number of parameters, tied ones counted once.

        Args:
            embeddings: count the tables of token vectors (and an untied output matrix).
            positions: count the tables of position vectors.
        """
        patterns = (() if embeddings else self.TOKEN_TABLES) + (() if positions else self.POSITION_TABLES)
        named = self.named_parameters(remove_duplicate=False)
        left_out = {id(p) for name, p in named if any(re.fullmatch(pattern, name) for pattern in patterns)}
        return sum(p.numel() for p in self.parameters() if id(p) not in left_out)

    @classmethod
    def presets(cls) -> list[str]:
        """Names for from_preset."""
        return list(cls.PRESETS)

    @classmethod
    def from_preset(cls: type[M], name: str, **overrides: Any) -> M:
        """A model of a published shape with random weights; `overrides` replace fields of its config.

        On the meta device (`with torch.device("meta")`) the largest preset takes no memory; elsewhere a model
        whose weights alone exceed this machine's free memory, or a field that is unknown, raise ValueError.
        """
        cls._check_fields(overrides)
        build = cast(Callable[[Any], M], cls)
        config = cls.CONFIG(**(find_preset(name, dict(cls.PRESETS)) | overrides))
        if torch.get_default_device().type == "cpu":
            with torch.device("meta"):
                needed = build(config).num_parameters() * torch.get_default_dtype().itemsize
            free = psutil.virtual_memory().available
            if needed > free:
                raise ValueError(
                    f"the weights of {name} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
                    'build it on the meta device (with torch.device("meta"): ...) to count and plan'
                )
        return build(config)

    @classmethod
    def _check_fields(cls, overrides: dict[str, Any]) -> None:
        legal = [field.name for field in fields(cls.CONFIG)]
        if unknown := sorted(set(overrides) - set(legal)):
            raise ValueError(
                f"a {cls.CONFIG.__name__} has no {', '.join(unknown)}; its fields are: {', '.join(legal)}"
            )

    @classmethod
    def from_pretrained(cls: type[M], source: str | Path, **overrides: Any) -> M:
        """A model, in eval mode, from a folder or hub repository in Hugging Face's format; strict.

        `overrides` replace fields of its config. Raises ValueError that says what is missing, unexpected or
        of the wrong shape. Repositories need the extra `hf`.
        """
        cls._check_fields(overrides)
        return cast(M, cls.hf_format().load(cast(Callable[[Any], nn.Module], cls), source, **overrides))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and the weights in Hugging Face's format, which the reference library loads."""
        self.hf_format().save(self, folder)


def check_sizes(config: Any, *names: str) -> None:
    """Raise ValueError unless each of these fields is a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_dropout(config: Any, *names: str) -> None:
    """Raise ValueError unless each of these fields is a probability below 1."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raise ValueError, with the legal numbers, unless the heads divide the width."""
    if hidden_size % num_heads:
        legal = [n for n in range(1, hidden_size + 1) if hidden_size % n == 0]
        raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}; legal: {legal}")
