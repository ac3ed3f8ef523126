"""The way back from a migration under a node that runs: copies of what it changes, in STATE/before, until the newer
version serves. Owns that directory.

It is there whole or not at all. While it is there, the older node has not heard that the newer one serves, and may have
to go on: whoever finds it puts all back as it was, and may be interrupted in that. What the newer node has written
meanwhile into those files is given up.
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
"""What there may be of a database, beside the file that has its name. Of its last, which it makes from the others,
nothing is kept.
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
    """Put everything back, if there is a way back. What was half kept or half removed goes. Raises ConfigError."""
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
    """There is no way back any more. Raises OSError."""
    late = state.before.with_suffix(".old")
    _remove(late)
    with suppress(FileNotFoundError):
        state.before.rename(late)
        sync(state.state)
    shutil.rmtree(late, ignore_errors=True)  # it is none any more


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
