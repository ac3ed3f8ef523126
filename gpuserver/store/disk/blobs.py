"""Decides which offered files are the node's own: large files of functions' snapshots, kept by content
(router/admin/snapshots.py).

Reads the directory of blobs, and changes nothing. A blob is written once, before it has its name, by the node alone, so
its name identifies its bytes and its times do not matter: those change with every snapshot that has it.
"""

import os
from pathlib import Path


class Blobs:
    """The blobs in one directory, which may not be there yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: dict[tuple[int, int], str] = {}  # by device and inode
        self._scanned_ns = -1  # the directory's time of change then

    def name_of(self, found: os.stat_result) -> str:
        """The name of the blob that an open file is, or ""."""
        if found.st_uid != os.geteuid() or found.st_mode & 0o222 or found.st_nlink < 2:
            return ""
        key = (found.st_dev, found.st_ino)
        if not self._is(self._names.get(key, ""), key):
            self._scan()
        name = self._names.get(key, "")
        return name if self._is(name, key) else ""

    def _is(self, name: str, key: tuple[int, int]) -> bool:
        """While a file is open, its inode is no other's."""
        try:
            there = os.stat(self._directory / name, follow_symlinks=False)
        except OSError:
            return False
        return bool(name) and (there.st_dev, there.st_ino) == key

    def _scan(self) -> None:
        try:
            changed_ns = self._directory.stat().st_mtime_ns
            if changed_ns == self._scanned_ns:
                return
            entries = [entry for entry in os.scandir(self._directory) if not entry.name.startswith(".")]
            stats = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        except OSError:  # there is none yet, or one went meanwhile
            return
        self._names = {(each.st_dev, each.st_ino): name for name, each in stats.items()}
        self._scanned_ns = changed_ns
