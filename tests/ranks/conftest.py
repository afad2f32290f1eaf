"""The pools of these tests, on this machine and on two hosts: agents on 127.0.0.1 and 127.0.0.2.

A test that takes `ranks2` or `ranks4` runs once over each.
"""

from collections.abc import Callable, Iterator

import pytest

from fmlab import Ranks
from tests.ranks.cluster import Cluster


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Cluster]]:
    """Clusters of two hosts by their number of ranks, alive for the whole session."""
    made: dict[int, Cluster] = {}

    def cluster(n: int) -> Cluster:
        if n not in made:
            made[n] = Cluster(tmp_path_factory.mktemp("hosts"))
            made[n].two_hosts(n // 2)
            made[n].start(n)
        return made[n]

    yield cluster
    for one in made.values():
        one.close()


@pytest.fixture(params=["here", "hosts"])
def where(request: pytest.FixtureRequest) -> str:
    """Where the ranks of a test are."""
    return request.param


@pytest.fixture
def ranks2(where: str, request: pytest.FixtureRequest, clusters: Callable[[int], Cluster]) -> Ranks:
    """Two ranks, one on each of two hosts or both here."""
    return clusters(2).get() if where == "hosts" else request.getfixturevalue("_pool2").get()


@pytest.fixture
def ranks4(where: str, request: pytest.FixtureRequest, clusters: Callable[[int], Cluster]) -> Ranks:
    """Four ranks, two on each of two hosts or all here."""
    return clusters(4).get() if where == "hosts" else request.getfixturevalue("_pool4").get()
