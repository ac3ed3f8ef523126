"""The ledger in a file, so that it survives a restart: SQLite in the state directory, some accounts at a time. A
damaged file is set aside: a node serves without knowing past usage. One that cannot be read or written for now, as on a
full disk, is tried again with each batch, and loses nothing.
"""

import json
import sqlite3
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dormouse.controller.ledger import MAX_ACCOUNTS, Account, Books, Ledger, Used, numbers

VERSION: Final = 1

BATCH: Final = 8
"""Accounts in one transaction: two or three milliseconds, in which the controller decides nothing."""


class UsageFile:
    """``log`` is the process's. Without a file that can be written, all goes on without. ``restored``: totals of what
    the file had when it was read.
    """

    def __init__(self, path: Path, ledger: Ledger, log: Any) -> None:
        self._path, self._ledger, self._log = path, ledger, log
        self._db: sqlite3.Connection | None = None
        self.restored: dict[Account, Used] = {}
        self._later = False  # it is to be read yet
        self._trouble = ""  # that was reported
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            self._read()
            self._later = False
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            self._later = _passes(error)
            if self._later:
                self._say(str(error))
                self._close()
                return
            self._drop(f"{error}; set aside as {path.name}.damaged")
            with suppress(OSError):
                path.replace(path.with_name(path.name + ".damaged"))
                for end in ("-wal", "-shm"):
                    path.with_name(path.name + end).unlink(missing_ok=True)
            try:
                self._read()
            except sqlite3.DatabaseError as again:
                self._later = _passes(again)
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
        kept: dict[Account, Books] = {}
        for tenant, function, text in db.execute("SELECT tenant, function, books FROM accounts"):
            total, marks = json.loads(text)
            books = Books(Used(*total), [(int(minute), Used(*values)) for minute, values in marks])
            kept[Account(tenant, function)] = books
        forgotten = set(self._ledger.closed)  # while it could not be read: their rows go with the next batch
        for account, books in kept.items():
            if account not in forgotten:
                self.restored[account] = books.total
                self._ledger.restore(account, books)

    def _drop(self, why: str) -> None:
        self._say(why)
        self._close()

    def _say(self, why: str) -> None:
        if why != self._trouble:
            self._log.warning("usage_not_kept", path=str(self._path), reason=why)
        self._trouble = why

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def write(self, most: int = BATCH) -> None:
        """So many of the accounts that have changed, those first whose change is oldest."""
        ledger = self._ledger
        if self._db is None and self._later:
            self._open()
            if self._later:
                del ledger.closed[:-MAX_ACCOUNTS]
                return
        names = list(islice(ledger.changed, most))
        closed, ledger.closed = ledger.closed, []
        for account in names:
            del ledger.changed[account]
        if self._db is None or not (names or closed):
            return
        rows = [(*account, _text(ledger.books[account])) for account in names]
        try:
            self._db.execute("BEGIN")
            # first the forgotten accounts: some may have been used again since
            self._db.executemany("DELETE FROM accounts WHERE tenant = ? AND function = ?", closed)
            self._db.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
            self._trouble = ""
        except sqlite3.Error as error:
            if not _passes(error):
                self._drop(str(error))
                return
            self._say(str(error))
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            ledger.changed |= dict.fromkeys(names)
            ledger.closed = [*closed, *ledger.closed][-MAX_ACCOUNTS:]

    def close(self) -> None:
        self.write(len(self._ledger.changed))
        self._close()


def _passes(error: Exception) -> bool:
    """Whether nothing is wrong with the file itself: there is no room, or no right, for now."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR


def _text(books: Books) -> str:
    """Numbers of any size, which neither SQLite nor msgpack has."""
    return json.dumps([numbers(books.total), [(minute, numbers(total)) for minute, total in books.marks]])
