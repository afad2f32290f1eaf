"""Whether a checkpoint's optimizer keeps the same numbers of a parameter as the one it is loaded into."""

import copy
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def check_optimizer(directory: str | Path, keys: Iterable[str], optimizer: Optimizer) -> None:
    """Raise ValueError for the state of an optimizer of another kind, on which the next step would fail or
    begin anew without a word.

    keys: "parameter/field" of all that the checkpoint holds.
    """
    saved, kinds = {key.rpartition("/")[2] for key in keys}, kept_by(optimizer)
    kept = set().union(*kinds)
    alike = len(set(kinds)) == 1  # else a checkpoint may have been saved before all groups had a gradient
    if saved and kinds and (not saved <= kept or (alike and saved != kept)):
        raise ValueError(
            f"{directory} holds an optimizer's {', '.join(sorted(saved))}, and "
            f"{type(optimizer).__name__} keeps {', '.join(sorted(kept)) or 'nothing'}: load it with the "
            "optimizer that saved it and the same settings, or take the weights alone "
            "(fmlab.parallel.checkpoint.load_model) and begin with a new one"
        )


def kept_by(optimizer: Optimizer) -> list[frozenset[str]]:
    """What an optimizer keeps of a parameter, by group: seen by a step of a copy on one number. Empty where a
    copy cannot step by itself."""
    found = []
    for group in optimizer.param_groups:
        one = nn.Parameter(torch.zeros(1))
        one.grad = torch.zeros(1)
        try:
            probe = copy.copy(optimizer)
            probe.state = defaultdict(dict)
            probe.param_groups = [{**group, "params": [one]}]
            probe.step()
        except Exception:  # it wants a closure, or belongs to a library with ranks of its own
            return []
        state: dict[str, Any] = probe.state[one]
        found.append(frozenset(key for key, value in state.items() if value is not None))
    return found
