"""The file system that an instance sees: an empty root, and the mounts in it. A pure plan, and the calls that carry it
out.

A *cover* is an empty directory; a *window* shows a file or directory of the node's there. The root is a cover, so a
path that no window shows is not there. The plan is made from paths alone; carrying it out needs a mount namespace of
our own.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dormouse.core.sandbox import linux

_READ_ONLY: Final = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
_WRITABLE: Final = linux.MS_NOSUID | linux.MS_NODEV
_DEVICE: Final = linux.MS_NOSUID | linux.MS_NOEXEC
_COVER_OPTIONS: Final = "mode=0755,size=1m,nr_inodes=4096"
_OWN_NBYTES: Final = 1 << 20  # directories, links and a passwd file
_OWN_FILES: Final = 1024
_MAX_SCRATCH_FILES: Final = 1 << 16  # their inodes are memory too, about 1 KiB each


@dataclass(frozen=True, kw_only=True)
class Cover:
    """An empty directory at ``path``; ``scratch`` ones may be written, and together hold what the sandbox allows."""

    path: str
    scratch: bool = False


@dataclass(frozen=True, kw_only=True)
class BoundPath:
    """``source``, by default the same path, at ``path``; read-only if not ``writable``. A ``device`` is one of /dev."""

    path: str
    source: str = ""
    device: bool = False
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class Root:
    """All that a root is made of: ``links`` and ``files`` by path, with their targets and texts."""

    steps: tuple[Cover | BoundPath, ...]
    links: dict[str, str]
    files: dict[str, str]
    home: str  # that of the scratch covers which the instance owns
    scratch_nbytes: int
    own_proc: bool


def plan(covers: Iterable[Cover], windows: Iterable[BoundPath]) -> list[Cover | BoundPath]:
    """The mounts to make, in order. Paths must be absolute and free of symbolic links.

    Deeper paths win over shallower ones, and a cover wins over a window of the same path. Paths that are hidden or
    visible anyway are omitted.
    """
    by_path: dict[str, Cover | BoundPath] = {window.path: window for window in windows}
    by_path |= {cover.path: cover for cover in covers}
    steps: list[Cover | BoundPath] = []
    for path in sorted(by_path, key=lambda path: (path.count("/"), path)):
        step = by_path[path]
        hidden = not isinstance(_nearest(path, by_path), BoundPath)
        if (step.scratch or not hidden) if isinstance(step, Cover) else (step.source or hidden):
            steps.append(step)
    return steps


def _nearest(path: str, by_path: dict[str, Cover | BoundPath]) -> Cover | BoundPath | None:
    while path != "/":
        path = os.path.dirname(path)
        if path in by_path:
            return by_path[path]
    return None


def links_on(path: str) -> dict[str, str]:
    """The symbolic links that are met on the way to what ``path`` means, by where they are."""
    found: dict[str, str] = {}
    done, left, followed = "/", path.split("/"), 0
    while left and followed < 40:  # as many as the kernel follows
        done, left = os.path.normpath(os.path.join(done, left[0])), left[1:]
        if os.path.islink(done):
            followed += 1
            found[done] = os.readlink(done)
            left = found[done].split("/") + left
            done = "/" if found[done].startswith("/") else os.path.dirname(done)
    return found


def enter(place: str, root: Root, uid: int) -> None:
    """Build the root at ``place``, an empty directory, and live in it. Raises OSError; missing sources are skipped."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    files = min(_MAX_SCRATCH_FILES, root.scratch_nbytes >> 12) + _OWN_FILES
    options = f"mode=0755,size={root.scratch_nbytes + _OWN_NBYTES},nr_inodes={files}"
    linux.mount("dormouse", place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for step in root.steps:
        if isinstance(step, Cover) and step.scratch:
            _open_scratch(place + step.path, uid if step.path == root.home else -1)
    linux.mount("none", place, None, linux.MS_UNBINDABLE)  # no window may show it, though one contains its place
    for step in root.steps:
        if isinstance(step, BoundPath):
            _open_window(step, place + step.path)
        elif not step.scratch and os.path.isdir(place + step.path):
            linux.mount("dormouse", place + step.path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _COVER_OPTIONS)
    os.makedirs(f"{place}/proc", exist_ok=True)
    if root.own_proc:
        linux.mount("proc", f"{place}/proc", "proc", _READ_ONLY | linux.MS_NOEXEC)
    else:
        linux.mount("/proc", f"{place}/proc", None, linux.MS_BIND | linux.MS_REC)
        linux.restrict_mount(f"{place}/proc", _READ_ONLY)
    for path, text in root.files.items():
        with open(_under(place, path), "w") as file:
            file.write(text)
    for path, link in root.links.items():
        with suppress(FileExistsError):  # a window shows it
            os.symlink(link, _under(place, path))
    linux.mount("none", place, None, linux.MS_REMOUNT | linux.MS_BIND | _READ_ONLY)
    linux.pivot_root(place)


def _under(place: str, path: str) -> str:
    os.makedirs(os.path.dirname(place + path), 0o755, exist_ok=True)
    return place + path


def _open_scratch(target: str, owner: int) -> None:
    """A directory of the root as a mount of its own, which stays writable; ``owner`` -1: everybody's."""
    os.makedirs(target, 0o755, exist_ok=True)
    os.chmod(target, 0o1777 if owner < 0 else 0o700)
    if owner >= 0:
        os.chown(target, owner, owner)
    linux.mount(target, target, None, linux.MS_BIND)


def _open_window(window: BoundPath, target: str) -> None:
    source = window.source or window.path
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    elif not os.path.exists(source):
        return
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    flags = _DEVICE if window.device else _WRITABLE if window.writable else _READ_ONLY
    linux.restrict_mount(target, flags)
