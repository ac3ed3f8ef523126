"""Snapshots: the files of each deployed function, as they were when it was deployed, below ``STATE/functions``.

::

    <name>/<snapshot>/...   one deploy: files 0444 or 0555, directories 0755; nothing of another kind
    .blobs/<hash>           files of at least 1 MiB, once per node: those of the trees are hard links to them

Owns that directory. Its input is a descriptor or a stream of bytes with a relative name, never a path; every entry
is made here, so no link can lead out. All methods block, some for minutes: they belong in a thread. A crash leaves
trees that no function has and blobs that no tree has, which :meth:`Snapshots.strays` finds.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from dormouse.core.names import base_of
from dormouse.core.paths import BLOBS, VERSIONS
from dormouse.core.quantities import size, sizes
from dormouse.router.admin.tenantfolders import BLOCK_NBYTES, TenantFolders
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.schemas.admin import MAX_NAME_NBYTES

BLOB_NBYTES: Final = 1 << 20
"""As for what the store takes by file identity: most of a model is in larger files, and they are what is shared."""

MAX_DEPTH: Final = 100
"""Folders that a file may lie in: far beyond any that people make. A file of a long name would make hundreds."""

READ_NBYTES: Final = 4 << 20
"""Hashed while it is still in the processor's cache."""

_FICLONE: Final = 0x40049409  # linux/fs.h: share the other file's extents
_PSEUDO: Final = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0x63677270: "cgroup2",
    0x27E0EB: "cgroup",
    0xCAFE4A11: "bpf",
    0x6165676C: "pstore",
}
"""File systems that make a file's bytes when they are read, and may ask who reads: here, the node."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: the next bytes of a file; none at its end."""


