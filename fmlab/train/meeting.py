"""Where the ranks of one start find each other, when torchrun starts them again and again.

torchrun lends its store to the ranks of every start. What dead ranks wrote there is still there, and gloo
dials their ports; and a launcher that was the first once sends its ranks to its own store for ever, even when
another one is the first (https://github.com/pytorch/pytorch/issues/135712). So the first rank of each start
opens a store of its own and says where it is: in its launcher's store, which the ranks of this host look at,
and in the run's folder, which all hosts share. A store dies with its rank: what an earlier start said leads
to a closed port, and is read again until it is this start's.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fmlab.storage import make_folder, write_atomic

PATIENCE = 300.0  # seconds until all ranks of a start have come: imports take that long on a slow disk
_KEY, _FILE = "fmlab/meeting", ".meeting"
_PROOF = "fmlab/proof"  # in the store itself, that it is the one that was told of
_LOOK = 0.05  # seconds between looks
_CONNECT = 3.0  # seconds that a store which is there may take to answer


def lends_its_store() -> bool:
    """Whether this process was started by torchrun, and would use the store of its launcher."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# region meet
def meet(rank: int, size: int, folder: str | None = None, seconds: float = PATIENCE) -> Any:
    """The store of this start, for `torch.distributed.init_process_group`; every rank calls it.

    folder: the run's, which all hosts see; without it ranks on several hosts meet in the launcher's store
    alone. Raises ConnectionError for a rank that does not find the first one within so many seconds.
    """
    shared = Path(folder) if folder and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else None
    if rank == 0:
        return _open(size, shared)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for told in _told(shared):
            if told.get("ranks") == size and (store := _join(told)) is not None:
                return store
        time.sleep(_LOOK)
    raise ConnectionError(
        f"rank {rank} has not found the first of {size} ranks within {seconds:g} s; look for its error, and "
        "on several hosts whether all see the same folder --out and reach each other's ports"
    )


# endregion


def _open(size: int, shared: Path | None) -> Any:
    """On the first rank: a new store, said where the others look."""
    address = os.environ["MASTER_ADDR"]  # of this host: the launcher of the first rank lends its own store
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    proof = secrets.token_hex(16)
    store.set(_PROOF, proof)
    told = json.dumps({"address": address, "port": store.port, "proof": proof, "ranks": size})
    lent = _connect(address, int(os.environ["MASTER_PORT"]))
    if lent is not None:
        lent.set(_KEY, told)
    if shared is not None:
        with suppress(OSError):  # a folder that cannot be written is named when the settings are checked
            make_folder(shared)
            write_atomic(shared / _FILE, told.encode())
    return store


def _told(shared: Path | None) -> Iterator[dict[str, Any]]:
    """What first ranks have said, of this start or of earlier ones."""
    found: list[bytes] = []
    if shared is not None:
        with suppress(OSError):
            found.append((shared / _FILE).read_bytes())
    lent = _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if lent is not None:
        with suppress(RuntimeError):
            if lent.check([_KEY]):
                found.append(lent.get(_KEY))
    for text in found:
        with suppress(ValueError):
            if isinstance(told := json.loads(text), dict):
                yield told


def _join(told: dict[str, Any]) -> Any:
    """The store that was told of, if it is there and the one that was meant; else None."""
    try:
        store = _connect(told["address"], told["port"])
        if store is None or not store.check([_PROOF]) or store.get(_PROOF).decode() != told["proof"]:
            return None
    except (RuntimeError, KeyError, TypeError):
        return None
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    return store


def _connect(address: str, port: int) -> Any:
    """A client of a store; None where nobody listens. torch's own client would knock until its timeout."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT).close()
        return dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT)
        )
    except (OSError, RuntimeError, ValueError):
        return None
