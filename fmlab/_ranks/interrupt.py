"""An interrupt that waits until it can do no harm."""

import signal
import threading
from typing import Any


class HeldInterrupt:
    """Within the context SIGINT is only noted (`pending`), so that it cannot cut a message in two.

    At the end a KeyboardInterrupt is raised if one is pending and nobody has dealt with it. Outside the main
    thread, or where the program has its own handler, nothing is changed.
    """

    def __init__(self) -> None:
        self.pending = False
        self._ours = False

    def __enter__(self) -> "HeldInterrupt":
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._ours = True
        return self

    def _note(self, *_: Any) -> None:
        self.pending = True

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.pending and kind is None:
            raise KeyboardInterrupt
