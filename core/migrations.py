"""In which version the state directory is, and what brings an older one to this Dormouse's. Owns STATE/version.

A directory is of version n once MIGRATIONS[n - 1] has been done to it, and its number was written after that. So a step
that was interrupted is done again from its beginning: each can be repeated, and replaces files by renaming. Files in
it that have versions of their own (SQLite's) are looked at by who opens them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dormouse.core.paths import StatePaths
from dormouse.core.version import package_version
from dormouse.schemas.errors import ConfigError

Migration = Callable[[StatePaths], None]
"""From one version to the next, in a directory that no node has but ours. Repeatable; what it has
written is on the disk when it returns. Raises OSError, ConfigError."""


def _numbered(state: StatePaths) -> None:
    """Directories from before there were numbers: what is in them has not changed."""


MIGRATIONS: Final[tuple[Migration, ...]] = (_numbered,)
"""By the version that they begin with. To be appended to with every change that an older Dormouse would misread."""


class StateVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says; ``dormouse``: who wrote it, for people."""

    version: int
    dormouse: str = ""


def found_version(state: StatePaths) -> StateVersion | None:
    """None: it is new. Raises ConfigError."""
    try:
        return msgspec.json.decode(state.version.read_bytes(), type=StateVersion)
    except FileNotFoundError:
        return StateVersion(version=0) if state.catalogue.exists() else None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{state.version}, which has the version of the state directory, cannot be read ({error}); write "
            f'{{"version": {len(MIGRATIONS)}}} there if it is of this Dormouse, or restore it from a copy'
        ) from error


def expect_not_newer(state: StatePaths, migrations: Sequence[Migration] = MIGRATIONS) -> StateVersion | None:
    """What :func:`found_version` says; ConfigError if a newer Dormouse has been here."""
    found = found_version(state)
    if found is not None and not 0 <= found.version <= len(migrations):
        by = f", of Dormouse {found.dormouse}" if found.dormouse else ""
        raise ConfigError(
            f"state directory {state.state} is of version {found.version}{by}, and this Dormouse "
            f"({package_version()}) reads versions up to {len(migrations)}: use the newer Dormouse, or another state "
            "directory ([node] state)"
        )
    return found


def expect_this_version(state: StatePaths) -> None:
    """For a node that takes over from one that runs, and might have to go on. Raises ConfigError."""
    found = expect_not_newer(state)
    if found is None or found.version != len(MIGRATIONS):
        raise ConfigError(
            f"state directory {state.state} is of an older version, and has to be brought to this one's while no node "
            "runs: `dormouse down`, and then `up`"
        )


def migrate(state: StatePaths, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the directory to this Dormouse's version; the caller has its lock. Raises ConfigError if a newer one has
    been here, or a step fails; then no node may use it.
    """
    found = expect_not_newer(state, migrations)
    version = len(migrations) if found is None else found.version
    try:
        for number in range(version, len(migrations)):
            migrations[number](state)
            _write(state, number + 1)
        if found is None:
            _write(state, version)
    except OSError as error:
        raise ConfigError(
            f"state directory {state.state} of version {version} could not be brought to version {len(migrations)} "
            f"({error}); free space on its disk and start again, which goes on where this ended"
        ) from error


def _write(state: StatePaths, version: int) -> None:
    """So that it is on the disk, whole."""
    early = state.version.with_suffix(".new")
    with early.open("wb") as file:
        file.write(msgspec.json.encode(StateVersion(version=version, dormouse=package_version())))
        file.flush()
        os.fsync(file.fileno())
    early.rename(state.version)
    _sync(state.state)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
