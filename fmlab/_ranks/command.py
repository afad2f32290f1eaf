"""`fmlab ranks join HOST:PORT`: this host's slots for the ranks of a notebook or script elsewhere."""

import argparse
import os
import socket
from pathlib import Path

from fmlab._ranks import token as tokens
from fmlab._ranks.agent import Member, end_on_terminate, join
from fmlab._ranks.fit import check_fits
from fmlab._ranks.listener import parse_address

DESCRIPTION = """\
Ranks of one notebook or script on many hosts. Make a token, give each host a copy (mode 0600), and let the
hosts join; then Ranks(16, transport=ClusterTransport("HOST:PORT", token_file=...)) or, in a notebook,
%ranks 16 --cluster HOST:PORT --token-file FILE. Who knows the token can run any code as you. The traffic is
not encrypted: use a private network.
"""


def main(argv: list[str]) -> int:
    """Serve until no head is left (0). ValueError for what cannot be right, OSError when no head came."""
    args = _parser().parse_args(argv)
    if args.action == "token":
        tokens.make(args.file)
        print(f"a new token is in {args.file}, which only you can read; copy it to each host as safely")
        return 0
    host, port = parse_address(args.head)
    check_fits(args.slots)
    if not args.wait >= 0:  # nan too
        raise ValueError(f"--wait must be a number of seconds, 0 or more, not {args.wait}")
    member = Member(
        host,
        port,
        args.slots,
        tokens.read(args.token_file),
        args.name,
        args.address,
        args.interface,
        args.wait,
        args.once,
    )
    end_on_terminate()
    join(member)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fmlab ranks", description=DESCRIPTION)
    actions = parser.add_subparsers(dest="action", required=True)
    token = actions.add_parser("token", help="write a new token into a file that only you can read")
    token.add_argument("file", type=Path, metavar="FILE")
    at = actions.add_parser("join", help="run ranks on this host for the head at HOST:PORT")
    at.add_argument("head", metavar="HOST:PORT", help="where the head listens")
    cores = os.cpu_count() or 1
    at.add_argument(
        "--slots", type=int, default=cores, help=f"most ranks on this host (default: {cores} cores)"
    )
    at.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="the head's token, mode 0600"
    )
    at.add_argument(
        "--name", default=socket.gethostname(), help="this host's, in errors (default: its hostname)"
    )
    at.add_argument("--address", help="this host's, if not the one that it reaches the head with")
    at.add_argument("--interface", help="of the ranks' connections, if not the one with that address")
    at.add_argument("--wait", type=float, default=300.0, help="seconds to wait for a head (default 300)")
    at.add_argument(
        "--once", action="store_true", help="end with the first head instead of waiting for the next"
    )
    return parser
