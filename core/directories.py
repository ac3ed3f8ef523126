"""The run and state directories as a node holds them: found without following what others may change, locked, emptied.

Owns what a node may delete of its run directory: names that nodes make (core/paths.py has their grammar), below a
directory that carries a node's marker. Everything is opened from its parent's descriptor with O_NOFOLLOW, and no parent
may be under another user's control. The contents of the files are not its business.
"""

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final, Self

from dormouse.core import paths
from dormouse.schemas.errors import ConfigError

MARKER: Final = ".dormouse-run"
_MARK: Final = (
    b"This is the run directory of a Dormouse node, which empties it when it starts and removes it at its end.\n"
)
_LINKS: Final = 40
"""As many symbolic links as the kernel follows in one path."""

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path, what: str, mode: int | None, *, links: bool = False) -> int | None:
    """A descriptor of ``path``. If it is not there, it is made with ``mode``, and its parents too. With ``mode`` None
    nothing is made, and the result is None.

    Each part is opened from the one before. Symbolic links are refused, or followed (``links``) where only this user or
    root could have made them. Raises ConfigError.
    """
    if not path.is_absolute():
        raise ConfigError(f"{what} {path}: write an absolute path, which begins with /")
    todo, here, followed = [*reversed(Path(os.path.normpath(path)).parts[1:])], Path("/"), 0
    fd = os.open("/", os.O_PATH | _DIRECTORY)
    try:
        while todo:
            _expect_trusted(os.fstat(fd), here, what)
            name = todo.pop()
            here /= name
            try:
                inner = os.open(name, (os.O_PATH if todo else os.O_RDONLY) | _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                if mode is None:
                    os.close(fd)
                    return None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode if not todo else 0o755, dir_fd=fd)
                todo.append(name)
                here = here.parent
                continue
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                if not stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise
                followed += 1
                if not links or followed > _LINKS:
                    real = os.path.realpath(path)
                    raise ConfigError(f"{what} {path}: {here} is a symbolic link; write {real}") from None
                target = here.parent / os.readlink(name, dir_fd=fd)
                todo += reversed(Path(os.path.normpath(target)).parts[1:])
                here, inner = Path("/"), os.open("/", os.O_PATH | _DIRECTORY)
            os.close(fd)
            fd = inner
        if os.fstat(fd).st_uid != os.geteuid():
            raise ConfigError(
                f"{what} {path} belongs to another user; set [node] {what.split()[0]} to a directory of your own"
            )
        return fd
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"{what} {path}: {here}: {error.strerror}; set [node] {what.split()[0]} to a directory of your own"
        ) from error
    except BaseException:
        os.close(fd)
        raise


def _expect_trusted(found: os.stat_result, path: Path, what: str) -> None:
    """Raises ConfigError if somebody else could replace the entries of this directory."""
    # Whoever owns / controls all: in a user namespace of one user that is a number without a name.
    if found.st_uid not in (0, os.geteuid(), os.stat("/").st_uid):
        raise ConfigError(
            f"{what}: {path} belongs to another user, who could exchange what is in it; set [node] {what.split()[0]} "
            "to a directory below your own"
        )
    open_ = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _private_group(found.st_gid))
    if open_ and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{what}: other users may write to {path}, and exchange what is in it; `chmod go-w {path}`, or set [node] "
            f"{what.split()[0]} elsewhere"
        )


def _private_group(gid: int) -> bool:
    """Root's, or the one that many systems give each user alone (and with it a umask that lets the group write)."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def expect_apart(run: Path, state: Path) -> None:
    """Raises ConfigError if one contains the other."""
    one, other = Path(os.path.realpath(run)), Path(os.path.realpath(state))
    if one == other or one in other.parents or other in one.parents:
        raise ConfigError(
            f"run directory {run} and state directory {state} are one, or one contains the other: a node empties its "
            "run directory; set [node] run or state elsewhere"
        )


def lock(fd: int, path: Path, what: str) -> None:
    """Lock the directory for this node's life; the lock ends with the process. Raises ConfigError if another node has
    it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pids = list(_holders(fd))
        who = f" (pid {', '.join(map(str, pids))})" if pids else ""
        which = f", `kill -KILL {pids[0]}` if that finds none," if pids else ","
        raise ConfigError(
            f"{what} {path} is in use by a running node{who}; stop it with `dormouse down`{which} or give this node "
            "another name"
        ) from None


def _holders(fd: int) -> Iterator[int]:
    """Other processes that have this directory open, as far as this user may see: one that is stopped may have lost its
    node long ago.
    """
    path = os.readlink(f"/proc/self/fd/{fd}")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it is another user's, or ends
            theirs = f"/proc/{pid}/fd"
            if int(pid) != os.getpid() and any(os.readlink(f"{theirs}/{each}") == path for each in os.listdir(theirs)):
                yield int(pid)


def _open_run(path: Path, mode: int | None) -> int | None:
    if len(os.fsencode(path)) > paths.MAX_RUN_NBYTES:
        raise ConfigError(
            f"run directory {path} is too long for sockets, whose paths end at 107 bytes; set [node] run to one of at "
            f"most {paths.MAX_RUN_NBYTES} bytes"
        )
    return open_directory(path, "run directory", mode)


