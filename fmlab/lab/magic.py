"""`%%ranks 4` runs a notebook cell on four real processes; `%ranks` looks after them.

    %load_ext fmlab.lab

    %%ranks 4 -o losses --timeout 20
    loss = step(model, batch)          # step and batch come from the notebook, model lives on the ranks
    print(rank, world_size)
    loss                               # the last expression is shown by rank; `losses` is the list of them

    %ranks status | restart | close

On the ranks `rank`, `world_size`, `torch`, `dist` (torch.distributed) and `display` are there already. Names
that a cell assigns stay on the ranks. Names that a cell, or a function it calls, takes from the notebook are
sent when they changed. Whoever assigned a name last, notebook or ranks, owns it.
"""

import argparse
import ast
import shlex
import sys
import time
from typing import Any, NoReturn

import psutil
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import clear_output
from IPython.display import display as show

from fmlab._ranks.errors import Interrupted
from fmlab._ranks.sending import Sender
from fmlab._ranks.transport import Message
from fmlab.interactive import is_live
from fmlab.ranks import RankError, Ranks, label, merged, name_ranks

LIVE_AFTER = 2.0  # seconds until the prints of a running cell are shown as they come, if someone watches


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ranks: {message}\n{self.format_usage()}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("n", type=int, nargs="?", help="number of ranks; the running ones by default")
    parser.add_argument("-o", "--out", help="name for the list of the last expression's values, by rank")
    parser.add_argument("-t", "--timeout", type=float, help="seconds this cell may take (default 60)")
    parser.add_argument("--threads", type=int, help="torch threads of each rank (default 1)")
    return parser


@magics_class
class RanksMagics(Magics):
    """The ranks of one notebook."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.pool: Ranks | None = None
        self.sender = Sender(shell.user_ns)
        self.threads = 1

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """`%%ranks N [-o NAME] [--timeout S] [--threads T]` or `%ranks status|restart|close`."""
        if cell is None:
            return self.command(line.strip())
        options = _parser().parse_args(shlex.split(line))
        if options.out is not None and not options.out.isidentifier():
            raise UsageError(f"%%ranks: -o needs a name for the results, not {options.out!r}")
        file = f"<In[{self.shell.execution_count}]>"
        tree = self.parse(cell, file)
        try:
            ranks = self.get_ranks(options.n, options.threads)
            names = self.sender.collect(tree)
        except ValueError as error:
            raise UsageError(str(error)) from None
        starts = ranks.starts
        collector = _Collector()
        ranks.output = collector
        try:
            timeout = ... if options.timeout is None else options.timeout
            values = ranks.run_cell(
                cell, names=names, timeout=timeout, file=file, keep=options.out is not None
            )
        except (RankError, Interrupted) as error:
            self.name_cells(error if isinstance(error, RankError) else error.error)
            raise
        finally:
            collector.finish()
            self.sender.note_assigned(collector.assigned)
            if ranks.starts != starts:
                self.sender = Sender(self.shell.user_ns)
        if options.out is not None:
            self.shell.user_ns[options.out] = values

    def parse(self, cell: str, file: str) -> ast.Module:
        """The cell's syntax tree; SyntaxError as Python gives it, UsageError for magics."""
        if "get_ipython()" in self.shell.transform_cell(cell):
            raise UsageError("%%ranks: magics and shell commands do not run on the ranks; use plain Python")
        return ast.parse(cell, file)

    def get_ranks(self, n: int | None, threads: int | None) -> Ranks:
        """The running ranks if they fit what is asked, else new ones in their place."""
        old = self.pool
        if old is not None and n in (None, old.n) and threads in (None, self.threads):
            if not old.alive:
                print(
                    f"The {old.n} ranks had ended: they are started anew, without the names assigned before."
                )
                self.restart()
            return old
        if n is None and old is None:
            raise UsageError("%%ranks: say how many ranks to start, for example: %%ranks 4")
        count = n if n is not None else old.n if old is not None else 0
        if old is not None:
            old.close()
            self.pool = None
            print(f"The {old.n} ranks were replaced by {count}: names assigned on them are gone.")
        self.threads = threads if threads is not None else self.threads
        self.sender = Sender(self.shell.user_ns)
        self.pool = Ranks(count, threads=self.threads)
        return self.pool

    def name_cells(self, error: RankError | None) -> None:
        """Name the lines of notebook cells as the notebook does."""
        for outcome in error.outcomes if error is not None else []:
            for frame in outcome.frames:
                named = self.shell.compile.format_code_name(frame.file)
                if named:
                    frame.text = frame.text or str(frame).partition(": ")[2]
                    frame.file = f"<{named[1]}>"

    def restart(self) -> None:
        assert self.pool is not None
        self.pool.restart()
        self.sender = Sender(self.shell.user_ns)

    def command(self, word: str) -> None:
        """`%ranks WORD`."""
        if word not in ("status", "restart", "close"):
            raise UsageError(
                "%ranks status, %ranks restart or %ranks close; %%ranks 4 starts a cell on 4 ranks"
            )
        if self.pool is None:
            print("No ranks are running; %%ranks 4 starts a cell on 4.")
        elif word == "restart":
            self.restart()
            print(f"{self.pool.n} new ranks; names assigned before are gone.")
        elif word == "close":
            self.pool.close()
            print(f"The {self.pool.n} ranks were ended.")
            self.pool = None
        else:
            self.status(self.pool)

    def status(self, ranks: Ranks) -> None:
        """Print what there is: ranks, memory, names."""
        if not ranks.alive:
            print(f"{ranks.n} ranks, not all alive: the next cell starts them anew.")
            return
        own = sum(psutil.Process(pid).memory_full_info().uss for pid in ranks.pids) / ranks.n
        print(
            f"{ranks.n} ranks alive, time limit {ranks.timeout:g} s, {own / 2**20:.0f} MB of own memory each"
        )
        print("names on the ranks: " + (", ".join(self.sender.names) or "none yet"))


class _Collector:
    """Keeps what ranks print and show until the cell ends, then gives it back in order of rank.

    When a cell takes long and a person watches, the prints appear as they come, and are replaced by the
    ordered ones at the end.
    """

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.kept: dict[int, list[Message]] = {}
        self.order: list[tuple[int, Message]] = []
        self.live = is_live()
        self.shown = False
        self.assigned: set[str] = set()

    def __call__(self, rank: int, message: Message) -> None:
        if message[0] == "assigned":
            self.assigned |= set(message[1])
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
        for ranks, messages in merged(self.kept):
            for message in messages:
                _emit(name_ranks(ranks), message)


def _emit(who: str, message: Message) -> None:
    if message[0] == "text":
        stream = sys.stderr if message[1] == "stderr" else sys.stdout
        stream.write(label(message[2], who))
        stream.flush()
        return
    bundle = dict(message[1])
    plain = label(bundle.pop("text/plain", ""), who)
    if not bundle:
        sys.stdout.write(plain)
        return
    sys.stdout.write(f"[{who}]\n")
    sys.stdout.flush()
    show({"text/plain": plain.rstrip("\n"), **bundle}, raw=True)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext fmlab.lab`."""
    shell.register_magics(RanksMagics)
