from fmlab.parallel.build import Build


def apply(build: Build) -> None:
    raise ValueError("recompute parallelism is not built yet")
