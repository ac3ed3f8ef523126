"""The catalogue: deployed functions, in SQLite, durable when a call returns. Owns the file; decides nothing."""

import sqlite3
from pathlib import Path

import msgspec

from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

SCHEMA_VERSION = 1


class Catalogue:
    """Functions by name, newest version only. Raises ConfigError if the file is of another Dormouse or damaged."""

    def __init__(self, path: Path) -> None:
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
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS functions "
                "(name TEXT PRIMARY KEY, version INTEGER NOT NULL, spec BLOB NOT NULL)"
            )
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path}: {error}; restore it from a copy, or move it away to start with no functions"
            ) from error

    def functions(self) -> list[FunctionSpec]:
        rows = self._db.execute("SELECT spec FROM functions ORDER BY name").fetchall()
        return [msgspec.msgpack.decode(spec, type=FunctionSpec) for (spec,) in rows]

    def versions(self) -> list[tuple[str, int]]:
        """``(name, version)`` of all functions."""
        return [(name, version) for name, version in self._db.execute("SELECT name, version FROM functions")]

    def keep(self, spec: FunctionSpec) -> None:
        self._db.execute(
            "INSERT INTO functions VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET version=excluded.version, spec=excluded.spec",
            (spec.name, spec.version, msgspec.msgpack.encode(spec)),
        )

    def remove(self, name: str) -> None:
        self._db.execute("DELETE FROM functions WHERE name = ?", (name,))

    def close(self) -> None:
        self._db.close()
