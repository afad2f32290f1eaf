"""Which licence a distribution is under, by its own metadata, and whether the project takes it."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: what is taken without a word: permissive ones, and MPL, which asks only for changes of its own files
ALLOWED = frozenset(
    {
        *("MIT", "MIT-0", "MIT-CMU", "HPND", "ISC", "0BSD", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"),
        *("PSF-2.0", "Python-2.0", "CNRI-Python", "Zlib", "CC0-1.0", "BSL-1.0", "Unlicense", "AFL-3.0"),
        "MPL-2.0",
    }
)

#: pattern of names -> why it is taken all the same
JUSTIFIED: Mapping[str, str] = {
    "nvidia-*": "CUDA's libraries, NVIDIA's own licence: they come with PyTorch's default build for Linux, "
    "which torch_xla asks for; used as they are, never handed on by us",
    "namex": "Apache-2.0 by the LICENSE file that it brings; its metadata say nothing (comes with Keras)",
}

#: how authors write a licence, in small letters -> its SPDX identifier
NAMES: Mapping[str, str] = {
    "mit license": "MIT",
    "the mit license": "MIT",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 2-clause license": "BSD-2-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "academic free license (afl)": "AFL-3.0",
    "the unlicense (unlicense)": "Unlicense",
    "historical permission notice and disclaimer (hpnd)": "HPND",
}


@dataclass(frozen=True)
class Licence:
    """What a distribution says of its licence: an SPDX expression, else as it was written."""

    said: str

    @property
    def taken(self) -> bool:
        """Whether each part joined by AND has an alternative (OR) that is allowed; exceptions only give."""
        parts = re.split(r"\bAND\b", self.said)
        return bool(self.said) and all(
            any(self._name(one) in ALLOWED for one in re.split(r"\bOR\b", part)) for part in parts
        )

    @staticmethod
    def _name(text: str) -> str:
        return re.split(r"\bWITH\b", text.strip("() \t\n"))[0].strip("() ")


def licence(expression: str, classifiers: Sequence[str], text: str) -> Licence:
    """From the metadata's three places, the most exact first; "" where none says it.

    Several classifiers are taken together: each of them has to be allowed.
    """
    if expression:
        return Licence(expression)
    names = [one.split(" :: ")[-1] for one in classifiers if one.count(" :: ") > 1]
    if names:
        return Licence(" AND ".join(spdx(name) for name in names))
    first = text.splitlines()[0].strip() if text else ""
    return Licence("" if first.upper() == "UNKNOWN" else spdx(first))


def spdx(name: str) -> str:
    return NAMES.get(name.strip().lower(), name.strip())


def justification(name: str) -> str | None:
    """Why a distribution is taken whatever its licence; None when nothing says so."""
    return next((why for pattern, why in JUSTIFIED.items() if fnmatch.fnmatch(name, pattern)), None)
