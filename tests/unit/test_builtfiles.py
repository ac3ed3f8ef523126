"""What a build of an environment leaves is measured and taken over, whatever code of packages has put there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dormouse.core.directories import remove_tree
from dormouse.router.admin import builtfiles
from dormouse.router.front.exchange import HttpError


def _own(site: Path) -> tuple[int, list[str]]:
    with _opened(site.parent) as fd:
        return builtfiles.own(site.name, fd)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    found = tmp_path / "built" / "site"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of the node's, which nobody else may read."""
    folder = tmp_path / "functions"
    folder.mkdir(mode=0o700)
    (folder / "key").write_bytes(b"k" * 100)
    (folder / "key").chmod(0o600)
    return folder


def _modes(folder: Path) -> list[int]:
    return [path.stat().st_mode & 0o7777 for path in (folder, folder / "key")]


def test_what_is_taken_is_readable_and_nobody_else_writes_it(site: Path) -> None:
    (site / "colours").mkdir(mode=0o777)
    (site / "colours" / "__init__.py").write_bytes(b"12345")
    (site / "run").write_bytes(b"123")
    (site / "run").chmod(0o4777)
    (site / "colours" / "__init__.py").chmod(0o600)
    assert builtfiles.nbytes(str(site.parent)) == 8
    nbytes, names = _own(site)
    assert (nbytes, sorted(names)) == (8, ["colours", "run"])
    found = {path.name: path.stat().st_mode & 0o7777 for path in (site, *site.rglob("*"))}
    assert found == {"site": 0o755, "colours": 0o755, "__init__.py": 0o644, "run": 0o755}


def test_a_link_in_place_of_all_of_it_leads_nowhere(site: Path, secret: Path) -> None:
    site.rmdir()
    site.symlink_to(secret)
    with pytest.raises(HttpError) as caught:
        _own(site)
    assert caught.value.failure.code == "bad_wheel"
    assert _modes(secret) == [0o700, 0o600]
    assert builtfiles.nbytes(str(site.parent)) < 100, "measuring does not follow it either"


@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "second name", "pipe"])
def test_what_is_no_ordinary_file_is_refused(site: Path, secret: Path, kind: str) -> None:
    odd = site / "odd"
    match kind:
        case "link to a folder":
            odd.symlink_to(secret)
        case "link to a file":
            odd.symlink_to(secret / "key")
        case "second name":
            odd.hardlink_to(secret / "key")
        case _:
            os.mkfifo(odd)
    with pytest.raises(HttpError, match="'odd' is no ordinary file"):
        _own(site)
    assert _modes(secret) == [0o700, 0o600]


@pytest.mark.parametrize("depth", [builtfiles.MAX_DEPTH, builtfiles.MAX_DEPTH + 1, 3000])
def test_folders_in_folders_are_bounded(site: Path, depth: int) -> None:
    fd = os.open(site, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    try:
        if depth <= builtfiles.MAX_DEPTH:
            assert _own(site) == (0, ["d"])
            return
        for look in (lambda: _own(site), lambda: builtfiles.nbytes(str(site))):
            with pytest.raises(HttpError) as caught:
                look()
            assert caught.value.failure.code == "bad_wheel"
    finally:
        remove_tree(str(site))


def test_files_are_counted_while_they_are_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtfiles, "MAX_FILES", 3)
    for name in "abc":
        (site / name).touch()
    assert builtfiles.nbytes(str(site)) == 0
    (site / "d").touch()
    for look in (lambda: _own(site), lambda: builtfiles.nbytes(str(site))):
        with pytest.raises(HttpError) as caught:
            look()
        assert caught.value.failure.code == "environment_too_large"
