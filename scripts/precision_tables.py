"""Write the tables of docs/precision.md from the package itself: formats, MX formats, ways to train.

Run it inside .venv after a change of fmlab/train/precision; with --check it only says whether they agree.
"""

import sys
from pathlib import Path

import made

from fmlab.train.precision import FORMATS, MX_FORMATS, NUMBERS, Numbers

PATH = Path(__file__).resolve().parent.parent / "docs" / "precision.md"
BEYOND = {"ieee": "inf and nan", "nan": "nan", "none": "nothing: saturates"}


def formats() -> str:
    head = "| Format | bits: sign, exponent, mantissa | largest | smallest normal | smallest | step at 1 |"
    rows = [head + " beyond the largest | torch |", "|---|---|---:|---:|---:|---:|---|---|"]
    for one in FORMATS.values():
        parts = f"1 + {one.exponent_bits} + {one.mantissa_bits}"
        split = f"{one.bits}: {parts}" if one.is_float else f"{one.bits}: two's complement"
        stored = f" (stored in {one.stored})" if one.stored != one.bits else ""
        name = str(one.dtype or "").removeprefix("torch.")
        rows.append(
            f"| `{one.name}` | {split}{stored} | {_short(one.max)} | {_short(one.smallest_normal)} | "
            f"{_short(one.smallest)} | {_short(one.epsilon)} | {BEYOND[one.specials]} | {name} |"
        )
    return "\n".join(rows)


def _short(value: float) -> str:
    return f"{value:.10g}" if value == int(value) and value < 1e6 else f"{value:.4g}"


def mx_formats() -> str:
    rows = ["| Format | number | bits a number, scale included | largest at scale 1 |", "|---|---|---:|---:|"]
    for one in MX_FORMATS.values():
        shift = f" x 2^{one.shift}" if one.shift else ""
        rows.append(f"| `{one.name}` | `{one.element}`{shift} | {one.bits:g} | {one.max:g} |")
    return "\n".join(rows)


def numbers() -> str:
    head = "| `numbers=` | What it is | bytes a parameter: weight, gradient, AdamW |"
    rows = [head, "|---|---|---:|"]
    rows += [f"| `{one.name}` | {one.about} | {_bytes(one)} |" for one in NUMBERS.values()]
    return "\n".join(rows)


def _bytes(one: Numbers) -> str:
    return f"{one.bytes_per_parameter()}" + (" (emulated)" if one.products is not None else "")


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {"formats": formats(), "mx": mx_formats(), "numbers": numbers()}
    return made.filled(text, parts, "precision_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "precision_tables.py", sys.argv[1:]))
