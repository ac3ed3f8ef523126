"""The catalogue survives, keeps the newest version, and refuses what it cannot read."""

import sqlite3
from pathlib import Path

import pytest

from dormouse.controller.catalogue import Catalogue
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec


def test_functions_survive_a_restart_in_their_newest_version(tmp_path: Path) -> None:
    first = Catalogue(tmp_path / "c")
    first.keep(FunctionSpec(name="a", version=1, path="/a.py", source="x = 1"))
    first.keep(FunctionSpec(name="a", version=2, path="/a.py", source="x = 2"))
    first.keep(FunctionSpec(name="b", version=1, path="/b.py", source=""))
    assert sorted(first.versions()) == [("a", 2), ("b", 1)]
    first.remove("b")
    first.close()
    again = Catalogue(tmp_path / "c")
    (spec,) = again.functions()
    assert (spec.name, spec.version, spec.source) == ("a", 2, "x = 2")
    assert again.versions() == [("a", 2)]
    again.close()


def test_a_damaged_file_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="restore it"):
        Catalogue(tmp_path / "c")


def test_a_newer_catalogue_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "c")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Catalogue(tmp_path / "c")
