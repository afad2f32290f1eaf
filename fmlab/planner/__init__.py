"""The planner: what a run will need and how long it will take, by arithmetic on shapes.

    model_shape("gpt3-175b").parameters           174,604,259,328: the same as the model's, without a tensor
    gpt_shape(layers=…, hidden=…, …)              shapes that no preset has

Everything that comes out of here is modelled; what a plan is compared with is measured or quoted.
"""

from fmlab.planner.shapes import (
    LayerGroup,
    ModelShape,
    bert_shape,
    gpt_shape,
    llama_shape,
    model_shape,
    t5_shape,
)

__all__ = [
    "LayerGroup",
    "ModelShape",
    "bert_shape",
    "gpt_shape",
    "llama_shape",
    "model_shape",
    "t5_shape",
]
