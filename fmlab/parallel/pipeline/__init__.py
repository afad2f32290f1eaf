from typing import Any

from fmlab.parallel.build import Build


def cut(build: Build) -> Any:
    raise ValueError("pipelines are not built yet")
