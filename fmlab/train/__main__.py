"""`fmlab train PRESET …`; `python -m fmlab.train PRESET …`; settings in a file: `fmlab train --config FILE`;
with several ranks `torchrun --nproc-per-node 2 -m fmlab.train PRESET …`. vae-nano and sd-tiny learn from
images, the others from text."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import tyro
from torch import nn

from fmlab.backends import get_backend
from fmlab.train.config import TrainConfig
from fmlab.train.config_file import read_config
from fmlab.train.images import ImageConfig
from fmlab.train.images.config import IMAGE_MODELS
from fmlab.train.images.samples import drawn_sample
from fmlab.train.loop import train
from fmlab.train.samples import sample_of
from fmlab.train.watchdog import ALARM, CommunicationError

_FIRST_SPEAKS = 2.0  # seconds

#: name -> what builds a model of yours
Models = Mapping[str, Callable[[], nn.Module]]


def main(argv: list[str] | None = None, models: Models | None = None) -> int:
    """Train and show a sample. Raises ValueError, OSError or ImportError for what the user can put right.

    models: those of a project of its own, which the command line names instead of our presets.
    """
    config = config_from(sys.argv[1:] if argv is None else argv, models)
    try:
        result = train(config, model=None if models is None else _built(config, models))
    except torch.OutOfMemoryError as error:  # of a GPU or a simulated chip: something to be put right
        raise ValueError(str(error)) from error
    if isinstance(config, ImageConfig):
        if _is_first():
            print(f"\n{drawn_sample(config, result.model)}")
    elif _is_first() and (models is None or hasattr(result.model, "new_cache")):
        if get_backend(config.backend).lazy:
            # Each token that is written makes the text one longer: a program of its own on such a device.
            get_backend("cpu").to_device(result.model)
        with _precision_of(config, bool(result.modelled_seconds)):
            print(f"\n{sample_of(result.objective, result.model, result.tokenizer)}")
    return 0


def _built(config: TrainConfig, models: Models) -> nn.Module:
    """The model that the config names, its weights drawn with the run's seed: the same on every rank."""
    if config.model not in models:
        raise ValueError(f"there is no model {config.model!r} here; the models are: {', '.join(models)}")
    torch.manual_seed(config.seed)
    return models[config.model]()


def config_from(argv: list[str], models: Models | None = None) -> TrainConfig:
    """The settings that a command line gives; those of `--config FILE` are the defaults of the others. The
    first of `models` is the usual one.

    Raises ValueError or OSError for a file that cannot be read; the command line's mistakes end the program.
    """
    first = argparse.ArgumentParser("fmlab train", add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE")
    given, others = first.parse_known_args(argv)
    if models is None and (not given.config and others and others[0] in IMAGE_MODELS):
        return tyro.cli(ImageConfig, args=others, prog="fmlab train", description=ImageConfig.__doc__)
    usual = TrainConfig() if models is None else TrainConfig(model=next(iter(models)))
    default = usual if given.config is None else read_config(given.config)
    return tyro.cli(
        type(default),
        args=others,
        prog="fmlab train",
        description=f"{type(default).__doc__} With --config FILE (TOML or JSON) the defaults are the file's.",
        default=default,
    )


def _precision_of(config: TrainConfig, simulated: bool) -> AbstractContextManager[Any]:
    """A simulated chip may have no rate for fp32: there the sample is made in the precision of training."""
    if not simulated:
        return nullcontext()
    precision: Any = config.layout.precision
    return get_backend(config.backend).autocast(precision)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run(models: Models | None = None) -> int:
    """`main` as the command `fmlab` runs it, told once by the first of several ranks that agree: 2 for wrong
    input. A project of its own gives its models."""
    try:
        return main(models=models)
    except (ValueError, OSError, ImportError) as error:
        who = ""
        if not _is_first():
            # What all ranks met the first has told by now, and the launcher has ended the others.
            time.sleep(_FIRST_SPEAKS)
            who = f"rank {os.environ['RANK']}: "
        print(f"fmlab: train: {who}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except CommunicationError:  # one of the ranks has said what happened
        return ALARM
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
