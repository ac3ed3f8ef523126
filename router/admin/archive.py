"""Takes the files of a function's folder out of a tar archive from another machine, into a snapshot.

Uncompressed, regular files and directories only, of plain relative names; everything else is refused, whole. Blocks.
"""

import os
from pathlib import Path

from dormouse.router.admin.snapshots import Upload, checked_name
from dormouse.router.admin.tarreader import ArchiveMember, BadArchive, members
from dormouse.router.front.exchange import refuse


def unpack(path: Path, upload: Upload, most_members: int) -> None:
    """Raises HttpError."""
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        try:
            for number, member in enumerate(members(lambda at, nbytes: os.pread(fd, nbytes, at), os.fstat(fd).st_size)):
                if number >= most_members:
                    raise refuse(413, "folder_too_large", f"the archive has more than {most_members:,} members")
                _add(fd, member, upload)
        except BadArchive as error:
            text = f"not a whole tar archive: {error}; send what `tar -c` writes, uncompressed"
            raise refuse(400, "bad_archive", text) from None


def _add(fd: int, member: ArchiveMember, upload: Upload) -> None:
    """Raises HttpError."""
    name = member.name.removeprefix("./")
    if member.sparse:
        raise refuse(400, "bad_file", f"{name!r} is archived without its holes; archive it whole (no tar -S)")
    if member.kind == "5":
        if name != ".":
            checked_name(name)
        return
    if member.kind != "0":
        text = f"{name!r} is neither a regular file nor a directory; archive what links mean (tar -h)"
        raise refuse(400, "bad_file", text)
    end = member.offset + member.nbytes

    def read(offset: int, nbytes: int) -> bytes:
        at = member.offset + offset
        return os.pread(fd, max(0, min(nbytes, end - at)), at)

    upload.add(name, member.nbytes, member.executable, read)
