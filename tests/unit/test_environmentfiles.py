"""What of environments is on the disk: what is there after a restart, and what goes."""

import os
from pathlib import Path

from dormouse.router.admin.environmentbook import EnvironmentRecord
from dormouse.router.admin.environmentfiles import RECORD, EnvironmentFiles

KEPT = EnvironmentRecord(lock=["a==1"], names=["a"], python="3.11.9", torch="2.13.0+cpu", nbytes=10, asked=["asked"])


def _made(directory: Path, key: str) -> None:
    (directory / key / "site").mkdir(parents=True)
    EnvironmentFiles(directory).remember(key, KEPT)


def test_what_was_being_removed_when_the_node_ended_is_removed_after_the_next_start(tmp_path: Path) -> None:
    for key in ("kept", "first", "second"):
        _made(tmp_path, key)
    before = EnvironmentFiles(tmp_path)
    gone = [before.set_aside(key) for key in ("first", "second")]  # and the node is killed before they are removed
    after = EnvironmentFiles(tmp_path)
    found, left = after.open()
    assert (found, sorted(left)) == ({"kept": KEPT}, sorted(map(str, gone)))
    assert sorted(os.listdir(tmp_path)) == sorted(["kept", *(Path(each).name for each in left)])
    assert after.place() not in map(Path, left), "none is in the way of what is built meanwhile"


def test_what_was_being_built_or_is_damaged_is_removed_after_the_next_start(tmp_path: Path) -> None:
    _made(tmp_path, "kept")
    _made(tmp_path, "damaged")
    (tmp_path / "damaged" / RECORD).write_bytes(b"{")
    (tmp_path / ".1" / "built" / "site").mkdir(parents=True)
    found, left = EnvironmentFiles(tmp_path).open()
    assert found == {"kept": KEPT}
    assert str(tmp_path / ".1") in left
    assert len(left) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(["kept", *(Path(each).name for each in left)])
