"""Secrets and keys are written beside the loop, in order; what the disk does not take leaves what was there."""

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dormouse.core.keys import KeyFile
from dormouse.core.secretfile import SecretFile
from dormouse.router.admin.filechanges import FileChanges
from dormouse.router.front.exchange import HttpError
from dormouse.schemas.admin import Wish

WAIT_S = 60


class SlowDisk:
    """Everything that is to be durable waits for :attr:`lets`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.lets = threading.Event(), threading.Event()
        monkeypatch.setattr("dormouse.core.wholefile.os.fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        self.asked.set()
        assert self.lets.wait(WAIT_S)


@pytest.fixture
def file(tmp_path: Path) -> SecretFile:
    found = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    found.set("shop", "TOKEN", "of before", "root", 0.0)
    return found


@pytest.fixture
def changes() -> Iterator[FileChanges]:
    found = FileChanges()
    yield found
    found.close()


def test_a_disk_that_is_slow_holds_nothing_up_and_the_last_word_stays(
    file: SecretFile, changes: FileChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)

    def making(value: str) -> "asyncio.Task[None]":
        return asyncio.ensure_future(changes.make("secrets", file.set, "shop", "TOKEN", value, "root", 0.0))

    async def ask() -> None:
        tasks = [making(f"value {number}") for number in range(5)]
        removal = asyncio.ensure_future(changes.make("secrets", file.remove, "shop", "TOKEN"))
        last = making("the last one")
        assert await asyncio.to_thread(disk.asked.wait, WAIT_S), "the loop goes on"
        assert file.values("shop", ["TOKEN"]) == {"TOKEN": "of before"}
        assert not any(task.done() for task in (*tasks, removal, last))
        tasks[3].cancel()  # who has left has asked for it all the same
        disk.lets.set()
        assert await removal
        await last

    asyncio.run(ask())
    assert file.values("shop", ["TOKEN"]) == {"TOKEN": "the last one"}


def test_what_was_asked_for_is_made_before_the_node_ends(
    file: SecretFile, changes: FileChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)

    async def ask() -> None:
        for number in range(3):
            task = asyncio.ensure_future(
                changes.make("secrets", file.set, "shop", f"S{number}", "any value", "root", 0.0)
            )
            await asyncio.sleep(0)
            task.cancel()
        disk.lets.set()

    asyncio.run(ask())
    changes.close()
    assert file.names("shop") == {"TOKEN", "S0", "S1", "S2"}


@contextmanager
def _full_disk() -> Iterator[None]:
    """As good as one: no file may grow beyond some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _refused(changes: FileChanges, what: str, change: Any, *arguments: Any) -> tuple[int, str, str]:
    with _full_disk(), pytest.raises(HttpError) as caught:
        asyncio.run(changes.make(what, change, *arguments))
    failure = caught.value.failure
    return failure.status, failure.code, failure.text


def test_a_secret_that_the_disk_does_not_take(file: SecretFile, changes: FileChanges, tmp_path: Path) -> None:
    before = (tmp_path / "secrets.json").read_bytes()
    for change in (
        (file.set, "shop", "TOKEN", "another value", "root", 0.0),
        (file.set, "bank", "OTHER", "another value", "root", 0.0),
    ):
        status, code, text = _refused(changes, "secrets", *change)
        assert (status, code) == (507, "not_kept")
        assert text == (
            "the file of secrets cannot be written: File too large; nothing was changed; free space on its disk"
        )
    assert (tmp_path / "secrets.json").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["secrets.json", "secrets.key"], "what was begun takes no room"
    asyncio.run(changes.make("secrets", file.set, "shop", "TOKEN", "another value", "root", 0.0))
    assert file.values("shop", ["TOKEN"]) == {"TOKEN": "another value"}


def test_a_first_secret_whose_key_the_disk_does_not_take(changes: FileChanges, tmp_path: Path) -> None:
    file = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    assert _refused(changes, "secrets", file.set, "shop", "TOKEN", "a value", "root", 0.0)[1] == "not_kept"
    assert os.listdir(tmp_path) == []
    asyncio.run(changes.make("secrets", file.set, "shop", "TOKEN", "a value", "root", 0.0))
    assert file.values("shop", ["TOKEN"]) == {"TOKEN": "a value"}


def test_a_key_that_the_disk_does_not_take_is_none(changes: FileChanges, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    kept, token = asyncio.run(changes.make("keys", keys.create, Wish(scopes=("invoke",)), "root", 0.0))
    assert _refused(changes, "keys", keys.create, Wish(scopes=("invoke",)), "root", 0.0)[:2] == (507, "not_kept")
    assert _refused(changes, "keys", keys.revoke, kept.id, 1.0)[:2] == (507, "not_kept")
    for each in (keys, KeyFile(tmp_path / "keys.json")):
        assert each.all() == [kept]
        assert each.find(token.encode()) == kept
    assert os.listdir(tmp_path) == ["keys.json"]


def test_a_change_that_cannot_be_is_told(file: SecretFile, changes: FileChanges) -> None:
    with pytest.raises(HttpError, match="cannot be a secret's name") as caught:
        asyncio.run(changes.make("secrets", file.set, "shop", "A=B", "a value", "root", 0.0))
    assert (caught.value.failure.status, caught.value.failure.code) == (400, "bad_request")
