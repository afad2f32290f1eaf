"""`python -m fmlab.rendezvous`: keeps the store that torchrun's launchers agree through.

torchrun lets one of the training hosts keep it, so that the job ends with that host, whoever else is left.
Kept by a host that does not train (a login or head node), it outlives any of them: start it there, and give
every launcher `--rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0`.
"""

import argparse
import signal
import sys
import threading
from typing import Any

import torch.distributed as dist

PORT = 29400  # torchrun's own


def keep(port: int) -> Any:
    """Open the store; it lives as long as what is returned. Raises ValueError for a port that cannot be, and
    OSError for one that is taken."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port}: legal are 1 to 65535, and 0 for any that is free")
    try:
        return dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise OSError(f"cannot listen on port {port}: {first}; choose another --port, 0 for any") from error


def main(argv: list[str] | None = None) -> int:
    """Keep the store until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m fmlab.rendezvous",
        description="Keep the store of torchrun's rendezvous, so that no training host has to. It asks "
        "nobody for a password, and listens on every address of this host: for a network that you trust.",
    )
    parser.add_argument("--port", type=int, default=PORT, help="to listen on (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        store = keep(args.port)
    except (ValueError, OSError) as error:
        print(f"fmlab: rendezvous: {error}", file=sys.stderr)
        return 2
    print(f"the rendezvous of torchrun's launchers is kept on port {store.port}", flush=True)
    ended = threading.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: ended.set())
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
