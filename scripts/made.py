"""Parts of a page that are made from the package: between markers that name the part and its script."""

from collections.abc import Mapping
from pathlib import Path


def filled(text: str, parts: Mapping[str, str], script: str) -> str:
    """`text` with what stands between the markers of each part made anew."""
    for name, made in parts.items():
        begin, end = f"<!-- {name}: made by scripts/{script} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return text


def main(path: Path, wanted: str, script: str, argv: list[str]) -> int:
    """Write `wanted` to the page; with --check only say, and return 1, when it is not what stands there."""
    agrees = path.read_text() == wanted
    if argv == ["--check"]:
        if not agrees:
            print(f"{path.name} does not agree with what it shows; run: python scripts/{script}")
        return int(not agrees)
    path.write_text(wanted)
    return 0
