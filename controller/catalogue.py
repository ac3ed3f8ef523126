"""The catalogue: deployed functions, in SQLite, durable when a call returns. Owns the file; decides nothing."""

import sqlite3
from pathlib import Path

import msgspec

from dormouse.schemas.errors import ConfigError, DormouseError
from dormouse.schemas.messages import FunctionSpec

SCHEMA_VERSION = 2


class NotWritten(DormouseError):
    """The disk takes nothing; the text says what to do. Worth a retry."""


class Catalogue:
    """Functions by name, newest version only. Raises ConfigError if the file is of another Dormouse or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._removed: set[str] = set()  # whose rows could not be deleted yet
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found not in (0, SCHEMA_VERSION):
                raise ConfigError(
                    f"{path} is a catalogue of version {found}, this Dormouse reads {SCHEMA_VERSION}; "
                    "use another state directory"
                )
            if not found:
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS functions "
                    "(name TEXT PRIMARY KEY, version INTEGER NOT NULL, spec BLOB NOT NULL)"
                )
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self.functions()  # while it can still be refused
        except sqlite3.OperationalError as error:  # nothing is wrong with the file itself
            raise ConfigError(
                f"{path}: {error}; free space on its disk, and see that it can be written by this user alone"
            ) from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{path}: {error}; restore it from a copy, or move it away to start with no functions"
            ) from error

    def functions(self) -> list[FunctionSpec]:
        rows = self._db.execute("SELECT spec FROM functions ORDER BY name").fetchall()
        specs = [msgspec.msgpack.decode(spec, type=FunctionSpec) for (spec,) in rows]
        return [spec for spec in specs if spec.name not in self._removed]

    def versions(self) -> list[tuple[str, int]]:
        """``(name, version)`` of all functions."""
        rows = self._db.execute("SELECT name, version FROM functions")
        return [(name, version) for name, version in rows if name not in self._removed]

    def keep(self, spec: FunctionSpec) -> None:
        """Raises NotWritten, and then keeps what was there."""
        try:
            self._db.execute(
                "INSERT INTO functions VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET version=excluded.version, spec=excluded.spec",
                (spec.name, spec.version, msgspec.msgpack.encode(spec)),
            )
        except sqlite3.Error as error:
            raise NotWritten(
                f"{self._path} cannot be written: {error}; free space on its disk, then try again"
            ) from error
        self._removed.discard(spec.name)

    def remove(self, name: str) -> None:
        """Whatever the disk says: who removes a function may do it because the disk is full. Raises NotWritten if its
        row is still there, to be deleted by :meth:`settle`.
        """
        self._removed.add(name)
        self.settle()

    def settle(self) -> None:
        """Delete the rows that could not be deleted before. Raises NotWritten."""
        for name in sorted(self._removed):
            try:
                self._db.execute("DELETE FROM functions WHERE name = ?", (name,))
            except sqlite3.Error as error:
                raise NotWritten(
                    f"{self._path} cannot be written: {error}; until its disk has space, a restart brings back function"
                    f" {name!r}, which was removed"
                ) from error
            self._removed.discard(name)

    def close(self) -> None:
        self._db.close()
