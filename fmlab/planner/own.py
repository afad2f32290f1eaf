"""Models that are not fmlab's, for the commands that plan and start their training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fmlab.planner.modelshape import ModelShape


@dataclass(frozen=True)
class OwnModels:
    """The models of a project that uses fmlab; see `fmlab new`.

    program: the module that trains them: `python -m program --config FILE`, or torchrun instead of python.
    build: name -> what builds the model. It is called on the meta device where the model is only looked at.
    shapes: name -> what a plan knows of it.

    Raises ValueError unless every model has a shape of its own name.
    """

    program: str
    build: Mapping[str, Callable[[], nn.Module]]
    shapes: Mapping[str, ModelShape]

    def __post_init__(self) -> None:
        if self.build.keys() != self.shapes.keys():
            raise ValueError(
                f"build has {sorted(self.build)} and shapes {sorted(self.shapes)}: give both for each model"
            )
        if wrong := [name for name, shape in self.shapes.items() if shape.name != name]:
            raise ValueError(
                f"the shape of {wrong[0]!r} is called {self.shapes[wrong[0]].name!r}: call it so"
            )

    def on_meta(self, name: str) -> nn.Module:
        """The model without weights."""
        with torch.device("meta"):
            return self.build[name]()

    def shape(self, name: str) -> ModelShape:
        """The shape of the model.

        Raises ValueError for an unknown name, and unless the model has as many parameters as its shape says:
        a plan of another model would be wrong in every line.
        """
        if name not in self.shapes:
            raise ValueError(f"there is no model {name!r} here; the models are: {', '.join(self.shapes)}")
        counted = sum(p.numel() for p in self.on_meta(name).parameters())
        if counted != (planned := self.shapes[name].parameters):
            raise ValueError(
                f"the model {name!r} has {counted:,} parameters, and its shape says {planned:,}: put the "
                "shape right, and with it the plan"
            )
        return self.shapes[name]
