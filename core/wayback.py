"""Rollback of a migration under a node that runs: copies of the files that it changes, in STATE/before, until the newer
version serves. Owns that directory.

The directory is there whole or not at all. While it is there, the newer node has not reported to the older one that it
serves, and the older one may have to go on: a process that finds it restores all files, and may be interrupted in that.
The newer node's writes to them are given up.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson

from dormouse.core.paths import StatePaths
from dormouse.core.wholefile import sync, write_whole
from dormouse.schemas.errors import ConfigError

_NAMES: Final = "names.json"
_SHARED: Final = "-shm"
_SQLITE: Final = ("", "-wal", _SHARED)
"""Suffixes of the files of a database, its own name first. The last one is not kept: SQLite makes it from the others.
"""


def keep(state: StatePaths, names: Iterable[str]) -> None:
    """Copy these files, as far as they are there; nobody writes to them. Raises OSError."""
    early = state.before.with_suffix(".new")
    _remove(early)
    try:
        early.mkdir(mode=0o700)
        files = [f"{name}{end}" for name in dict.fromkeys(names) for end in _SQLITE]
        for number, name in enumerate(files):
            if name.endswith(_SHARED):
                continue
            if (state.state / name).exists():
                _copy(state.state / name, early / str(number))
        write_whole(early / _NAMES, orjson.dumps(files))
        early.rename(state.before)
    except OSError:
        shutil.rmtree(early, ignore_errors=True)  # the disk may be full of it
        raise
    sync(state.state)


def go(state: StatePaths) -> bool:
    """Put everything back, if there is a rollback. Half kept or half removed copies go. Raises ConfigError."""
    for half in (".new", ".old"):
        shutil.rmtree(state.before.with_suffix(half), ignore_errors=True)
    try:
        if not state.before.exists():
            return False
        files = orjson.loads((state.before / _NAMES).read_bytes())
        for number, name in enumerate(files):
            _put_back(state.before / str(number), state.state / name)
        drop(state)
        return True
    except OSError as error:
        raise ConfigError(
            f"state directory {state.state}: the migration to a newer version, which did not come to serve, could not "
            f"be undone ({error}); free space on its disk and start again, which goes on where this ended"
        ) from error


def _put_back(kept: Path, path: Path) -> None:
    if kept.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy(kept, path)
    else:
        path.unlink(missing_ok=True)


def _copy(path: Path, to: Path) -> None:
    write_whole(to, path.read_bytes(), path.stat().st_mode & 0o777)


def drop(state: StatePaths) -> None:
    """Give the rollback up. Raises OSError."""
    late = state.before.with_suffix(".old")
    _remove(late)
    with suppress(FileNotFoundError):
        state.before.rename(late)
        sync(state.state)
    shutil.rmtree(late, ignore_errors=True)  # it is none any more


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
