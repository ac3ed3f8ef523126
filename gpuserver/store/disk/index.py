"""The index of the segment files, in SQLite: owns STATE/store/index.sqlite3; decides nothing.

Rows are written by one thread, after the bytes that they refer to are on disk, and read at the start; file identities
are read all the time, over a connection of their own, so that a reader does not wait for a writer's disk.
"""

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from dormouse.core.database import opening
from dormouse.gpuserver.store.memory.functions import Key
from dormouse.schemas.errors import ConfigError

SCHEMA_VERSION: Final = 1

MAX_IDENTITIES: Final = 1_000_000
"""File ranges that are remembered: about 200 MB of index, and some thousand checkpoints."""

ID_BLOCK: Final = 1 << 30
"""Segment ids that one run of the store may use. Each run begins behind the last one's, so an id never means two
things; the wire's 64 bits, one of them a sign, are enough for 2^33 runs."""

RESTORE: Final = (
    "restore it from a copy, or give the stored models up, so that functions load theirs afresh: "
    "`dormouse up --forget-models`"
)

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS runs (next_id INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS segments "
    "(fingerprint BLOB PRIMARY KEY, nbytes INTEGER NOT NULL, scope TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS functions (name TEXT NOT NULL, version INTEGER NOT NULL, position INTEGER NOT NULL, "
    "fingerprint BLOB NOT NULL, PRIMARY KEY (name, version, position)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS functions_by_fingerprint ON functions (fingerprint)",
    "CREATE TABLE IF NOT EXISTS identities (id INTEGER PRIMARY KEY AUTOINCREMENT, dev INTEGER NOT NULL, "
    "ino INTEGER NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, "
    "start INTEGER NOT NULL, nbytes INTEGER NOT NULL, scope TEXT NOT NULL, fingerprint BLOB NOT NULL, "
    "UNIQUE (dev, ino, start, nbytes, scope, size, mtime_ns, ctime_ns))",
)


class Identity(NamedTuple):
    """A range of a file that has not changed since: device and inode numbers, size, times in nanoseconds, the range,
    and the sharing scope of its reader.
    """

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    start: int
    nbytes: int
    scope: str


class FiledSegment(NamedTuple):
    """A segment that is in a file."""

    fingerprint: bytes
    nbytes: int
    scope: str


class Index:
    """The rows. Raises ConfigError if the file is lost, damaged or of another Dormouse; later errors are sqlite3.Error.

    Args:
        path: of the file; None: nothing outlives this process.
        segments: where the files are that it refers to; None: if there is no index yet, those may go.
    """

    def __init__(self, path: Path | None, segments: Path | None = None) -> None:
        how = opening(path, "a store's index", SCHEMA_VERSION, RESTORE, check_same_thread=False)
        with how as (self._db, new):
            if new:
                if segments is not None and any(segments.glob("*/*")):
                    raise ConfigError(
                        f"{path} is lost or empty, but {segments} has models, which nothing else tells apart; {RESTORE}"
                    )
                for statement in _SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self.first_id = self._reserve_ids()
            self.segments, self.functions = self._read()
            self._reader = self._db if path is None else sqlite3.connect(path, isolation_level=None)

    def _reserve_ids(self) -> int:
        row = self._db.execute("SELECT next_id FROM runs").fetchone()
        first = 1 if row is None else int(row[0])
        try:
            with self._transaction():
                self._db.execute("DELETE FROM runs")
                self._db.execute("INSERT INTO runs VALUES (?)", (first + ID_BLOCK,))
        except sqlite3.OperationalError:
            if row is None:
                raise
            # A full disk is no reason not to serve its files: the writer will report the error. This run's block
            # is then any of the upper half, which no count of runs reaches.
            return ((1 << 32) + secrets.randbelow(1 << 32)) * ID_BLOCK
        return first

    def _read(self) -> tuple[list[FiledSegment], dict[Key, list[bytes]]]:
        stored = [FiledSegment(*row) for row in self._db.execute("SELECT fingerprint, nbytes, scope FROM segments")]
        functions: dict[Key, list[bytes]] = {}
        rows = self._db.execute("SELECT name, version, fingerprint FROM functions ORDER BY name, version, position")
        for name, version, fingerprint in rows:
            functions.setdefault((name, version), []).append(fingerprint)
        return stored, functions

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All statements or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # a statement or the commit itself has failed
                self._db.execute("ROLLBACK")

    def forget(self, fingerprints: Iterable[bytes], functions: Iterable[Key]) -> None:
        """Drop rows; the files go afterwards. Segments that a function no longer has leave its rows, although its newer
        ones are not written yet.
        """
        gone = [(each,) for each in fingerprints]
        with self._transaction():
            self._db.executemany("DELETE FROM functions WHERE name = ? AND version = ?", list(functions))
            self._db.executemany("DELETE FROM functions WHERE fingerprint = ?", gone)
            self._db.executemany("DELETE FROM segments WHERE fingerprint = ?", gone)

    def keep(
        self,
        segments: Iterable[FiledSegment],
        functions: Mapping[Key, Sequence[bytes]],
        identities: Mapping[Identity, bytes],
    ) -> None:
        """Add rows for segments on disk; a function's rows replace those that it had."""
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?, ?)", segments)
            for (name, version), fingerprints in functions.items():
                self._db.execute("DELETE FROM functions WHERE name = ? AND version = ?", (name, version))
                self._db.executemany(
                    "INSERT INTO functions VALUES (?, ?, ?, ?)",
                    [(name, version, position, each) for position, each in enumerate(fingerprints)],
                )
            if identities:
                self._keep_identities(identities)

    def _keep_identities(self, identities: Mapping[Identity, bytes]) -> None:
        rows = [(_signed(row.dev), _signed(row.ino), *row[2:], fingerprint) for row, fingerprint in identities.items()]
        self._db.executemany(
            "INSERT OR REPLACE INTO identities (dev, ino, size, mtime_ns, ctime_ns, start, nbytes, scope, fingerprint) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        self._db.execute("DELETE FROM identities WHERE id <= (SELECT max(id) FROM identities) - ?", (MAX_IDENTITIES,))

    def has(self, fingerprint: bytes) -> bool:
        """Whether a segment has its row. In the thread that writes."""
        row = self._db.execute("SELECT 1 FROM segments WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return row is not None

    def find(self, identity: Identity) -> bytes | None:
        """The fingerprint that this file range had."""
        row = self._reader.execute(
            "SELECT fingerprint FROM identities WHERE dev = ? AND ino = ? AND size = ? AND mtime_ns = ? "
            "AND ctime_ns = ? AND start = ? AND nbytes = ? AND scope = ?",
            (_signed(identity.dev), _signed(identity.ino), *identity[2:]),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def close(self) -> None:
        self._reader.close()
        self._db.close()


def forget_all(path: Path) -> None:
    """Begin with no rows; the files that they referred to go with the first sweep. Raises OSError."""
    for name in (path.name, path.name + "-wal", path.name + "-shm"):
        path.with_name(name).unlink(missing_ok=True)


def _signed(number: int) -> int:
    """SQLite's integers have a sign; device and inode numbers use all 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number
