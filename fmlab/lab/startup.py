"""Runs in each kernel that `fmlab lab` starts: until a notebook's first cell has run, `%%ranks` asks for it.

After a restart of the kernel IPython would say no more than that it does not know `%%ranks`.
"""


def _ranks(line: str, cell: str | None = None) -> None:
    from IPython.core.error import UsageError

    raise UsageError(
        "%%ranks comes with this notebook's first code cell (%load_ext fmlab.lab): "
        "run that one, and those between, then this one again"
    )


if "get_ipython" in globals():  # a plain Python in Lab's terminal reads this file too
    globals()["get_ipython"]().register_magic_function(_ranks, "line_cell", "ranks")
del _ranks
