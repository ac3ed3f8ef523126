"""A function's folder: which of its files travel to a node, found and opened with the caller's own rights.

Knows no socket. What is left out: ``__pycache__``, hidden directories, virtual environments, directories of a node, and
whatever is not a regular file or a link to one; links to directories are not followed.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ENTRY: Final = "function.py"

_STRANGE: Final = ("pyvenv.cfg", ".dormouse-run", "catalogue.sqlite3")
"""A directory below the function's that has one of these is no part of it: an environment, a node's run or state."""

_HANDLE: Final = re.compile(rb"^(async +)?def +handle\b", re.MULTILINE)


class NoFunction(Exception):
    """There is nothing to deploy; the text says what to do."""


class Found(NamedTuple):
    """``entry`` is the file in ``folder`` that has ``load`` and ``handle``; ``alone``: nothing else goes."""

    folder: Path
    entry: str
    alone: bool


def find(path: Path) -> Found:
    """What ``path``, a file or a folder, stands for. Raises NoFunction."""
    if not path.is_dir():
        if not path.is_file():
            raise NoFunction(f"{path} is not a file")
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise NoFunction(f"{path} cannot be read as UTF-8 text: {error}") from error
        return Found(path.parent, path.name, _is_everybodys(path.parent))
    if (path / ENTRY).is_file():
        return Found(path, ENTRY, False)
    names = sorted(file.name for file in path.glob("*.py") if file.is_file() and _HANDLE.search(file.read_bytes()))
    if len(names) != 1:
        what = f"{len(names)} files that define handle ({', '.join(names[:5])})" if names else "no other with handle"
        raise NoFunction(f"{path} has no {ENTRY}, and {what}; name the function's file instead of its folder")
    return Found(path, names[0], False)


def _is_everybodys(folder: Path) -> bool:
    """Whether more lies in it than belongs to one function."""
    places = {"/", "/tmp", "/var/tmp", tempfile.gettempdir(), os.path.expanduser("~")}
    return os.path.realpath(folder) in {os.path.realpath(place) for place in places}


def files(found: Found) -> Iterator[tuple[str, int]]:
    """Names below the folder, and descriptors that are the caller's to close. Raises NoFunction, OSError."""
    if found.alone:
        yield found.entry, _open(found.folder / found.entry)
        return
    for here, folders, names in os.walk(found.folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if _belongs(os.path.join(here, name)))
        for name in sorted(names):
            path = Path(here, name)
            if path.is_file():  # or a link to one
                yield str(path.relative_to(found.folder)), _open(path)


def _raise(error: OSError) -> None:
    raise error


def _belongs(path: str) -> bool:
    name = os.path.basename(path)
    return (
        name != "__pycache__"
        and not name.startswith(".")
        and not any(os.path.lexists(os.path.join(path, strange)) for strange in _STRANGE)
    )


def _open(path: Path) -> int:
    """For reading, and without waiting: by now a pipe may have the file's name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NoFunction(f"{path} is not a regular file any more; deploy again")
    return fd
