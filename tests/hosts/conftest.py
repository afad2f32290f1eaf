"""Hosts for tests, or the reason why there are none here."""

from collections.abc import Iterator

import pytest

from tests.hosts.namespaces import Hosts, refusal


@pytest.fixture(scope="session")
def hosts_can_be_made() -> None:
    """Skip where this machine refuses namespaces."""
    if why := refusal():
        pytest.skip(why)


@pytest.fixture
def two_hosts(hosts_can_be_made: None) -> Iterator[Hosts]:
    """Two hosts whose own names are 127.0.1.1 to themselves, as on Debian."""
    with Hosts(2, own_name="loopback") as hosts:
        yield hosts
