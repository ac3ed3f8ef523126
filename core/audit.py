"""The audit log, ``STATE/logs/audit.log``: one JSON line per administrative act, done or refused.

Owns the file: its owner alone reads it, it is bounded, and it is turned over so slowly that refused attempts, of which
anybody can make any number, do not push the acts out. Permissions are decided elsewhere.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from dormouse.core.rate import Bucket
from dormouse.schemas.errors import ConfigError

FILE_NBYTES: Final = 4 << 20
FILES: Final = 8
"""With the current one: a hundred thousand acts."""

REFUSED_AT_ONCE: Final = 100
REFUSED_S: Final = 0.1
"""Then one line in ten seconds, of 400 bytes at most: eight files hold three months of it."""

MAX_CHARS: Final = 200
"""Of a name or an address that somebody sent."""


class Audit:
    """Appends lines; a disk that takes none is reported by :attr:`trouble`, and holds nothing up."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._refused = Bucket.full(REFUSED_S, REFUSED_AT_ONCE, clock())
        self._left_out = 0
        self.trouble: str | None = None

    def write(self, who: str, origin: str, act: str, name: str, outcome: str, **more: Any) -> None:
        """``outcome``: "ok", or the code of the refusal."""
        now_s = self._clock()
        if outcome != "ok" and self._refused.take(now_s) > 0.0:
            self._left_out += 1
            return
        line: dict[str, Any] = {
            "at": f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "who": who[:MAX_CHARS],
            "from": origin[:MAX_CHARS],
            "act": act,
            "name": name[:MAX_CHARS],
            "outcome": outcome,
            **more,
        }
        if self._left_out:
            line["refused_and_left_out"] = self._left_out
        try:
            self._append(orjson.dumps(line) + b"\n")
        except OSError as error:
            self.trouble = f"{self._path}: {error.strerror}"
        else:
            self._left_out, self.trouble = 0, None

    def _append(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            if os.fstat(fd).st_size + len(line) > FILE_NBYTES:
                self._turn_over()
                os.close(fd)
                fd = os.open(self._path, flags, 0o600)
            as_its_directory(fd, self._path)
            os.write(fd, line)
        finally:
            os.close(fd)

    def _turn_over(self) -> None:
        for number in range(FILES - 1, 0, -1):
            older = f"{self._path}.{number}"
            newer = f"{self._path}.{number - 1}" if number > 1 else str(self._path)
            with suppress(FileNotFoundError):
                os.replace(newer, older)


def read(path: Path, since_s: float) -> list[dict[str, Any]]:
    """Lines since then, oldest first. Raises ConfigError."""
    since, found = f"{datetime.fromtimestamp(since_s, UTC):%Y-%m-%dT%H:%M:%S.%fZ}", []
    for file in (*(Path(f"{path}.{number}") for number in range(FILES - 1, 0, -1)), path):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; the node's user and root may read it") from error
        for line in lines:
            with suppress(orjson.JSONDecodeError):  # one that a full disk has cut
                row = orjson.loads(line)
                found += [row] if row["at"] >= since else []
    return found


def as_its_directory(fd: int, path: Path) -> None:
    """A file that root makes in another user's state directory is that user's."""
    owner = path.parent.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.fchown(fd, owner.st_uid, owner.st_gid)
