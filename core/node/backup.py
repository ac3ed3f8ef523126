"""Backs a node's state directory up into one file, while the node runs, and restores it into an empty directory.

::

    dormouse-backup.json       which format, which Dormouse, which version of the state directory
    state/...                  the state directory: databases as SQLite copies them, all else as it was linked
    dormouse-backup.end        nothing: the file is whole

Files there are never changed in place, but logs, which grow, and databases. So first all files get a second name, which
takes no time, in a folder of the state directory, and are read from there at leisure. Functions that were deployed or
removed meanwhile would be half there: then it begins anew. Knows the contents of no file.
"""

import io
import json
import os
import shutil
import sqlite3
import stat
import tarfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from dormouse.core.migrations import MIGRATIONS, expect_not_newer
from dormouse.core.paths import StatePaths
from dormouse.core.times import utc
from dormouse.core.version import package_version
from dormouse.core.wholefile import PRIVATE, sync
from dormouse.schemas.errors import ConfigError, DormouseError

FORMAT: Final = 1
META: Final = "dormouse-backup.json"
END: Final = "dormouse-backup.end"
ATTEMPTS: Final = 5
_BELOW: Final = "state"
_STAGE: Final = "backup.new"
_NEVER: Final = (_STAGE, "before", "before.new", "before.old")
"""Of a backup, and of a migration under a node that runs (wayback.py)."""


