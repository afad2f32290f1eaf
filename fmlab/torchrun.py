"""`python -m fmlab.torchrun …`: torchrun, so that a host that comes (back) can join a job that runs.

The options are torchrun's own. A launcher of torch 2.5 and later lends the ranks of every start its own
store, and says only once where that is: a host that comes later waits for it until it gives up, and one that
becomes the first may have none to lend (https://github.com/pytorch/pytorch/issues/135712). Here it lends
none: the launchers agree anew on an address for every start.
"""

import os
import sys


def main(argv: list[str] | None = None) -> None:
    """Launch as torchrun does; it ends the process with its own exit code."""
    from torch.distributed.run import main as torchrun

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch has no other place to say it
    torchrun(argv)


if __name__ == "__main__":
    sys.argv[0] = "torchrun"
    main()
