"""A function's folder as a tar archive, from another machine: its files go into a snapshot, and nothing else does.

Uncompressed, regular files and directories only, of plain relative names; everything else is refused, whole. Blocks.
"""

import os
import tarfile
from pathlib import Path
from typing import Any, Final

from dormouse.router.admin.snapshots import Upload, checked_name
from dormouse.router.front.exchange import refuse

HEADER_NBYTES: Final = 64 << 10
"""Of a member that only describes the next one; tarfile reads those into memory."""

_PLAIN: Final = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)


class _Member(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type not in _PLAIN and self.size > HEADER_NBYTES:
            raise tarfile.ReadError(f"a description of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


def unpack(path: Path, upload: Upload, most_members: int) -> None:
    """Raises HttpError."""
    try:
        with tarfile.open(path, "r:", tarinfo=_Member) as archive:
            for number, member in enumerate(archive):
                if number >= most_members:
                    raise refuse(413, "folder_too_large", f"the archive has more than {most_members:,} members")
                _add(archive, member, upload)
        _expect_end(path)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise refuse(400, "bad_archive", f"not a whole tar archive: {error}; send what `tar -c` writes") from None


def _add(archive: tarfile.TarFile, member: tarfile.TarInfo, upload: Upload) -> None:
    name = member.name.removeprefix("./")
    if member.isdir():
        if name != ".":
            checked_name(name)
        return
    if member.type not in _PLAIN:
        text = f"{member.name!r} is neither a regular file nor a directory; archive what links mean (tar -h)"
        raise refuse(400, "bad_file", text)
    if member.issparse():
        raise refuse(400, "bad_file", f"{member.name!r} is archived without its holes; archive it whole (no tar -S)")
    stream = archive.extractfile(member)
    assert stream is not None  # of a regular file there is one
    with stream:
        upload.add(name, member.size, bool(member.mode & 0o111), lambda _, nbytes: stream.read(nbytes))


def _expect_end(path: Path) -> None:
    """Archives end with two empty blocks; without them, something may be missing."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 1024))
        if file.read() != bytes(1024):
            raise tarfile.ReadError("its end is missing")
