"""The cells of the published record as values: what a source printed, read strictly.

Each function takes the text of a cell and returns a value, or None for an empty cell. What is neither raises
ValueError; fmlab.planner.published adds the row's id. Two forms of print are known: "1933 (1858)", where a
table gives a second precision in parentheses (the first is taken), and "661[^note]", a mark of a footnote.
"""

import re
from typing import Literal

Sharding = Literal["none", "zero1", "zero2", "fsdp"]
#: What is computed a second time in the backward pass.
Recompute = Literal["none", "attention", "half", "all but attention", "full"]

#: chip as printed (its beginning) -> name in fmlab.chips. The first that fits is taken.
CHIPS = {
    "DGX-GB300": "gb300",
    "DGX-GB200": "gb200",
    "DGX-B300": "b300",
    "DGX-B200": "b200",
    "DGX-H100": "h100",
    "GB300": "gb300",
    "GB200": "gb200",
    "B300": "b300",
    "B200": "b200",
    "H100 96GB HBM2e": "h100-96gb",
    "H100": "h100",
    "H200": "h200",
    "A100-40GB": "a100-40gb",
    "A100-80GB": "a100-80gb",
    "V100-32GB": "v100-32gb",
    "TPU v3": "tpu-v3",
    "TPU v4": "tpu-v4",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6e": "tpu-v6e",
    "TPU v7": "tpu-v7",
    "TPU7x": "tpu-v7",
    "Ironwood": "tpu-v7",
    "Trainium1": "trn1",
    "Trainium2": "trn2",
    "Gaudi 2": "gaudi2",
}

#: precision as printed (its beginning, lower case) -> the dtype of the matrix products. The longest is taken.
PRECISIONS = {
    "bf16": "bf16",
    "bf16/fp16": "bf16",
    "fp16/bf16": "bf16",
    "fp16": "fp16",
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",
    "float8": "fp8",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
    "tf32": "tf32",
    "fp32": "fp32",
    "mixed_precision": "bf16",
    "autocast:bf16": "bf16",
    "autocast:amp": "bf16",
}

RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "sp only": "none",
    "selective": "attention",  # Megatron: the core of attention (Korthikanti et al. 2022, section 5)
    "selective (coreattention + llamamlp)": "all but attention",
    "minimal": "attention",  # MaxText: outputs of matrix products with weights are kept
    "minimal_flash": "none",  # those, and what flash attention needs
    "per-op selective": "half",  # torchtitan: every second matrix product
    "qkv_proj_offloaded": "full",  # MaxText: all but three projections, which go to the host and come back
    "full": "full",
    "full (uniform)": "full",
    "full recompute": "full",
    "activation checkpointing": "full",
}


def number(text: str) -> float | None:
    """The number of a cell, or the first one where a second stands in parentheses."""
    plain = re.sub(r"\[\^[\w-]+\]$", "", text.strip())
    if plain in ("", "n/a"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?: \(\d+(?:\.\d+)?\))?", plain, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no number")
    return float(found[1])


def whole(text: str) -> int | None:
    """The whole number of a cell."""
    found = number(text)
    if found is None:
        return None
    if found != int(found):
        raise ValueError(f"{text!r} is no whole number")
    return int(found)


def chip_name(text: str) -> str | None:
    """What fmlab.chips calls it; None for a chip that it does not know, or that is not said exactly."""
    for printed, name in CHIPS.items():
        if text.startswith(printed):
            return name
    return None


def precision(text: str) -> str | None:
    """The dtype of the matrix products, None where none is printed. ValueError for an unknown word."""
    if not text:
        return None
    if text.startswith("int8"):
        return "int8"
    fits = [printed for printed in PRECISIONS if text.lower().startswith(printed)]
    if not fits:
        raise ValueError(f"{text!r} is no precision that is known; known are {', '.join(PRECISIONS)}")
    return PRECISIONS[max(fits, key=len)]


def recompute(text: str) -> Recompute | None:
    """What is computed again; None where it is not printed."""
    if not text or text.startswith("yes"):
        return None
    if text.lower() not in RECOMPUTE:
        raise ValueError(f"{text!r} is no way of recomputing that is known; known are {', '.join(RECOMPUTE)}")
    return RECOMPUTE[text.lower()]


def sharding(text: str) -> tuple[Sharding, int | None]:
    """How states are divided, and among how many chips where that is printed ("FSDP 64")."""
    lower = text.lower()
    if not lower:
        return "none", None
    if lower.startswith("zero-1"):
        return "zero1", None
    if lower == "shard_grad_op":
        return "zero2", None
    if lower.startswith(("fsdp", "full_shard")):
        among = re.match(r"fsdp (\d+)", lower)
        return "fsdp", int(among[1]) if among else None
    raise ValueError(f"{text!r} is no way of dividing states that is known")


def flag(text: str) -> bool | None:
    """yes or no, also with a remark behind it; None for an empty cell."""
    if not text:
        return None
    if text.split()[0] not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.startswith("yes")
