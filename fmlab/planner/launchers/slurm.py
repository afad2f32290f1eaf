"""SLURM: sbatch asks for hosts, srun starts torchrun once on each, and the first host is where they meet."""

from fmlab.planner.launchers.job import CONFIG, Job
from fmlab.planner.launchers.lint import lint_sbatch, lint_shell

FILES = ("job.sbatch",)

_JOB = """#!/bin/bash
# {title}
#   sbatch job.sbatch             in this folder; what follows goes to {command}, as in: --steps 2
# Partition, account and time limit are your cluster's: add them here or give them to sbatch.
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
{chips}#SBATCH --output=%x-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a host meet at ports of their own
srun --kill-on-bad-exit=1 torchrun --nnodes {hosts} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "${{names[0]}}:$port" --rdzv-id "$SLURM_JOB_ID" \\
    -m {program} --config {config} "$@"
"""


def files(job: Job) -> dict[str, str]:
    """job.sbatch. SLURM counts GPUs; hosts that are used whole or have other chips are taken whole.

    Raises ValueError for what sbatch or bash would not take."""
    gpus = job.vendor in ("NVIDIA", "AMD")
    lines = f"#SBATCH --gpus-per-node={job.ranks_per_host}\n" if gpus else ""
    if job.whole_hosts or not gpus:
        lines += "#SBATCH --exclusive\n"
    text = _JOB.format(
        title=job.title,
        name=job.name,
        hosts=job.hosts,
        chips=lines,
        ranks=job.ranks_per_host,
        config=CONFIG,
        program=job.program,
        command=job.command,
    )
    if found := [*lint_sbatch(text), *lint_shell(text)]:
        raise ValueError(f"SLURM would refuse job.sbatch: {'; '.join(found)}")
    return {"job.sbatch": text}
