"""Hugging Face's folder format, in and out, for any model: config.json and safetensors.

A family says in one list how its parameter names correspond to transformers' (`Weight`); this module reads
and writes the files, strictly: every missing, unexpected or mis-shaped name is reported in one error, before
the model is touched. Nothing is ever unpickled except through torch.load(weights_only=True).

Format: https://huggingface.co/docs/safetensors and a `model.safetensors.index.json` whose "weight_map"
gives the file of each name when a checkpoint is cut into several.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fmlab.extras import require

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
_HUB_FILES = ["config.json", "*.safetensors", INDEX]


@dataclass(frozen=True)
class Weight:
    """One parameter: our name, the name in the file, and whether the file holds its transpose."""

    ours: str
    theirs: str
    transposed: bool = False


def find_folder(source: str | Path) -> Path:
    """A local folder as it is; otherwise the files of that hub repository, downloaded or from the cache.

    Raises ValueError if `source` is neither. Needs the extra `hf` for a repository.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder that holds it and its config.json")
    name = str(source)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"there is no folder {folder}")
    hub = require("hf", "huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, hub.errors.HfHubHTTPError, hub.errors.HFValidationError) as error:
        raise ValueError(
            f"{name!r} is neither a folder here nor a repository that could be fetched from the Hugging Face "
            f"hub ({type(error).__name__}); check the name and the connection, or give a local folder"
        ) from error


def read_config(folder: Path, model_type: str) -> dict[str, Any]:
    """config.json of `folder`. Raises ValueError if it is missing, unreadable or of another family."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json; it holds {_listing(folder)}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if config.get("model_type") != model_type:
        raise ValueError(
            f"{path} is for model_type {config.get('model_type')!r}; {model_type!r} is needed here"
        )
    return config


def load_weights(
    model: nn.Module,
    folder: Path,
    weights: Iterable[Weight],
    rename: Callable[[str], str] = lambda name: name,
    ignore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copy a checkpoint into `model`, casting to its dtypes.

    Args:
        weights: the correspondence, one entry for each parameter of the model.
        rename: turns a name found in the files into the one `weights` uses (an older prefix, say).
        ignore: names in the files that hold no parameter (old mask buffers, a stored copy of a tied weight).

    Raises ValueError that lists all missing, unexpected and mis-shaped names; the model is then unchanged.
    """
    files = _Files(folder)
    found = {rename(name): name for name in files.names if not ignore(rename(name))}
    wanted = {weight.theirs: weight for weight in weights}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(set(wanted) - set(found))
    unexpected = sorted(set(found) - set(wanted))
    misshaped = []
    for theirs in wanted.keys() & found.keys():
        expected = list(parameters[wanted[theirs].ours].shape)
        expected = expected[::-1] if wanted[theirs].transposed else expected
        if (shape := files.shape(found[theirs])) != expected:
            misshaped.append(f"{theirs} is {shape}, the model needs {expected}")
    problems = {"missing": missing, "unexpected": unexpected, "of the wrong shape": sorted(misshaped)}
    if any(problems.values()):
        lines = [f"  {len(names)} {what}: {_shorten(names)}" for what, names in problems.items() if names]
        raise ValueError(f"the checkpoint in {folder} does not fit this model:\n" + "\n".join(lines))
    with torch.no_grad():
        for theirs, weight in wanted.items():
            tensor = files.read(found[theirs])
            parameters[weight.ours].copy_(tensor.T if weight.transposed else tensor)


def save_weights(
    model: nn.Module, folder: Path, weights: Iterable[Weight], config: Mapping[str, Any]
) -> None:
    """Write config.json and model.safetensors. The config comes last: a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {}
    for weight in weights:
        tensor = parameters[weight.ours].detach()
        tensors[weight.theirs] = (tensor.T if weight.transposed else tensor).contiguous().cpu()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers asks for this key
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Files:
    """The tensors of a checkpoint folder by name, read one at a time."""

    def __init__(self, folder: Path):
        self.file_of: dict[str, Path] = {}
        self.loaded: dict[str, Tensor] = {}
        if (folder / INDEX).is_file():
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            self.file_of = {name: folder / file for name, file in weight_map.items()}
            absent = sorted({path.name for path in self.file_of.values() if not path.is_file()})
            if absent:
                raise ValueError(f"{INDEX} in {folder} names files that are not there: {', '.join(absent)}")
        elif (folder / WEIGHTS).is_file():
            with _open(folder / WEIGHTS) as file:
                self.file_of = dict.fromkeys(file.keys(), folder / WEIGHTS)
        elif (folder / PICKLED).is_file():
            self.loaded = _load_pickled(folder / PICKLED)
        else:
            raise ValueError(f"{folder} has no {WEIGHTS}, {INDEX} or {PICKLED}; it holds {_listing(folder)}")
        self.names = [*self.file_of, *self.loaded]

    def shape(self, name: str) -> list[int]:
        if name in self.loaded:
            return list(self.loaded[name].shape)
        with _open(self.file_of[name]) as file:
            return list(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        if name in self.loaded:
            return self.loaded[name]
        with _open(self.file_of[name]) as file:
            return file.get_tensor(name)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def _load_pickled(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} needs more than torch.load(weights_only=True), so it may run code of its author, and is "
            f"refused; ask for a safetensors version of it ({type(error).__name__})"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} does not hold a dictionary of tensors")
    return state


def _listing(folder: Path) -> str:
    return _shorten(sorted(path.name for path in folder.iterdir())) or "nothing"


def _shorten(names: list[str], most: int = 8) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