class Snapshots:
    """All of one node's. ``most_nbytes`` and ``most_files`` bound one function's folder, ``most_of`` all folders of a
    tenant, with versions that are kept.
    """

    def __init__(
        self, directory: Path, most_nbytes: int, most_files: int, most_of: Callable[[str], int] | None = None
    ) -> None:
        self.directory = directory
        self.most_nbytes = most_nbytes
        self.most_files = most_files
        self._blobs = directory / BLOBS
        self._books = threading.Lock()  # of these, which the loop has no time to wait for long
        self._folders = TenantFolders(most_of)
        self._lock = threading.Lock()  # between finding that something is there, or not used, and acting on it

    def tree(self, name: str, snapshot: str) -> Path:
        return self.directory / base_of(name) / snapshot

    def begin(self, name: str, below: str = "", tenant: str = "") -> "Upload":
        """A new snapshot, which is nobody's until it is finished. Its files come ``below`` there. Raises HttpError."""
        upload = Upload(self, name, secrets.token_hex(8), below, tenant)
        with _as_refusals(), self._lock:
            self._blobs.mkdir(mode=0o700, exist_ok=True)
            _make_directory(upload.tree)
        return upload

    def count(self, known: Iterable[tuple[str, str, str]]) -> None:
        """Count the trees of ``(name, snapshot, tenant)`` from before this process."""
        for name, snapshot, tenant in known if self._folders.most is not None else ():
            tree = self.tree(name, snapshot)
            for here, folders, names in os.walk(tree):
                self.put(tree, tenant, BLOCK_NBYTES * len(folders))
                for each in names:
                    with suppress(OSError):  # it has been removed since
                        found = os.lstat(os.path.join(here, each))
                        large = found.st_size >= BLOB_NBYTES
                        nbytes = found.st_size if large else max(BLOCK_NBYTES, found.st_size)
                        self.put(tree, tenant, nbytes, found.st_ino if large else None)
            if not tree.is_dir():
                self.drop(tree)

    def put(self, tree: Path, tenant: str, nbytes: int, inode: int | None = None) -> tuple[int, int]:
        """Bytes that the tenant has with these, and bytes in excess."""
        with self._books:
            over = self._folders.put(tree, tenant, nbytes, inode)
            return self._folders.held[tenant], over

    def drop(self, tree: Path) -> None:
        with self._books:
            self._folders.drop(tree)

    def charge(self, tree: Path, tenant: str, nbytes: int, inode: int | None = None) -> None:
        """Raises HttpError: the tenant has too much."""
        has, over = self.put(tree, tenant, nbytes, inode)
        if over:
            had, may_have = sizes(has, has - over)
            text = (
                f"the folders of tenant {tenant!r} would have {had}, with versions that are kept, and may have "
                f"{may_have} (limits.tenant_folders); remove functions, or deploy less"
            )
            raise refuse(507, "folders_full", text)

    def strays(self, known: Iterable[tuple[str, str]]) -> list[Path]:
        """All trees but those of ``(name, snapshot)``, and blobs that a crash left half written."""
        kept = {self.tree(*each) for each in known}
        trees = (tree for function in _folders(self.directory) if function.name != BLOBS for tree in _folders(function))
        halves = self._blobs.glob(".*") if self._blobs.is_dir() else ()
        return [*(tree for tree in trees if tree not in kept), *halves]

    def remove(self, paths: Iterable[Path]) -> None:
        """Trees or halves of blobs, and then what no tree has any more."""
        for path in paths:
            if path.parent == self._blobs:
                path.unlink(missing_ok=True)
                continue
            shutil.rmtree(path, ignore_errors=True)
            self.drop(path)
            with self._lock, suppress(OSError):  # other versions are there
                if not _folders(path.parent):
                    (path.parent / VERSIONS).unlink(missing_ok=True)
                path.parent.rmdir()
        with self._lock:
            for entry in os.scandir(self._blobs) if self._blobs.is_dir() else ():
                if not entry.name.startswith(".") and entry.stat(follow_symlinks=False).st_nlink == 1:
                    os.unlink(entry.path)

    def share(self, half: Path, name: str, target: Path) -> None:
        """``half`` becomes the blob ``name``, or goes if there is one, which then has the name ``target`` too."""
        blob = self._blobs / name
        with self._lock:
            try:
                os.link(blob, target)
                half.unlink()
            except FileNotFoundError:
                os.rename(half, blob)
                os.link(blob, target)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                os.rename(half, target)  # a file system allows only so many names: a copy of its own, then

    def half(self) -> Path:
        return self._blobs / f".{secrets.token_hex(8)}"

    def refuse_if_full(self, nbytes: int) -> None:
        """Raises HttpError if the disk has no room for that."""
        disk = os.statvfs(self.directory)
        if nbytes > disk.f_bavail * disk.f_frsize:
            raise disk_full()

    def sync(self) -> None:
        """All that was written is on the disk: the catalogue may name it."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.directory))
        finally:
            os.close(fd)


class Upload:
    """One snapshot as it comes in, from one caller. Given up, nothing of it stays."""

    def __init__(self, snapshots: Snapshots, name: str, snapshot: str, below: str, tenant: str) -> None:
        self.snapshot = snapshot
        self.tree = snapshots.tree(name, snapshot)
        self._place = self.tree / below
        self._snapshots = snapshots
        self.tenant = tenant
        self._folders: set[str] = set()
        self._files = 0
        self._nbytes = 0
        self._spooled = 0  # bytes of an archive
        self._hashes: dict[str, str] = {}  # by name

    def take(self, names: list[str], fds: list[int]) -> None:
        """Files by descriptor, which stay the caller's. Raises HttpError."""
        if len(names) != len(fds):
            raise refuse(400, "bad_request", f"{len(names)} names with {len(fds)} descriptors")
        for name, fd in zip(names, fds, strict=True):
            before = _examine(name, fd)
            self.add(name, before.st_size, bool(before.st_mode & 0o111), partial(_read, fd), fd)
            if _stamp(os.fstat(fd)) != _stamp(before):
                raise changed(name)

    def add(self, name: str, nbytes: int, executable: bool, read: Read, clone_of: int = -1) -> None:
        """One file of ``nbytes``. Raises HttpError."""
        path = self._place / checked_name(name)
        folders = [*accumulate(name.split("/")[:-1], "{}/{}".format)]
        made = len({*folders} - self._folders)
        self._folders.update(folders)
        self._files += 1
        self._nbytes += nbytes
        if self._files + len(self._folders) > self._snapshots.most_files:
            raise _too_large(f"more than {self._snapshots.most_files:,} files and folders (limits.folder_files)")
        if self._nbytes > self._snapshots.most_nbytes:
            raise _too_large(f"more than {size(self._snapshots.most_nbytes)} (limits.folder)")
        self._snapshots.refuse_if_full(nbytes)
        with _as_refusals(name):
            _make_directory(path.parent)
            small = 0 if nbytes >= BLOB_NBYTES else max(BLOCK_NBYTES, nbytes)
            self._snapshots.charge(self.tree, self.tenant, BLOCK_NBYTES * made + small)
            if nbytes < BLOB_NBYTES:
                self._hashes[name] = _write(path, name, nbytes, executable, read, -1)
                return
            half = self._snapshots.half()
            try:
                self._hashes[name] = _write(half, name, nbytes, executable, read, clone_of)
                self._snapshots.share(half, self._hashes[name], path)
                self._snapshots.charge(self.tree, self.tenant, nbytes, path.stat().st_ino)
            except BaseException:
                half.unlink(missing_ok=True)
                raise

    def spool(self, file: BinaryIO, piece: bytes) -> None:
        """A piece of an archive, which counts as long as it is there. Raises OSError, HttpError."""
        self._spooled += len(piece)
        self._snapshots.charge(self.tree, self.tenant, len(piece))
        file.write(piece)

    def spooled(self) -> None:
        """The archive is gone."""
        self._snapshots.put(self.tree, self.tenant, -self._spooled)
        self._spooled = 0

    def own(self, name: str) -> Path:
        """Where a file that came is, if it came."""
        return self._place / name

    @property
    def content(self) -> str:
        """Equal for equal files with equal names."""
        said = "".join(f"{found} {name}\n" for name, found in sorted(self._hashes.items()))
        return str(blake3(said.encode()).hexdigest())

    def finish(self, entry: str) -> None:
        """All has come. Raises HttpError."""
        if not (self._place / checked_name(entry)).is_file():
            raise refuse(400, "bad_request", f"the function's file, {entry!r}, did not come with its folder")
        with _as_refusals():
            self._snapshots.sync()

    def beside(self, other: Path) -> None:
        """All files of another snapshot, under the names that they have there. They are the same files. Raises
        HttpError.
        """
        with _as_refusals():
            try:
                for here, folders, names in os.walk(other, onerror=_raise):
                    place = self.tree / Path(here).relative_to(other)
                    folders[:] = [name for name in folders if place / name != self._place]
                    _make_directory(place)
                    self._snapshots.charge(self.tree, self.tenant, BLOCK_NBYTES)
                    for name in names:
                        os.link(os.path.join(here, name), place / name, follow_symlinks=False)
            except FileNotFoundError:
                text = "the function over which it was to be deployed was deployed anew, or removed; deploy again"
                raise refuse(409, "base_changed", text) from None

    def give_up(self) -> None:
        self._snapshots.remove([self.tree])


