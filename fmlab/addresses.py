"""Which addresses only this machine can reach."""

import ipaddress


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
