"""The secret that the head and the agents share, in a file that its owner alone can read.

It is never an argument of a command: other users of a host can read those.
"""

import os
import secrets
import stat
from pathlib import Path

SHORTEST = 16  # characters; the tokens made here have 43


def make(path: Path) -> str:
    """Write a new token into a new file with mode 0600 and return it. ValueError when the file exists."""
    token = secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path} exists; delete it first, or use the token in it") from None
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token


def read(path: Path) -> str:
    """The token in a file. ValueError when others can read the file, or when it holds no token."""
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).strip()
    except OSError as error:
        raise ValueError(
            f"no token in {path} ({error.strerror}): `fmlab ranks token {path}` makes one"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no token, which is one line of text") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others can read the token in {path}: chmod 600 {path}, or make a new one")
    check(token, str(path))
    return token


def check(token: str, where: str = "token") -> None:
    """ValueError unless `token` is long enough not to be guessed."""
    if len(token) < SHORTEST or not token.isprintable() or any(c.isspace() for c in token):
        raise ValueError(
            f"{where}: a token is one line of at least {SHORTEST} characters without spaces; "
            "`fmlab ranks token FILE` makes a good one"
        )
