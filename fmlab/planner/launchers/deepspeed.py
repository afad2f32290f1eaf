"""DeepSpeed's launcher, which reaches other hosts by ssh, and its settings as a file.

It is called as a module: pip installs a program `deepspeed` that fails in a folder with a space in its name.
`fmlab train` sets DeepSpeed up from run.toml. ds_config.json says the same to a program of yours that calls
deepspeed.initialize(config="ds_config.json") with its own optimizer.
"""

import json
from typing import Any

from fmlab.parallel.engines.deepspeed_engine import settings
from fmlab.planner.launchers.job import CONFIG, Job
from fmlab.planner.launchers.lint import lint_shell

FILES = ("launch.sh", "ds_config.json")

_ONE = """#!/usr/bin/env bash
# {title}
#   bash launch.sh                starts the run; what follows goes to {command}, as in: --steps 2
# {command} sets DeepSpeed up from {config}; ds_config.json says the same for a program of your own.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
exec python -m deepspeed.launcher.runner --num_gpus {ranks} --no_local_rank \\
    --module {program} --config {config} "$@"
"""

_MANY = """#!/usr/bin/env bash
# {title}
# On the first host, which reaches the others by ssh and shares this folder with them:
#   HOSTFILE=hosts bash launch.sh     starts the run; what follows goes to {command}, as in: --steps 2
# Without ssh, on every host: the same with HEAD=host-0, the first of them, and NODE_RANK=0, 1, ...
# The file, in this folder, has a line "NAME slots={ranks}" for each host.
# {command} sets DeepSpeed up from {config}; ds_config.json says the same for a program of your own.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
: "${{HOSTFILE:?give a file with a line 'NAME slots={ranks}' for each of the {hosts} hosts}}"
own=()
if [[ -n "${{NODE_RANK:-}}" ]]; then
    own=(--no_ssh --node_rank "$NODE_RANK" --master_addr "${{HEAD:?give the first of the hosts}}")
fi
exec python -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --num_nodes {hosts} --num_gpus {ranks} \\
    --no_local_rank ${{own[@]+"${{own[@]}}"}} --module {program} --config {config} "$@"
"""


def files(job: Job) -> dict[str, str]:
    """launch.sh and ds_config.json. Raises ValueError for what bash cannot read."""
    text = (_ONE if job.hosts == 1 else _MANY).format(
        title=job.title,
        hosts=job.hosts,
        ranks=job.ranks_per_host,
        config=CONFIG,
        program=job.program,
        command=job.command,
    )
    if found := list(lint_shell(text)):
        raise ValueError(f"bash cannot read launch.sh: {'; '.join(found)}")
    return {"launch.sh": text, "ds_config.json": json.dumps(ds_config(job), indent=2) + "\n"}


def ds_config(job: Job) -> dict[str, Any]:
    """DeepSpeed's settings of the step. Weights stay fp32 as fmlab trains them, with products in bfloat16 by
    autocast ("bf16" of DeepSpeed would keep the weights in 16 bits)."""
    config, layout = job.config, job.config.layout
    made = settings(layout, config.clip or None)
    del made["steps_per_print"]  # a program of your own may print
    return made | {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": layout.micro_batches,
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": layout.precision == "bf16", "dtype": "bfloat16"},
    }
