"""A graph of ATen operators as a JAX function, by torchax's table of operators.

torchax names two overloads that torch 2.13 no longer has; its table needs only the names to exist.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

from fmlab.extras import require

_GONE = (("prod", "dim_Dimname", "dim_int"), ("index_copy", "dimname", "default"))


def load_jax() -> Any:
    """JAX on its CPU platform, with the compiler for TPUs at hand; call it before anything imports jax.

    Raises ImportError that names the extra, or ValueError where another device has torch's one free name.
    """
    if find_spec("libtpu") is None:
        require("tpu-aot", "libtpu")  # raises, and says how to get it
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "jax"):
        raise ValueError(
            f"torch's one further device is already {taken!r} in this process, and torchax wants the name: "
            "compile for TPUs in a process of its own (fmlab aot ...)"
        )
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # do not look for a TPU to run on
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nor ask a cloud's metadata server for minutes
        os.environ.setdefault(
            "TPU_ACCELERATOR_TYPE", "v5litepod-4"
        )  # only silences a warning; targets decide
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    require("tpu-aot", "libtpu")
    return require("tpu-aot", "jax")


def lowered(graph: GraphModule) -> Callable[..., list[Any]]:
    """The graph as a function of JAX arrays, in the order of its inputs, that returns a flat list.

    Raises ValueError that names the operators without a rule.
    """
    rules = _rules()
    wanted = {node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    found = {target: rules(target) for target in wanted}
    if missing := sorted(str(target) for target, rule in found.items() if rule is None):
        raise ValueError(f"torchax has no rule for {', '.join(missing)}: this step cannot be compiled")

    class InJax(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            rule = found.get(target)
            return rule(*args, **kwargs) if rule else super().call_function(target, args, kwargs)

    def function(*inputs: Any) -> list[Any]:
        return tree_leaves(InJax(graph).run(*inputs, enable_io_processing=False))

    return function


def _rules() -> Callable[[Any], Callable[..., Any] | None]:
    """operator -> how to say it in JAX, or None."""
    for packet, name, stand_in in _GONE:
        operator = getattr(torch.ops.aten, packet)
        if name not in operator.overloads():
            setattr(operator, name, getattr(operator, stand_in))
    require("tpu-aot", "torchax")
    require("tpu-aot", "torchax.ops.jaten")  # fills the table
    table = require("tpu-aot", "torchax.ops.ops_registry").all_aten_ops

    def rule(target: Any) -> Callable[..., Any] | None:
        entry = table.get(target) or table.get(target.overloadpacket)
        return entry.func if entry is not None and entry.is_jax_function else None

    return rule
