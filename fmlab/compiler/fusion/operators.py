"""What each operator that can be fused computes: its expression, its cost, and how it walks over rows.

A fused group walks over rows [rows, columns], the last dim being the columns. In it an operator is

- elementwise: one element of the result from one of each input;
- by row: it needs a reduction over a row first, such as a softmax or a norm;
- labelled: a row has a label, the column that counts, as in a cross-entropy;
- by image: rows are the pixels of images, and a reduction goes over all pixels and a group of channels.
"""

from dataclasses import dataclass

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Elementwise:
    """An expression in C++ with {0}, {1} ... for the inputs; flops: its price in additions, roughly."""

    expression: str
    flops: int = 1


def _gelu(x: str) -> str:
    return f"({x} * T(0.5) * (T(1) + f_erf({x} * T(0.70710678118654752440))))"


#: Whose inputs are all read elementwise; broadcasting is the group's business.
ELEMENTWISE: dict[object, Elementwise] = {
    aten.add.Tensor: Elementwise("({0} + {1})"),
    aten.sub.Tensor: Elementwise("({0} - {1})"),
    aten.add.Scalar: Elementwise("({0} + {1})"),
    aten.sub.Scalar: Elementwise("({0} - {1})"),
    aten.mul.Scalar: Elementwise("({0} * {1})"),
    aten.div.Scalar: Elementwise("({0} / {1})", 4),
    aten.rsub.Scalar: Elementwise("({1} - {0})"),
    aten.mul.Tensor: Elementwise("({0} * {1})"),
    aten.div.Tensor: Elementwise("({0} / {1})", 4),
    aten.neg.default: Elementwise("(-{0})"),
    aten.abs.default: Elementwise("f_abs({0})"),
    aten.relu.default: Elementwise("f_relu({0})"),
    aten.exp.default: Elementwise("f_exp({0})", 12),
    aten.log.default: Elementwise("std::log({0})", 20),
    aten.tanh.default: Elementwise("f_tanh({0})", 20),
    aten.sigmoid.default: Elementwise("f_sigmoid({0})", 16),
    aten.erf.default: Elementwise("f_erf({0})", 24),
    aten.rsqrt.default: Elementwise("(T(1) / std::sqrt({0}))", 8),
    aten.sqrt.default: Elementwise("std::sqrt({0})", 6),
    aten.reciprocal.default: Elementwise("(T(1) / {0})", 4),
    aten.silu.default: Elementwise("({0} * f_sigmoid({0}))", 17),
    aten.where.self: Elementwise("({0} ? {1} : {2})"),
    aten.clone.default: Elementwise("{0}", 0),
    aten.threshold_backward.default: Elementwise("({1} <= {2} ? T(0) : {0})", 1),
    aten.tanh_backward.default: Elementwise("({0} * (T(1) - {1} * {1}))", 3),
    aten.sigmoid_backward.default: Elementwise("({0} * {1} * (T(1) - {1}))", 3),
    aten.silu_backward.default: Elementwise("f_silu_grad({0}, {1})", 22),
    aten.le.Scalar: Elementwise("({0} <= {1})"),
    aten.lt.Scalar: Elementwise("({0} < {1})"),
    aten.ge.Scalar: Elementwise("({0} >= {1})"),
    aten.gt.Scalar: Elementwise("({0} > {1})"),
    aten.eq.Scalar: Elementwise("({0} == {1})"),
    aten.ne.Scalar: Elementwise("({0} != {1})"),
    aten.logical_not.default: Elementwise("(!{0})"),
    # to the dtype of the result: rounded to 16 bits where it has 16, inside a group as well
    aten._to_copy.default: Elementwise("{0}", 0),
}

#: By the value of their `approximate`.
GELU = {"none": Elementwise(_gelu("{0}"), 30), "tanh": Elementwise("f_gelu_tanh({0})", 30)}
GELU_BACKWARD = {
    "none": Elementwise("f_gelu_grad({0}, {1})", 45),
    "tanh": Elementwise("f_gelu_tanh_grad({0}, {1})", 45),
}

#: Operators that reduce over the last dim of their first input: what they are called in the generated code.
BY_ROW = {
    aten.sum.dim_IntList: "sum",
    aten.mean.dim: "mean",
    aten.amax.default: "max",
    aten._softmax.default: "softmax",
    aten._log_softmax.default: "log_softmax",
    aten._softmax_backward_data.default: "softmax_backward",
    aten._log_softmax_backward_data.default: "log_softmax_backward",
    aten.native_layer_norm.default: "layer_norm",
    aten.native_layer_norm_backward.default: "layer_norm_backward",
}
#: Of a cross-entropy: a row of log-probabilities and a label.
LABELLED = {
    aten.nll_loss_forward.default: "nll_loss",
    aten.nll_loss_backward.default: "nll_loss_backward",
}
#: Of images in channels_last memory.
BY_IMAGE = {
    aten.native_group_norm.default: "group_norm",
    aten.native_group_norm_backward.default: "group_norm_backward",
}
#: Puts parts side by side: in a group each is written to its place in the wider result.
JOINING = aten.cat.default
REDUCING = {**BY_ROW, **LABELLED, **BY_IMAGE}
ROW_FLOPS = 20  # of one element in an operator by row, roughly: an exponential, or two passes and a division
