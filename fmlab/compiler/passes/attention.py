"""Attention that was written out becomes torch's one operator, which never holds the scores."""

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, insert, replace
from fmlab.compiler.passes.cleaning import FACTORIES
from fmlab.compiler.passes.match import Match, Number, OneOf, Op, Var, find

aten = torch.ops.aten


# region pattern
def _scores() -> OneOf:
    keys = OneOf(Op(aten.transpose.int, Var("k"), -2, -1), Op(aten.transpose.int, Var("k"), -1, -2))
    product = Op(aten.matmul.default, Var("q"), keys)
    return OneOf(
        Op(aten.mul.Tensor, product, Number("factor")),
        Op(aten.div.Tensor, product, Number("divisor")),
        product,
    )


_MASKED = OneOf(
    Op(aten.masked_fill.Scalar, _scores(), Var("hidden"), Number("fill")),
    Op(aten.add.Tensor, _scores(), Var("added")),
    _scores(),
)
_PROBS = OneOf(
    Op(aten.softmax.int, _MASKED, -1), Op(aten.softmax.int, _MASKED, 3), Op(aten.softmax.int, _MASKED, 2)
)
_MAYBE_DROPPED = OneOf(Op(aten.dropout.default, _PROBS, Number("p"), False), _PROBS)  # off: in eval mode
ATTENTION = Op(aten.matmul.default, _MAYBE_DROPPED, Var("v"))
# endregion


class AttentionToSDPA(GraphPass):
    """softmax(scale * q k^T, masked) v becomes scaled_dot_product_attention.

    Made before differentiation, so that the gradient is the operator's too. Left alone: probabilities or
    scores that somebody else reads, dropout, a softmax over another dim, and a mask under which a row might
    see nothing: such a row is NaN when written out with -inf, and 0 in the operator. A mask made of constants
    is looked at; for one that is an input, `every_row_sees` is the caller's word.
    """

    name = "attention"
    claims = "equal up to rounding wherever every query sees a key"
    source = True

    def __init__(self, every_row_sees: bool = False):
        self.every_row_sees = every_row_sees

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or not node.users:
                continue
            if _drops(node):
                report.refused.append(f"{node.name}: the probabilities pass through dropout")
                continue
            match = find(ATTENTION, node)
            if match is None or not _fits(node, match, report):
                continue
            made = self._operator(node, match, report)
            if made is not None:
                replace(node, made)
                for inner in match.inside[1:]:  # a dropout that is off counts as random, and would stay
                    if not inner.users:
                        graph.erase_node(inner)
        drop_unread(graph)

    def _operator(self, node: fx.Node, match: Match, report: Report) -> fx.Node | None:
        q, k, v = match["q"], match["k"], match["v"]
        scale = 1.0
        if "factor" in match.names:
            scale = float(match["factor"])
        elif "divisor" in match.names:
            scale = 1.0 / match["divisor"]
        causal, mask = False, None
        if "hidden" in match.names or "added" in match.names:
            sees = _visible(match)
            if sees is None and not self.every_row_sees:
                report.refused.append(
                    f"{node.name}: a row might see nothing; every_row_sees=True says it does not"
                )
                return None
            if sees is not None and not bool(sees.any(-1).all()):
                report.refused.append(f"{node.name}: a row sees nothing: NaN here, 0 in the operator")
                return None
            causal = sees is not None and "hidden" in match.names and _is_causal(sees, g.shape(q), g.shape(k))
            if not causal:
                mask = match.get("added") or insert(node, aten.logical_not.default, match["hidden"])
        report.made["causal attention" if causal else "attention"] += 1
        arguments = (q, k, v, mask, 0.0, causal)
        return insert(node, aten.scaled_dot_product_attention.default, *arguments, scale=scale)


def _drops(node: fx.Node) -> bool:
    """Whether this is matmul(dropout(softmax), v) with a dropout that is on."""
    first = node.args[0] if node.args else None
    if node.target is not aten.matmul.default or not isinstance(first, fx.Node):
        return False
    if first.target is not aten.dropout.default or not first.args[1] or not first.args[2]:
        return False
    source = first.args[0]
    return isinstance(source, fx.Node) and source.target is aten.softmax.int


def _fits(node: fx.Node, match: Match, report: Report) -> bool:
    q, k, v = (g.value(match[name]) for name in "qkv")
    softmax = next(inner for inner in match.inside if inner.target is aten.softmax.int)
    dim = softmax.args[1]
    assert isinstance(dim, int)
    if other := match.read_elsewhere():
        report.refused.append(f"{node.name}: {other[0].name} has a second reader")
    elif q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        report.refused.append(f"{node.name}: not [batch, heads, length, width] throughout")
    elif dim % q.dim() != q.dim() - 1:
        report.refused.append(f"{node.name}: the softmax is over dim {dim}, not over the keys")
    elif q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]:
        report.refused.append(f"{node.name}: batches or heads of q, k and v differ")
    elif "fill" in match.names and match["fill"] != -math.inf and match["fill"] > -1e4:
        report.refused.append(f"{node.name}: filled with {match['fill']}, which does not hide")
    elif "added" in match.names and g.value(match["added"]).dtype != q.dtype:
        report.refused.append(f"{node.name}: the mask has another dtype than the scores")
    else:
        return True
    return False


def _visible(match: Match) -> Tensor | None:
    """Which keys each query sees, if the mask is made of constants; else None."""
    node = match.get("hidden") or match.get("added")
    found = _evaluate(node)
    if found is None:
        return None
    return ~found if "hidden" in match.names else found > -math.inf


def _evaluate(node: Any) -> Tensor | None:
    """The value of a node that depends on no input."""
    if not isinstance(node, fx.Node) or not g.is_pure(node) or node.op != "call_function":
        return None
    sources = {source: _evaluate(source) for source in node.all_input_nodes}
    if any(found is None for found in sources.values()) or not (sources or node.target in SOURCES):
        return None
    args, kwargs = pytree.tree_map_only(fx.Node, sources.__getitem__, (node.args, node.kwargs))
    assert callable(node.target)
    result = node.target(*args, **kwargs)
    return result if isinstance(result, Tensor) else None


#: What a function makes tensors with before they are taken apart into ATen's core operators.
SOURCES = FACTORIES | {aten.full.default, aten.ones.default, aten.zeros.default}


def _is_causal(sees: Tensor, q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    queries, keys = q[-2], k[-2]
    wanted = torch.ones(queries, keys, dtype=torch.bool).tril()
    return (
        queries == keys
        and sees.numel() == wanted.numel()
        and bool((sees.reshape(wanted.shape) == wanted).all())
    )
