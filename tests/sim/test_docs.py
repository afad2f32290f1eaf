"""docs/simulated-chips.md: its example runs as it stands, and its settings exist."""

import re
from pathlib import Path

from fmlab import Ranks

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "simulated-chips.md").read_text()


def test_the_example_runs(aside: Ranks) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    aside.run(lambda: exec(snippet, {}))


def test_settings_that_it_names_exist() -> None:
    from inspect import signature

    from fmlab.sim import simulate

    named = set(re.findall(r"`(\w+)=[^`]*`", TEXT)) - {"out", "fullgraph", "map_location"}
    assert named - set(signature(simulate).parameters) == set()
