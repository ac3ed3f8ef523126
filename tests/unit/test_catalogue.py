"""The catalogue survives, keeps the newest version, and refuses what it cannot read."""

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dormouse.controller.catalogue import Catalogue, NotWritten
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec


def test_functions_survive_a_restart_in_their_newest_version(tmp_path: Path) -> None:
    first = Catalogue(tmp_path / "c")
    first.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    first.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot="x = 2"))
    first.keep(FunctionSpec(name="b", version=1, entry="b.py", snapshot=""))
    assert sorted(first.versions()) == [("a", 2), ("b", 1)]
    first.remove("b")
    first.close()
    again = Catalogue(tmp_path / "c")
    (spec,) = again.functions()
    assert (spec.name, spec.version, spec.snapshot) == ("a", 2, "x = 2")
    assert again.versions() == [("a", 2)]
    again.close()


def test_a_damaged_file_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="restore it"):
        Catalogue(tmp_path / "c")


def test_a_damaged_row_is_refused_with_advice(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    catalogue.close()
    db = sqlite3.connect(tmp_path / "c")
    db.execute("UPDATE functions SET spec = ?", (b"not a function",))
    db.commit()
    db.close()
    with pytest.raises(ConfigError, match="restore it"):
        Catalogue(tmp_path / "c")


@contextmanager
def full_disk() -> Iterator[None]:
    """Files take no more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_what_was_there_and_lets_functions_go(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    catalogue.keep(FunctionSpec(name="b", version=1, entry="b.py", snapshot=""))
    with full_disk():
        with pytest.raises(NotWritten, match="free space"):
            catalogue.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot="x = 2"))
        assert sorted(catalogue.versions()) == [("a", 1), ("b", 1)]
        with pytest.raises(NotWritten, match="brings back function 'b'"):
            catalogue.remove("b")
        assert catalogue.versions() == [("a", 1)]
        assert [spec.name for spec in catalogue.functions()] == ["a"]
        with pytest.raises(NotWritten):
            catalogue.settle()
    catalogue.settle()
    catalogue.close()
    again = Catalogue(tmp_path / "c")
    assert again.versions() == [("a", 1)]
    again.close()


def test_a_name_that_comes_back_before_its_row_could_go_stays(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    with full_disk(), pytest.raises(NotWritten):
        catalogue.remove("a")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 2"))
    catalogue.settle()
    assert [spec.snapshot for spec in catalogue.functions()] == ["x = 2"]
    catalogue.close()


def test_a_disk_that_is_full_at_the_start_is_not_called_damage(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match="free space") as raised:
        Catalogue(tmp_path / "c")
    assert "move it away" not in str(raised.value)


def test_a_newer_catalogue_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "c")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Catalogue(tmp_path / "c")
