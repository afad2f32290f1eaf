"""The device "sim" is registered once in a process and stays: its tests run in processes of their own."""

from collections.abc import Iterator

import pytest

from fmlab import Ranks


@pytest.fixture(scope="session")
def _aside() -> Iterator[Ranks]:
    with Ranks(1, timeout=60) as pool:
        yield pool


@pytest.fixture
def aside(_aside: Ranks) -> Ranks:
    """One process beside this one, where functions of a test run: aside.run(function)."""
    return _aside


@pytest.fixture
def fresh2(ranks2: Ranks) -> Iterator[Ranks]:
    """The session's two ranks, restarted afterwards, so that no other test meets the device."""
    yield ranks2
    ranks2.restart()
