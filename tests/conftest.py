"""Shared fixtures: one pool of ranks per size, and tests that need a part of the system.

A test that uses `ranks2` or `ranks4` runs functions on real processes that live for the whole session. A
test marked `needs_system("chromium")` is skipped, and counted, where that part is absent; with
`--strict-system` it fails instead.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmlab import Ranks
from fmlab.doctor import SYSTEM_PARTS

# The scripts are no package: put them where tests can import them.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

# Started in the background of a script, a process ignores interrupts, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-system",
        action="store_true",
        help="fail, instead of skip, tests whose needs_system part is absent",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_system"):
        part = SYSTEM_PARTS[mark.args[0]]
        if not part.found():
            message = f"{mark.args[0]} is absent: {part.fix}"
            if item.config.getoption("--strict-system"):
                pytest.fail(message, pytrace=False)
            pytest.skip(message)


class _Pool:
    """A pool made at its first use, and made whole again before each test that uses it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.ranks: Ranks | None = None

    def get(self) -> Ranks:
        if self.ranks is None:
            self.ranks = Ranks(self.n, timeout=60)
        elif not self.ranks.alive:
            self.ranks.restart()
        return self.ranks

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()


@pytest.fixture(scope="session")
def _pool2() -> Iterator[_Pool]:
    pool = _Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def _pool4() -> Iterator[_Pool]:
    pool = _Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def ranks2(_pool2: _Pool) -> Ranks:
    """Two ranks, alive for the whole session."""
    return _pool2.get()


@pytest.fixture
def ranks4(_pool4: _Pool) -> Ranks:
    """Four ranks, alive for the whole session."""
    return _pool4.get()
