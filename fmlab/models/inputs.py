"""Checks of what a language model is called with, before any work starts.

Shapes: b batch, l length.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fmlab.models.attention import KVCache, token_positions


def check_token_batch(
    input_ids: Tensor, given: Mapping[str, Tensor], cache: KVCache | None, max_positions: int
) -> None:
    """Raise ValueError unless `input_ids` is [b,l], all tensors of `given` have its shape, and all fits.

    Fits: the tokens, after those in the cache, into `max_positions`, unless `given` holds position_ids or
    document_ids, which may let positions start anew (see `check_positions`). A cache must be for as many
    rows, and takes no document_ids.
    """
    if input_ids.dim() != 2 or not input_ids.shape[1]:  # without rows: a rank that has no more data
        raise ValueError(
            f"input_ids must be [batch, length] with a token at least, got shape {list(input_ids.shape)}"
        )
    for name, tensor in given.items():
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids, {list(input_ids.shape)}, got {list(tensor.shape)}"
            )
    check_values({"input_ids": input_ids, **given})
    total = input_ids.shape[1] + (cache.length if cache is not None else 0)
    if total > max_positions and "position_ids" not in given and "document_ids" not in given:
        raise ValueError(
            f"a sequence of {total} tokens is longer than the model's {max_positions} "
            "positions; shorten it, or build the model with a larger max_positions"
        )
    if cache is not None and "document_ids" in given:
        raise ValueError("document_ids and cache cannot be used together: generate from one document a row")
    if cache is not None and cache.batch != input_ids.shape[0]:
        raise ValueError(f"the cache is for a batch of {cache.batch}, got {input_ids.shape[0]} rows")


def check_values(given: Mapping[str, Tensor]) -> None:
    """Raise ValueError for ids and labels that are no whole numbers, and masks of other numbers than 0 and 1.

    Such a mask is one that is added to the scores (0 real, -inf padding), or one of numbers of documents:
    taken for true and false, the first would turn real tokens and padding round. Values are looked at on the
    CPU only, and not while compiling: elsewhere that would wait for the device.
    """
    for name, tensor in given.items():
        if name.endswith("attention_mask"):
            plain = type(tensor) is Tensor and tensor.device.type == "cpu"  # a traced one has no values
            readable = plain and tensor.dtype != torch.bool and not torch.compiler.is_compiling()
            if readable and bool(((tensor != 0) & (tensor != 1)).any()):
                raise ValueError(
                    f"{name} must be 1 for real tokens and 0 for padding, got {tensor.min().item():g}.."
                    f"{tensor.max().item():g}; a mask that is added to scores is mask == 0 here, and packed "
                    "documents are told apart by document_ids"
                )
        elif name.endswith(("ids", "labels")) and tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be whole numbers (int64 or int32), got {tensor.dtype}")


def check_prefix(input_ids: Tensor, prefix_lengths: Tensor, document_ids: Tensor | None) -> None:
    """Raise ValueError unless `prefix_lengths` is a whole number for each row, a single document."""
    kinds = (torch.int32, torch.int64)
    if prefix_lengths.shape != input_ids.shape[:1] or prefix_lengths.dtype not in kinds:
        raise ValueError(
            f"prefix_lengths must be whole numbers [{len(input_ids)}], one a row, got "
            f"{prefix_lengths.dtype} {list(prefix_lengths.shape)}"
        )
    if document_ids is not None:
        raise ValueError("prefix_lengths and document_ids cannot be used together: put one document in a row")


def next_positions(
    input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, cache: KVCache | None
) -> Tensor:
    """Positions of the tokens, int64 [b,l], after those in the cache, in which room is made for them.

    From 0 at the first real token of each row or document; see token_positions.
    """
    past = None if cache is None else cache.begin(input_ids.shape[1], attention_mask)
    if cache is None or cache.padded or cache.window is not None:
        return token_positions(input_ids, attention_mask, document_ids, past)
    # nothing was ever padded: every row is as long as the cache
    new = torch.arange(cache.length, cache.length + input_ids.shape[1], device=input_ids.device)
    return new.expand(input_ids.shape)


def check_last(last: int, labels: Tensor | None) -> int:
    """`last`, how many tokens' logits are wanted. Raises ValueError below 1, and with labels."""
    if last < 1:
        raise ValueError(f"last must be at least 1 token, got {last}; None for the logits of all")
    if labels is not None:
        raise ValueError("last does nothing with labels: then there are no logits")
    return last


def check_positions(position_ids: Tensor, max_positions: int) -> None:
    """Raise ValueError if a position is beyond the model's: for models without a table that would say so.

    On the CPU only, and not while compiling: elsewhere a look at the numbers would wait for the device.
    """
    if torch.compiler.is_compiling() or position_ids.device.type != "cpu" or not position_ids.numel():
        return
    last = int(position_ids.max())
    if last >= max_positions:
        raise ValueError(
            f"position {last} is beyond the model's {max_positions} positions; shorten that document, or "
            "build the model with a larger max_positions"
        )
