"""What an instance sees of the file system: a pure plan of covers and windows, and the calls that carry it out.

A *cover* is an empty tmpfs over a directory; a *window* is a bind mount of something that a cover would hide. The plan
is made from paths alone; carrying it out needs a mount namespace of our own.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from dormouse.client_shim import linux


@dataclass(frozen=True, kw_only=True)
class Cover:
    """An empty tmpfs at ``path``; ``scratch`` ones may be written by everybody."""

    path: str
    scratch: bool = False


@dataclass(frozen=True, kw_only=True)
class Window:
    """``path`` as it was before the covers, read-only unless ``writable``."""

    path: str
    writable: bool = False


def plan(covers: Iterable[Cover], windows: Iterable[Window]) -> list[Cover | Window]:
    """The mounts to make, in order. Paths must be absolute and free of symbolic links.

    Deeper paths win over shallower ones, and a cover wins over a window of the same path. What is hidden or visible
    anyway is left out, except writable windows, which are always made.
    """
    by_path: dict[str, Cover | Window] = {window.path: window for window in windows}
    by_path |= {cover.path: cover for cover in covers}
    steps: list[Cover | Window] = []
    for path in sorted(by_path, key=lambda path: (path.count("/"), path)):
        step = by_path[path]
        hidden = isinstance(_nearest(path, by_path), Cover)
        if (step.scratch or not hidden) if isinstance(step, Cover) else (step.writable or hidden):
            steps.append(step)
    return steps


def _nearest(path: str, by_path: dict[str, Cover | Window]) -> Cover | Window | None:
    while path != "/":
        path = os.path.dirname(path)
        if path in by_path:
            return by_path[path]
    return None


def blocked(path: str) -> list[str]:
    """Directories above ``path`` that a stranger (another uid, no group) cannot pass through."""
    found = []
    while path != "/":
        path = os.path.dirname(path)
        if os.stat(path).st_mode & 0o001 == 0:
            found.append(path)
    return found


def carry_out(steps: list[Cover | Window]) -> None:
    """Make everything read-only, then the covers and windows. Raises OSError; missing paths are skipped."""
    try:
        linux.set_read_only("/", True, recursive=True)
        sealed = True
    except OSError:  # before Linux 5.12: file modes alone protect the rest of the system
        sealed = False
    sources: dict[str, int] = {}
    present = []
    for step in steps:
        if isinstance(step, Window):
            try:
                sources[step.path] = os.open(step.path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
        present.append(step)
    for step in present:
        if isinstance(step, Cover):
            if not os.path.isdir(step.path):
                if not step.scratch:
                    continue
                os.makedirs(step.path, 0o755)
            options = "mode=1777,size=256m,nr_inodes=16384" if step.scratch else "mode=0755,size=1m,nr_inodes=4096"
            linux.mount("dormouse", step.path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
            continue
        _make_target(step.path, os.fstat(sources[step.path]).st_mode & 0o170000 == 0o040000)
        linux.mount(f"/proc/self/fd/{sources[step.path]}", step.path, None, linux.MS_BIND | linux.MS_REC)
        if sealed and step.writable:
            linux.set_read_only(step.path, False)
    for fd in sources.values():
        os.close(fd)


def _make_target(path: str, directory: bool) -> None:
    if os.path.lexists(path):
        return
    if directory:
        os.makedirs(path, 0o755)
    else:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
