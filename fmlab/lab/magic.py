"""`%%ranks 4` runs a notebook cell on four real processes; `%ranks` looks after them.

    %load_ext fmlab.lab

    %%ranks 4 -o losses --timeout 20
    loss = step(model, batch)          # step and batch come from the notebook, model lives on the ranks
    print(rank, world_size)
    loss                               # the last expression is shown by rank; `losses` is the list of them

    %ranks status | restart | close
    %ranks 16 --cluster 10.0.0.1:29400 --token-file FILE    # ranks on the hosts that join; %%ranks as before

On the ranks `rank`, `world_size`, `torch`, `dist` (torch.distributed) and `display` are there already. Names
that a cell assigns stay on the ranks. Names that a cell, or a function it calls, takes from the notebook are
sent when they changed. Whoever assigned a name last, notebook or ranks, owns it.
"""

import argparse
import ast
import itertools
import re
import shlex
import sys
import time
from typing import Any, NoReturn

import psutil
from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import clear_output
from IPython.display import display as show

from fmlab._ranks.forking import Server
from fmlab._ranks.sending import Sender
from fmlab._ranks.transport import Message
from fmlab.interactive import is_live
from fmlab.lab.exercises import show_unsolved
from fmlab.ranks import ClusterTransport, RankError, Ranks, label, merged, name_ranks

LIVE_AFTER = 2.0  # seconds until the prints of a running cell are shown as they come, if someone watches


_cells = itertools.count(1)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ranks: {message}\n{self.format_usage()}")