def back_up(state: StatePaths, to: Path, models: bool) -> dict[str, Any]:
    """``models``: also what can be had again by loading anew. Returns what is in the file. Raises DormouseError."""
    if to.exists():
        raise DormouseError(f"{to} is there; give another name, or remove it")
    if not to.parent.is_dir():
        raise DormouseError(f"there is no folder {to.parent}; make it, or name another place")
    if not state.catalogue.exists():
        raise DormouseError(f"{state.state} is no node's state directory: there is no {state.catalogue.name} in it")
    stage, half = state.state / _STAGE, to.with_name(to.name + ".new")
    try:
        shutil.rmtree(stage, ignore_errors=True)  # of a backup that was killed
        _whole(state, stage, models)
        said = {
            "format": FORMAT,
            "dormouse": package_version(),
            "state_version": _version(stage),
            "at": utc(time.time()),
        }
        _write(half, stage, said)
        os.link(half, to)  # not over what somebody has put there meanwhile
        sync(to.parent)
    except sqlite3.Error as error:
        raise DormouseError(f"no backup was made: a database in {state.state} cannot be read: {error}") from error
    except OSError as error:
        raise DormouseError(f"no backup was made: {error.filename or to}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
    functions = len(_functions(state.catalogue))
    return said | {"file": str(to), "nbytes": to.stat().st_size, "functions": functions}


def _whole(state: StatePaths, stage: Path, models: bool) -> None:
    for _ in range(ATTEMPTS):
        shutil.rmtree(stage, ignore_errors=True)
        before = _functions(state.catalogue)
        _link(state, stage, models)
        if _functions(state.catalogue) == before == _functions(stage / state.catalogue.name):
            return
    raise DormouseError(f"functions were deployed or removed each of {ATTEMPTS} times; do it when fewer are")


def _functions(catalogue: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{catalogue}?mode=ro", uri=True)) as database:
        return list(database.execute("SELECT name, version, spec FROM functions ORDER BY name"))


def _link(state: StatePaths, stage: Path, models: bool) -> None:
    """Each file's second name, and copies of databases: those of the store before its files, which it may drop."""
    stage.mkdir(mode=0o700)
    databases = [state.catalogue, state.jobs, state.usage, *([state.store_index] if models else [])]
    left_out = {state.state / name for name in _NEVER} | (set() if models else {state.store})
    left_out |= {path.with_name(path.name + end) for path in databases for end in ("", "-wal", "-shm")}
    files = list[Path]()
    for here, folders, names in os.walk(state.state):
        place = stage / Path(here).relative_to(state.state)
        folders[:] = [name for name in folders if Path(here, name) not in left_out]
        for name in folders:
            (place / name).mkdir(mode=0o700)
        files += [path for path in (Path(here, name) for name in names) if path not in left_out]
    for path in databases:
        if path.exists():
            _copy_database(path, stage / path.relative_to(state.state), path == state.store_index)
    for path in files:
        with suppress(FileNotFoundError):  # removed since
            _second_name(path, stage / path.relative_to(state.state), state.logs)
    for here, folders, _ in os.walk(stage):
        for name in folders:
            with suppress(FileNotFoundError):
                found = os.stat(state.state / Path(here).relative_to(stage) / name)
                os.chmod(Path(here, name), stat.S_IMODE(found.st_mode))


def _copy_database(path: Path, to: Path, of_store: bool) -> None:
    """The store knows files by their numbers, which are others' elsewhere."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source, closing(sqlite3.connect(to)) as copy:
        source.backup(copy)
        if of_store:
            copy.execute("DELETE FROM identities")
            copy.commit()
    to.chmod(PRIVATE)


def _second_name(path: Path, name: Path, logs: Path) -> None:
    """A log is copied: it grows, and what is beside it is written anew in its place."""
    if stat.S_ISREG(os.lstat(path).st_mode):
        if path.parent != logs:
            with suppress(OSError):  # another disk, or as many names as a file may have
                os.link(path, name, follow_symlinks=False)
                return
        shutil.copy2(path, name, follow_symlinks=False)


def _version(stage: Path) -> int:
    found = expect_not_newer(StatePaths(stage))
    return 0 if found is None else found.version


def _write(half: Path, stage: Path, said: dict[str, Any]) -> None:
    half.unlink(missing_ok=True)
    fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    with os.fdopen(fd, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            text, info = json.dumps(said).encode(), tarfile.TarInfo(META)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
            archive.add(stage, _BELOW, filter=_nobodys)
            archive.addfile(tarfile.TarInfo(END))
        file.flush()
        os.fsync(fd)


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whoever restores it, owns it."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


# --- back


def restore(file: Path, state: StatePaths) -> dict[str, Any]:
    """Into a directory that is empty, or not there. Returns what the file says of itself. Raises DormouseError,
    ConfigError.
    """
    if state.state.exists() and any(state.state.iterdir()):
        what = "a node's state is in it" if state.version.exists() else "there are files in it"
        raise DormouseError(f"{state.state} is not empty ({what}): name another directory, or move that away")
    stage = state.state.with_name(state.state.name + ".restoring")
    try:
        state.state.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(mode=0o700)
        with tarfile.open(file, "r:") as archive:
            members = iter(archive)
            said = _said(archive, next(members, None), file)
            for member in members:
                if member.name == END:
                    break
                _put(archive, member, stage)
            else:
                raise ValueError("its end is missing")
        expect_not_newer(StatePaths(stage))
        os.sync()
        with suppress(FileNotFoundError):
            state.state.rmdir()
        stage.rename(state.state)
        sync(state.state.parent)
    except (tarfile.TarError, ValueError, EOFError, sqlite3.Error) as error:
        raise DormouseError(f"{file} is no whole backup: {error}") from error
    except OSError as error:
        raise DormouseError(f"nothing was restored: {error.filename or state.state}: {error.strerror}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return said | {"state": str(state.state), "functions": len(_functions(state.catalogue))}


def _said(archive: tarfile.TarFile, first: tarfile.TarInfo | None, file: Path) -> dict[str, Any]:
    """Raises ConfigError, ValueError."""
    stream = archive.extractfile(first) if first is not None and first.name == META and first.isreg() else None
    said = None if stream is None else json.load(stream)
    if not isinstance(said, dict) or not isinstance(said.get("format"), int):
        raise ValueError(f"it does not begin with {META}")
    if said["format"] > FORMAT or said.get("state_version", 0) > len(MIGRATIONS):
        raise ConfigError(
            f"{file} is of Dormouse {said.get('dormouse')}, and this one, {package_version()}, is too old for it: use "
            "the newer Dormouse"
        )
    return said


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, stage: Path) -> None:
    """Nothing outside, and no link to anywhere. Raises ValueError, OSError."""
    path = _place(member.name, stage)
    mode = stat.S_IMODE(member.mode) & 0o755
    if member.isdir():
        path.mkdir(mode=0o700, exist_ok=True)
    elif member.islnk():
        os.link(_place(member.linkname, stage), path, follow_symlinks=False)
    elif member.isreg() and (stream := archive.extractfile(member)) is not None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        with os.fdopen(fd, "wb") as target:
            shutil.copyfileobj(stream, target, 1 << 20)
            os.fchmod(fd, mode)
        if path.stat().st_size != member.size:
            raise ValueError(f"{member.name!r} is cut off")
    else:
        raise ValueError(f"{member.name!r} is neither a file nor a folder")
    if member.isdir() and path != stage:
        path.chmod(mode | 0o700)


def _place(name: str, stage: Path) -> Path:
    """Raises ValueError."""
    top, *parts = name.split("/")
    if top != _BELOW or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not below {_BELOW}")
    return stage.joinpath(*parts)
