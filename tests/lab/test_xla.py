"""The first cell of the chapters on XLA, in a kernel without torch_xla; and which kernel a notebook names."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from fmlab.lab import builder, xla
from fmlab.lab.curriculum import KERNEL, XLA_KERNEL, load, notebooks_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import environment


@pytest.fixture(autouse=True)
def without_torch_xla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch_xla" else find(name, *a)
    )
    monkeypatch.setattr(xla, "_root", lambda: tmp_path)
    monkeypatch.setattr(xla.sys, "platform", "linux")
    monkeypatch.setattr(xla.platform, "machine", lambda: "x86_64")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "fm.py").write_text("print('installing 7.6 GB ...')")


def said(**options: Any) -> str:
    with pytest.raises(ImportError) as refusal:
        xla.need_xla(**options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_it_names_the_command_then_the_kernel_in_one_line(tmp_path: Path) -> None:
    assert "make lab-xla" in said()
    (tmp_path / ".venv-xla").mkdir()
    (tmp_path / ".venv-xla" / "fmlab-stamp.json").write_text("{}")
    assert said() == "This chapter runs on torch_xla: choose the kernel 'fmlab (XLA)' at the top right."


def test_it_installs_when_asked_and_shows_how_far_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(install=True).startswith("Ready. Now choose the kernel 'fmlab (XLA)'")
    assert "installing 7.6 GB" in capfd.readouterr().out
    (tmp_path / "scripts" / "fm.py").write_text("raise SystemExit('no space left')")
    assert "did not succeed" in said(install=True)


def test_where_there_is_no_torch_xla_the_stored_outputs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla.platform, "machine", lambda: "aarch64")
    assert "for linux-x86_64 only, while this is linux-aarch64. Its stored outputs" in said(install=True)


def test_a_notebook_names_the_kernel_of_its_environment() -> None:
    curriculum = load()
    names = {entry.number: entry.kernel for entry in curriculum.entries}
    assert names["1.11"] is XLA_KERNEL
    assert names["1.3"] is KERNEL
    form = builder.Form(notebooks_folder(), curriculum.find("1.11"), solved=False)
    assert form.metadata["kernelspec"]["name"] == environment.XLA.kernel.name == XLA_KERNEL.name
    assert environment.XLA.kernel.title == XLA_KERNEL.title
    assert environment.MAIN.kernel.name == KERNEL.name


def test_a_kernel_that_is_not_there_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client import kernelspec

    def absent(self: Any, name: str) -> None:
        raise kernelspec.NoSuchKernel(name)

    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", absent)
    with pytest.raises(RuntimeError, match=r"'fmlab \(XLA\)', which is not here; to get it: make lab-xla"):
        builder.check_kernel(load().find("1.11"))
