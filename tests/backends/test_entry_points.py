"""Backends from other packages: found by entry points, left out with a warning where they are broken."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from fmlab.backends import available_backends, backend_names, get_backend, registry
from fmlab.backends.cpu import CPU

ROOT = Path(__file__).resolve().parents[2]


class Mychip(CPU):
    name = "mychip"


class NotABackend:
    pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment with packages that offer backends, and without this package's own metadata."""
    here = sys.modules[__name__].__name__
    monkeypatch.setitem(sys.modules, "someones", sys.modules[here])
    points = [
        metadata.EntryPoint(name, value, registry.GROUP)
        for name, value in (
            ("mychip", "someones:Mychip"),
            ("broken", "someones.absent:Chip"),
            ("strange", "someones:NotABackend"),
            ("cpu", "someones:Mychip"),
        )
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(registry, "_broken", set())
    registry._foreign.cache_clear()
    yield
    registry._foreign.cache_clear()


def test_backends_of_other_packages_are_found_and_broken_ones_left_out(installed: None) -> None:
    with pytest.warns(UserWarning, match=r"backend 'cpu' .* is left out: its name is taken"):
        names = backend_names()
    assert {"mychip", "sim", "cpu"} <= set(names)
    with pytest.warns(UserWarning, match="cannot be loaded") as told:
        assert "mychip" in available_backends()
    said = sorted(str(warning.message) for warning in told)
    assert "'broken' (someones.absent:Chip) is left out" in said[0]
    assert "NotABackend is not a subclass of fmlab.backends.Backend" in said[1]
    assert get_backend("mychip").name == "mychip"
    assert type(get_backend("cpu")) is CPU
    with pytest.raises(ValueError, match="unknown backend 'broken'; legal: auto, cpu"):
        get_backend("broken")


def test_our_own_are_found_whatever_the_installed_metadata_say(installed: None) -> None:
    with pytest.warns(UserWarning, match="name is taken"):
        assert "sim" in backend_names()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.GROUP] == registry.OWN_ENTRY_POINTS


def test_listing_backends_makes_no_device() -> None:
    code = (
        "import sys, torch, fmlab.backends as b\n"
        "assert not any(name.startswith('fmlab.sim') for name in sys.modules)\n"
        "print(b.available_backends())\n"
        "assert 'fmlab.sim.device' not in sys.modules and 'fmlab.sim.dispatch' not in sys.modules\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "'sim'" in out.stdout
