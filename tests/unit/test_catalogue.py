"""The catalogue survives, keeps the newest version, and refuses what it cannot read."""

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from dormouse.controller.catalogue import RESERVE_NBYTES, CatalogueFile, NotWritten
from dormouse.core.config import StartSection
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec, StepTimes


def test_functions_survive_a_restart_in_their_newest_version(tmp_path: Path) -> None:
    first = CatalogueFile(tmp_path / "c")
    first.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    first.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot="x = 2"))
    first.keep(FunctionSpec(name="b", version=1, entry="b.py", snapshot=""))
    assert sorted(first.versions()) == [("a", 2), ("b", 1)]
    first.remove("b")
    first.close()
    again = CatalogueFile(tmp_path / "c")
    (spec,) = again.functions()
    assert (spec.name, spec.version, spec.snapshot) == ("a", 2, "x = 2")
    assert again.versions() == [("a", 2)]
    again.close()


def test_what_steps_take_is_kept_of_functions_that_are_there(tmp_path: Path) -> None:
    first, times = CatalogueFile(tmp_path / "c"), StepTimes(step_us=1.5, prompt_token_us=0.25, sequence_us=0.0)
    for name in ("a", "b"):
        first.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
    first.keep_step_times({"a": times, "b": times, "c": times})
    first.keep_step_times({"a": StepTimes(step_us=2.0, prompt_token_us=0.5, sequence_us=1.0)})
    first.remove("b")
    first.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.step_times() == {"a": StepTimes(step_us=2.0, prompt_token_us=0.5, sequence_us=1.0)}
    again.close()


def test_what_batches_take_is_kept_of_functions_that_are_there(tmp_path: Path) -> None:
    first = CatalogueFile(tmp_path / "c")
    for name in ("a", "b"):
        first.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
    first.keep_batch_times(dict.fromkeys("abc", ((1, 0.5),)))
    first.keep_batch_times({"a": ((1, 0.5), (8, 0.75))})
    first.remove("b")
    first.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.batch_times() == {"a": ((1, 0.5), (8, 0.75))}
    again.close()


def test_shares_are_kept_of_versions_that_are_there(tmp_path: Path) -> None:
    first = CatalogueFile(tmp_path / "c")
    for name in ("a", "a@2", "b@2"):
        first.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
    for name, share in (("a@2", 10), ("b@2", 20), ("c@2", 30), ("a@2", 15)):
        first.share(name, share)
    first.remove("b@2")
    first.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.traffic() == {"a@2": 15}
    again.close()


def test_an_older_file_learns_what_steps_take(tmp_path: Path) -> None:
    CatalogueFile(tmp_path / "c").close()
    db = sqlite3.connect(tmp_path / "c")
    db.execute("DROP TABLE step_times")
    db.execute("DROP TABLE batch_times")
    db.commit()
    db.close()
    again = CatalogueFile(tmp_path / "c")
    assert (again.step_times(), again.batch_times()) == ({}, {})
    again.close()


def test_pins_last_over_versions_and_go_with_their_function(tmp_path: Path) -> None:
    first = CatalogueFile(tmp_path / "c")
    for name in ("a", "b"):
        first.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
        first.pin(name, True)
        first.pin(name, True)
    first.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot=""))
    first.remove("b")
    first.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.pins() == {"a"}
    again.pin("a", False)
    assert again.pins() == set()
    again.close()


def test_a_damaged_file_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="restore it"):
        CatalogueFile(tmp_path / "c")


def test_a_damaged_row_is_refused_with_advice(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    catalogue.close()
    db = sqlite3.connect(tmp_path / "c")
    db.execute("UPDATE functions SET spec = ?", (b"not a function",))
    db.commit()
    db.close()
    with pytest.raises(ConfigError, match="restore it"):
        CatalogueFile(tmp_path / "c")


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
    catalogue = CatalogueFile(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot="x = 1"))
    catalogue.keep(FunctionSpec(name="b", version=1, entry="b.py", snapshot=""))
    with full_disk():
        with pytest.raises(NotWritten, match="free space"):
            catalogue.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot="x = 2"))
        assert sorted(catalogue.versions()) == [("a", 1), ("b", 1)]
        with pytest.raises(NotWritten, match="free space on its disk, then remove it again"):
            catalogue.remove("b")
        assert [spec.name for spec in catalogue.functions()] == ["a", "b"], "what is said to be there is there"
    catalogue.remove("b")
    catalogue.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.versions() == [("a", 1)]
    again.close()


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m"):
        yield tmp_path


