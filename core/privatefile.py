"""A small file that the node's user alone reads, written as a whole: keys, secrets. Knows nothing of what is in it."""

import os
from contextlib import suppress
from pathlib import Path

from dormouse.core.audit import as_its_directory


def write_private(path: Path, data: bytes) -> None:
    """Anew beside the old one, and durable when it returns: a crash leaves one of them, and a disk that is full the old
    one. Raises OSError.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            as_its_directory(fd, path)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):  # what was written of it takes room that others need
            new.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
