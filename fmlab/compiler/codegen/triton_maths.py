"""What each operator of a fused group is in Triton: an expression, or a function that its file brings along.

Functions that Triton has are used as they are. tanh is not among them; it is written here so that it neither
overflows nor loses digits near 0. Each keeps NaN, and infinities where torch does.
"""

import re

import torch

aten = torch.ops.aten

#: With {0}, {1} ... for the inputs: names of values, or numbers.
EXPRESSIONS: dict[object, str] = {
    aten.add.Tensor: "{0} + {1}",
    aten.sub.Tensor: "{0} - {1}",
    aten.rsub.Scalar: "{1} - {0}",
    aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}",
    aten.add.Scalar: "{0} + {1}",
    aten.sub.Scalar: "{0} - {1}",
    aten.mul.Scalar: "{0} * {1}",
    aten.div.Scalar: "{0} / {1}",
    aten.neg.default: "{0} * (-1.0)",  # Triton's -x is 0 - x, which turns 0 into 0 and not into -0
    aten.abs.default: "tl.abs({0})",
    aten.relu.default: "tl.where({0} < 0, 0.0, {0})",
    aten.exp.default: "tl.exp({0})",
    aten.log.default: "tl.log({0})",
    aten.tanh.default: "f_tanh({0})",
    aten.sigmoid.default: "tl.sigmoid({0})",
    aten.erf.default: "tl.erf({0})",
    aten.rsqrt.default: "1 / tl.sqrt({0})",
    aten.sqrt.default: "tl.sqrt({0})",
    aten.reciprocal.default: "1 / {0}",
    aten.silu.default: "{0} * tl.sigmoid({0})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.threshold_backward.default: "tl.where({1} <= {2}, 0.0, {0})",
    aten.tanh_backward.default: "{0} * (1 - {1} * {1})",
    aten.sigmoid_backward.default: "{0} * {1} * (1 - {1})",
    aten.silu_backward.default: "f_silu_grad({0}, {1})",
    aten.le.Scalar: "{0} <= {1}",
    aten.lt.Scalar: "{0} < {1}",
    aten.ge.Scalar: "{0} >= {1}",
    aten.gt.Scalar: "{0} > {1}",
    aten.eq.Scalar: "{0} == {1}",
    aten.ne.Scalar: "{0} != {1}",
    aten.logical_not.default: "{0} == 0",
}
#: Those that may give or take truth values; elsewhere a truth value is a number, 0 or 1.
LOGICAL = {
    aten.where.self, aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar,
    aten.ne.Scalar, aten.logical_not.default,
}  # fmt: skip

#: By the value of their `approximate`.
GELU = {"none": "f_gelu({0})", "tanh": "f_gelu_tanh({0})"}
GELU_BACKWARD = {"none": "f_gelu_grad({0}, {1})", "tanh": "f_gelu_tanh_grad({0}, {1})"}

FUNCTIONS = {
    "f_tanh": '''
@triton.jit
def f_tanh(x):
    size = tl.abs(x)
    power = tl.exp(-2 * size)  # of a negative number: it cannot overflow
    s = x * x
    near = size * (1 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835)))))
    y = tl.where(size < 0.1, near, (1 - power) / (1 + power))
    return tl.where(x < 0, y * (-1.0), y)
''',
    "f_gelu": '''
@triton.jit
def f_gelu(x):
    return 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
''',
    "f_gelu_grad": '''
@triton.jit
def f_gelu_grad(d, x):
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return d * (0.5 * (1 + tl.erf(0.7071067811865476 * x)) + x * density)
''',
    "f_gelu_tanh": '''
@triton.jit
def f_gelu_tanh(x):
    return 0.5 * x * (1 + f_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
''',
    "f_gelu_tanh_grad": '''
@triton.jit
def f_gelu_tanh_grad(d, x):
    t = f_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 0.7978845608028654 * (1 + 0.134145 * x * x)
    return d * 0.5 * (1 + t + x * (1 - t * t) * slope)
''',
    "f_silu_grad": '''
@triton.jit
def f_silu_grad(d, x):
    share = tl.sigmoid(x)
    return d * share * (1 + x * (1 - share))
''',
    "f_row_sum": '''
@triton.jit
def f_row_sum(x, inside):
    return tl.sum(tl.where(inside, x, 0.0), axis=1, keep_dims=True)
''',
    "f_tile_sum": '''
@triton.jit
def f_tile_sum(x, inside):
    return tl.sum(f_row_sum(x, inside), axis=0, keep_dims=True)
''',
    "f_row_max": '''
@triton.jit
def f_row_max(x, inside):
    return tl.max(tl.where(inside, x, -float("inf")), axis=1, keep_dims=True)
''',
    "f_row_max_or_nan": '''
@triton.jit
def f_row_max_or_nan(x, inside):
    unknown = f_row_sum(tl.where(x == x, 0.0, 1.0), inside)  # tl.max leaves NaN out, and torch does not
    return tl.where(unknown > 0, float("nan"), f_row_max(x, inside))
''',
}  # fmt: skip


def functions_in(text: str) -> list[str]:
    """The texts of the functions that `text` calls, and of those they call, each behind what it needs."""
    found: list[str] = []
    seen: set[str] = set()

    def visit(text: str) -> None:
        for name in re.findall(r"\b(f_\w+)\(", text):
            if name not in seen:
                seen.add(name)
                visit(FUNCTIONS[name])
                found.append(FUNCTIONS[name].strip())

    visit(text)
    return found
