"""SQLite files that the node cannot do without: opened, or refused with advice."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dormouse.schemas.errors import ConfigError


@contextmanager
def opening(
    path: Path | None, what: str, version: int, way_on: str, **how: Any
) -> Iterator[tuple[sqlite3.Connection, bool]]:
    """The database, and whether it has yet to be made, for who reads it now and keeps it. ``path`` None: in memory.
    ``way_on``: what to do if it is damaged. Raises ConfigError, with the database closed.
    """
    with ExitStack() as undo:
        try:
            db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, **how)
            undo.callback(db.close)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found not in (0, version):
                text = f"{path} is {what} of version {found}, this Dormouse reads {version}"
                raise ConfigError(f"{text}; use another state directory")
            yield db, not found
        except sqlite3.OperationalError as error:  # nothing is wrong with the file itself
            raise ConfigError(
                f"{path}: {error}; free space on its disk, and see that it can be written by this user alone"
            ) from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: {error}; {way_on}") from error
        undo.pop_all()
