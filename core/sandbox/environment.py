"""The environment of the zygote and of instances. Imports next to nothing: the zygote starts with it, twice."""

import os
import sys
from collections.abc import Sequence
from typing import Final

ALLOWED: Final = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "LD_LIBRARY_PATH",
)
"""Variables that reach an instance, besides LC_* and those made for it. An allow-list: secrets have any name."""

_OWN: Final = (
    "HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "TMPDIR",
    "DORMOUSE_READY_FD",
    "DORMOUSE_PARENT",
    "DORMOUSE_NEXT",
)
"""Further variables that the zygote itself needs."""

_CLEAN: Final = "DORMOUSE_CLEAN"

_MALLOC: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Memory that ``malloc`` maps asks for huge pages: the value of a JSON body of 64 MiB is made in 16 ms, not in 38, most
of which were page faults. glibc reads it when a program starts, so instances get it from the zygote.
"""


def scrubbed(variables: dict[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """The part of an environment that may reach an instance."""
    return {
        name: value for name, value in variables.items() if name in ALLOWED or name in extra or name.startswith("LC_")
    }


def start_clean() -> None:
    """Start this program anew without secrets, unless it has been: an instance, which is forked, can read the memory
    in which its ancestor's environment was put.
    """
    if os.environ.pop(_CLEAN, None) is None:
        clean = scrubbed(dict(os.environ), _OWN) | {_CLEAN: "1"} | _MALLOC
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)
