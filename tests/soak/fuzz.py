"""Any command line of `fmlab` ends with what was asked for, or with a line that says what to put right."""

import contextlib
import io
import random
import shutil
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fmlab.cli import main as fmlab
from fmlab.lab import launch
from tests.soak.fuzz_draws import COMMANDS, Place

LIMIT = 10  # seconds of a command, after which it is taken for one that runs


class Runs(BaseException):
    """The command got as far as its work: it would start ranks or a server, or still runs at the limit."""


def prepare(folder: Path) -> Place:
    """A place with a tokenizer and a run of two checkpoints."""
    place = Place(folder)
    corpus = f"--corpus {place.text}"
    small = "--steps 2 --batch-size 2 --seq-len 16 --eval-every 0 --log-every 0 --save-every 1 --backend cpu"
    for line in (
        f"data tokenizer {place.tokenizer} {corpus} --vocab-size 300",
        f"train gpt2-tiny {corpus} --tokenizer {place.tokenizer} {small} --out {place.run}",
    ):
        code, said = told(line.split(), seconds=120)
        assert code == 0, said
    return place


def told(words: list[str], seconds: int = LIMIT) -> tuple[int, str]:
    """The exit code of a command line, in this process, and all that it printed; -1 for Runs.

    Raises AssertionError with the traceback for an exception that `fmlab` lets through.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _limited(seconds), _no_work():
        try:
            code = fmlab(words)
        except Runs:
            code = -1
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
        except BaseException as error:
            raise AssertionError(f"fmlab {words}\n{traceback.format_exc()}") from error
    return code, out.getvalue()


@contextlib.contextmanager
def _no_work() -> Iterator[None]:
    """Neither ranks nor a server are started; warnings are told, not raised."""

    def runs(*_: Any, **__: Any) -> Any:
        raise Runs

    with (
        warnings.catch_warnings(),
        mock.patch("fmlab.ranks.Ranks.__init__", runs),
        mock.patch.object(launch, "start", runs),
        mock.patch.object(launch.signal, "signal"),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise Runs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(folder: Path, number: int, draw: random.Random, seconds: int = LIMIT) -> Counter[str]:
    """So many command lines, of so many seconds at most; how often each end.

    Raises AssertionError for a traceback, for an end without a word, and for an unknown exit code.
    """
    place = prepare(folder)
    names = [name for name, (_, weight) in COMMANDS.items() for _ in range(weight)]
    ends: Counter[str] = Counter()
    with contextlib.chdir(folder):
        for _ in range(number):
            name = draw.choice(names)
            words = [name, *COMMANDS[name][0](draw, place)]
            if "--resume" in words:
                shutil.copytree(place.run, folder / "resumed")
            code, said = told(words, seconds)
            what = f"fmlab {words}: {code}\n{said[-2000:]}"
            assert code in (-1, 0, 1, 2), what
            assert "Traceback (most recent call last)" not in said, what
            if code == 2:
                line = said.strip().splitlines()[-1] if said.strip() else ""
                assert line.startswith("fmlab: ") or "usage:" in said or "full helptext" in said, what
                assert len(said.strip()) > 20, what
            ends[{-1: "runs", 0: "done", 1: "the answer is no", 2: "refused"}[code]] += 1
            shutil.rmtree(folder / "resumed", ignore_errors=True)
    return ends
