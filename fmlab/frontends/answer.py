"""What a front end's process sends back: one JSON line, arrays as lists. No framework is imported here."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def node(
    name: str, op: str, inputs: Sequence[str], shape: Sequence[int] | None, dtype: str
) -> dict[str, Any]:
    """One operation: `inputs` are names of other nodes; shape None where the framework does not know it."""
    known = None if shape is None else [int(size) for size in shape]
    return {"name": name, "op": op, "inputs": list(inputs), "shape": known, "dtype": dtype}


def send(
    *,
    versions: Mapping[str, str],
    nodes: Sequence[Mapping[str, Any]],
    text: str,
    output: np.ndarray,
    updated: Mapping[str, np.ndarray],
    program: str,
) -> None:
    """Write the answer. versions: of the framework; nodes, text: the captured block; output: of the block;
    updated: weights behind the data-parallel step; program: what really ran it, as text."""
    found = {
        "versions": dict(versions),
        "nodes": list(nodes),
        "text": text,
        "output": output.tolist(),
        "updated": {name: value.tolist() for name, value in updated.items()},
        "program": program,
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")
