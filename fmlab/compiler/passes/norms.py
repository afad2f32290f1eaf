"""Norms that were written out become torch's one operator, with its one kernel forward and backward."""

from typing import Any

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, insert, replace
from fmlab.compiler.passes.match import Match, Number, OneOf, Op, Var, find

aten = torch.ops.aten


def _mean(of: Any) -> Op:
    return Op(aten.mean.dim, of, [-1], True)


def _square(of: Any) -> OneOf:
    return OneOf(Op(aten.pow.Tensor_Scalar, of, 2), Op(aten.mul.Tensor, of, of), Op(aten.square.default, of))


# region pattern
def _divided(x: Any, variance: Any) -> OneOf:
    """x * rsqrt(variance + eps), or x / sqrt(variance + eps)."""
    shifted = Op(aten.add.Tensor, variance, Number("eps"))
    return OneOf(
        Op(aten.mul.Tensor, x, Op(aten.rsqrt.default, shifted), swaps=True),
        Op(aten.div.Tensor, x, Op(aten.sqrt.default, shifted)),
    )


def _affine(normed: Any) -> OneOf:
    scaled = Op(aten.mul.Tensor, normed, Var("weight"), swaps=True)
    return OneOf(Op(aten.add.Tensor, scaled, Var("bias"), swaps=True), scaled, normed)


# The centred stream is written once and read twice, so both of its places are the one node.
_CENTRED = Op(aten.sub.Tensor, Var("x"), _mean(Var("x")))
LAYER_NORM = _affine(_divided(_CENTRED, _mean(_square(_CENTRED))))
RMS_NORM = _affine(_divided(Var("x"), _mean(_square(Var("x")))))
# endregion


class Norms(GraphPass):
    """(x - mean) / sqrt(var + eps) * w + b over the last dim becomes layer_norm, x / rms * w rms_norm.

    Made before differentiation, so that the gradient is the operator's too. Left alone: a mean, a variance or
    a normed stream that somebody else reads; weights of other shapes than the last dim; x of 16 bits, which
    the operators round once and the written-out norm after each step.
    """

    name = "norms"
    claims = "equal up to rounding; NaN and infinities spread over the same rows"
    source = True

    def apply(self, graph: fx.Graph, report: Report) -> None:
        alive = set(graph.nodes)
        for node in reversed(list(graph.nodes)):
            if node.op != "call_function" or node not in alive:
                continue
            for name, pattern in (("layer_norm", LAYER_NORM), ("rms_norm", RMS_NORM)):
                match = find(pattern, node)
                if match is not None and self._legal(node, match, name, report):
                    report.made[name] += 1
                    replace(node, self._norm(node, name, match))
                    drop_unread(graph)  # at once: a part of this norm must not be taken for another one
                    alive = set(graph.nodes)
                    break

    @staticmethod
    def _legal(node: fx.Node, match: Match, name: str, report: Report) -> bool:
        x = g.value(match["x"])
        if other := match.read_elsewhere():
            report.refused.append(f"{node.name}: {other[0].name} has a second reader")
        elif x.dtype.itemsize < 4 or not x.is_floating_point() or g.value(node).dtype != x.dtype:
            report.refused.append(f"{node.name}: {name} of {x.dtype} rounds elsewhere")
        elif any(g.shape(match[key]) != x.shape[-1:] for key in ("weight", "bias") if key in match.names):
            report.refused.append(f"{node.name}: weight or bias is not [{x.shape[-1]}]")
        elif "bias" in match.names and name == "rms_norm":
            report.refused.append(f"{node.name}: rms_norm has no bias")
        else:
            return True
        return False

    @staticmethod
    def _norm(node: fx.Node, name: str, match: Match) -> fx.Node:
        x, weight, bias, eps = match["x"], match.get("weight"), match.get("bias"), match["eps"]
        width = [g.shape(x)[-1]]
        if name == "layer_norm":
            return insert(node, aten.layer_norm.default, x, width, weight, bias, eps)
        return insert(node, aten.rms_norm.default, x, width, weight, eps)
