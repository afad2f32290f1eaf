"""Where a rank is: what fmlab.stacks finds, and the answer of a rank whose threads cannot run."""

import re
import signal

from fmlab.stacks import Frame, of_lines, of_thread, of_traceback

__all__ = ["STACKS_SIGNAL", "Frame", "of_lines", "of_stacks", "of_thread", "of_traceback"]

STACKS_SIGNAL = signal.SIGUSR2  # asks a rank for the stacks of its threads, in the file of its raw output
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def of_stacks(text: str) -> list[Frame]:
    """User lines of the main thread, from the stacks of all threads as faulthandler writes them.

    The main thread is the oldest, which faulthandler writes last; lines are innermost first.
    """
    last = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)[-1]
    return of_lines([(file, int(line), function) for file, line, function in _LINE.findall(last)])
