"""Say as JSON what is installed in the environment whose Python runs this; needs nothing but that Python."""

import json
import site
import sys
from importlib import metadata
from pathlib import Path


def distributions() -> list[dict[str, object]]:
    """Name, version, what the metadata says of the licence, what is required, and the modules at the top."""
    modules: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            modules.setdefault(name, []).append(module)
    found = []
    for one in metadata.distributions():
        said, name = one.metadata, one.metadata["Name"]
        classifiers = [c for c in said.get_all("Classifier") or [] if c.startswith("License ::")]
        found.append(
            {
                "name": name,
                "version": one.version,
                "expression": said.get("License-Expression") or "",
                "text": (said.get("License") or "").strip(),
                "classifiers": classifiers,
                "modules": sorted(modules.get(name, [])),
            }
        )
    return found


def strangers() -> list[str]:
    """Files that run whenever Python starts (*.pth, sitecustomize) and that no distribution brought."""
    brought = {
        str(Path(str(one.locate_file(file))).resolve())
        for one in metadata.distributions()
        for file in one.files or []
        if str(file).endswith(".pth") or "customize" in str(file)
    }
    found = []
    for folder in {path for path in site.getsitepackages() if Path(path).is_dir()}:
        for pattern in ("*.pth", "sitecustomize.py", "usercustomize.py"):
            found += [str(path) for path in Path(folder).glob(pattern) if str(path.resolve()) not in brought]
    return sorted(found)


if __name__ == "__main__":
    json.dump({"distributions": distributions(), "strangers": strangers()}, sys.stdout)
