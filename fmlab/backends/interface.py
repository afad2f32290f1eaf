"""The network interface that gloo takes, chosen before ranks of several hosts meet.

gloo listens on the address of this host's own name. Debian and its kin say in /etc/hosts that it is
127.0.1.1, which no other host reaches: the ranks hang, or end with "Connection refused" from 127.0.0.1. So it
is told the interface that leads to the first rank's host.
"""

import os
from collections.abc import MutableMapping

from fmlab.addresses import addresses, is_loopback, own_address

VARIABLE = "GLOO_SOCKET_IFNAME"  # gloo has no other way to be told, also for the groups that are made later


def choose_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell gloo, in `environ`, the interface that leads to MASTER_ADDR; the loopback one for a single host.

    A choice that is there already stays. Outside of a launched rank nothing is done.

    Raises ValueError where no interface, or no single one, leads to the first rank, with what to set; and for
    a choice that this host does not have.
    """
    found = addresses()
    if VARIABLE in environ:
        unknown = [name for name in environ[VARIABLE].split(",") if name not in found.values()]
        if unknown:
            raise ValueError(
                f"{VARIABLE}={environ[VARIABLE]}: this host has no interface {', '.join(unknown)} that is up "
                f"and has an address; it has {', '.join(sorted(set(found.values())))}"
            )
        return
    head = environ.get("MASTER_ADDR")
    if head is None:
        return
    if _one_host(environ, head):
        if "127.0.0.1" in found:
            environ[VARIABLE] = found["127.0.0.1"]
        return
    try:
        environ[VARIABLE] = found[own_address(head)]
    except ValueError as error:
        raise ValueError(
            f"{error}. Either give each host its address (torchrun --local-addr ADDRESS), or say which "
            f"interface leads to the others: {VARIABLE}=NAME, of {', '.join(sorted(set(found.values())))}"
        ) from error


def _one_host(environ: MutableMapping[str, str], head: str) -> bool:
    """Whether all ranks are on this host: torchrun and DeepSpeed say how many of them are."""
    here = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    return is_loopback(head) if here is None else here == environ.get("WORLD_SIZE")
