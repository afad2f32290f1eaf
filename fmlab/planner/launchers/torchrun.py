"""torchrun: one process a rank; several hosts find each other at the first one (c10d rendezvous)."""

from fmlab.planner.launchers.job import CONFIG, PORT, Job
from fmlab.planner.launchers.lint import lint_shell

FILES = ("launch.sh",)

_ONE = """#!/usr/bin/env bash
# {title}
#   bash launch.sh                            starts the run
#   bash launch.sh --steps 2 --backend cpu    with other settings: what follows goes to {command}
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
exec torchrun --standalone --nnodes 1 --nproc-per-node {ranks} -m {program} --config {config} "$@"
"""

_MANY = """#!/usr/bin/env bash
# {title}
# On every host, with the name or address of the first:
#   HEAD=host-0 bash launch.sh                starts its part of the run; what follows goes to {command}
# PORT is a free port of the first host, RUN_ID the same word on all.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
: "${{HEAD:?give the first of the {hosts} hosts: HEAD=host-0 bash launch.sh}}"
options=$(python -m fmlab.addresses "$HEAD")  # whether this host is the first, and its address
read -ra own <<< "$options"
exec torchrun --nnodes {hosts} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${{PORT:-{port}}}" --rdzv-id "${{RUN_ID:-{name}}}" \\
    "${{own[@]}}" -m {program} --config {config} "$@"
"""


def files(job: Job) -> dict[str, str]:
    """launch.sh, for one host or many. Raises ValueError for what bash cannot read."""
    text = (_ONE if job.hosts == 1 else _MANY).format(
        title=job.title,
        hosts=job.hosts,
        ranks=job.ranks_per_host,
        port=PORT,
        name=job.name,
        config=CONFIG,
        program=job.program,
        command=job.command,
    )
    if found := list(lint_shell(text)):
        raise ValueError(f"bash cannot read launch.sh: {'; '.join(found)}")
    return {"launch.sh": text}
