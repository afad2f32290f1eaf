"""Which addresses only this machine can reach, and by which one other hosts reach this machine.

python -m fmlab.addresses HEAD      what torchrun must be told on this host, if HEAD is the first of many
"""

import ipaddress
import socket
import sys


def is_loopback(address: str) -> bool:
    """Whether a server that listens there is reached from this machine alone: localhost, 127.x.x.x or ::1.

    Any other form is not, also one that would be resolved to such an address: "" and "*" mean all of them.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def own_address(towards: str) -> str:
    """This host's IPv4 address on the network that leads to another host, a name or an address.

    Towards itself it is the address by which others reach it, also where its own name is 127.0.1.1 in
    /etc/hosts, as Debian has it.

    Raises ValueError for a name that is not known here, for one that nothing leads to, and where this host
    has several networks and nothing says which of them is meant.
    """
    try:
        address = socket.gethostbyname(towards)
    except OSError as error:
        raise ValueError(
            f"host {socket.gethostname()} knows no {towards!r} ({error}): give its address, or add it to "
            "/etc/hosts of every host"
        ) from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ValueError(
                f"nothing leads from {socket.gethostname()} to {towards} ({address}): {error}"
            ) from error
        own = str(probe.getsockname()[0])
    if not is_loopback(own):
        return own
    reached = [each for each in addresses() if not is_loopback(each)]
    if len(reached) == 1:
        return reached[0]
    networks = ", ".join(f"{name} {each}" for each, name in addresses().items() if each in reached)
    raise ValueError(
        f"{towards!r} is {address} here, which no other host reaches, and this host, "
        f"{socket.gethostname()}, has "
        + (f"several networks ({networks})" if reached else "no network but its own")
        + ": give the first host by an address"
    )


def addresses() -> dict[str, str]:
    """The IPv4 addresses of this host -> the network interface of each; those that are up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        each.address: name
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET and name in up
    }


def torchrun_options(head: str) -> list[str]:
    """What torchrun is told on this host beside `--rdzv-endpoint head:PORT`: whether it is the first host,
    and by which address the others reach it.

    torchrun compares names, and misses that it is the first where `head` is an address and its own name is
    127.0.1.1; then no host opens the store, and all give up after a minute. It also tells the others to meet
    at its name, which they need not know.

    Raises ValueError like `own_address`, and for a head that means another host on every host.
    """
    if is_loopback(head):
        raise ValueError(f"{head!r} is a different host on every host: give the name or address of the first")
    own = own_address(head)
    address = socket.gethostbyname(head)
    first = address == own or is_loopback(address)
    return ["--rdzv-conf", f"is_host={str(first).lower()}", "--local-addr", own]


def main(argv: list[str]) -> int:
    """Print torchrun's options for this host; 2 with a message where there are none."""
    if len(argv) != 1:
        print("usage: python -m fmlab.addresses HEAD", file=sys.stderr)
        return 2
    try:
        print(" ".join(torchrun_options(argv[0])))
    except ValueError as error:
        print(f"fmlab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
