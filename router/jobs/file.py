"""Jobs in a file, so that they survive a restart: SQLite in the state directory, on a thread of its own.

The result of a :meth:`JobFile.do` call is durable as long as the machine does not lose its power. Decides nothing.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from dormouse.schemas.errors import DormouseError

T = TypeVar("T")

VERSION: Final = 1

LOG_NBYTES: Final = 16 << 20
"""Of SQLite's log, while nothing is written: a large answer makes it longer for a moment."""

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, number INTEGER, function TEXT, tenant TEXT, route TEXT, "
    "scope TEXT, digest BLOB, patient INTEGER, idempotent INTEGER, label TEXT, trace TEXT, kind TEXT, accept TEXT, "
    "created REAL, begun INTEGER, ended REAL, status INTEGER, code TEXT, answer_kind TEXT, headers TEXT)",
    "CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, data BLOB)",
    "CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, data BLOB)",
)

_ALL: Final = (
    "SELECT jobs.*, ifnull(length(bodies.data), 0) + ifnull(length(answers.data), 0) FROM jobs "
    "LEFT JOIN bodies USING (id) LEFT JOIN answers USING (id) ORDER BY number"
)
"""SQLite does not read a body for its length."""


class NotKept(DormouseError):
    """The disk takes nothing, or the file is damaged; the text says what to do."""


class JobRow(NamedTuple):
    """A job in the file, without its bytes. ``ended`` is None until it has; times are of the Unix clock."""

    id: str
    number: int
    function: str
    tenant: str
    route: str
    scope: str
    digest: bytes
    patient: bool
    idempotent: bool
    label: str
    trace: str
    kind: str  # of the body, as in Run
    accept: str  # likewise
    created: float
    begun: bool
    ended: float | None
    status: int
    code: str
    answer_kind: str
    headers: str  # of the answer, as "name: value" lines


class Input(NamedTuple):
    """The input with which a job is run."""

    label: str
    trace: str
    kind: str
    accept: str
    body: bytes


class Result(NamedTuple):
    """The answer of a job."""

    status: int
    code: str  # of an error
    kind: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class JobFile:
    """``log`` is the process's. A file that is damaged, or of another version, is set aside."""

    def __init__(self, path: Path, log: Any) -> None:
        self._path, self._log = path, log
        self._db: sqlite3.Connection | None = None
        self.unread = False  # it could not be read, and may be later
        self._loop, self._closed = asyncio.get_running_loop(), False
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Have it done by the thread, in order. Raises NotKept."""
        if self._closed:
            raise NotKept("the node is being stopped")
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put((lambda: work(*arguments), future))
        return await future

    def close(self) -> None:
        """After all that was asked for."""
        self._closed = True
        self._work.put(None)
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            result: Any = None
            failure: Exception | None = None
            try:
                result = work()
            except (sqlite3.Error, OSError) as error:
                failure = NotKept(f"{self._path.name} cannot be written or read: {error}; free space on its disk")
                self._roll_back()
            except Exception as error:
                failure = error
                self._roll_back()
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_settle, future, result, failure)
        if self._db is not None:
            self._db.close()

    def _roll_back(self) -> None:
        if self._db is not None and self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    @property
    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError("it could not be opened")
        return self._db

    def read(self) -> list[tuple[JobRow, int]]:
        """All jobs, in their order, and how many bytes each has; the first work there is, and again where it could not
        be done.
        """
        try:
            rows = self._read()
            self.unread = False
            return rows
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if self._db is not None:
                self._db.close()
                self._db = None
            if isinstance(error, sqlite3.OperationalError):  # nothing is wrong with the file itself
                if not self.unread:
                    self._log.error("jobs_not_read", path=str(self._path), reason=str(error))
                self.unread = True
                return []
            self._log.error("jobs_set_aside", path=str(self._path), reason=str(error))
            self.unread = False  # it never will be: to read the new one again would end what runs
            with suppress(OSError):
                self._path.replace(self._path.with_name(self._path.name + ".damaged"))
                for end in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + end).unlink(missing_ok=True)
            with suppress(sqlite3.DatabaseError):
                return self._read()
            return []

    def _read(self) -> list[tuple[JobRow, int]]:
        db = self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA auto_vacuum=FULL")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={LOG_NBYTES}")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, VERSION):
            raise ValueError(f"of version {found}")
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version={VERSION}")
        rows = [(JobRow(*row), nbytes) for *row, nbytes in db.execute(_ALL)]
        return [(row._replace(patient=bool(row.patient), begun=bool(row.begun)), nbytes) for row, nbytes in rows]

    def add(self, row: JobRow, body: bytes, forgotten: Iterable[str]) -> None:
        with _Transaction(self._open) as db:
            self._forget(db, forgotten)
            db.execute(f"INSERT INTO jobs VALUES ({','.join('?' * len(row))})", row)
            db.execute("INSERT INTO bodies VALUES (?, ?)", (row.id, body))

    def begin(self, job: str, idempotent: bool) -> Input:
        """It is handed over: from now on it may have run."""
        db = self._open
        db.execute("UPDATE jobs SET begun = 1, idempotent = ? WHERE id = ?", (idempotent, job))
        found = db.execute(
            "SELECT label, trace, kind, accept, data FROM jobs JOIN bodies USING (id) WHERE id = ?", (job,)
        ).fetchone()
        if found is None:
            raise sqlite3.DatabaseError(f"job {job} is not there")
        return Input(*found)

    def back(self, jobs: Iterable[str]) -> None:
        """They have not run."""
        self._open.executemany("UPDATE jobs SET begun = 0 WHERE id = ?", [(job,) for job in jobs])

    def end(self, job: str, unix_s: float, result: Result, forgotten: Iterable[str]) -> None:
        headers = "\n".join(f"{name.decode('latin-1')}: {value.decode('latin-1')}" for name, value in result.headers)
        with _Transaction(self._open) as db:
            self._forget(db, forgotten)
            db.execute("DELETE FROM bodies WHERE id = ?", (job,))
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (job, result.body))
            db.execute(
                "UPDATE jobs SET ended = ?, status = ?, code = ?, answer_kind = ?, headers = ? WHERE id = ?",
                (unix_s, result.status, result.code, result.kind, headers, job),
            )

    def result(self, job: str) -> Result | None:
        found = self._open.execute(
            "SELECT status, code, answer_kind, headers, data FROM jobs JOIN answers USING (id) WHERE id = ?", (job,)
        ).fetchone()
        if found is None:
            return None
        status, code, kind, headers, body = found
        pairs = [line.partition(": ") for line in headers.splitlines()]
        return Result(
            status,
            code,
            kind,
            tuple((name.encode("latin-1"), value.encode("latin-1")) for name, _, value in pairs),
            body,
        )

    def forget(self, jobs: Iterable[str]) -> None:
        with _Transaction(self._open) as db:
            self._forget(db, jobs)

    def _forget(self, db: sqlite3.Connection, jobs: Iterable[str]) -> None:
        ids = [(job,) for job in jobs]
        for table in ("jobs", "bodies", "answers") if ids else ():
            db.executemany(f"DELETE FROM {table} WHERE id = ?", ids)


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._db.execute("COMMIT")
        elif self._db.in_transaction:  # SQLite itself ends one for which the disk has no room
            self._db.execute("ROLLBACK")


def _settle(future: "asyncio.Future[Any]", result: Any, failure: Exception | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
