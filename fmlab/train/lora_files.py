"""Low-rank updates as files of their own, in the format of the peft library, which loads them onto the same
model in transformers: adapter_config.json and adapter_model.safetensors.

Names: "base_model.model." + the matrix's name in transformers + ".lora_A.weight" [r,i] and ".lora_B.weight"
[o,r]. Where transformers has one matrix for several of ours (GPT-2's c_attn is query, key and value), ours
are written as one update of a larger rank: A is theirs one below the other, B has theirs as blocks.

Shapes: i inputs and o outputs of a matrix, r rank, p parts that are adapted.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fmlab.models.base import Model
from fmlab.models.hf import refuse_other_than
from fmlab.train.adapt import Trained
from fmlab.train.lora import LoRA, add_lora, lora_layers, matrices, parts_of, remove_lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of a LoraConfig that change the mathematics, with the only values we compute.
_FIXED = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "lora_bias": False,
}


def save_lora(model: Model, folder: str | Path) -> None:
    """Write the updates alone, without the model, into `folder`, which is made if needed.

    Raises ValueError when there are none.
    """
    layers = dict(lora_layers(model))
    if not layers:
        raise ValueError("the model has no low-rank updates to save; add_lora gives it some")
    theirs, fan_in_fan_out = _their_names(model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module, layer in layers.items():
        names, scale, dropout = theirs[module], layer.scale, layer.dropout
        a, b = dict(layer.lora_a.items()), dict(layer.lora_b.items())
        if len(names) == 1 and len(layer.order) > 1:
            a, b = _as_one(a, b, layer.order)
            named = dict(zip(a, names, strict=True))
        else:
            named = dict(zip(layer.order, names, strict=True))
        for part in a:
            tensors[f"{_PREFIX}{named[part]}.lora_A.weight"] = a[part].detach().contiguous()
            tensors[f"{_PREFIX}{named[part]}.lora_B.weight"] = b[part].detach().contiguous()
            ranks[named[part]] = len(a[part])
    rank = min(ranks.values())
    other = {name: r for name, r in ranks.items() if r != rank}
    config = _FIXED | {
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": dropout,
        "rank_pattern": other,
        "alpha_pattern": {name: scale * r for name, r in other.items()},
        "target_modules": list(ranks),
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    adapted = [f"{module}/{','.join(layer.lora_a)}" for module, layer in layers.items()]
    save_file(tensors, folder / WEIGHTS, {"format": "pt", "fmlab": " ".join(adapted)})


@torch.no_grad()
def load_lora(model: Model, folder: str | Path) -> Trained:
    """Give a model, which has none, the updates in `folder`, ours or peft's; what would learn.

    Raises ValueError for settings that we do not compute, and for files that are missing or do not fit.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; save_lora and peft's save_pretrained write it")
    config = json.loads((folder / CONFIG).read_text())
    refuse_other_than(_FIXED, {k: v for k, v in config.items() if v not in (None, [], {})})
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ours = (file.metadata() or {}).get("fmlab", "")
    written = {
        module: tuple(parts.split(",")) for module, _, parts in (e.partition("/") for e in ours.split())
    }
    updates = _read(model, tensors, written)
    names = {pair: name for name, pair in matrices(model).items()}
    rank, scale = _one_rank(updates, config), config["lora_alpha"] / config["r"]
    targets = tuple(_literal(names[key]) for key in updates)
    trained = add_lora(model, LoRA(rank, scale * rank, targets, config.get("lora_dropout", 0.0)))
    layers = dict(lora_layers(model))
    try:
        for (module, part), (a, b) in updates.items():
            for mine, new in ((layers[module].lora_a[part], a), (layers[module].lora_b[part], b)):
                if mine.shape != new.shape:
                    raise ValueError(
                        f"{module}: an update of {list(new.shape)} does not fit {list(mine.shape)}"
                    )
                mine.copy_(new)
    except ValueError:
        remove_lora(model)
        raise
    return trained


def _read(
    model: Model, tensors: dict[str, Tensor], written: dict[str, tuple[str, ...]]
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """(module, part) -> (A, B), from the file's tensors. Raises ValueError for names that are not used up."""
    left, updates = dict(tensors), {}
    for module, names in _their_names(model)[0].items():
        parts = parts_of(module)
        for place, name in enumerate(names):
            a = left.pop(f"{_PREFIX}{name}.lora_A.weight", None)
            b = left.pop(f"{_PREFIX}{name}.lora_B.weight", None)
            if a is None or b is None:
                continue
            if len(names) == len(parts):
                updates[module, parts[place]] = (a, b)
            elif module in written:
                updates |= {
                    (module, part): pair for part, pair in _apart(a, b, parts, written[module]).items()
                }
            else:  # one A for all parts
                rows = b.chunk(len(parts))
                updates |= {(module, part): (a, rows[i]) for i, part in enumerate(parts)}
    if left or not updates:
        raise ValueError(
            f"the adapter is for another model: no matrix here for {sorted(left)[:3] or 'any of its names'}"
        )
    return updates


def _one_rank(updates: dict[tuple[str, str], tuple[Tensor, Tensor]], config: dict[str, Any]) -> int:
    """The rank of all updates. Raises ValueError when they differ in rank or in scale."""
    ranks = {len(a) for a, _ in updates.values()}
    other = {
        **dict.fromkeys(config.get("alpha_pattern") or {}, config["r"]),
        **(config.get("rank_pattern") or {}),
    }
    scales = {
        (config.get("alpha_pattern") or {}).get(name, config["lora_alpha"]) / rank
        for name, rank in other.items()
    }
    if len(ranks) > 1 or len(scales | {config["lora_alpha"] / config["r"]}) > 1:
        raise ValueError(
            f"the adapter's updates differ in rank {sorted(ranks)} or in scale; only one is supported"
        )
    return ranks.pop()


def _as_one(
    a: dict[str, Tensor], b: dict[str, Tensor], order: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The updates of several parts as one of the fused matrix: A [p*r,i], B [o,p*r] with a block each."""
    rank, outputs = len(next(iter(a.values()))), len(next(iter(b.values())))
    fused = next(iter(b.values())).new_zeros(len(order) * outputs, len(a) * rank)
    for block, part in enumerate(a):
        row = order.index(part) * outputs
        fused[row : row + outputs, block * rank : (block + 1) * rank] = b[part]
    return {"fused": torch.cat(list(a.values()))}, {"fused": fused}


def _apart(
    a: Tensor, b: Tensor, order: tuple[str, ...], parts: tuple[str, ...]
) -> dict[str, tuple[Tensor, Tensor]]:
    """What `_as_one` joined."""
    rows, blocks = b.chunk(len(order)), a.chunk(len(parts))
    return {
        part: (blocks[i], rows[order.index(part)].chunk(len(parts), 1)[i]) for i, part in enumerate(parts)
    }


def _their_names(model: Model) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Module -> names of its matrices in transformers; whether those are stored as [in, out]."""
    modules = {module for module, _ in matrices(model).values()}
    weights = [
        w for w in model.hf_format().weights(model.config) if w.ours.removesuffix(".weight") in modules
    ]
    names = {
        w.ours.removesuffix(".weight"): tuple(n.removesuffix(".weight") for n in w.names) for w in weights
    }
    return names, any(w.transposed for w in weights)


def _literal(name: str) -> str:
    return name.replace(".", r"\.")
