"""The ledger in a file, so that it is there again after a restart: SQLite in the state directory, some accounts at a
time. A file that is damaged is set aside: a node serves without knowing what was used.
"""

import json
import sqlite3
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dormouse.controller.ledger import Account, Books, Ledger, Used, numbers

VERSION: Final = 1

BATCH: Final = 8
"""Accounts in one transaction: two or three milliseconds, in which the controller decides nothing."""


class UsageFile:
    """``log`` is the process's. Without a file that can be written, all goes on without."""

    def __init__(self, path: Path, ledger: Ledger, log: Any) -> None:
        self._path, self._ledger, self._log = path, ledger, log
        self._db: sqlite3.Connection | None = None
        try:
            self._read()
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            self._drop(f"{error}; set aside as {path.name}.damaged")
            with suppress(OSError):
                path.replace(path.with_name(path.name + ".damaged"))
                for end in ("-wal", "-shm"):
                    path.with_name(path.name + end).unlink(missing_ok=True)
            try:
                self._read()
            except sqlite3.DatabaseError as again:
                self._drop(str(again))

    def _read(self) -> None:
        db = self._db = sqlite3.connect(self._path, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, VERSION):
            raise ValueError(f"of version {found}")
        db.execute("CREATE TABLE IF NOT EXISTS accounts (tenant TEXT, function TEXT, books TEXT, "
                   "PRIMARY KEY (tenant, function))")  # fmt: skip
        db.execute(f"PRAGMA user_version={VERSION}")
        for tenant, function, text in db.execute("SELECT tenant, function, books FROM accounts"):
            total, marks = json.loads(text)
            books = Books(Used(*total), [(int(minute), Used(*values)) for minute, values in marks])
            self._ledger.restore(Account(tenant, function), books)

    def _drop(self, why: str) -> None:
        self._log.warning("usage_not_kept", path=str(self._path), reason=why)
        if self._db is not None:
            self._db.close()
            self._db = None

    def write(self, most: int = BATCH) -> None:
        """So many of the accounts that have changed, those first whose change is oldest."""
        ledger = self._ledger
        names = list(islice(ledger.changed, most))
        closed, ledger.closed = ledger.closed, []
        for account in names:
            del ledger.changed[account]
        if self._db is None or not (names or closed):
            return
        rows = [(*account, _text(ledger.books[account])) for account in names]
        try:
            self._db.execute("BEGIN")
            # first what was forgotten: some of it may have been used again since
            self._db.executemany("DELETE FROM accounts WHERE tenant = ? AND function = ?", closed)
            self._db.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._drop(str(error))

    def close(self) -> None:
        if self._db is not None:
            self.write(len(self._ledger.changed))
        if self._db is not None:
            self._db.close()
            self._db = None


def _text(books: Books) -> str:
    """Numbers of any size, which neither SQLite nor msgpack has."""
    return json.dumps([numbers(books.total), [(minute, numbers(total)) for minute, total in books.marks]])
