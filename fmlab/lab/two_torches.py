"""What chapter 2.9 runs on two releases of PyTorch: the same programs, some of which lean on moving ground.

The chapter's own ranks run them on this torch, and a process of .venv-xla, which torch_xla keeps on 2.9, runs
this same file. Where .venv-xla is not there, the outcomes on torch 2.9 are the committed ones.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmlab.lab.curriculum import environment_python
from fmlab.models import GPT, GPTConfig
from fmlab.parallel import Layout, parity

RANKS = 2
SECONDS = 150  # for all programs
WORKS = "works"
COMMAND = "python -m fmlab.lab.two_torches"
#: What `COMMAND` printed in .venv-xla, for machines that do not have it.
COMMITTED = {
    "our engine": WORKS,
    "engine torch: FSDP2": WORKS,
    "engine torch: DTensor": WORKS,
    "engine torch: pipelining": WORKS,
    "frozen_column": "is trained!",
    "drop_outputs": "TypeError: Linear.forward() got an unexpected keyword argument 'return_outputs'",
    "shape_of_stage": WORKS,
    "two_stages": "SIGABRT: the process is ended",
}
MADE_BY = f"committed, made by: {COMMAND} in .venv-xla, torch 2.9.1, 30 November 2026"


# region programs
def two_stages() -> str:
    x = torch.ones(4, 4)
    given = {"target": x} if dist.get_rank() else {}
    _schedule(dist.get_rank(), RANKS).step(*([] if given else [x]), **given)
    return WORKS


def drop_outputs() -> str:
    _schedule(0, 1).step(torch.ones(4, 4), target=torch.ones(4, 4), return_outputs=False)
    return WORKS


def shape_of_stage() -> str:
    schedule = _schedule(0, 1)
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return WORKS if schedule._stage.get_outputs_meta()[0].shape == (2, 4) else "another shape"


def frozen_column() -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = nn.Linear(4, 4).requires_grad_(False)
    parallelize_module(layer, _meshes(), ColwiseParallel())
    return "is trained!" if layer.weight.requires_grad else WORKS


# endregion


def engine(name: str, layout: Layout) -> Callable[[], str]:
    """A program that trains a small GPT under a layout and compares it with one device."""

    def program() -> str:
        report = parity(_gpt, layout, name, steps=1)
        return WORKS if report.ok else report.diagnosis

    return program


#: All programs, by what they use. Each runs on two ranks. The last one may end their processes.
PROGRAMS: dict[str, Callable[[], str]] = {
    "our engine": engine("fmlab", Layout(pipeline=2, micro_batches=2)),
    "engine torch: FSDP2": engine("torch", Layout(data=2, fsdp=True)),
    "engine torch: DTensor": engine("torch", Layout(tensor=2, sequence_parallel=True)),
    "engine torch: pipelining": engine("torch", Layout(pipeline=2, micro_batches=2)),
    "frozen_column": frozen_column,
    "drop_outputs": drop_outputs,
    "shape_of_stage": shape_of_stage,
    "two_stages": two_stages,
}


def _gpt() -> GPT:
    return GPT(GPTConfig(131, 24, num_layers=3, hidden_size=16, num_heads=2))


def _meshes() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,))


def _schedule(stage: int, stages: int) -> Any:
    """GPipe over linear layers, two micro-batches; a rank with all stages is a pipeline of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    group = init_device_mesh("cpu", (RANKS // stages, stages)).get_group(1)
    part = PipelineStage(nn.Linear(4, 4), stage, stages, torch.device("cpu"), group=group)
    return ScheduleGPipe(part, 2, loss_fn=F.mse_loss)


def outcome(name: str) -> str:
    """On a rank: what becomes of a program: "works", what is wrong, or the error as torch words it."""
    try:
        return PROGRAMS[name]()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def outcomes() -> dict[str, str]:
    """`outcome` of every program on ranks of this environment, also of one that ends their processes."""
    from fmlab.ranks import RankError, Ranks

    found = {}
    with Ranks(RANKS, output=lambda *_: None) as ranks:
        for name in PROGRAMS:
            try:
                found[name] = ranks.run(outcome, name)[0]
            except RankError as error:
                if "SIGABRT" not in str(error):
                    raise
                found[name] = "SIGABRT: the process is ended"
    return found


def on_torch_2_9() -> tuple[dict[str, str], str]:
    """(`outcomes()` on torch 2.9.1, where they come from): run now in .venv-xla where that is there, else the
    committed ones."""
    python = environment_python(".venv-xla")
    if python is None:
        return dict(COMMITTED), MADE_BY
    return run(python), "measured now, in .venv-xla"


def run(python: Path) -> dict[str, str]:
    """`outcomes()` in the environment of that Python. Raises RuntimeError with its error if it has none."""
    # torch would load torch_xla by itself, which takes seconds
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [str(python), "-m", "fmlab.lab.two_torches"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{COMMAND} failed:\n{done.stderr[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(outcomes()))
