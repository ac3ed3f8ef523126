"""The version of the state directory, and the migrations that bring an older one to this Dormouse's. Owns
STATE/version.

A directory is of version n once MIGRATIONS[n - 1] has been done to it, and its number was written after that. So a step
that was interrupted is done again from its beginning: each can be repeated, and replaces files by renaming. Files in it
that have versions of their own (SQLite's) are checked by the code that opens them. A node that takes over from one that
runs keeps copies of the files that a step will change (wayback.py) until it serves: before that, the older one may have
to go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from dormouse.core import wayback
from dormouse.core.paths import StatePaths
from dormouse.core.version import package_version
from dormouse.core.wholefile import write_whole
from dormouse.schemas.errors import ConfigError


@dataclass(frozen=True)
class Migration:
    """From one version to the next. ``step`` is repeatable, in a directory that no node has but ours; what it has
    written is on the disk when it returns. Raises OSError, ConfigError. ``files``: names there of all that an older
    Dormouse misreads after it; None if that is too much to be copied while requests wait.
    """

    step: Callable[[StatePaths], None]
    files: tuple[str, ...] | None


def _numbered(state: StatePaths) -> None:
    """Directories from before there were numbers: what is in them has not changed."""


MIGRATIONS: Final[tuple[Migration, ...]] = (Migration(_numbered, files=()),)
"""By the version that they begin with. To be appended to with every change that an older Dormouse would misread."""


class StateVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file; ``dormouse``: the version that wrote it, for people."""

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
    """Returns :func:`found_version`; ConfigError if a newer Dormouse has been here."""
    found = found_version(state)
    if found is not None and not 0 <= found.version <= len(migrations):
        by = f", of Dormouse {found.dormouse}" if found.dormouse else ""
        raise ConfigError(
            f"state directory {state.state} is of version {found.version}{by}, and this Dormouse "
            f"({package_version()}) reads versions up to {len(migrations)}: use the newer Dormouse, or another state "
            "directory ([node] state)"
        )
    return found


def _missing(state: StatePaths, migrations: Sequence[Migration]) -> Sequence[Migration]:
    """The migrations that it lacks. Raises ConfigError."""
    found = expect_not_newer(state, migrations)
    return () if found is None else migrations[found.version :]


def expect_replaceable(state: StatePaths, goes_back: bool, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """For a node that takes over from one that runs, and might have to go on: ``goes_back`` is whether that one can,
    once the directory has been migrated. Raises ConfigError.
    """
    missing = _missing(state, migrations)
    if missing and not (goes_back and all(each.files is not None for each in missing)):
        raise ConfigError(
            f"state directory {state.state} is of an older version, and has to be brought to this one's while no node "
            "runs: `dormouse drain`, which lets requests end, then `dormouse down`, and `up`"
        )


def migrate_with_way_back(state: StatePaths, migrations: Sequence[Migration] = MIGRATIONS) -> bool:
    """As :func:`migrate`, for such a node: until it drops the way back, the other may go it. False if there is nothing
    to be done. Raises ConfigError.
    """
    missing = _missing(state, migrations)
    if not missing:
        return False
    try:
        wayback.keep(state, [state.version.name, *(name for each in missing for name in each.files or ())])
    except OSError as error:
        raise ConfigError(
            f"state directory {state.state}: what its migration changes could not be put aside ({error}); free space "
            "on its disk, and try again"
        ) from error
    migrate(state, migrations)
    return True


def migrate(state: StatePaths, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the directory to this Dormouse's version; the caller has its lock. Raises ConfigError if a newer one has
    been here, or a step fails; then no node may use it.
    """
    found = expect_not_newer(state, migrations)
    version = len(migrations) if found is None else found.version
    try:
        for number in range(version, len(migrations)):
            migrations[number].step(state)
            _write(state, number + 1)
        if found is None:
            _write(state, version)
    except OSError as error:
        raise ConfigError(
            f"state directory {state.state} of version {version} could not be brought to version {len(migrations)} "
            f"({error}); free space on its disk and start again, which goes on where this ended"
        ) from error


def _write(state: StatePaths, version: int) -> None:
    text = msgspec.json.encode(StateVersion(version=version, dormouse=package_version()))
    write_whole(state.version, text)
