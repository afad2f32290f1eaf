"""The strategies of the matrix by name. Those of one slot are alternatives; those of two are combined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmlab.parallel.layout import Layout


@dataclass(frozen=True)
class Strategy:
    """settings: fields of Layout. fills: settings for what another strategy of the cell has left out."""

    name: str
    slot: str
    settings: Mapping[str, Any]
    fills: Mapping[str, Any] = field(default_factory=dict)


def _s(name: str, slot: str, fills: Mapping[str, Any] | None = None, **settings: Any) -> Strategy:
    return Strategy(name, slot, settings, fills or {})


_PIPE: dict[str, Any] = dict(pipeline=2, micro_batches=4)
_TWO: dict[str, Any] = dict(data=2)

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        _s("ddp", "states", data=2),
        _s("zero1", "states", data=2, zero=1),
        _s("zero2", "states", data=2, zero=2),
        _s("zero3", "states", data=2, zero=3),
        _s("fsdp", "states", data=2, fsdp=True),
        _s("fsdp kept", "states", data=2, fsdp=True, reshard=False),
        _s("fsdp hybrid", "states", data=4, fsdp=True, replicas=2),
        _s("zero hybrid", "states", data=4, zero=2, replicas=2),
        _s("accumulation", "parts", micro_batches=2),
        _s("tensor", "tensor", tensor=2),
        _s("sequence", "tensor", tensor=2, sequence_parallel=True),
        _s("gpipe", "pipeline", **_PIPE, schedule="gpipe"),
        _s("1f1b", "pipeline", **_PIPE),
        _s("interleaved", "pipeline", **_PIPE, schedule="interleaved", virtual_stages=2),
        _s("zb-h1", "pipeline", **_PIPE, schedule="zb-h1"),
        _s("zbv", "pipeline", **_PIPE, schedule="zbv", virtual_stages=2),
        _s("ring", "context", context=2),
        _s("ring striped", "context", context=2, context_balance="striped"),
        _s("ring plain", "context", context=2, context_balance="none"),
        _s("ulysses", "context", context=2, context_method="ulysses"),
        _s("expert", "expert", _TWO, expert=2),
        _s("selective", "recompute", recompute="selective"),
        _s("full", "recompute", recompute="full"),
        _s("offload states", "offload", dict(data=2, zero=1), offload="optimizer"),
        _s("offload all", "offload", dict(data=2, zero=3), offload="parameters"),
        _s("own collectives", "transport", _TWO, collectives="fmlab"),
    )
}
SLOTS: Sequence[str] = tuple(dict.fromkeys(strategy.slot for strategy in STRATEGIES.values()))


def layout_of(names: Sequence[str], in_one_piece: bool = False) -> Layout:
    """The layout that combines these strategies; in_one_piece: without micro-batches.

    Raises ValueError where they cannot be combined.
    """
    chosen = [STRATEGIES[name] for name in names]
    settings: dict[str, Any] = {}
    for strategy in chosen:
        for name, value in strategy.settings.items():
            degree = (
                isinstance(value, int) and not isinstance(value, bool) and name in ("data", "micro_batches")
            )
            settings[name] = max(settings.get(name, 1), value) if degree else value
    states = settings.keys() & {"zero", "fsdp"}
    for strategy in chosen:
        for name, value in strategy.fills.items():
            if not (name == "zero" and states):
                settings.setdefault(name, value)
    if in_one_piece:
        settings.pop("micro_batches", None)
    return Layout(**settings)


def combines(a: str, b: str) -> bool:
    """Whether two strategies are of different slots."""
    return STRATEGIES[a].slot != STRATEGIES[b].slot
