"""Blocks of tensors out of files into pieces: what was cut one way is wanted in another."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fmlab.parallel.checkpoint.pieces import Piece
from fmlab.parallel.checkpoint.snapshot import dtype_called
from fmlab.storage import StorageError


@dataclass(frozen=True)
class Block:
    """A block of a tensor in a file: the name it has there, where it begins in the whole, its size."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Stored:
    """A tensor of a checkpoint, in blocks."""

    shape: torch.Size
    dtype: torch.dtype
    blocks: list[Block]


def stored(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Stored]:
    """The tensors in the files of a manifest, by name. Raises ValueError, TypeError or KeyError for a table
    that says what cannot be."""
    found: dict[str, Stored] = {}
    for file, entry in files.items():
        for name, place in dict(entry.get("blocks", {})).items():
            shape, dtype = torch.Size(place["shape"]), dtype_called(place["dtype"])
            block = Block(file, name, tuple(place["offsets"]), tuple(place["sizes"]))
            inside = zip(block.offsets, block.sizes, shape, strict=True)
            if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in inside):
                raise ValueError(f"{name} in {file} lies outside its tensor of shape {tuple(shape)}")
            tensor = found.setdefault(place["tensor"], Stored(shape, dtype, []))
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise ValueError(f"{place['tensor']} has two shapes or types")
            tensor.blocks.append(block)
        claimed = sum(
            prod(place["sizes"]) * dtype_called(place["dtype"]).itemsize
            for place in dict(entry.get("blocks", {})).values()
        )
        if claimed > entry["bytes"]:
            raise ValueError(f"{file} holds {entry['bytes']} bytes and its tensors would have {claimed}")
    for key, tensor in found.items():
        if sum(prod(block.sizes) for block in tensor.blocks) != prod(tensor.shape):
            raise ValueError(f"the blocks of {key} are not the whole")
    return found


# region fill
def fill(folder: Path, tensors: Mapping[str, Stored], pieces: Mapping[str, Piece]) -> None:
    """Read into the pieces what lies in them, file by file. Raises StorageError for a damaged file."""
    wanted: dict[str, list[tuple[Block, Piece]]] = {}
    for key, piece in pieces.items():
        for block in tensors[key].blocks:
            wanted.setdefault(block.file, []).append((block, piece))
    for file, blocks in wanted.items():
        try:
            with safe_open(folder / file, framework="pt") as reader:
                for block, piece in blocks:
                    _copy(reader, block, piece)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise StorageError(
                errno.EIO, f"{folder / file} is damaged and cannot be read: {error}"
            ) from error


def _copy(reader: Any, block: Block, piece: Piece) -> None:
    whole: Tensor | None = None
    for box in piece.boxes:
        common = list(_overlaps(block.offsets, block.sizes, box.offsets, box.sizes))
        if any(start >= end for start, end in common):
            continue
        if whole is None:
            whole = reader.get_tensor(block.name)  # of the file's memory map: only what is copied is read
            if tuple(whole.shape) != block.sizes:
                raise SafetensorError(f"{block.name} is {tuple(whole.shape)}, not {block.sizes}")
        source = whole[_slices(common, block.offsets)]
        box.of(piece.tensor)[_slices(common, box.offsets)].copy_(source)


# endregion


def _overlaps(
    a: Sequence[int], a_sizes: Sequence[int], b: Sequence[int], b_sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where two boxes overlap in each dim: start and end in the whole."""
    for start_a, size_a, start_b, size_b in zip(a, a_sizes, b, b_sizes, strict=True):
        yield max(start_a, start_b), min(start_a + size_a, start_b + size_b)


def _slices(common: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, end - o) for (start, end), o in zip(common, offsets, strict=True))
