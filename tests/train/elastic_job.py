"""A rank of a tiny run that is started by torchrun, and hurts itself where it is told to.

`torchrun … -m tests.train.elastic_job OUT [setting=value …] [die=STEP:RANK] [pace=SECONDS]`: at that step of
the first start the rank is killed; pace: how long a step waits, so that there is time to hurt it, until there
is a file "hurry" beside OUT.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from fmlab.parallel import Layout
from fmlab.train import Callback
from tests.train.tiny_run import tiny_train


class Hurt(Callback):
    def __init__(self, out: Path, die: str, pace: float) -> None:
        self.out, self.pace = out, pace
        self.step, self.rank = (int(part) for part in die.split(":")) if die else (0, 0)

    def on_step(self, metrics):
        if not (self.out / "hurry").exists():
            time.sleep(self.pace)
        if metrics.step == self.step and not (self.out / "hurt").exists():
            (self.out / "hurt").touch()
            os.kill(int((self.out / f"pid-{self.rank}").read_text()), signal.SIGKILL)
            time.sleep(60)  # the launcher ends it


def main(argv: list[str]) -> int:
    out = Path(argv[0])
    given = dict(word.split("=", 1) for word in argv[1:])
    hurt = Hurt(out.parent, given.pop("die", ""), float(given.pop("pace", "0")))
    (out.parent / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    settings = {name: json.loads(value) for name, value in given.items()}
    layout = Layout(**settings.pop("layout", {}))
    try:
        tiny_train(out=str(out), layout=layout, callbacks=(hurt,), **settings)
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
