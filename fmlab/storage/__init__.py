"""Files that are either whole or not there, and that are proved to be what was written before they are used.

atomic.py     files and folders, written as a whole or not at all
manifest.py   size and SHA-256 of every file of a folder; files that did not change are linked
tensors.py    tensors in safetensors files
"""

from fmlab.storage.atomic import (
    StorageError,
    atomic_directory,
    check_free_space,
    check_writable,
    exclusive,
    explain,
    flush,
    make_folder,
    readable,
    recover,
    write_atomic,
)
from fmlab.storage.manifest import (
    MANIFEST,
    damage,
    enter_files,
    read_file,
    read_manifest,
    sha256,
    verify,
    write_manifest,
)
from fmlab.storage.tensors import (
    load_metadata,
    load_tensors,
    read_tensors,
    save_tensors,
    write_tensors,
)

__all__ = [
    "MANIFEST",
    "StorageError",
    "atomic_directory",
    "check_free_space",
    "check_writable",
    "damage",
    "enter_files",
    "exclusive",
    "explain",
    "flush",
    "load_metadata",
    "load_tensors",
    "make_folder",
    "read_file",
    "read_manifest",
    "read_tensors",
    "readable",
    "recover",
    "save_tensors",
    "sha256",
    "verify",
    "write_atomic",
    "write_manifest",
    "write_tensors",
]
