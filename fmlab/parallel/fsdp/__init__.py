from fmlab.parallel.build import Build
from fmlab.parallel.states import States


def states(build: Build) -> States:
    raise ValueError("fsdp is not built yet")