def disk_full() -> HttpError:
    return refuse(507, "disk_full", "the disk of [node] state has no room for the function's files; free space on it")


def changed(name: str) -> HttpError:
    return refuse(
        409, "changed_while_read", f"{name!r} was written to while it was read; deploy again when it is whole"
    )


def _too_large(what: str) -> HttpError:
    return refuse(
        413, "folder_too_large", f"the function's folder has {what}; give it a folder of its own, or raise it"
    )


def checked_name(name: str) -> str:
    """Raises HttpError for anything but a plain name below a folder."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name or len(name.encode()) > MAX_NAME_NBYTES:
        raise refuse(400, "bad_name", f"{name!r} cannot be a file's name below the function's folder")
    if len(parts) > MAX_DEPTH:
        text = f"{name[:100]!r}... lies in {len(parts) - 1} folders; at most {MAX_DEPTH - 1}"
        raise refuse(400, "bad_name", text)
    return name


def _examine(name: str, fd: int) -> os.stat_result:
    """Raises HttpError for a descriptor that is not an ordinary file, or proves no right to read it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise refuse(400, "bad_file", f"{name!r} is not a regular file")
    if flags & os.O_PATH or flags & os.O_ACCMODE != os.O_RDONLY:
        raise refuse(400, "bad_file", f"{name!r} was not opened for reading only")
    answer = (ctypes.c_long * 32)()  # struct statfs begins with the kind and is shorter than this
    kind = answer[0] & 0xFFFFFFFF if _libc.fstatfs(fd, answer) == 0 else 0
    if (pseudo := _PSEUDO.get(kind)) is not None:
        raise refuse(400, "bad_file", f"{name!r} is a file of {pseudo}, which has no bytes of its own")
    return found


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write(path: Path, name: str, nbytes: int, executable: bool, read: Read, clone_of: int) -> str:
    """A new file; its hash. Raises OSError, HttpError."""
    hasher = blake3()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        cloned = clone_of >= 0 and _cloned(fd, clone_of)
        if cloned and os.fstat(fd).st_size != nbytes:
            raise changed(name)
        done = 0
        while done < nbytes:
            wanted = min(READ_NBYTES, nbytes - done)
            piece = os.pread(fd, wanted, done) if cloned else read(done, wanted)
            if not piece:
                raise changed(name)
            hasher.update(piece)
            rest = memoryview(b"" if cloned else piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
            done += len(piece)
        if not cloned and read(done, 1):
            raise changed(name)
        os.fchmod(fd, 0o555 if executable else 0o444)
    finally:
        os.close(fd)
    return hasher.hexdigest()


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    return os.pread(fd, nbytes, offset)


def _cloned(fd: int, source: int) -> bool:
    try:
        fcntl.ioctl(fd, _FICLONE, source)
    except OSError:  # another file system, or one that cannot
        return False
    return True


def _make_directory(path: Path) -> None:
    """With those above it, whatever the umask."""
    if not path.is_dir():
        if path.parent != path:
            _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def _raise(error: OSError) -> None:
    raise error


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]


@contextmanager
def _as_refusals(name: str = "") -> Iterator[None]:
    """Turns errors of the system into errors for the caller."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full() from error
        text = f"{name!r} cannot be kept: {error.strerror}"
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL):
            raise refuse(400, "bad_name", text) from error
        raise refuse(507, "not_kept", f"{text}; see that [node] state can be written") from error
