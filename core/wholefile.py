"""Writes a small file as a whole and durably: keys, secrets, a version. Knows nothing of its contents."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from dormouse.core.audit import as_its_directory

PRIVATE: Final = 0o600
"""The mode of files that the node's user alone reads."""


def write_whole(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Anew beside the old one, and durable when it returns: a crash leaves one of them, and a disk that is full the old
    one. Raises OSError.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            as_its_directory(fd, path)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):  # what was written of it takes room that others need
            new.unlink()
        raise
    sync(path.parent)


def sync(directory: Path) -> None:
    """Its names are on the disk when it returns. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
