"""Hugging Face's folder format, in and out, for any model: config.json and safetensors.

A family says in one `HFFormat` how its config and, name by name (`Weight`), its parameters correspond to
those of transformers or diffusers. This module reads and writes the files, strictly: all missing, unexpected
and mis-shaped names are reported in one error, before the model is touched. Nothing is ever unpickled except
through torch.load(weights_only=True).

Format: https://huggingface.co/docs/safetensors and a `model.safetensors.index.json` whose "weight_map"
gives the file of each name when a checkpoint is cut into several.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fmlab.extras import require

PICKLED = "pytorch_model.bin"
_HUB_FILES = ["*.json", "*.safetensors"]


@dataclass(frozen=True)
class Weight:
    """One parameter: our name, its name in the file, and whether the file holds its transpose.

    `theirs` may be several names: ours is then theirs, one below the other (a fused query-key-value matrix),
    with `rows` each, or equal parts if not given. With `stacked`, ours has one more dim in front, of that
    size (experts): theirs one below the other, cut into so many equal pieces.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, ...] | None = None
    stacked: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the file."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Our tensor from theirs."""
        parts = [tensor.T if self.transposed else tensor for tensor in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self.stacked is None else joined.unflatten(0, (self.stacked, -1))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Theirs from ours (a weight or its gradient)."""
        if tensor.dim() == 0:
            return (tensor,)
        if self.stacked is not None:
            tensor = tensor.flatten(0, 1)
        parts = tensor.chunk(len(self.names)) if self.rows is None else tensor.split(list(self.rows))
        return tuple(part.T if self.transposed else part for part in parts)


@dataclass(frozen=True)
class HFFormat:
    """How a family is written in Hugging Face's format.

    Args:
        config_key, config_value: what config.json must say: ("model_type", "gpt2"), or diffusers'
            ("_class_name", "UNet2DConditionModel").
        weights: config -> the correspondence, one entry for each parameter (a tied one once) and buffer.
        to_fields: config -> the fields of config.json.
        from_fields: those fields -> our config; raises ValueError for settings that we do not compute.
        rename: (config, name found in the files) -> the name that `weights` uses (an older prefix, say).
        ignore: (config, renamed name) -> True for what holds no parameter (old mask buffers, a tied copy).
        stem: of the weight file, "model" or diffusers' "diffusion_pytorch_model".
    """

    config_key: str
    config_value: str
    weights: Callable[[Any], list[Weight]]
    to_fields: Callable[[Any], dict[str, Any]]
    from_fields: Callable[[dict[str, Any]], Any]
    rename: Callable[[Any, str], str] = lambda config, name: name
    ignore: Callable[[Any, str], bool] = lambda config, name: False
    stem: str = "model"

    def load(self, build: Callable[[Any], nn.Module], source: str | Path, **overrides: Any) -> nn.Module:
        """Build and fill a model, in eval mode; `overrides` replace fields of its config. Strict."""
        folder = find_folder(source)
        config = replace(self._read(folder), **overrides)
        model = build(config)
        load_weights(
            model,
            folder,
            self.weights(config),
            lambda name: self.rename(config, name),
            lambda name: self.ignore(config, name),
            self.stem,
        )
        return model.eval()

    def _read(self, folder: Path) -> Any:
        """Our config. Raises ValueError for fields of a kind that they cannot have, too."""
        found = read_config(folder, self.config_key, self.config_value)
        try:
            config = self.from_fields(found)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{folder / 'config.json'} has a field missing or of a wrong kind: {error}"
            ) from error
        _check_numbers(config, folder / "config.json")
        return config

    def save(self, model: nn.Module, folder: str | Path) -> None:
        """Write config.json and the weights into `folder`, which is made if needed."""
        config = model.config
        save_weights(model, Path(folder), self.weights(config), self.to_fields(config), self.stem)


def _check_numbers(config: Any, path: Path) -> None:
    """Raise ValueError unless each field that is a float, in nested configs too, is a number."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            _check_numbers(value, path)
        elif field.type is float and not isinstance(value, int | float):
            raise ValueError(f"{path}: {field.name} must be a number, got {value!r}")


def refuse_other_than(fixed: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ValueError if config.json sets something to another value than the only one that we compute."""
    for name, only in fixed.items():
        if found.get(name, only) != only:
            raise ValueError(f"config.json sets {name}={found[name]!r}; only {only!r} is supported")


def find_folder(source: str | Path, files: Sequence[str] = _HUB_FILES) -> Path:
    """A local folder as it is; otherwise these files of that hub repository, downloaded or from the cache.

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
        return Path(hub.snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError, hub.errors.HfHubHTTPError, hub.errors.HFValidationError) as error:
        raise ValueError(
            f"{name!r} is neither a folder here nor a repository that could be fetched from the Hugging Face "
            f"hub ({type(error).__name__}); check the name and the connection, or give a local folder"
        ) from error


def read_config(folder: Path, key: str, value: str) -> dict[str, Any]:
    """config.json of `folder`. Raises ValueError if it is missing, unreadable or of another family."""
    config = _config(folder)
    if config.get(key) != value:
        raise ValueError(
            f"{folder / 'config.json'} is for {key} {config.get(key)!r}; {value!r} is needed here"
        )
    return config


def model_type(folder: Path) -> str:
    """Which family the model in `folder` is of, as transformers names it: "gpt2", "llama", ..."""
    return str(_config(folder).get("model_type"))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json; it holds {_listing(folder)}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return config


def load_weights(
    model: nn.Module,
    folder: Path,
    weights: Iterable[Weight],
    rename: Callable[[str], str] = lambda name: name,
    ignore: Callable[[str], bool] = lambda name: False,
    stem: str = "model",
) -> None:
    """Copy a checkpoint into `model`, casting to its dtypes; the arguments are explained at HFFormat.

    Raises ValueError that lists all missing, unexpected and mis-shaped names; the model is then unchanged.
    """
    files = _Files(folder, stem)
    found = {rename(name): name for name in files.names if not ignore(rename(name))}
    weights = list(weights)
    wanted = [name for weight in weights for name in weight.names]
    parameters = named_tensors(model)
    misshaped = []
    for weight in weights:
        if all(name in found for name in weight.names):
            shapes = [files.shape(found[name]) for name in weight.names]
            misshaped += _misshaped(weight, shapes, list(parameters[weight.ours].shape))
    problems = {
        "missing": sorted(set(wanted) - set(found)),
        "unexpected": sorted(set(found) - set(wanted)),
        "of the wrong shape": sorted(misshaped),
        "of whole numbers, which mean nothing without their scales (a quantised checkpoint)": sorted(
            name for name in set(wanted) & set(found) if files.quantised(found[name])
        ),
    }
    if any(problems.values()):
        lines = [f"  {len(names)} {what}: {_shorten(names)}" for what, names in problems.items() if names]
        raise ValueError(f"the checkpoint in {folder} does not fit this model:\n" + "\n".join(lines))
    with torch.no_grad():
        for weight in weights:
            parameters[weight.ours].copy_(weight.join([files.read(found[name]) for name in weight.names]))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones under each name, and buffers (the running statistics of batch norm)."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _misshaped(weight: Weight, shapes: list[list[int]], ours: list[int]) -> list[str]:
    """What is wrong with the shapes of the tensors in the files; nothing if they make our parameter."""
    if weight.stacked is not None:
        ours = [ours[0] * ours[1], *ours[2:]]
    if weight.transposed:
        ours = ours[::-1]
    rows = -1 if weight.transposed else 0  # the dim along which several are put together
    if len(shapes) == 1:
        return [] if shapes[0] == ours else [f"{weight.names[0]} is {shapes[0]}, the model needs {ours}"]
    total = [*shapes[0]]
    total[rows] = sum(shape[rows] for shape in shapes)
    if total == ours and all(len(shape) == len(ours) for shape in shapes):
        return []
    return [f"{', '.join(weight.names)} are {shapes}, together the model needs {ours}"]


def save_weights(
    model: nn.Module,
    folder: Path,
    weights: Iterable[Weight],
    config: Mapping[str, Any],
    stem: str = "model",
) -> None:
    """Write config.json and the weights. The config comes last: a folder that has one is complete."""
    parameters = named_tensors(model)
    if any(tensor.is_meta for tensor in parameters.values()):
        raise ValueError(
            "a model on the meta device has no weights to save; fill it first (to_empty, then load)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    written: set[str] = set()
    for weight in weights:
        parts = weight.split(parameters[weight.ours].detach())
        for name, part in zip(weight.names, parts, strict=True):
            # a copy where one parameter has several names there: the format refuses shared memory
            again = weight.ours in written
            tensors[name] = part.contiguous().cpu().clone() if again else part.contiguous().cpu()
        written.add(weight.ours)
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})  # the key is asked for
    # Of an older checkpoint in several files, which would be read instead of this one.
    (folder / f"{stem}.safetensors.index.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Files:
    """The tensors of a checkpoint folder by name, read one at a time."""

    def __init__(self, folder: Path, stem: str):
        self.file_of: dict[str, Path] = {}
        self.loaded: dict[str, Tensor] = {}
        whole, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if (folder / index).is_file():
            self.file_of = {name: folder / file for name, file in _weight_map(folder / index).items()}
            absent = sorted({path.name for path in self.file_of.values() if not path.is_file()})
            if absent:
                raise ValueError(f"{index} in {folder} names files that are not there: {', '.join(absent)}")
        elif (folder / whole).is_file():
            with _open(folder / whole) as file:
                self.file_of = dict.fromkeys(file.keys(), folder / whole)
        elif (folder / PICKLED).is_file():
            self.loaded = _load_pickled(folder / PICKLED)
        else:
            raise ValueError(f"{folder} has no {whole}, {index} or {PICKLED}; it holds {_listing(folder)}")
        self.names = [*self.file_of, *self.loaded]

    def shape(self, name: str) -> list[int]:
        if name in self.loaded:
            return list(self.loaded[name].shape)
        with _open(self.file_of[name]) as file:
            return list(file.get_slice(name).get_shape())

    def quantised(self, name: str) -> bool:
        """Whether the tensor holds whole numbers or 8-bit floats, whose scales stand elsewhere."""
        if name in self.loaded:
            dtype = self.loaded[name].dtype
            return not dtype.is_floating_point or dtype.itemsize == 1
        with _open(self.file_of[name]) as file:
            return file.get_slice(name).get_dtype() not in ("F64", "F32", "F16", "BF16")

    def read(self, name: str) -> Tensor:
        if name in self.loaded:
            return self.loaded[name]
        with _open(self.file_of[name]) as file:
            return file.get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} does not say which file holds which tensor ({error!r})") from error


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
