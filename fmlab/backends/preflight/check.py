"""`preflight`: watch a few steps of a training program and say what will hurt on a chip."""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

from fmlab.backends.environment import late_variables
from fmlab.backends.moving import tie_groups
from fmlab.backends.preflight.finding import Finding, Report
from fmlab.backends.preflight.judge import judge
from fmlab.backends.preflight.limits import check_cores, check_products, devices_of, limits_of
from fmlab.backends.preflight.shapes import large_integers, signatures
from fmlab.backends.preflight.watch import Record, Watch
from fmlab.backends.preflight.where import Modules
from fmlab.chips import chip as find_chip

Loss = Callable[[nn.Module, Any], Tensor]
_STEPS = 3  # the first makes the optimizer's state, the second and third should be one program


def preflight(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    chip: str = "trn2",
    optimizer: Optimizer | None = None,
    step: Callable[[Any], Any] | None = None,
    precision: str = "bf16",
    cores: int | None = None,
    logical_core: int | None = None,
    limit: int | None = 10_000,
) -> Report:
    """Find what of a training program will hurt on `chip`, on any machine.

    model:     left as it is: a copy of it is trained for three steps. On the meta device only shapes are
               watched, and a model of any size passes.
    batches:   the loader, or a list; its shapes are counted (of the first `limit` batches), and the first
               batch is what the watched steps see
    loss:      (model, batch) -> scalar; by default the model is called with the batch, and its "loss",
               "loss_sum" or scalar result is taken
    optimizer: yours, made for `model`; by default AdamW. A copy is used.
    step:      your own training step, a function of the batch, in place of all that; then your model and
               optimizer are really trained, and reads of tensors that stay on the host count too, since here
               everything is on the host
    precision: "bf16" runs the forward pass under autocast, "fp32" does not; on meta it makes no difference
    cores:     logical cores that the job will use on one host
    logical_core: physical cores in a logical one (trn2, trn3: 1 or 2)

    Raises ValueError for an unknown chip, one without a static-shape compiler or whose rules are not known,
    a loader without batches, or a model whose loss cannot be told from its result.
    """
    target = find_chip(chip)
    limits = limits_of(target)
    if precision not in ("bf16", "fp32"):
        raise ValueError(f"precision must be bf16 or fp32, got {precision!r}")
    devices = devices_of(target.name, logical_core)
    batches = iter(batches)
    head = list(islice(batches, 1))
    shapes = signatures(chain(head, batches), limit)
    findings = [*shapes.findings(), *large_integers(head[0])]

    records, states = _watched_steps(model, head[0], loss, optimizer, step, precision)
    usual = records[-1]
    matrix, instructions, useful = check_products(limits, list(usual.products.items()))
    findings += [*judge(records, limits), *matrix, *_ties(model), *_foreign(model, optimizer), *_late()]
    memory = target.memory_bytes // devices
    findings += _too_large(states, memory, chip)
    if cores is not None:
        findings += check_cores(target.name, cores)
    gib = f"{states / 2**30:.3f} GiB of {memory / 2**30:.1f} GiB a device"
    gib += f", of which a chip has {devices}" if devices > 1 else ""
    facts = {
        "compilations": f"{_counted(shapes.compilations, 'shape')} x "
        f"{_counted(len({_program(r) for r in records}), 'program')} "
        f"(with and without the optimizer's state), from {shapes.batches:,} batches",
        "operators of a step": usual.operators,
        "instructions": f"{instructions:,} for matrix products at least; all others are not estimated"
        if limits.instructions
        else "not estimated",
        "useful part of the matrix work": f"{useful:.0%}",
        "weights, gradients, optimizer state": gib,
    }
    return Report(f"{target.title}", tuple(findings), facts)


def _watched_steps(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: Optimizer | None,
    step: Callable[[Any], Any] | None,
    precision: str,
) -> tuple[list[Record], int]:
    """The records of the steps, and the bytes of weights, gradients and optimizer state."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta:
        batch = _to_meta(batch)
    if step is None:
        model, optimizer = copy.deepcopy((model, optimizer))  # together, so that they still belong together
        optimizer = optimizer or AdamW(p for p in model.parameters() if p.requires_grad)
        step = _default_step(model, loss or _loss_of, optimizer, precision)
    records = []
    states = 0
    for _ in range(_STEPS):
        watch = Watch(Modules(model))
        with watch as record, sdpa_kernel(SDPBackend.MATH):  # attention by its products, which are counted
            step(batch)
        records.append(record)
        states = max(states, _state_bytes(model, optimizer))
    return records, states


def _default_step(
    model: nn.Module, loss: Loss, optimizer: Optimizer, precision: str
) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    model.train()
    return step


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    """What the model itself calls its loss."""
    if isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    for name in ("loss", "loss_sum"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(result, Tensor) and result.dim() == 0:
        return result
    raise ValueError(
        f"{type(model).__name__} gives a {type(result).__name__} without a scalar loss; pass loss=, a "
        "function of (model, batch), or step=, your training step"
    )


def _to_meta(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, batch)


def _state_bytes(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Bytes of weights, gradients and optimizer state; without an optimizer AdamW in fp32 is assumed."""
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    held = sum(t.numel() * t.element_size() for t in [*weights, *trained])  # a gradient is like its weight
    if optimizer is None:
        return held + sum(8 * weight.numel() for weight in trained)
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    return held + sum(t.numel() * t.element_size() for t in values if isinstance(t, Tensor))


def _program(record: Record) -> int:
    return hash(tuple(record.program))


def _ties(model: nn.Module) -> list[Finding]:
    """Weights that a plain move to the device would untie."""
    groups = tie_groups(model)
    if not groups or any(parameter.is_meta for parameter in model.parameters()):
        return []
    moved = copy.deepcopy(model).to("meta")  # another kind of device, as the chip is
    if tie_groups(moved) == groups:
        return []
    return [
        Finding(
            "error",
            "ties",
            f"{' and '.join(groups[0])} are one weight, and model.to(device) makes them two that drift apart",
            "the move to the device",
            "move it with backend.to_device(model), or tie again after model.to(device)",
        )
    ]


def _foreign(model: nn.Module, optimizer: Optimizer | None) -> list[Finding]:
    """Tensors of the optimizer that the model does not have: an optimizer made before the model was moved."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = optimizer.param_groups if optimizer is not None else []
    strangers = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    if not strangers:
        return []
    return [
        Finding(
            "error",
            "optimizer",
            f"the optimizer updates {strangers} tensors that are not the model's, which stays as it is",
            "the optimizer",
            "make the optimizer after the model has been moved",
        )
    ]


def _too_large(states: int, memory: int, chip: str) -> list[Finding]:
    if states <= memory:
        return []
    return [
        Finding(
            "error",
            "memory",
            f"weights, gradients and optimizer state take {states / 2**30:.1f} GiB and a device has "
            f"{memory / 2**30:.1f} GiB; activations come on top",
            "the model",
            f"shard them over devices (fsdp, zero, tensor); get_backend('sim:{chip}') runs the step with the "
            "memory of the chip",
        )
    ]


def _late() -> list[Finding]:
    """Variables that were changed after the library that reads them had been loaded."""
    late = [(name, library) for library in ("torch_neuronx", "torch_tpu") for name in late_variables(library)]
    return [
        Finding(
            "error",
            "environment",
            f"{name} was changed after {library} had been loaded, which has read it already",
            "the start of the program",
            f"set {name} before the program, or above the first import of torch",
        )
        for name, library in late
    ]


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
