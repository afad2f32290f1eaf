"""Where the ranks of many hosts meet: a TCPStore at the head, and each host's interface that reaches it."""

import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil

from fmlab._ranks.link import Link
from fmlab.addresses import is_loopback


def open_store(host: str, timeout: float) -> tuple[Any, int]:
    """A store on a free port of `host` alone, where torch's own takes every address; and the port."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        _own(host),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    return store, port


def _own(host: str) -> str:
    """An address at which this process reaches what listens at `host`, which may stand for all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name, or "" for all addresses
        return host or "127.0.0.1"
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def interface_of(address: str) -> str:
    """The network interface of this host with an address. ValueError when there is none."""
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    for name, addresses in found.items():  # all of 127.0.0.0/8 is the loopback interface's
        if is_loopback(address) and any(is_loopback(one.address) for one in addresses):
            return name
    raise ValueError(f"no interface of this host has the address {address}; there are: {', '.join(found)}")


def check_reach(links: Sequence[Link]) -> None:
    """ValueError when a host joined over its loopback interface, where no other host can reach its ranks."""
    inside = [link.host for link in links if is_loopback(link.address)]
    outside = [link.host for link in links if not is_loopback(link.address)]
    if inside and outside:
        raise ValueError(
            f"host {inside[0]} joined over loopback, where host {outside[0]} cannot reach its ranks: let "
            "it join with the address that the other hosts use"
        )
