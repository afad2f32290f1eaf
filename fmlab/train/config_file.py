"""A run's settings as a file: TOML or JSON with the names of TrainConfig, and a table "layout" of a Layout's.

    model = "gpt2"
    steps = 1000
    batch_size = 64

    [layout]
    data = 8
    zero = 1

What a file leaves out has its default. A name that does not exist is refused, not ignored.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fmlab.parallel import Layout
from fmlab.train.config import TrainConfig
from fmlab.train.images.config import IMAGE_MODELS, ImageConfig

#: always written, even where they are the default
_ALWAYS = ("model", "corpus", "steps", "batch_size", "seq_len")
_LAYOUT_NAMES = tuple(field.name for field in fields(Layout))


def read_config(path: str | Path) -> TrainConfig:
    """The settings in a file; its ending, .toml or .json, says how to read it.

    Raises ValueError, with the file and what is legal, for another ending, for text that is no TOML or JSON,
    for names that do not exist, and for values that TrainConfig or Layout refuse. OSError without a file.
    """
    path = Path(path).expanduser()
    table = _table(path)
    kind = ImageConfig if table.get("model") in IMAGE_MODELS else TrainConfig
    _check_names(path, "a setting of fmlab train", table, tuple(field.name for field in fields(kind)))
    layout = table.get("layout", {})
    if not isinstance(layout, Mapping):
        raise ValueError(f"{path}: layout is a table of a Layout's settings, not {layout!r}")
    _check_names(path, "a setting of a layout", layout, _LAYOUT_NAMES)
    try:
        return kind(**{**table, "layout": Layout(**layout)})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table(path: Path) -> Mapping[str, Any]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: a config file ends with .toml or .json")
    try:
        found: Any = reader(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of both readers, and of text that is no UTF-8
        raise ValueError(f"{path} is no {path.suffix[1:].upper()}: {error}") from error
    except RecursionError:
        raise ValueError(f"{path}: lists in lists, too deep to read; a config file has two levels") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: names and values are wanted, not {type(found).__name__}")
    return found


def _check_names(path: Path, what: str, given: Iterable[str], legal: tuple[str, ...]) -> None:
    for name in given:
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{path}: {name!r} is not {what}; {hint}legal are {', '.join(legal)}")


def config_text(config: TrainConfig) -> str:
    """The settings as TOML that `read_config` reads back into an equal value; defaults are left out."""
    lines = [
        f"{field.name} = {_value(getattr(config, field.name))}"
        for field in fields(config)
        if field.name != "layout" and (field.name in _ALWAYS or getattr(config, field.name) != field.default)
    ]
    layout = [
        f"{field.name} = {_value(getattr(config.layout, field.name))}"
        for field in fields(Layout)
        if getattr(config.layout, field.name) != field.default
    ]
    return "\n".join([*lines, "", "[layout]", *layout, ""])


def _value(value: Any) -> str:
    """A value in TOML, whose numbers, truth values, texts and lists are those of JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
