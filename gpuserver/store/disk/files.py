"""The lower tier: one file per segment under STATE/store/segments, named by its fingerprint.

Owns the directory. A file is written under a hidden name, brought to disk, then renamed, so a name means all bytes; a
crash leaves hidden names, which :meth:`SegmentFiles.open` removes, or files that the index does not have, which
:meth:`SegmentFiles.sweep` removes. All methods block: they belong in a thread.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from blake3 import blake3

from dormouse.core.quantities import size
from dormouse.gpuserver.store.memory.fingerprint import FINGERPRINT_NBYTES
from dormouse.schemas.errors import ConfigError

READ_NBYTES: Final = 4 << 20
"""A piece that is hashed while it is still in the processor's cache, and small enough that a read is not one long wait
in the kernel."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]


class Damaged(Exception):
    """The file does not have the bytes that were written to it; the text says how that was seen."""


class SegmentFiles:
    """The segment files.

    Args:
        budget_nbytes: most bytes of all files; None: as long as a tenth of the disk is free.
    """

    def __init__(self, directory: Path, budget_nbytes: int | None) -> None:
        self.budget_nbytes = budget_nbytes
        self._directory = directory

    def open(self) -> None:
        """Make the directory, or remove files that a crash left half written. Raises ConfigError."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in os.listdir(self._directory):
                if name.startswith("."):
                    os.unlink(self._directory / name)
        except OSError as error:
            raise ConfigError(
                f"{self._directory}: {error.strerror}; set [node] state to a directory that can be written"
            ) from error

    def path(self, fingerprint: bytes) -> Path:
        name = fingerprint.hex()
        return self._directory / name[:2] / name

    def refusal(self, used_nbytes: int, nbytes: int) -> str | None:
        """Why ``nbytes`` more may not be written, if so. Raises OSError."""
        if self.budget_nbytes is not None:
            if used_nbytes + nbytes > self.budget_nbytes:
                return (
                    f"segment files use {size(used_nbytes)} of {size(self.budget_nbytes)}: some models are kept in "
                    "memory only and a restart will not find them; raise limits.disk or remove functions"
                )
            return None
        disk = os.statvfs(self._directory)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free - nbytes < total // 10:
            return (
                f"the disk of {self._directory} has {size(free)} of {size(total)} free and a tenth stays free: some "
                "models are kept in memory only and a restart will not find them; free space, or set limits.disk"
            )
        return None

    def write(self, batch: Sequence[tuple[bytes, memoryview]]) -> None:
        """Write segments, ``(fingerprint, bytes)``: all of them are on disk under their names afterwards, or an error
        has been raised and none is.

        Raises OSError.
        """
        written: list[tuple[Path, Path]] = []
        try:
            for fingerprint, data in batch:
                path = self.path(fingerprint)
                temporary = self._directory / f".{path.name}"
                written.append((temporary, path))
                self._write(temporary, data)
            self._sync()
            for temporary, path in written:
                path.parent.mkdir(exist_ok=True, mode=0o700)
                os.rename(temporary, path)
            self._sync()
        except OSError:
            for paths in written:
                for path in paths:
                    path.unlink(missing_ok=True)
            raise

    @staticmethod
    def _write(path: Path, data: memoryview) -> None:
        with open(path, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(data)

    def _sync(self) -> None:
        """One for the batch: hundreds of small files would each wait for the disk with fsync."""
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self._directory))
        finally:
            os.close(fd)

    def read(self, fingerprint: bytes, key: bytes, into: memoryview) -> None:
        """Read a segment and check it.

        Raises:
            Damaged: it is gone, of another size, unreadable, or its bytes have another fingerprint.
            OSError: this process could not open it now (too many descriptors, no memory).
        """
        path = self.path(fingerprint)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Damaged(f"{path} is gone") from error
        try:
            size = os.fstat(fd).st_size
            if size != into.nbytes:
                raise Damaged(f"{path} has {size:,} bytes instead of {into.nbytes:,}")
            hasher = blake3(key=key)
            done = 0
            while done < into.nbytes:
                count = _read_piece(path, fd, into[done : done + READ_NBYTES], done)
                hasher.update(into[done : done + count])
                done += count
        finally:
            os.close(fd)
        if hasher.digest() != fingerprint:
            raise Damaged(f"{path} has other bytes than were written to it")

    def remove(self, fingerprint: bytes) -> None:
        """Raises OSError."""
        path = self.path(fingerprint)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it
            path.parent.rmdir()

    def sweep(self, known: Callable[[bytes], bool]) -> int:
        """Remove files that are not ``known``: those of a crash between the rename and the index row. Returns how
        many. Raises OSError.
        """
        removed = 0
        for folder in os.scandir(self._directory):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for name in os.listdir(folder.path):
                if len(name) == 2 * FINGERPRINT_NBYTES and not known(bytes.fromhex(name)):
                    os.unlink(os.path.join(folder.path, name))
                    removed += 1
            with contextlib.suppress(OSError):
                os.rmdir(folder.path)
        return removed


def _read_piece(path: Path, fd: int, into: memoryview, offset: int) -> int:
    try:
        count = os.preadv(fd, [into], offset)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if not count:
        raise Damaged(f"{path} ends at byte {offset:,}")
    return count
