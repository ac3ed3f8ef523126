"""What was used is there again after a restart; a file that is damaged is no reason not to serve."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dormouse.controller.ledger import MAX_ACCOUNTS, MINUTE_S, Account, Ledger, Used
from dormouse.controller.usagefile import BATCH, UsageFile

NOW_S = 1_700_000_000.0


class Log:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(f"{event}: {fields['reason']}")


def opened(path: Path) -> tuple[Ledger, UsageFile, Log]:
    ledger, log = Ledger(), Log()
    return ledger, UsageFile(path, ledger, log), log


def test_it_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    ledger, file, log = opened(path)
    account = Account("t", "f")
    for minute in range(5):
        ledger.add(account, Used(requests=1, weights=1 << 90), NOW_S + minute * MINUTE_S)
    ledger.add(Account("u", "g"), Used(host=7), NOW_S)
    file.close()
    again, file, _ = opened(path)
    for since_s in (0.0, NOW_S + 3 * MINUTE_S):
        assert again.since(since_s, NOW_S + 300) == ledger.since(since_s, NOW_S + 300)
    assert again.books[account].total.weights == 5 << 90, "more than a number of SQLite can have"
    assert not log.warnings
    file.close()


def test_some_accounts_at_a_time(tmp_path: Path) -> None:
    """As the disk has them when the process is killed."""
    path = tmp_path / "usage"
    ledger, file, _ = opened(path)
    for number in range(BATCH + 3):
        ledger.add(Account("t", f"f{number}"), Used(requests=1), NOW_S)
    file.write()
    assert len(ledger.changed) == 3
    other, unused, _ = opened(path)
    assert len(other.books) == BATCH
    unused.close()
    file.write()
    assert not ledger.changed
    file.close()


def test_what_is_forgotten_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    ledger, file, _ = opened(path)
    for number in range(MAX_ACCOUNTS + 2):
        ledger.add(Account("t", f"f{number}"), Used(requests=1), NOW_S + number * MINUTE_S)
        if number == 5:
            file.write()
    file.close()
    again, file, _ = opened(path)
    assert len(again.books) == MAX_ACCOUNTS
    file.close()


def test_what_is_forgotten_and_used_again_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    ledger, file, _ = opened(path)
    again_used = Account("t", "f0")
    for number in range(MAX_ACCOUNTS + 1):
        ledger.add(Account("t", f"f{number}"), Used(requests=1), NOW_S + number * MINUTE_S)
    assert ledger.closed == [again_used]
    ledger.add(again_used, Used(requests=5), NOW_S + MAX_ACCOUNTS * MINUTE_S)
    file.close()
    again, file, _ = opened(path)
    assert again.books[again_used].total.requests == 5
    assert len(again.books) == MAX_ACCOUNTS
    file.close()


@pytest.mark.parametrize("content", [b"no database", b"", "version", "rows"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "usage"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        _, file, _ = opened(path)
        file.close()
        with closing(sqlite3.connect(path)) as db, db:
            if content == "version":
                db.execute("PRAGMA user_version=99")
            else:
                db.execute("INSERT INTO accounts VALUES ('t', 'f', '[1')")
    ledger, file, log = opened(path)
    assert len(log.warnings) == (1 if content else 0)
    assert path.with_name("usage.damaged").exists() == bool(content)
    ledger.add(Account("t", "f"), Used(requests=1), NOW_S)
    file.close()
    again, file, _ = opened(path)
    assert len(again.books) == 1
    file.close()


def test_without_a_file_all_goes_on(tmp_path: Path) -> None:
    ledger, file, log = opened(tmp_path / "no" / "usage")
    assert log.warnings
    ledger.add(Account("t", "f"), Used(requests=1), NOW_S)
    file.write()
    file.close()
    assert len(log.warnings) == 1, "it is said once"


def test_a_file_that_cannot_be_read_for_now_is_read_later_and_nothing_is_lost(tmp_path: Path) -> None:
    """As when a controller starts on a full disk, where SQLite cannot make its log."""
    place, account, other = tmp_path / "there", Account("t", "f"), Account("t", "g")
    place.mkdir()
    ledger, file, _ = opened(place / "usage")
    for minute in range(3):
        ledger.add(account, Used(requests=1), NOW_S + minute * MINUTE_S)
    file.close()
    away = place.rename(tmp_path / "away")
    ledger, file, log = opened(place / "usage")
    assert [warning.split(":")[0] for warning in log.warnings] == ["usage_not_kept"]
    for minute in (2, 3, 4):
        ledger.add(account, Used(requests=10), NOW_S + minute * MINUTE_S)
    ledger.add(other, Used(requests=5), NOW_S + 4 * MINUTE_S)
    file.write()
    away.rename(place)
    file.write()
    assert file.restored == {account: Used(requests=3)}
    assert not (place / "usage.damaged").exists()
    file.close()
    again, file, log = opened(place / "usage")
    for found in (ledger, again):
        used = found.since(0.0, NOW_S + 300)[1]
        assert {name: each.requests for name, each in used.items()} == {account: 33, other: 5}
        used = found.since(NOW_S + 3 * MINUTE_S, NOW_S + 300)[1]
        assert {name: each.requests for name, each in used.items()} == {account: 20, other: 5}
    assert not log.warnings
    file.close()


def test_what_is_forgotten_while_the_file_cannot_be_read_is_forgotten_in_both(tmp_path: Path) -> None:
    """One that was used again since has what it has used since."""
    place = tmp_path / "there"
    place.mkdir()
    first, second = Account("t", "f0"), Account("t", "f1")
    ledger, file, _ = opened(place / "usage")
    for account in (first, second, Account("t", "kept")):
        ledger.add(account, Used(requests=1), NOW_S)
    file.close()
    away = place.rename(tmp_path / "away")
    ledger, file, _ = opened(place / "usage")
    for number in range(MAX_ACCOUNTS + 2):
        ledger.add(Account("t", f"f{number}"), Used(requests=1), NOW_S + number * MINUTE_S)
    assert ledger.closed == [first, second]
    ledger.add(second, Used(requests=5), NOW_S + (MAX_ACCOUNTS + 2) * MINUTE_S)
    away.rename(place)
    file.write()
    assert file.restored == {Account("t", "kept"): Used(requests=1)}
    file.close()
    again, file, _ = opened(place / "usage")
    for found in (ledger, again):
        assert first not in found.books
        assert found.books[second].total.requests == 5
        assert found.books[Account("t", "kept")].total.requests == 1
    assert again.books.keys() == ledger.books.keys()
    file.close()


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    ledger, file, log = opened(tmp_path / "usage")
    file.write()
    db = file._db
    assert db is not None
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    names = [Account("t", "f" * 200 + str(number)) for number in range(BATCH * 8)]
    for name in names:
        ledger.add(name, Used(requests=1), NOW_S)
    for _ in range(20):
        file.write()
    assert log.warnings == ["usage_not_kept: database or disk is full"], "it is said once"
    assert ledger.changed
    db.execute("PRAGMA max_page_count=4294967294")
    file.close()
    again, file, _ = opened(tmp_path / "usage")
    assert {name: books.total for name, books in again.books.items()} == dict.fromkeys(names, Used(requests=1))
    file.close()


def test_a_file_that_another_program_holds_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """As one that makes a copy of it may."""
    ledger, file, log = opened(tmp_path / "usage")
    file.write()
    assert file._db is not None
    file._db.execute("PRAGMA busy_timeout=0")
    other = sqlite3.connect(tmp_path / "usage", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    account = Account("t", "f")
    for _ in range(3):
        ledger.add(account, Used(requests=1), NOW_S)
        file.write()
    assert log.warnings == ["usage_not_kept: database is locked"], "it is said once"
    other.execute("ROLLBACK")
    other.close()
    file.write()
    file.close()
    again, file, log = opened(tmp_path / "usage")
    assert again.books[account].total == Used(requests=3)
    assert not log.warnings
    file.close()