def _seconds(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _parser() -> _Parser:
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("n", type=int, nargs="?", help="number of ranks; the running ones by default")
    parser.add_argument("-o", "--out", help="name for the list of the last expression's values, by rank")
    parser.add_argument("-t", "--timeout", type=_seconds, help="seconds this cell may take (default 60)")
    parser.add_argument("--threads", type=int, help="torch threads of each rank (default 1)")
    parser.add_argument("--cluster", metavar="ADDRESS:PORT", help="where hosts join: fmlab ranks join")
    parser.add_argument("--token-file", metavar="FILE", help="the secret that the hosts know, mode 0600")
    return parser


@magics_class
class RanksMagics(Magics):
    """The ranks of one notebook."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.pool: Ranks | None = None
        self.sender = Sender(shell.user_ns)
        self.lost: set[str] = set()  # names that ranks had before they were restarted
        self.starts = 0
        self.threads = 1
        self.cluster: tuple[str, str | None] | None = None  # address and token file; None: this machine
        self.note = ""  # what a cell was told about its ranks before it began

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """`%%ranks N [-o NAME] [--timeout S] [--threads T]` or `%ranks status|restart|close`; `%ranks N` only
        starts ranks. Both take `--cluster ADDRESS:PORT --token-file FILE`."""
        if cell is None:
            return self.command(line.strip())
        options = _parser().parse_args(shlex.split(line))
        if options.out is not None and not options.out.isidentifier():
            raise UsageError(f"%%ranks: -o needs a name for the results, not {options.out!r}")
        file = f"<%%ranks {next(_cells)}>"
        cell = "\n" + cell  # errors name the lines of the whole cell, the one with the magic too
        tree = self.parse(cell, file)
        self.note = ""
        try:
            ranks = self.get_ranks(options.n, options.threads, _cluster(options))
            if ranks.starts != self.starts:  # they have nothing of what was sent before
                self.lost |= set(self.sender.names)
                self.starts, self.sender = ranks.starts, Sender(self.shell.user_ns)
            names = self.sender.collect(tree)
        except (ValueError, OSError) as error:  # of a cluster: its port, or hosts that did not join
            raise UsageError(str(error)) from None
        collector = ranks.output = _Collector(self.note)
        try:
            timeout = ... if options.timeout is None else options.timeout
            values = ranks.run_cell(
                cell, names=names, timeout=timeout, file=file, keep=options.out is not None
            )
        except RankError as error:
            error.advice = self.advise(error)
            raise
        finally:
            ranks.output = None
            collector.finish()
            if collector.assigned is None:
                self.sender.unsend()  # the ranks never came to run the cell
            else:
                self.sender.note_assigned(collector.assigned)
        if options.out is not None:
            self.shell.user_ns[options.out] = values

    def advise(self, error: RankError) -> str:
        """What to do about a name that ranks do not have; "" for other errors."""
        found = re.match(r"NameError: name '(\w+)' is not defined", error.error)
        if not found:
            return ""
        if found[1] in self.lost:
            return f"Ranks had {found[1]!r} before they were restarted: run the cell that assigns it again."
        return f"No cell that ran assigns {found[1]!r}: is one above this cell still to run?"

    def parse(self, cell: str, file: str) -> ast.Module:
        """The cell's syntax tree; SyntaxError as Python gives it, UsageError for magics."""
        if "get_ipython()" in self.shell.transform_cell(cell):
            raise UsageError("%%ranks: magics and shell commands do not run on the ranks; use plain Python")
        return ast.parse(cell, file)

    def get_ranks(
        self, n: int | None, threads: int | None, cluster: tuple[str, str | None] | None = None
    ) -> Ranks:
        """The running ranks if they fit what is asked, else new ones in their place."""
        old = self.pool
        fits = threads in (None, self.threads) and cluster in (None, self.cluster)
        if old is not None and n in (None, old.n) and fits:
            return old
        if n is None and old is None:
            raise UsageError("%%ranks: say how many ranks to start, for example: %%ranks 4")
        count = n if n is not None else old.n if old is not None else 0
        if old is not None:
            old.close()
            self.pool = None
            self.note = f"The {old.n} ranks were replaced by {count}: names assigned on them are gone.\n"
            sys.stdout.write(self.note)
        self.threads = threads if threads is not None else self.threads
        self.starts = 0
        cluster = cluster if cluster is not None else self.cluster
        transport = None
        if cluster is not None:
            transport = ClusterTransport(cluster[0], token_file=cluster[1])
            print(f"Hosts may join {transport.address} with the token in {transport.token_file}.", flush=True)
        self.pool = Ranks(count, threads=self.threads, transport=transport)
        self.cluster = cluster
        return self.pool

    def command(self, word: str) -> None:
        """`%ranks WORD`, or `%ranks N` with options that start ranks."""
        if word[:1].isdigit():
            options = _parser().parse_args(shlex.split(word))
            try:
                ranks = self.get_ranks(options.n, options.threads, _cluster(options))
            except (ValueError, OSError) as error:
                raise UsageError(str(error)) from None
            return self.status(ranks)
        if word not in ("status", "restart", "close"):
            raise UsageError(
                "%ranks status, %ranks restart, %ranks close or %ranks 4; %%ranks 4 starts a cell on 4 ranks"
            )
        if self.pool is None:
            print("No ranks are running; %%ranks 4 starts a cell on 4.")
        elif word == "restart":
            self.pool.restart()
            print(f"{self.pool.n} new ranks; names assigned before are gone.")
        elif word == "close":
            self.pool.close()
            print(f"The {self.pool.n} ranks were ended.")
            self.pool = self.cluster = None
        else:
            self.status(self.pool)

    def status(self, ranks: Ranks) -> None:
        """Print what there is: ranks, memory, names."""
        if not ranks.alive:
            print(f"{ranks.n} ranks, not all alive; %ranks restart starts them anew.")
            return
        if ranks.hosts:
            what = ", ".join(
                name_ranks([r for r in range(ranks.n) if ranks.hosts[r] == host]) + f" on {host}"
                for host in dict.fromkeys(ranks.hosts)
            )
        else:
            own = sum(psutil.Process(pid).memory_full_info().uss for pid in ranks.pids) / ranks.n
            what = f"{own / 2**20:.0f} MB of own memory each"
        print(f"{ranks.n} ranks alive, time limit {ranks.timeout:g} s, {what}")
        names = self.sender.names if ranks.starts == self.starts else []
        print("names on the ranks: " + (", ".join(names) or "none yet"))


class _Collector:
    """Keeps what ranks print and show until the cell ends, then gives it back in order of rank.

    When a cell takes long and a person watches, the prints appear as they come, and are replaced by the
    ordered ones at the end.
    """

    def __init__(self, note: str = "") -> None:
        self.note = note  # stands above the prints already
        self.start = time.monotonic()
        self.kept: dict[int, list[Message]] = {}
        self.order: list[tuple[int, Message]] = []
        self.live = is_live()
        self.shown = False
        self.assigned: set[str] | None = None  # once a rank said which names the cell assigned there

    def __call__(self, rank: int, message: Message) -> None:
        if message[0] == "assigned":
            self.assigned = (self.assigned or set()) | set(message[1])
            return
        self.kept.setdefault(rank, []).append(message)
        if not self.live or message[0] != "text":
            return
        self.order.append((rank, message))
        if time.monotonic() - self.start > LIVE_AFTER:
            for one, text in self.order:
                sys.stdout.write(label(text[2], name_ranks([one])))
            sys.stdout.flush()
            self.order = []
            self.shown = True

    def finish(self) -> None:
        """Show everything, ranks with equal output together."""
        if self.shown:
            clear_output(wait=True)
            sys.stdout.write(self.note)
        printed: dict[str, str] = {}  # stream → text not yet written: one output area, not one a line
        for ranks, messages in merged(self.kept):
            for message in messages:
                _emit(name_ranks(ranks), message, printed)
        _write(printed)


def _emit(who: str, message: Message, printed: dict[str, str]) -> None:
    bundle = {"text/plain": message[2]} if message[0] == "text" else dict(message[1])
    name = message[1] if message[0] == "text" else "stdout"
    plain = label(bundle.pop("text/plain", ""), who)
    if name not in printed:
        _write(printed)
    printed[name] = printed.get(name, "") + (f"[{who}]\n" if bundle else plain)
    if bundle:
        _write(printed)
        show({"text/plain": plain.rstrip("\n"), **bundle}, raw=True)


def _cluster(options: argparse.Namespace) -> tuple[str, str | None] | None:
    if options.cluster is None and options.token_file is not None:
        raise UsageError("%ranks: --token-file goes with --cluster ADDRESS:PORT")
    return None if options.cluster is None else (options.cluster, options.token_file)


def _write(printed: dict[str, str]) -> None:
    for name, text in printed.items():
        stream = sys.stderr if name == "stderr" else sys.stdout
        stream.write(text)
        stream.flush()
    printed.clear()


def notebook_ranks(n: int | None = None) -> Ranks:
    """The ranks behind `%%ranks`, for code that takes a `Ranks`; started if they do not run yet."""
    magics = get_ipython().magics_manager.registry["RanksMagics"]
    return magics.get_ranks(n, None)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext fmlab.lab`: adds the magic, and begins to import torch for the ranks in the background."""
    Server.shared()
    shell.register_magics(RanksMagics)
    shell.set_custom_exc((NotImplementedError,), show_unsolved)
