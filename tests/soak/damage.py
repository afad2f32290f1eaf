"""Damaged checkpoints: each is refused by the name of a file, or an older whole one is taken; never a
traceback of another kind, never other numbers than were saved."""

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from fmlab.storage import StorageError
from fmlab.train import checkpoint
from fmlab.train.checkpoint import RunState
from fmlab.train.saver import Saver
from tests.train.tiny_run import tiny_engine, tiny_tokenizer

STEPS = (2, 4)


def _flip(file: Path, other: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, other: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def _empty(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def _longer(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _swap(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(other.read_bytes())


def _gone(file: Path, other: Path, draw: random.Random) -> None:
    file.unlink()


def _folder(file: Path, other: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _noise(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(draw.choice([1, 7, 8, 9, 1000])))


def _huge_header(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(draw.choice([2**63 - 1, 2**64 - 1, 2**40, 10**9]).to_bytes(8, "little") + b"{}")


def _deep(file: Path, other: Path, draw: random.Random) -> None:
    file.write_bytes(draw.choice([b"[" * 100_000, b'{"files":' * 50_000, b"null", b"1e999", b"\xff\xfe"]))


KINDS: list[Callable[[Path, Path, random.Random], None]] = [
    *(_flip, _cut, _empty, _longer, _swap, _gone, _folder, _noise, _huge_header, _deep),
]


class Written:
    """A run's folder with two whole checkpoints, and an engine to resume into."""

    def __init__(self, out: Path) -> None:
        self.out, self.tokenizer, self.engine = out, tiny_tokenizer(), tiny_engine()
        self.saver = Saver(out, self.engine, self.tokenizer, keep=5)
        self.was = {}
        for step in STEPS:
            for parameter in self.engine.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            self.engine.optimizer.step()
            self.saver.save(RunState(step, step, {"step": step}, [0.5] * step, {}))
            self.was[step] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        found = {**self.engine.full_params(), **self.engine.full_optimizer_state()}
        return {name: tensor.clone() for name, tensor in found.items()}

    def holds(self, step: int) -> bool:
        """Whether the engine has bitwise the state of that step."""
        now, was = self.now(), self.was[step]
        return now.keys() == was.keys() and all(torch.equal(now[name], was[name]) for name in was)


def damage(folder: Path, number: int, draw: random.Random) -> Counter[str]:
    """Damage a file of the newer of two checkpoints, or of both, and resume; how often what came of it.

    Raises AssertionError with the damage for a load of anything but what was saved, and for another error
    than one that names the file.
    """
    written = Written(folder / "whole")
    counts: Counter[str] = Counter()
    names = sorted(p.name for p in checkpoint.folder_of(written.out, STEPS[-1]).iterdir())
    for i in range(number):
        out = folder / "damaged"
        shutil.copytree(written.out, out)
        name, kind, both = names[i % len(names)], draw.choice(KINDS), i % 5 == 4
        for step, other in (STEPS[::-1], *([STEPS] if both else [])):
            file = checkpoint.folder_of(out, step) / name
            before = file.read_bytes()
            kind(file, checkpoint.folder_of(written.out, other) / name, draw)
            if file.is_file() and file.read_bytes() == before:  # the same tokenizer, say, or no difference
                _flip(file, file, draw)
        what = f"{kind.__name__} of {name} in {'both' if both else 'the newer'}"
        # Of a manifest that was swapped it is another file that does not agree with it.
        named = [f"{STEPS[1]:06d}", *([name] if kind is not _swap else [])]
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                _, state = checkpoint.resume(out, written.engine)
        except StorageError as error:
            if not both or not all(part in str(error) for part in named):
                raise AssertionError(f"{what}: {error}") from error
            counts["refused by name"] += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        else:
            assert not both, f"{what}: loaded"
            assert state.step == STEPS[0], f"{what}: step {state.step}"
            assert written.holds(STEPS[0]), f"{what}: a wrong load"
            text = " ".join(str(one.message) for one in said)
            assert all(part in text for part in named), f"{what} is not named: {text}"
            counts["passed over for the older one"] += 1
        shutil.rmtree(out)
    return counts
