"""State directories of older and newer versions, and migrations that are interrupted at any point."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dormouse.core.migrations import StateVersion, found_version, migrate
from dormouse.core.paths import StatePaths
from dormouse.core.version import package_version
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path)


def _steps(done: list[str]) -> list[Callable[[StatePaths], None]]:
    return [lambda state, n=n: done.append(f"{n} -> {n + 1}") for n in range(3)]  # type: ignore[misc]


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
        migrate(state, [steps[0], full, steps[2]])
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
        migrate(state, [lambda state: step(state, True)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert found_version(state) == StateVersion(version=0)
    migrate(state, [lambda state: step(state, False)])
    assert (state.catalogue.read_text(), found_version(state)) == (
        "new",
        StateVersion(version=1, dormouse=package_version()),
    )


def test_the_number_is_written_after_the_step(state: StatePaths) -> None:
    state.catalogue.touch()
    seen: list[StateVersion | None] = []
    migrate(state, [lambda state: seen.append(found_version(state))] * 2)
    assert [each.version for each in seen if each is not None] == [0, 1]
