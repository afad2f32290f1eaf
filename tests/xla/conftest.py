"""Tests on torch_xla run in .venv-xla, each group in a process of its own.

torch's autograd counts devices at the first backward pass of a process, and torch_xla reads its settings
once, so that nothing of it may run in the process of other tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SETTINGS = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = importlib.util.find_spec("torch_xla") is None
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.xla)
            if absent:
                item.add_marker(pytest.mark.skip(reason="torch_xla is not in this environment: make lab-xla"))


@pytest.fixture(scope="session")
def run_xla() -> Callable[..., dict[str, Any]]:
    """run_xla("jobs/name.py", **variables) runs that program; what it prints last is a JSON object."""

    def run(job: str, timeout: float = 200, **variables: str) -> dict[str, Any]:
        env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        command = [sys.executable, str(HERE / job)]
        done = subprocess.run(
            command, env={**env, **variables}, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run
