"""What of environments is on the disk: what is there after a restart, and what goes."""

import os
from pathlib import Path

from dormouse.router.admin.environmentbook import EnvironmentRecord
from dormouse.router.admin.environmentfiles import RECORD, EnvironmentFiles

KEPT = EnvironmentRecord(lock=["a==1"], names=["a"], python="3.11.9", torch="2.13.0+cpu", nbytes=10, asked=["asked"])


def _made(directory: Path, key: str) -> None:
    (directory / key / "site").mkdir(parents=True)
    EnvironmentFiles(directory).remember(key, KEPT)


def test_what_was_being_removed_when_the_node_ended_is_gone_after_the_next_start(tmp_path: Path) -> None:
    for key in ("kept", "first", "second"):
        _made(tmp_path, key)
    before = EnvironmentFiles(tmp_path)
    assert [before.set_aside(key) for key in ("first", "second")] == [
        str(tmp_path / ".gone-1"),
        str(tmp_path / ".gone-2"),
    ]  # and the node is killed before they are removed
    after = EnvironmentFiles(tmp_path)
    assert list(after.open()) == [("kept", KEPT)]
    assert os.listdir(tmp_path) == ["kept"]
    assert after.set_aside("kept") == str(tmp_path / ".gone-1"), "none is in the way"


def test_what_was_being_built_or_is_damaged_is_gone_after_the_next_start(tmp_path: Path) -> None:
    _made(tmp_path, "kept")
    _made(tmp_path, "damaged")
    (tmp_path / "damaged" / RECORD).write_bytes(b"{")
    (tmp_path / ".1" / "built" / "site").mkdir(parents=True)
    assert list(EnvironmentFiles(tmp_path).open()) == [("kept", KEPT)]
    assert os.listdir(tmp_path) == ["kept"]
