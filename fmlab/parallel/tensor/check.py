"""What tensor parallelism refuses, before anything is changed."""

from collections.abc import Mapping

from torch import nn

from fmlab.models.convolutional import CausalConv
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.diffusion.convolution import Conv2d
from fmlab.models.layers import Embedding, Linear
from fmlab.models.plan import ParallelPlan, Rule

_MOST = 1024


def legal_degrees(model: nn.Module, plan: ParallelPlan, upto: int = _MOST) -> list[int]:
    """The numbers of ranks among which the plan can divide every matrix of the model.

    28 heads: 1, 2, 4, 7, 14, 28, if nothing else stands against them.
    """
    legal = set(range(1, upto + 1))
    for rule, shape in {(plan.rule(name), p.shape) for name, p in model.named_parameters()}:
        if rule.kind != "expert":  # whole on each tensor rank
            legal &= set(rule.degrees(shape, upto))
    return sorted(legal)


def check(model: nn.Module, plan: ParallelPlan, degree: int, sequence_parallel: bool) -> None:
    """Raise ValueError for what cannot be done, with what is legal."""
    rules = {name: plan.rule(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    family = type(model).__name__
    if all(rule.kind in ("replicate", "expert") for rule in rules.values()):
        raise ValueError(f"tensor={degree}: the plan of {family} divides no matrix; legal: 1")
    _check_degree(model, plan, degree)
    for group in plan.tied:
        if len({(rules[name].kind, rules[name].parts) for name in group}) > 1:
            raise ValueError(f"{group} are one parameter, and the plan of {family} divides them differently")
    for name, module in model.named_modules(remove_duplicate=False):
        for leaf, _ in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            _check_layer(name, module, leaf, rules[full])
    sizes = vocabularies(model, plan)
    for name, module in model.named_modules():
        loss = getattr(module, "cross_entropy", linear_cross_entropy)
        if loss is not linear_cross_entropy and vocabulary_under(name, sizes):
            raise ValueError(
                f"tensor={degree} brings a cross-entropy over a divided vocabulary, and {name or family!r} "
                f"was given its own, {loss!r}; build the model without it, or use tensor=1"
            )
    if sequence_parallel and not plan.streams:
        raise ValueError(
            f"sequence_parallel: the plan of {family} names no streams whose positions may be divided "
            "(ParallelPlan.streams), for something between its matrices looks at all of them (a router's "
            "totals, a convolution); use sequence_parallel=False"
        )


def _check_degree(model: nn.Module, plan: ParallelPlan, degree: int) -> None:
    for name, parameter in model.named_parameters():
        rule = plan.rule(name)
        if rule.kind == "expert" or degree in rule.degrees(parameter.shape, degree):
            continue
        unit = f" in whole heads of {rule.unit}" if rule.unit > 1 else ""
        parts = f" of {rule.parts} matrices" if rule.parts > 1 else ""
        legal = ", ".join(map(str, legal_degrees(model, plan)))
        raise ValueError(
            f"tensor={degree} cannot divide {name}, {list(parameter.shape)}{parts}, by {rule.kind}{unit}; "
            f"legal for this model: {legal}"
        )


#: The layers whose weight can be divided, and how.
_LAYERS: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Linear, ("column", "row", "vocab")),
    (nn.Linear, ("column", "row", "vocab")),
    (Embedding, ("vocab",)),
    (nn.Embedding, ("vocab",)),
    (Conv2d, ("column", "row")),
    (nn.Conv2d, ("column",)),
    (CausalConv, ("column",)),
)


def _check_layer(name: str, module: nn.Module, leaf: str, rule: Rule) -> None:
    """Raise ValueError for a matrix that is divided but stands in a layer that is not known here."""
    if rule.kind not in ("column", "row", "vocab") or getattr(module, leaf).dim() < 2:
        return
    able = next((kinds for layer, kinds in _LAYERS if type(module) is layer), ())
    if leaf != "weight" or rule.kind not in able:
        raise ValueError(
            f"the plan divides {name}.{leaf} by {rule.kind}, and {name} is a {type(module).__name__}: tensor "
            "parallelism divides the weights of Linear (column, row, vocab), Embedding (vocab) and "
            'convolutions; make the layer of these, or declare it "replicate"'
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(f"{name} has forward hooks, which a divided layer would not run; remove them")


def vocabulary_under(name: str, sizes: Mapping[str, int]) -> int:
    """Rows of the vocabulary table in the module `name`, 0 if none is divided there."""
    found = {size for other, size in sizes.items() if other.startswith(f"{name}." if name else "")}
    return max(found, default=0)


def vocabularies(model: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """The rows of each parameter that is divided by vocabulary, under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: len(p) for name, p in named if plan.rule(name).kind == "vocab"}
