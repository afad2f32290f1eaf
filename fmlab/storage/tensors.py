"""Tensors in safetensors files: an 8-byte length, a JSON header, then the tensors' bytes one after another.

The file is written and hashed in one pass over the tensors' memory; the library's writer copies each tensor
to a bytes object first, and the hash would read the file again. Reading is the library's.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fmlab.storage.atomic import StorageError, explain
from fmlab.storage.manifest import MANIFEST, entry_of, read_manifest, unchanged, verify, write_manifest

#: the format's names of element types
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_CHUNK = 1 << 22  # bytes, written and hashed while they are in the cache


def save_tensors(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    name: str = "tensors",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` to directory/name.safetensors and enter it in the manifest.

    Names that share one tensor (tied weights) are written once and restored under every name.
    `metadata` is anything JSON can hold. Use inside `atomic_directory`. Raises StorageError.
    """
    folder = Path(directory)
    entry = write_tensors(folder / f"{name}.safetensors", tensors)
    files = read_manifest(folder) if (folder / MANIFEST).exists() else {}
    write_manifest(folder, files | {f"{name}.safetensors": entry | {"metadata": dict(metadata or {})}})


def load_tensors(directory: str | Path, name: str = "tensors", check: bool = True) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; unless `check` is false, size and SHA-256 are checked first.

    Raises StorageError that names the file when it is missing, cut short or changed.
    """
    file = Path(directory) / f"{name}.safetensors"
    entry = entry_of(directory, file.name)
    if check:
        verify(file, entry)
    tensors = read_tensors(file)
    try:
        for alias, key in dict(entry.get("aliases", {})).items():
            tensors[alias] = tensors[key]
    except (KeyError, ValueError, TypeError) as error:
        raise StorageError(errno.EIO, f"{file} is damaged: it has no tensor {error}") from error
    return tensors


def load_metadata(directory: str | Path, name: str = "tensors") -> dict[str, Any]:
    """The metadata given to `save_tensors`."""
    return dict(entry_of(directory, f"{name}.safetensors").get("metadata", {}))


def read_tensors(file: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises StorageError when it is none."""
    try:
        with safe_open(file, framework="pt") as reader:
            return {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StorageError(errno.EIO, f"{file} is damaged and cannot be read: {error}") from error


# region write
def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], before: Path | None = None, constant: bool = False
) -> dict[str, Any]:
    """Write a safetensors file, flush it to disk; its entry for the manifest.

    constant: the tensors are not expected to change: if those in the file of this name in the folder `before`
    have the same content, and that file is whole, this one becomes a link to it and nothing is written.
    Raises StorageError, and ValueError for an element type that the format has not.
    """
    unique, aliases = _unique(tensors)
    known: dict[str, Any] = {"aliases": aliases}
    try:
        if constant:
            known["content"] = _content(unique)
            if same := unchanged(before, file.name, known):
                with suppress(OSError):  # a file system without links: written anew
                    os.link(same, file)
                    return entry_of(same.parent, file.name)
        return {**_write(file, unique), **known}
    except OSError as error:
        raise explain(error, file) from error


def _write(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    size = 0
    # The widest first, so that all are aligned; then by name, so that the same tensors make the same file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for key, tensor in ordered:
        end = size + tensor.numel() * tensor.element_size()
        if tensor.dtype not in TYPES:
            raise ValueError(f"{key} is {tensor.dtype}, which a safetensors file cannot hold")
        header[key] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(file, "wb", buffering=0) as stream:
        parts: list[Any] = [len(text).to_bytes(8, "little"), text, *(_bytes(t) for _, t in ordered)]
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                chunk = memoryview(part)[start : start + _CHUNK]
                digest.update(chunk)
                while len(chunk):  # a full disk may take a part
                    chunk = chunk[stream.write(chunk) :]
        os.fsync(stream.fileno())
    return {"bytes": 8 + len(text) + size, "sha256": digest.hexdigest()}


# endregion


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _content(tensors: Mapping[str, Tensor]) -> str:
    """A SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _unique(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, contiguous on the host; and the other names of those that have several."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for key, tensor in tensors.items():
        # Where a device shows no address (torch_xla: always 0), only the same object is the same tensor.
        place = tensor.data_ptr() or ("no address", id(tensor))
        identity = (place, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            aliases[key] = seen[identity]
        else:
            seen[identity] = key
            unique[key] = tensor.detach().to("cpu").contiguous()
    return unique, aliases
