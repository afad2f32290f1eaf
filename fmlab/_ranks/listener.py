"""The head's port: takes connections, has each prove itself, checks the versions, and says why it refused."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from fmlab._ranks.channel import PROVE, Channel, NotProved, prove
from fmlab._ranks.link import differences, versions
from fmlab.addresses import is_loopback

AT_ONCE = 32  # connections that prove themselves at the same time; more are closed, and agents try again
KEPT = 10  # refusals that are remembered, to be told when hosts are missing
_HELLO = {"host": str, "slots": int, "agent": str, "address": str, "port": int, "versions": dict}


def parse_address(text: str) -> tuple[str, int]:
    """ "10.0.0.1:29400" or "[::1]:29400" as (address, port). ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} is no ADDRESS:PORT, as in 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def name_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Listener:
    """Listens until closed. `joined` is called, in a thread, with each agent's channel and what it said."""

    def __init__(
        self, host: str, port: int, token: str, joined: Callable[[Channel, dict[str, Any]], None]
    ) -> None:
        self._token, self._joined = token, joined
        self.refused: list[str] = []
        self._seats = threading.Semaphore(AT_ONCE)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        at = self._socket.getsockname()[0]
        if is_loopback(at) and not is_loopback(host):  # as Debian's /etc/hosts has it for a host's own name
            self._socket.close()
            raise ValueError(f"{host!r} is {at} here, which no other host reaches: give this host's address")
        self._socket.settimeout(0.2)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True, name="fmlab-listener")
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the port is free afterwards."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # a connection that ended before it was taken
                continue
            if not self._seats.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock, peer[0]), daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            self._admit(sock)
        except NotProved as error:
            self._refuse(f"a connection from {peer} was refused: {error}")
        except (OSError, EOFError, ValueError) as error:
            self._refuse(f"a connection from {peer} ended before it had joined ({error})")
        except _Refused as error:
            self._refuse(str(error))
        else:
            return
        finally:
            self._seats.release()
        sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        channel = prove(sock, self._token, "head")
        channel.set_timeout(PROVE)
        fields, _ = channel.receive()
        hello: dict[str, Any] = {name: fields.get(name) for name in _HELLO}
        wrong = [name for name, kind in _HELLO.items() if not isinstance(hello[name], kind)]
        different = wrong or differences(hello.pop("versions"), versions())
        if different:
            reason = f"host {hello['host']} has other versions: {'; '.join(different)}"
            channel.send("refused", reason=reason)
            raise _Refused(reason)
        channel.set_timeout(None)
        self._joined(channel, hello)

    def _refuse(self, reason: str) -> None:
        self.refused = [*self.refused[1 - KEPT :], reason]


class _Refused(Exception):
    pass
