"""SLURM: sbatch asks for hosts, srun starts torchrun once on each, and the first host is where they meet."""

from fmlab.planner.launchers.job import CONFIG, PORT, Job

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
srun --kill-on-bad-exit=1 torchrun --nnodes {hosts} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "${{names[0]}}:{port}" --rdzv-id "$SLURM_JOB_ID" \\
    -m {program} --config {config} "$@"
"""


def files(job: Job) -> dict[str, str]:
    """job.sbatch. SLURM counts GPUs; hosts that are used whole or have other chips are taken whole."""
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
        port=PORT,
        config=CONFIG,
        program=job.program,
        command=job.command,
    )
    return {"job.sbatch": text}
