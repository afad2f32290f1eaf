"""A first draft of a parallel plan for a model that declares none, from its structure alone.

    print(draft_plan(model))      # rules to paste into parallel_plan(), and what is left to decide

Recognised: embeddings (tables of a vocabulary); pairs of linear layers side by side in a module, of which the
second reads as many features as the first makes (or a half or a third: fused gate and up, query-key-value);
norms, biases and everything else of one dimension. What was not recognised is replicated, which is right and
divides nothing, and listed. A draft is a guess: prove it with check_plan and with parity.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block

_SHOWN = 4
_PARTS = (1, 3, 2)  # of a fused matrix: none, query-key-value, gate and up


@dataclass(frozen=True)
class DraftedPlan:
    """plan: to begin with. unresolved: names of the matrices for which no rule was found, so replicated."""

    plan: ParallelPlan
    unresolved: tuple[str, ...]

    @property
    def advice(self) -> str:
        """In one sentence, what was found and what is left to decide."""
        found = len([rule for rule in self.plan.rules if rule.kind != "replicate"])
        left = f"{len(self.unresolved)} matrices are left to decide: {_some(self.unresolved)}"
        return (
            f"fmlab.models.draft_plan(model) drafts one with {found} rules that divide something; "
            + (left if self.unresolved else "every matrix was recognised")
            + ("" if self.plan.cuts else "; no list `blocks` of fmlab.models.Block was found to cut")
        )

    def __str__(self) -> str:
        """Python to paste."""
        lines = ["ParallelPlan(", "    rules=("]
        for rule in self.plan.rules:
            settings = "".join(
                f", {name}={getattr(rule, name)}" for name in ("parts", "unit") if getattr(rule, name) != 1
            )
            lines.append(f'        Rule(r"{rule.pattern}", "{rule.kind}"{settings}),')
        lines += ["    ),", f"    tied={self.plan.tied!r},", f"    cuts={self.plan.cuts!r},", ")"]
        if self.unresolved:
            lines.append(f"# not recognised, so replicated: {', '.join(self.unresolved)}")
        return "\n".join(lines)


def draft_plan(model: nn.Module) -> DraftedPlan:
    """The draft for `model`, which may be on the meta device. Every parameter matches exactly one rule."""
    kinds: dict[str, tuple[str, int, int]] = {}  # parameter -> kind, parts, unit
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not _of_positions(name):
            kinds[_join(name, "weight")] = ("vocab", 1, 1)
        for first, second, parts in _pairs(module):
            unit = _head_width(module)
            kinds[_join(name, f"{first}.weight")] = ("column", parts, unit)
            if getattr(module.get_submodule(first), "bias", None) is not None:
                kinds[_join(name, f"{first}.bias")] = ("column", parts, unit)
            kinds[_join(name, f"{second}.weight")] = ("row", 1, unit)
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    for group in tied:  # the output matrix that is the embedding is divided as the embedding is
        vocab = next((kinds[name] for name in group if kinds.get(name, ("",))[0] == "vocab"), None)
        if vocab is not None:
            kinds |= dict.fromkeys(group, vocab)
    unresolved = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in kinds and parameter.dim() > 1 and not _of_positions(name):
            unresolved.append(name)
        kinds.setdefault(name, ("replicate", 1, 1))
    return DraftedPlan(ParallelPlan(_rules(kinds), tied, _cuts(model)), tuple(unresolved))


def _pairs(module: nn.Module) -> Iterator[tuple[str, str, int]]:
    """(first, second, parts) of the linear layers right inside `module`: the last one reads what those
    before it, which read the same stream, have made."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if len(layers) < 2:
        return
    *firsts, second = layers
    width = layers[second].in_features
    parts = {name: _parts(layers[name].out_features, width) for name in firsts}
    fewer = [name for name in firsts if not parts[name] and width % layers[name].out_features == 0]
    if len(fewer) > 2:  # not keys and values for heads that several queries share: something else
        fewer = []
    if any(parts.values()):
        for name in firsts:
            if found := parts[name] or int(name in fewer):
                yield name, second, found


def _parts(made: int, read: int) -> int:
    """How many matrices are stacked in a layer that makes `made` features, if one is `read` wide; 0 if
    none fits."""
    return next((parts for parts in _PARTS if made == parts * read), 0)


def _head_width(module: nn.Module) -> int:
    """The width of an attention head, if the module says it in a usual way; else 1."""
    for name in ("head_size", "head_dim", "head_width"):
        if isinstance(width := getattr(module, name, None), int) and width > 0:
            return width
    heads: Any = next((getattr(module, n) for n in ("num_heads", "heads", "n_head") if hasattr(module, n)), 0)
    last = [child for child in module.children() if isinstance(child, nn.Linear)][-1:]
    if isinstance(heads, int) and heads > 0 and last and last[0].in_features % heads == 0:
        return last[0].in_features // heads
    return 1


def _rules(kinds: dict[str, tuple[str, int, int]]) -> tuple[Rule, ...]:
    r"""One rule for all names that differ in numbers only and are divided alike:
    blocks\.\d+\.mlp\.up\.weight"""
    by_pattern: dict[str, set[tuple[str, int, int]]] = {}
    for name, kind in kinds.items():
        by_pattern.setdefault(_pattern(name), set()).add(kind)
    rules: dict[str, tuple[str, int, int]] = {}
    for name, kind in kinds.items():
        pattern = _pattern(name)
        rules[pattern if len(by_pattern[pattern]) == 1 else re.escape(name)] = kind
    return tuple(Rule(pattern, *kind) for pattern, kind in rules.items())  # type: ignore[arg-type]


def _of_positions(name: str) -> bool:
    """Whether a table holds a vector for each position, all of which every rank needs."""
    return any(part.startswith(("position", "pos_", "wpe")) for part in name.split("."))


def _pattern(name: str) -> str:
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))


def _cuts(model: nn.Module) -> tuple[int, ...]:
    blocks: Any = getattr(model, "blocks", None)
    whole = isinstance(blocks, (nn.ModuleList, Sequence)) and all(isinstance(b, Block) for b in blocks)
    return tuple(range(1, len(blocks))) if whole and hasattr(model, "prepare") else ()


def _join(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
