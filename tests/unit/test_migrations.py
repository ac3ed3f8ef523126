"""State directories of older and newer versions, and migrations that are interrupted at any point."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from dormouse.core import wayback
from dormouse.core.migrations import (
    Migration,
    StateVersion,
    expect_replaceable,
    found_version,
    migrate,
    migrate_with_way_back,
)
from dormouse.core.paths import StatePaths
from dormouse.core.version import package_version
from dormouse.core.wholefile import write_whole
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path)


def _steps(done: list[str]) -> list[Migration]:
    return [Migration(lambda state, n=n: done.append(f"{n} -> {n + 1}"), files=()) for n in range(3)]  # type: ignore[misc]


def test_a_new_directory_is_of_this_version_and_no_step_is_done_to_it(state: StatePaths) -> None:
    done: list[str] = []
    migrate(state, _steps(done))
    assert (done, found_version(state)) == ([], StateVersion(version=3, dormouse=package_version()))


def test_a_directory_without_a_number_takes_all_steps(state: StatePaths) -> None:
    state.catalogue.touch()
    done: list[str] = []
    migrate(state, _steps(done))
    migrate(state, _steps(done))
    assert done == ["0 -> 1", "1 -> 2", "2 -> 3"]
    assert found_version(state) == StateVersion(version=3, dormouse=package_version())


def test_a_directory_of_the_middle_takes_the_steps_that_are_left(state: StatePaths) -> None:
    state.version.write_text('{"version": 2}')
    done: list[str] = []
    migrate(state, _steps(done))
    assert done == ["2 -> 3"]


def test_a_directory_of_a_newer_version_is_refused_and_left_as_it_is(state: StatePaths) -> None:
    state.version.write_text('{"version": 4, "dormouse": "9.1"}')
    done: list[str] = []
    with pytest.raises(ConfigError, match=r"is of version 4, of Dormouse 9\.1, and this Dormouse .* up to 3: use the"):
        migrate(state, _steps(done))
    assert (done, state.version.read_text()) == ([], '{"version": 4, "dormouse": "9.1"}')


@pytest.mark.parametrize("text", ["", "7", '{"version": "1"}', '{"version": -1}', "\0" * 50, '{"dormouse": "1"}'])
def test_a_number_that_cannot_be_read_is_refused(state: StatePaths, text: str) -> None:
    state.version.write_text(text)
    with pytest.raises(ConfigError):
        migrate(state)
    assert state.version.read_text() == text


def test_a_step_that_fails_is_done_again(state: StatePaths) -> None:
    state.catalogue.touch()
    done: list[str] = []
    steps = _steps(done)

    def full(_: StatePaths) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"of version 0 could not .* to version 3 \(.*No space.* free space"):
        migrate(state, [steps[0], Migration(full, files=()), steps[2]])
    assert (done, found_version(state)) == (["0 -> 1"], StateVersion(version=1, dormouse=package_version()))
    migrate(state, steps)
    assert done == ["0 -> 1", "1 -> 2", "2 -> 3"]


@pytest.mark.parametrize("at", ["before", "within", "after"])
def test_who_is_killed_in_a_migration_leaves_what_the_next_start_completes(state: StatePaths, at: str) -> None:
    """A step that replaces a file, killed before it has renamed it, after that, and before the number is written."""
    state.catalogue.write_text("old")

    def step(state: StatePaths, dies: bool) -> None:
        if dies and at == "before":
            os._exit(7)
        if state.catalogue.read_text() == "old":  # repeatable
            new = state.state / "catalogue.new"
            new.write_text("new")
            if dies and at == "within":
                os._exit(7)
            new.rename(state.catalogue)
        if dies:
            os._exit(7)

    child = os.fork()
    if child == 0:
        migrate(state, [Migration(lambda state: step(state, True), files=())])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert found_version(state) == StateVersion(version=0)
    migrate(state, [Migration(lambda state: step(state, False), files=())])
    assert (state.catalogue.read_text(), found_version(state)) == (
        "new",
        StateVersion(version=1, dormouse=package_version()),
    )


def test_the_number_is_written_after_the_step(state: StatePaths) -> None:
    state.catalogue.touch()
    seen: list[StateVersion | None] = []
    migrate(state, [Migration(lambda state: seen.append(found_version(state)), files=())] * 2)
    assert [each.version for each in seen if each is not None] == [0, 1]


# --- under a node that takes over from one that runs


def _rewrites(state: StatePaths) -> None:
    """What an older Dormouse cannot read: a table, a file, and one that is new."""
    with sqlite3.connect(state.catalogue) as database:
        database.execute("drop table functions")
    database.close()
    write_whole(state.keys, b"other keys")
    (state.state / "more").write_text("new")


REWRITES = Migration(_rewrites, files=("catalogue.sqlite3", "keys.json", "more"))
LARGE = Migration(_rewrites, files=None)


def _old(state: StatePaths) -> dict[str, bytes]:
    """A directory of version 1, with a row that lies in the log of its database alone; its files."""
    database = sqlite3.connect(state.catalogue)
    database.execute("pragma journal_mode = wal")
    database.execute("create table functions (name)")
    database.commit()
    database.execute("pragma wal_checkpoint(truncate)")
    database.execute("insert into functions values ('f')")
    database.commit()
    wal = (state.state / "catalogue.sqlite3-wal").read_bytes()
    database.close()
    (state.state / "catalogue.sqlite3-wal").write_bytes(wal)
    state.keys.write_text("keys")
    state.version.write_text('{"version": 1}')
    return _files(state)


def _files(state: StatePaths) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in state.state.iterdir() if not path.name.endswith("-shm")}


def test_a_node_that_takes_over_migrates_and_the_old_one_may_go_back(state: StatePaths) -> None:
    before, steps = _old(state), [LARGE, REWRITES]
    expect_replaceable(state, True, steps)
    assert migrate_with_way_back(state, steps) is True
    assert (found_version(state), state.keys.read_text()) == (
        StateVersion(version=2, dormouse=package_version()),
        "other keys",
    )
    assert wayback.go(state) is True
    assert _files(state) == before
    with sqlite3.connect(state.catalogue) as database:
        assert database.execute("select name from functions").fetchall() == [("f",)]
    database.close()
    assert wayback.go(state) is False


def test_the_way_back_has_modes_and_folders_as_they_were(state: StatePaths) -> None:
    def step(state: StatePaths) -> None:
        shutil.rmtree(state.state / "folder")
        state.keys.unlink()

    _old(state)
    state.keys.chmod(0o640)
    (state.state / "folder").mkdir()
    (state.state / "folder" / "file").write_text("kept")
    assert migrate_with_way_back(state, [LARGE, Migration(step, files=("keys.json", "folder/file"))]) is True
    assert wayback.go(state) is True
    assert (state.state / "folder" / "file").read_text() == "kept"
    assert (state.keys.read_text(), state.keys.stat().st_mode & 0o777) == ("keys", 0o640)
    assert found_version(state) == StateVersion(version=1)
    assert wayback.go(state) is False


def test_once_the_new_one_serves_there_is_no_way_back(state: StatePaths) -> None:
    _old(state)
    migrate_with_way_back(state, [LARGE, REWRITES])
    wayback.drop(state)
    assert wayback.go(state) is False
    assert state.keys.read_text() == "other keys"
    assert sorted(path.name for path in state.state.iterdir() if "catalogue" not in path.name) == [
        "keys.json",
        "more",
        "version",
    ]


def test_a_directory_of_this_version_is_left_as_it_is(state: StatePaths) -> None:
    before = _old(state)
    expect_replaceable(state, False, [LARGE])
    assert migrate_with_way_back(state, [LARGE]) is False
    assert _files(state) == before


@pytest.mark.parametrize(
    ("goes_back", "steps"), [(False, [LARGE, REWRITES]), (True, [LARGE, LARGE]), (True, [LARGE, REWRITES, LARGE])]
)
def test_what_cannot_be_undone_is_refused_with_what_to_do(
    state: StatePaths, goes_back: bool, steps: list[Migration]
) -> None:
    before = _old(state)
    with pytest.raises(ConfigError, match=r"while no node runs: `dormouse drain`.* then `dormouse down`, and `up`"):
        expect_replaceable(state, goes_back, steps)
    assert _files(state) == before


def _syncs_fail_from(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk has no room any more from the ``number``th time on that something is written there."""
    left = [number]

    def sync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync)


def test_a_disk_that_is_full_at_any_moment_leaves_a_way_back(
    state: StatePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is kept, while the step is done, and on the way back, which is gone again then."""
    before, steps = _old(state), [LARGE, REWRITES]
    failed: list[str] = []
    for number in range(100):
        with monkeypatch.context() as there:
            _syncs_fail_from(there, number)
            try:
                migrate_with_way_back(state, steps)
                wayback.go(state)
            except ConfigError as error:
                failed.append(str(error))
            assert [path.name for path in state.state.rglob("*.new")] == [], "the disk is full enough"
        wayback.go(state)
        assert _files(state) == before, number
        if len(failed) <= number:
            break
    assert all("No space left" in text for text in failed)
    assert {text.partition(" could")[2].partition(" (")[0] for text in failed} == {
        " not be put aside",
        " not be brought to version 2",
        " not be undone",
    }
    assert _files(state) == before


def test_what_a_node_that_was_killed_had_half_kept_goes_with_the_next_start(state: StatePaths) -> None:
    before = _old(state)
    (state.state / "before.new").mkdir()
    (state.state / "before.new" / "0").write_bytes(b"half of")
    assert wayback.go(state) is False
    assert _files(state) == before
