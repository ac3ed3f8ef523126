"""The files that a build of an environment has written: measured meanwhile, and made the node's at its end.

Code of packages may have run in it. So every name is opened from the descriptor of its folder, no link is followed, and
depth and number are bounded: measuring must not fail by it.
"""

import os
import stat
from contextlib import suppress
from typing import Final

from dormouse.router.front.exchange import refuse

MAX_FILES: Final = 200_000
MAX_DEPTH: Final = 100
"""Folders in folders: three times what libraries have, and far from the bounds of a thread's stack and descriptors."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def nbytes(place: str) -> int:
    """Of what is being written; what moves meanwhile is seen the next time. Raises HttpError if it is too deep or too
    many, OSError.
    """
    walk = _Walk(own=False)
    walk.open(place, None, "", 0)
    return walk.nbytes


def own(name: str, parent: int) -> tuple[int, list[str]]:
    """Make this folder in ``parent`` and all below it the node's, which nobody else writes: its bytes, and the names in
    it. Raises HttpError, OSError.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise refuse(422, "bad_wheel", f"the build has put something else in the place of the folder {name!r}")
    walk = _Walk(own=True)
    walk.open(name, parent, "", 0)
    return walk.nbytes, walk.names


def take_folder(fd: int, mode: int) -> None:
    """From now on nobody else changes names in it."""
    os.fchown(fd, os.getuid(), os.getgid())
    os.fchmod(fd, mode)


class _Walk:
    """One look at all of it."""

    def __init__(self, *, own: bool) -> None:
        self.nbytes, self.names = 0, list[str]()  # the names at the top
        self._own, self._files = own, 0

    def open(self, name: str, parent: int | None, path: str, depth: int) -> None:
        """A folder, and what is below it."""
        if depth > MAX_DEPTH:
            raise refuse(422, "bad_wheel", f"there are more than {MAX_DEPTH} folders in one another; require less")
        fd = os.open(name, _FOLDER, dir_fd=parent)
        try:
            if self._own:
                take_folder(fd, 0o755)
            with os.scandir(fd) as entries:
                for entry in entries:
                    self._files += 1
                    if self._files > MAX_FILES:
                        text = f"the environment has more than {MAX_FILES:,} files; require less"
                        raise refuse(413, "environment_too_large", text)
                    if not depth:
                        self.names.append(entry.name)
                    self._look(entry, fd, os.path.join(path, entry.name), depth)
        finally:
            os.close(fd)

    def _look(self, entry: "os.DirEntry[str]", folder: int, path: str, depth: int) -> None:
        if self._own:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                self.open(entry.name, folder, path, depth + 1)
            else:
                self._take_file(entry.name, folder, path)
                self.nbytes += found.st_size
            return
        with suppress(OSError):  # it has gone, or is no folder any more
            if entry.is_dir(follow_symlinks=False):
                self.open(entry.name, folder, path, depth + 1)
            else:
                self.nbytes += entry.stat(follow_symlinks=False).st_size

    def _take_file(self, name: str, folder: int, path: str) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise refuse(422, "bad_wheel", f"{path!r} is no ordinary file")
        fd = os.open(name, _FILE, dir_fd=folder)
        try:
            os.fchown(fd, os.getuid(), os.getgid())
            os.fchmod(fd, 0o755 if found.st_mode & 0o100 else 0o644)
        finally:
            os.close(fd)
