"""Environments on the disk, below ``STATE/environments``: checks, takes over and removes the output of builds.

::

    KEY/environment.json   what it is made of (EnvironmentRecord)
    KEY/site/              the libraries, as an instance sees them before the node's own
    .SOMETHING/            one that is being built, or removed: removed after the next start

Calls that read or write files block, some for minutes: they belong in a thread. The environments to keep are decided
elsewhere.
"""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final, NamedTuple

import msgspec

from dormouse.core.directories import remove_tree
from dormouse.core.sandbox.builder import RESULT, SITE
from dormouse.router.admin import builtfiles
from dormouse.router.admin.environmentbook import EnvironmentRecord
from dormouse.router.admin.environmentbuild import BUILT, BuildBounds, disk_full
from dormouse.router.front.exchange import refuse

RECORD: Final = "environment.json"
RESULT_NBYTES: Final = 1 << 20
TEXT_NBYTES: Final = 4000


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """The builder's report."""

    code: str
    text: str = ""
    lock: list[str] = []
    names: list[str] = []


class BuiltTree(NamedTuple):
    """A build's output, owned by the node by now."""

    lock: list[str]
    names: list[str]  # of modules
    nbytes: int


class EnvironmentFiles:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def site(self, key: str) -> str:
        return str(self._directory / key / SITE)

    def place(self) -> Path:
        """A new one's, while it is built, or an old one's, while it is removed."""
        return self._directory / f".{token_hex(8)}"  # what an earlier router has left may be there for long

    def open(self) -> tuple[dict[str, EnvironmentRecord], list[str]]:
        """Those that are there, by key; and the paths to remove."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        found, left = dict[str, EnvironmentRecord](), list[str]()
        for path in [*self._directory.iterdir()]:
            if path.name.startswith("."):  # also whole ones, which nobody had any more
                left.append(str(path))
                continue
            try:
                found[path.name] = msgspec.json.decode((path / RECORD).read_bytes(), type=EnvironmentRecord)
            except (OSError, msgspec.MsgspecError):  # a build that was cut short, or damaged
                if (gone := self.set_aside(path.name)) is not None:
                    left.append(gone)
        return found, left

    def take_over(self, place: Path, bounds: BuildBounds, full: bool) -> BuiltTree | None:
        """The build's output; None if nothing was missing. ``full``: the disk is. Raises HttpError, OSError."""
        built = place / BUILT
        try:
            fd = os.open(built / RESULT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                result = msgspec.json.decode(file.read(RESULT_NBYTES), type=BuildResult)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if full:
                raise disk_full() from None
            raise refuse(500, "build_failed", "the build said nothing of its end; see the function's log") from None
        if result.code == "disk_full":
            raise disk_full()
        if result.code == "environment_too_large":
            raise bounds.too_large()
        if result.code:
            raise refuse(422, result.code[:40], result.text[:TEXT_NBYTES])
        if not result.lock:
            return None
        # Nothing of the build runs any more: a zygote reports that an instance has ended when all its processes have.
        fd = os.open(built, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            builtfiles.take_folder(fd, 0o700)
            nbytes, files = builtfiles.own(SITE, fd)
        finally:
            os.close(fd)
        if nbytes > bounds.size_nbytes:
            raise bounds.too_large()
        names = sorted({name.removesuffix(".py").partition(".")[0] for name in files})
        return BuiltTree(result.lock, [each for each in names if each.isidentifier()], nbytes)

    def keep(self, place: Path, key: str, record: EnvironmentRecord) -> None:
        """Keep the tree taken over there under its key. Raises OSError."""
        whole, target = place / "new", self._directory / key
        whole.mkdir(mode=0o755)
        os.rename(place / BUILT / SITE, whole / SITE)
        _write(whole / RECORD, record)
        os.sync()
        remove_tree(str(target))
        os.rename(whole, target)

    def remember(self, key: str, record: EnvironmentRecord) -> None:
        """Of one that is there, what led to it. Raises OSError."""
        _write(self._directory / key / RECORD, record)

    def set_aside(self, key: str) -> str | None:
        """From now on it is not there. Returns the path to remove, if any. Does not block for long."""
        gone = self.place()
        with suppress(OSError):
            os.rename(self._directory / key, gone)
            return str(gone)
        return None


def _write(path: Path, record: EnvironmentRecord) -> None:
    half = path.with_name(f"{path.name}.new")
    half.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    half.replace(path)
