"""The catalogue: deployed functions, in SQLite, durable when a call returns. Owns the file and, beside it, a reserve of
disk that makes a removal durable on a full one; decides nothing.
"""

import contextlib
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from dormouse.core.config import StartSection
from dormouse.core.database import opening
from dormouse.schemas.errors import ConfigError, DormouseError
from dormouse.schemas.messages import FunctionSpec, StepTimes

SCHEMA_VERSION = 2

RESERVE_NBYTES: Final = 256 << 10
"""A removal writes some pages of 4 KiB to the log, and the log's index of 32 KiB."""

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS functions (name TEXT PRIMARY KEY, version INTEGER NOT NULL, spec BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS quarantine (name TEXT PRIMARY KEY, reason TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS emptied (row INTEGER PRIMARY KEY)",  # has one while the last function was removed
    "CREATE TABLE IF NOT EXISTS step_times (name TEXT PRIMARY KEY, times BLOB NOT NULL)",  # of language models
    "CREATE TABLE IF NOT EXISTS pins (name TEXT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS traffic (name TEXT PRIMARY KEY, share INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS batch_times (name TEXT PRIMARY KEY, times BLOB NOT NULL)",
)

BatchTimesKnown = tuple[tuple[int, float], ...]
"""Seconds that a batch of so many requests takes."""

_NOTE_IF_EMPTY: Final = ("INSERT OR IGNORE INTO emptied SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM functions)", ())


class NotWritten(DormouseError):
    """The disk takes nothing, and the content is kept; the text says what to do. Worth a retry."""


class CatalogueFile:
    """Functions by name, newest version only. Raises ConfigError if the file is of another Dormouse or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_name(path.name + ".reserve")
        way_on = "restore it from a copy, or move it away and `dormouse up --forget-models` to start with no functions"
        with opening(path, "a catalogue", SCHEMA_VERSION, way_on) as (self._db, new):
            names = "'functions', 'quarantine', 'emptied', 'step_times', 'pins', 'traffic', 'batch_times'"
            missing = len(_SCHEMA) - self._count(f"sqlite_master WHERE name IN ({names})")
            for statement in _SCHEMA if missing else ():  # a full disk is no reason not to serve the existing functions
                self._db.execute(statement)
            if new:
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self.functions()  # while it can still be refused
        self.settle()

    def _count(self, what: str) -> int:
        return int(self._db.execute(f"SELECT count(*) FROM {what}").fetchone()[0])

    @property
    def lost(self) -> bool:
        """Whether it has no functions although nobody has removed the last one: it is new, or not what it was."""
        return not self._count("functions") and not self._count("emptied")

    def functions(self) -> list[FunctionSpec]:
        rows = self._db.execute("SELECT spec FROM functions ORDER BY name").fetchall()
        return [msgspec.msgpack.decode(spec, type=FunctionSpec) for (spec,) in rows]

    def versions(self) -> list[tuple[str, int]]:
        """``(name, version)`` of all functions."""
        return list(self._db.execute("SELECT name, version FROM functions"))

    def quarantined(self) -> dict[str, str]:
        """Why, by name."""
        return dict(self._db.execute("SELECT name, reason FROM quarantine"))

    def keep(self, spec: FunctionSpec) -> None:
        """A new version, which is in no quarantine. Raises NotWritten."""
        try:
            self._write(
                (
                    "INSERT INTO functions VALUES (?, ?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET version=excluded.version, spec=excluded.spec",
                    (spec.name, spec.version, msgspec.msgpack.encode(spec)),
                ),
                ("DELETE FROM quarantine WHERE name = ?", (spec.name,)),
                ("DELETE FROM emptied", ()),
            )
        except sqlite3.Error as error:
            raise NotWritten(
                f"{self._path} cannot be written: {error}; free space on its disk, then try again"
            ) from error

    def set_quarantine(self, name: str, reason: str | None) -> None:
        """It is in quarantine from now on, or, without a reason, not any more. Raises NotWritten."""
        write = ("INSERT OR REPLACE INTO quarantine VALUES (?, ?)", (name, reason))
        try:
            self._write(write if reason is not None else ("DELETE FROM quarantine WHERE name = ?", (name,)))
        except sqlite3.Error as error:
            raise NotWritten(f"{self._path} cannot be written: {error}; a restart forgets this") from error

    def pins(self) -> set[str]:
        """Functions that are pinned."""
        return {name for (name,) in self._db.execute("SELECT name FROM pins")}

    def pin(self, name: str, pinned: bool) -> None:
        """Raises NotWritten."""
        change = "INSERT OR IGNORE INTO pins VALUES (?)" if pinned else "DELETE FROM pins WHERE name = ?"
        try:
            self._write((change, (name,)))
        except sqlite3.Error as error:
            raise NotWritten(f"{self._path} cannot be written: {error}; free space on its disk") from error

    def traffic(self) -> dict[str, int]:
        """The share of each version that is served beside another, in per cent."""
        return dict(self._db.execute("SELECT name, share FROM traffic"))

    def share(self, name: str, share: int) -> None:
        """Of a function that is there. Raises NotWritten."""
        there = "EXISTS (SELECT 1 FROM functions WHERE name = ?)"
        try:
            self._write((f"INSERT OR REPLACE INTO traffic SELECT ?, ? WHERE {there}", (name, share, name)))
        except sqlite3.Error as error:
            raise NotWritten(f"{self._path} cannot be written: {error}; free space on its disk") from error

    def step_times(self) -> dict[str, StepTimes]:
        """Learned times of language models' steps, by function."""
        rows = self._db.execute("SELECT name, times FROM step_times").fetchall()
        return {name: msgspec.msgpack.decode(times, type=StepTimes) for name, times in rows}

    def keep_step_times(self, times: Mapping[str, StepTimes]) -> None:
        """Of functions that are there. Raises NotWritten."""
        self._keep_learned("step_times", times)

    def batch_times(self) -> dict[str, BatchTimesKnown]:
        """Learned times of batches, by function."""
        rows = self._db.execute("SELECT name, times FROM batch_times").fetchall()
        return {name: msgspec.msgpack.decode(times, type=BatchTimesKnown) for name, times in rows}

    def keep_batch_times(self, times: Mapping[str, BatchTimesKnown]) -> None:
        """Of functions that are there. Raises NotWritten."""
        self._keep_learned("batch_times", times)

    def _keep_learned(self, table: str, times: Mapping[str, object]) -> None:
        there = "EXISTS (SELECT 1 FROM functions WHERE name = ?)"
        statement = f"INSERT OR REPLACE INTO {table} SELECT ?, ? WHERE {there}"
        try:
            self._write(*((statement, (name, msgspec.msgpack.encode(each), name)) for name, each in times.items()))
        except sqlite3.Error as error:
            raise NotWritten(f"{self._path} cannot be written: {error}; they are learned anew") from error

    def remove(self, name: str) -> None:
        """Also on a full disk: that may be the reason for the removal. Raises NotWritten."""
        try:
            self._remove(name)
        except sqlite3.Error:
            self._reserve.unlink(missing_ok=True)
            try:
                self._remove(name)
            except sqlite3.Error as error:
                raise NotWritten(
                    f"{self._path} cannot be written: {error}; free space on its disk, then remove it again"
                ) from error

    def _remove(self, name: str) -> None:
        self._write(
            ("DELETE FROM functions WHERE name = ?", (name,)),
            ("DELETE FROM quarantine WHERE name = ?", (name,)),
            ("DELETE FROM step_times WHERE name = ?", (name,)),
            ("DELETE FROM batch_times WHERE name = ?", (name,)),
            ("DELETE FROM pins WHERE name = ?", (name,)),
            ("DELETE FROM traffic WHERE name = ?", (name,)),
            _NOTE_IF_EMPTY,
        )

    def forget_models(self) -> None:
        """That it has no functions is right. Raises NotWritten."""
        try:
            self._write(_NOTE_IF_EMPTY)
        except sqlite3.Error as error:
            raise NotWritten(f"{self._path} cannot be written: {error}; free space on its disk") from error

    def expect_whole(self, start: StartSection, segments: Path) -> None:
        """When a node starts, whose models are in ``segments``. Raises ConfigError saying what the choices are."""
        names = sorted(name for name, _ in self.versions())
        if unknown := sorted(set(start.without).difference(names)):
            raise ConfigError(
                f"--without {unknown[0]}: there is no such function; there are: {', '.join(names) or 'none'}"
            )
        if start.forget_models:
            self.forget_models()
        elif self.lost and any(segments.glob("*/*")):
            raise ConfigError(
                f"{self._path} has no functions, but {segments} has models: it was lost or emptied. Restore it from a "
                "copy, or give the models up and start with no functions: `dormouse up --forget-models`"
            )

    def settle(self) -> None:
        """Make the reserve again if it was used; files that have gone may have made room."""
        if self._reserve.exists():
            return
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(fd, 0, RESERVE_NBYTES)
        except OSError:
            self._reserve.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _write(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        """All or none. Raises sqlite3.Error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()
