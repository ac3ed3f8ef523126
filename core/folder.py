"""A function's folder: which of its files travel to a node, found and opened with the caller's own rights.

Knows no socket. These stay behind: all whose name begins with a dot, ``__pycache__``, and all that ``.dormouseignore``
in the folder names, in the language of .gitignore (``!.env`` takes it along); virtual environments; all but regular
files and links to them. Links to directories are not followed. A node's own directories may not be part of it.
"""

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from dormouse.schemas.options import FILE, FILE_NBYTES

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

ENTRY: Final = "function.py"
IGNORE: Final = ".dormouseignore"

_STAYS: Final = (".*", "__pycache__/")
_UNREMARKABLE: Final = (IGNORE, ".git", ".DS_Store")
"""A file whose name begins with one of these stays behind without a word."""

_ENVIRONMENT: Final = "pyvenv.cfg"
_NODES: Final = {".dormouse-run": "run", "catalogue.sqlite3": "state"}
"""A file by which a directory is known as a node's."""

_HANDLE: Final = re.compile(rb"^(async +)?def +handle(_batch)?\b", re.MULTILINE)


class NoFunction(Exception):
    """There is nothing to deploy; the text says what to do."""


class FunctionFolder(NamedTuple):
    """``entry`` is the file in ``folder`` that has ``load`` and ``handle``; ``alone``: nothing else goes.

    ``takes``: which names go at all; None: any. ``inside``: where files must lie to which links of the folder lead;
    None: anywhere.
    """

    folder: Path
    entry: str
    alone: bool
    takes: Callable[[str], bool] | None = None
    inside: Path | None = None


def find(path: Path) -> FunctionFolder:
    """The function that ``path``, a file or a folder, stands for. Raises NoFunction."""
    if not path.is_dir():
        if not path.is_file():
            raise NoFunction(f"{path} is not a file")
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise NoFunction(f"{path} cannot be read as UTF-8 text: {error}") from error
        return FunctionFolder(path.parent, path.name, _is_everybodys(path.parent))
    if (path / ENTRY).is_file():
        return FunctionFolder(path, ENTRY, False)
    names = sorted(file.name for file in path.glob("*.py") if file.is_file() and _HANDLE.search(file.read_bytes()))
    if len(names) != 1:
        what = f"{len(names)} files that define handle ({', '.join(names[:5])})" if names else "no other with handle"
        raise NoFunction(f"{path} has no {ENTRY}, and {what}; name the function's file instead of its folder")
    return FunctionFolder(path, names[0], False)


def _is_everybodys(folder: Path) -> bool:
    """Whether more lies in it than belongs to one function."""
    places = {"/", "/tmp", "/var/tmp", tempfile.gettempdir(), os.path.expanduser("~")}
    return os.path.realpath(folder) in {os.path.realpath(place) for place in places}


def files(found: FunctionFolder) -> Iterator[tuple[str, int]]:
    """Names below the folder, and descriptors that are the caller's to close. Raises NoFunction, OSError."""
    for name, goes in _walk(found):
        if goes:
            yield name, _open(found.folder / name, found.inside)


def state(found: FunctionFolder) -> tuple[tuple[str, int, int, int], ...]:
    """Another value once a file that goes has changed, come or gone. Raises NoFunction, OSError."""
    told = ((name, os.stat(found.folder / name)) for name, goes in _walk(found) if goes)
    return tuple((name, each.st_ino, each.st_mtime_ns, each.st_size) for name, each in told)


def options_file(found: FunctionFolder) -> str:
    """The text of the file of a deploy's options beside the function; "" without one. Raises NoFunction, OSError."""
    path = found.folder / FILE
    if found.alone or not path.is_file():
        return ""
    try:
        with open(_open(path, None), "rb") as file:
            return file.read(FILE_NBYTES + 1).decode()
    except UnicodeDecodeError as error:
        raise NoFunction(f"{path} cannot be read as UTF-8 text: {error}") from error


def left_out(found: FunctionFolder) -> list[str]:
    """Hidden files that stay behind although no line of ``.dormouseignore`` says so: a function may want them. Raises
    NoFunction, OSError.
    """
    names = (name for name, goes in _walk(found) if not goes)
    return [name for name in names if not os.path.basename(name).startswith(_UNREMARKABLE)]


def _walk(found: FunctionFolder) -> Iterator[tuple[str, bool]]:
    """Files below the folder: those that go (True), and hidden ones that stay although no line of ``.dormouseignore``
    says so (False).
    """
    for above in (found.folder.resolve(), *found.folder.resolve().parents):
        if (what := _of_a_node(above)) is not None:
            raise NoFunction(f"{found.folder} lies in {above}, the {what} directory of a node; deploy from elsewhere")
    if found.alone:
        yield found.entry, True
        return
    ignored = _ignored(found.folder / IGNORE)
    for here, folders, names in os.walk(found.folder, onerror=_raise):
        below = os.path.relpath(here, found.folder)
        prefix = "" if below == "." else f"{below}/"
        folders[:] = sorted(name for name in folders if not ignored.match_file(f"{prefix}{name}/"))
        for name in folders:
            if (what := _of_a_node(Path(here, name))) is not None:
                raise NoFunction(
                    f"{found.folder} contains {prefix}{name}, the {what} directory of a node; keep the function in a "
                    f"folder of its own, or write {prefix}{name}/ into {found.folder / IGNORE}"
                )
        folders[:] = [name for name in folders if not os.path.lexists(os.path.join(here, name, _ENVIRONMENT))]
        for name in sorted(names):
            if not os.path.isfile(os.path.join(here, name)):  # nor a link to one
                continue
            if found.takes is not None and not found.takes(prefix + name):
                continue
            decided = ignored.check_file(prefix + name)
            if not decided.include:
                yield prefix + name, True
            elif prefix + name == found.entry:
                raise NoFunction(f"{found.entry} is left out by {found.folder / IGNORE}; add the line !{found.entry}")
            elif decided.index is not None and decided.index < len(_STAYS):
                yield prefix + name, False


def _ignored(path: Path) -> "GitIgnoreSpec":
    from pathspec import GitIgnoreSpec  # only who deploys pays for its import

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except UnicodeDecodeError as error:
        raise NoFunction(f"{path} cannot be read as UTF-8 text: {error}") from error
    try:
        return GitIgnoreSpec.from_lines([*_STAYS, *lines])
    except ValueError as error:
        raise NoFunction(f"{path}: {error}; write it as a .gitignore is written") from error


def _of_a_node(directory: Path) -> str | None:
    """The kind of a node's directory that this is; None for others."""
    return next((what for file, what in _NODES.items() if os.path.lexists(directory / file)), None)


def _raise(error: OSError) -> None:
    raise error


def _open(path: Path, inside: Path | None) -> int:
    """For reading, and without waiting: by now a pipe may have the file's name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NoFunction(f"{path} is not a regular file any more; deploy again")
        if inside is not None:
            real = Path(os.readlink(f"/proc/self/fd/{fd}"))  # of what was opened, whatever the link says by now
            if not real.is_relative_to(inside.resolve()):
                raise NoFunction(f"{path} is a link to {real}, outside of {inside}; it is not taken along")
    except BaseException:
        os.close(fd)
        raise
    return fd