def test_d14_a_removal_on_a_full_disk_is_durable(full_soon: Path) -> None:
    catalogue = CatalogueFile(full_soon / "c")
    for name in ("a", "b"):
        catalogue.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot="x" * 100_000))
    filler = fill(full_soon)
    with pytest.raises(NotWritten):
        catalogue.keep(FunctionSpec(name="c", version=1, entry="c.py", snapshot="y" * 400_000))
    before = [spec.name for spec in catalogue.functions()]
    catalogue.remove("b")
    copy = sqlite3.connect(full_soon / "c")
    assert copy.execute("SELECT name FROM functions").fetchall() == [("a",)]
    copy.close()
    assert before == ["a", "b"]
    assert not (full_soon / "c.reserve").exists()
    filler.unlink()
    catalogue.settle()
    assert (full_soon / "c.reserve").stat().st_blocks * 512 >= RESERVE_NBYTES
    catalogue.close()
    again = CatalogueFile(full_soon / "c")
    assert again.versions() == [("a", 1)]
    again.close()


def test_d4_a_quarantine_survives_and_a_new_version_or_a_restart_ends_it(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    for name in ("a", "b", "c"):
        catalogue.keep(FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
        catalogue.set_quarantine(name, f"{name} kills")
    catalogue.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.quarantined() == {"a": "a kills", "b": "b kills", "c": "c kills"}
    again.keep(FunctionSpec(name="a", version=2, entry="a.py", snapshot=""))
    again.set_quarantine("b", None)
    again.remove("c")
    assert again.quarantined() == {}
    again.close()


def test_d15_a_catalogue_without_functions_is_lost_unless_they_were_removed(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    assert catalogue.lost, "a new one"
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot=""))
    assert not catalogue.lost
    catalogue.remove("a")
    assert not catalogue.lost
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot=""))
    catalogue.close()
    db = sqlite3.connect(tmp_path / "c")
    db.execute("DELETE FROM functions")
    db.commit()
    db.close()
    again = CatalogueFile(tmp_path / "c")
    assert again.lost
    again.forget_models()
    assert not again.lost
    again.close()


def test_d15_a_lost_catalogue_is_asked_about_where_there_are_models(tmp_path: Path) -> None:
    catalogue, segments = CatalogueFile(tmp_path / "c"), tmp_path / "segments"
    catalogue.expect_whole(StartSection(), segments)  # a first start
    (segments / "ab").mkdir(parents=True)
    (segments / "ab" / "abcd").touch()
    with pytest.raises(ConfigError, match=r"has no functions, but .*segments has models.*--forget-models"):
        catalogue.expect_whole(StartSection(), segments)
    catalogue.expect_whole(StartSection(forget_models=True), segments)
    catalogue.expect_whole(StartSection(), segments)  # it was answered
    catalogue.close()


def test_d4_who_is_left_out_must_be_there(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot=""))
    catalogue.expect_whole(StartSection(without=("a",)), tmp_path)
    with pytest.raises(ConfigError, match="--without b: there is no such function; there are: a"):
        catalogue.expect_whole(StartSection(without=("a", "b")), tmp_path)
    catalogue.close()


def test_a_catalogue_of_before_there_were_quarantines_is_read(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    catalogue.keep(FunctionSpec(name="a", version=1, entry="a.py", snapshot=""))
    catalogue.close()
    db = sqlite3.connect(tmp_path / "c")
    db.execute("DROP TABLE quarantine")
    db.execute("DROP TABLE emptied")
    db.commit()
    db.close()
    again = CatalogueFile(tmp_path / "c")
    again.set_quarantine("a", "why")
    assert (again.versions(), again.quarantined()) == ([("a", 1)], {"a": "why"})
    again.close()


def test_a_disk_that_is_full_at_the_start_is_not_called_damage(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match="free space") as raised:
        CatalogueFile(tmp_path / "c")
    assert "move it away" not in str(raised.value)


def test_a_newer_catalogue_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "c")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        CatalogueFile(tmp_path / "c")
