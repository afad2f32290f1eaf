"""What chapter 3.7 runs: an evaluation that counts programs, and a project of one's own with faults in it."""

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from fmlab import Ranks
from fmlab.backends import get_backend
from fmlab.backends.preflight import preflight
from fmlab.data import LengthBuckets
from fmlab.data import load as load_corpus
from fmlab.models import GPT, check_plan
from fmlab.parallel import Layout, parity
from fmlab.project import Target, new_project
from fmlab.train.decode import evaluating, open_stream

PACKAGE = "owl"
CHIP = "sim:trn2"
PROMPT = [72, 111, 119, 63]  # bytes are tokens here


# ---- evaluation --------------------------------------------------------------------------------------------


def sentences(count: int, longest: int = 120) -> list[list[int]]:
    """The first sentences of Python's manual that are no longer than that, as bytes."""
    lines = (line.strip() for text in load_corpus("python-docs").documents for line in text.splitlines())
    found = [list(line.encode()) for line in lines if line.endswith(".")]
    return [row for row in found if 20 <= len(row) <= longest][:count]


def tiny() -> tuple[Any, GPT]:
    """The simulated chip's backend, and gpt2-tiny on it, the same each time; no program is compiled yet."""
    backend: Any = get_backend(CHIP)
    backend.chip.forget_programs()
    torch.manual_seed(0)
    return backend, backend.to_device(GPT.from_preset("gpt2-tiny")).eval()


# region scored
@torch.no_grad()
def scored(rows: list[list[int]], buckets: LengthBuckets | None = None) -> tuple[float, int]:
    """The loss of a token over all rows, one row at a time, and how many programs that took."""
    backend, model = tiny()
    backend.chip.reset()
    loss, count = 0.0, 0
    for row in rows:
        tokens = torch.tensor([row])
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if buckets is not None:
            batch = buckets.pad(batch)
            batch.pop("attention_mask", None)  # a causal model does not need it
        with backend.step():
            summed = model(**backend.to_device(batch))["loss_sum"]
        loss, count = loss + summed.item(), count + len(row) - 1
    return loss / count, backend.chip.totals.compiles


# endregion


# region written
def written(tokens: int, static_shapes: bool) -> tuple[list[int], int]:
    """So many tokens after a prompt, each the most likely one, and how many programs that took."""
    backend, model = tiny()
    backend.chip.reset()
    with evaluating(model):
        stream = open_stream(model, [PROMPT], tokens, static_shapes)
        chosen = [int(stream.start().argmax(-1))]  # a host read: the program ends here
        while len(chosen) < tokens:
            chosen.append(int(stream.step(torch.tensor(chosen[-1:])).argmax(-1)))
    return chosen, backend.chip.totals.compiles


# endregion

# ---- a project ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A mistake of somebody who changes the model: in model.py `old` becomes `new`."""

    what: str
    old: str
    new: str


# region faults
FAULTS: Mapping[str, Fault] = {
    "tie lost": Fault(
        "a move to the device makes two weights of one",
        "super()._apply(fn, recurse)\n        self.tie()",
        "super()._apply(fn, recurse)",
    ),
    "host read": Fault(
        "a branch on a tensor",
        "hidden = state.hidden + ",
        "hidden = state.hidden * (0.5 if state.hidden.abs().max() > 1e4 else 1.0) + ",
    ),
    "heads of the config": Fault(
        "a rank splits its share into all heads",
        "x_bld.unflatten(-1, (-1, self.head_size))",
        "x_bld.unflatten(-1, (4, -1))",
    ),
    "norm without a rule": Fault(
        "a new weight that the plan does not know",
        "self.output = nn.Linear(d, d)",
        "self.output = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d))",
    ),
    "layer too many": Fault(
        "the model grew, the planner's shape did not",
        "for _ in range(config.num_layers)]",
        "for _ in range(config.num_layers + 1)]",
    ),
}
# endregion


def write_project(target: Target) -> Path:
    """A new project called "owl" in a folder of its own; see fmlab.project.new_project."""
    return new_project(PACKAGE, Path(mkdtemp(prefix="fmlab-")) / PACKAGE, target)


def import_project(project: Path, fault: str | None = None) -> ModuleType:
    """The project's package under a name of its own, with that fault in it. Ranks get it by value."""
    name = f"{PACKAGE}_{'sound' if fault is None else fault.replace(' ', '_')}"
    folder = Path(mkdtemp(prefix="fmlab-"))
    shutil.copytree(project / PACKAGE, folder / name)
    if fault is not None:
        file, change = folder / name / "model.py", FAULTS[fault]
        text = file.read_text()
        assert text.count(change.old) == 1, f"{fault}: the template has changed"
        file.write_text(text.replace(change.old, change.new))
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        package = importlib.import_module(name)
        for part in ("model", "plan", "preflight"):
            importlib.import_module(f"{name}.{part}")
    finally:
        sys.path.remove(str(folder))
    cloudpickle.register_pickle_by_value(package)
    return package


# ---- the checks --------------------------------------------------------------------------------------------


def loss_falls(package: Any, ranks: Ranks) -> None:
    """What most people look at: ten steps on one batch."""
    torch.manual_seed(0)
    model, batches, loss = package.preflight.program()
    batch, optimizer = next(iter(batches)), torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    if not losses[-1] < losses[0] - 0.3:
        raise ValueError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


# region checks
def plan_is_proven(package: Any, ranks: Ranks) -> None:
    check_plan(package.model.build(), {"input_ids": torch.arange(20).view(2, 10)})


def layouts_are_equal(package: Any, ranks: Ranks) -> None:
    for layout in (Layout(data=2, zero=1), Layout(tensor=2)):
        parity(package.model.build, layout, precision="fp64", ranks=ranks).raise_if_different()


def shape_is_right(package: Any, ranks: Ranks) -> None:
    package.plan.OWN.shape("tiny")


def nothing_hurts(package: Any, ranks: Ranks) -> None:
    report = preflight(*package.preflight.program(), chip="trn2")
    if not report.ok:
        raise ValueError(", ".join(f.check for f in report.findings if f.severity != "note"))


# endregion

CHECKS: Mapping[str, Callable[[Any, Ranks], None]] = {
    "loss falls": loss_falls,
    "check_plan": plan_is_proven,
    "parity": layouts_are_equal,
    "shape": shape_is_right,
    "preflight": nothing_hurts,
}


def found_by(package: ModuleType, ranks: Ranks) -> dict[str, str]:
    """check -> what it says of the package, "" where it finds nothing."""
    said = {}
    for name, run in CHECKS.items():
        try:
            run(package, ranks)
        except (ValueError, AssertionError) as error:
            said[name] = str(error).strip() or type(error).__name__
        else:
            said[name] = ""
    return said