class RunDirectory:
    """The run directory of this node, or of one that was killed. Use :meth:`claim`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Make, lock and mark it. Raises ConfigError, and then has changed nothing that was there."""
        while True:
            fd = _open_run(path, 0o711)
            assert fd is not None
            try:
                lock(fd, path, "run directory")
                if os.fstat(fd).st_nlink:
                    found = cls(path, fd)
                    found._expect_ours()
                    found._mark()
                    return found
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # a node that ended removed it before we had the lock

    @classmethod
    def examine(cls, path: Path) -> None:
        """Raises ConfigError if :meth:`claim` would, but for another node's lock; changes nothing."""
        if (fd := _open_run(path, None)) is not None:
            try:
                cls(path, fd)._expect_ours()
            finally:
                os.close(fd)

    @classmethod
    def clean_up(cls, path: Path) -> None:
        """Remove that of a node that has died, unless another has it by now."""
        with contextlib.suppress(ConfigError):
            if (fd := _open_run(path, None)) is not None:
                directory = cls(path, fd)
                try:
                    lock(fd, path, "run directory")
                    directory._expect_ours()
                    directory.remove()
                finally:
                    directory.close()

    def _expect_ours(self) -> None:
        names = os.listdir(self._fd)
        if names and MARKER not in names:
            raise ConfigError(
                f"run directory {self.path} has {sorted(names)[0]!r} in it and not the marker of a node, which empties "
                "its run directory: set [node] run to a directory that is empty or not there yet"
            )
        if names and not self._marked():
            raise ConfigError(f"run directory {self.path}: {MARKER} was not made by a node of this user; remove it")
        if (foreign := next(self._foreign(), None)) is not None:
            raise ConfigError(
                f"run directory {self.path} has {foreign!r} in it, which no node made: move that away, or set [node] "
                "run to another directory"
            )

    def _mark(self) -> None:
        os.fchmod(self._fd, 0o711)
        with contextlib.suppress(FileExistsError):
            fd = os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as marker:
                marker.write(_MARK)

    def _marked(self) -> bool:
        try:
            fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return False
        with os.fdopen(fd, "rb") as marker:
            found = os.fstat(fd)
            return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and marker.read(1000) == _MARK

    def _foreign(self) -> Iterator[str]:
        """The names in it that no node makes."""
        for name in sorted(os.listdir(self._fd)):
            if name not in (MARKER, *paths.RUN_NAMES):
                yield name
        for folder, grammar in paths.INNER_NAMES.items():
            with contextlib.suppress(FileNotFoundError), self._inner(folder) as fd:
                for name in sorted(os.listdir(fd)):
                    if not grammar.fullmatch(name):
                        yield f"{folder}/{name}"

    @contextlib.contextmanager
    def _inner(self, folder: str) -> Iterator[int]:
        try:
            fd = os.open(folder, os.O_RDONLY | _DIRECTORY, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path} has {folder!r} in it, which is no directory and no node's: move it away"
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Remove what nodes have made in it, but for the marker. Raises ConfigError if that cannot be."""
        try:
            for name in paths.RUN_NAMES:
                remove_tree(name, self._fd)
        except OSError as error:
            raise ConfigError(f"run directory {self.path} cannot be emptied: {error}; remove it by hand") from error

    def make(self) -> None:
        """The directories in it, with their modes, independent of the umask. Those of instances are removed first."""
        remove_tree("i", self._fd)
        for name, mode in paths.RUN_FOLDERS.items():
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
            with self._inner(name) as fd:
                os.fchmod(fd, mode)

    def remove(self) -> None:
        """At a node's end: all of it, unless somebody has put something else there."""
        with contextlib.suppress(ConfigError, OSError):
            if next(self._foreign(), None) is None:
                self.empty()
                os.unlink(MARKER, dir_fd=self._fd)
                os.rmdir(self.path)  # no other user can have exchanged it, and only an empty one goes

    def close(self) -> None:
        os.close(self._fd)


def remove_tree(name: str, parent: int | None = None) -> None:
    """``name`` (in the directory ``parent``, if given) and all below it; never through a symbolic link, however deep.

    Entries deeper than one level are first moved up, so that neither depth nor path lengths matter: an instance may
    have made it.
    """
    try:
        top = _opened_anyway(name, parent)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return
    numbers = count()
    try:
        while names := os.listdir(top):
            for entry in names:
                with contextlib.suppress(FileNotFoundError):  # whoever bound a socket here may be removing it too
                    _clear(entry, top, numbers)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _clear(name: str, top: int, numbers: "count[int]") -> None:
    """Remove an entry of ``top``; what directories are in it are in ``top`` afterwards."""
    try:
        fd = _opened_anyway(name, top)
    except NotADirectoryError:
        os.unlink(name, dir_fd=top)
        return
    try:
        for inner in os.listdir(fd):
            try:
                os.unlink(inner, dir_fd=fd)
            except (IsADirectoryError, PermissionError):
                os.close(_opened_anyway(inner, fd))  # to be moved it must be writable
                os.rename(inner, _free_name(top, numbers), src_dir_fd=fd, dst_dir_fd=top)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=top)


def _free_name(top: int, numbers: "count[int]") -> str:
    for number in numbers:
        name = f"dormouse-removes-{number}"
        try:
            os.stat(name, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            return name
    raise AssertionError("numbers do not end")


def _opened_anyway(name: str, parent: int | None) -> int:
    """A directory for reading, whatever its mode. Raises NotADirectoryError, also for a symbolic link."""
    handle = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        with contextlib.suppress(PermissionError):  # not ours, and perhaps open to us as it is
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)
