"""By which address other hosts reach this one, and the interface that gloo is told."""

import socket

import pytest

from fmlab import addresses
from fmlab.addresses import is_loopback, main, own_address, torchrun_options
from fmlab.backends.interface import VARIABLE, choose_interface

HERE = {"127.0.0.1": "lo", "10.77.0.1": "eth0"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with one network, called host-0, whose own name is 127.0.1.1 as Debian has it."""
    names = {"host-0": "127.0.1.1", "localhost": "127.0.0.1"}

    def known(name: str) -> str:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return names[name]

    found = dict(HERE)
    monkeypatch.setattr(socket, "gethostbyname", known)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-0")
    monkeypatch.setattr(addresses, "addresses", lambda: found)
    monkeypatch.setattr("fmlab.backends.interface.addresses", lambda: found)
    return found


def test_a_host_called_127_0_1_1_is_reached_by_its_only_network(host: dict[str, str]) -> None:
    assert own_address("host-0") == "10.77.0.1"
    assert torchrun_options("host-0") == ["--rdzv-conf", "is_host=true", "--local-addr", "10.77.0.1"]


def test_of_several_networks_none_is_guessed(host: dict[str, str]) -> None:
    host["10.88.0.1"] = "eth1"
    with pytest.raises(ValueError, match=r"several networks \(eth0 10.77.0.1, eth1 10.88.0.1\)"):
        own_address("host-0")
    ranks = {"MASTER_ADDR": "host-0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=NAME, of eth0, eth1, lo"):
        choose_interface(ranks)
    assert VARIABLE not in ranks


def test_what_cannot_be_the_first_of_several_hosts_is_refused(
    host: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"'host-9'.*add it to /etc/hosts"):
        own_address("host-9")
    with pytest.raises(ValueError, match="a different host on every host"):
        torchrun_options("localhost")
    assert main(["host-9"]) == 2
    assert "host-9" in capsys.readouterr().err
    assert main([]) == 2
    del host["10.77.0.1"]
    with pytest.raises(ValueError, match="no network but its own"):
        own_address("host-0")


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ({"MASTER_ADDR": "host-0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "eth0"),
        ({"MASTER_ADDR": "host-9", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),  # all are here
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, "lo"),
        ({"MASTER_ADDR": "host-0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, "eth0"),  # DeepSpeed's launcher
        ({"MASTER_ADDR": "host-0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", VARIABLE: "lo"}, "lo"),
        ({}, None),  # no launcher
    ],
)
def test_gloo_is_told_the_interface_that_leads_to_the_others(
    said: dict[str, str], chosen: str | None, host: dict[str, str]
) -> None:
    choose_interface(said)
    assert said.get(VARIABLE) == chosen


def test_an_interface_that_is_not_there_is_refused(host: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"no interface ib0 that is up and has an address; it has eth0, lo"):
        choose_interface({VARIABLE: "ib0"})


def test_the_addresses_of_this_machine_have_its_loopback() -> None:
    assert is_loopback(next(each for each, name in addresses.addresses().items() if name in ("lo", "lo0")))
    assert own_address("127.0.0.1") in addresses.addresses() or len(addresses.addresses()) != 2
