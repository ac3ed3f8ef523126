"""Which versions of a function are kept, also over a restart."""

from pathlib import Path
from typing import Any

from router_rig import spec

from dormouse.core.paths import VERSIONS
from dormouse.router.admin.history import History
from dormouse.schemas import messages as m


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, what: str, **_: Any) -> None:
        self.said.append(what)


def _history(top: Path, most: int = 2) -> tuple[History, Log]:
    log = Log()
    return History(most, lambda name, snapshot: top / name / snapshot, log), log


def _spec(version: int, snapshot: str = "", name: str = "f") -> m.FunctionSpec:
    return m.FunctionSpec(name=name, version=version, entry="f.py", snapshot=snapshot or f"s{version}")


def _deploy(history: History, top: Path, *versions: int) -> list[str]:
    """Returns the snapshots that are not kept any more."""
    gone = []
    for version in versions:
        (top / "f" / f"s{version}").mkdir(parents=True)
        gone += [each.snapshot for each in history.deployed(_spec(version), 1000.0 + version)]
    return gone


def _of(history: History) -> list[int]:
    return [each.spec.version for each in history.of("f")]


def test_so_many_earlier_versions_are_kept(tmp_path: Path) -> None:
    history, _ = _history(tmp_path)
    assert _deploy(history, tmp_path, 1, 2, 3) == []
    assert _deploy(history, tmp_path, 4) == ["s1"]
    assert _of(history) == [2, 3, 4]
    none, _ = _history(tmp_path / "other", most=0)
    assert _deploy(none, tmp_path / "other", 1, 2) == ["s1"]


def test_they_are_known_after_a_restart(tmp_path: Path) -> None:
    history, _ = _history(tmp_path)
    _deploy(history, tmp_path, 1, 2, 3)
    (tmp_path / "f" / "s1").rmdir()  # somebody has removed its files
    again, log = _history(tmp_path)
    again.restore([_spec(3), _spec(1, name="g")])
    assert [(each.spec.version, each.at) for each in again.of("f")] == [(2, 1002.0), (3, 1003.0)]
    assert [(each.spec.version, each.at) for each in again.of("g")] == [(1, 0.0)]
    assert sorted(again.snapshots()) == [("f", "s2"), ("f", "s3"), ("g", "s1")]
    fewer, _ = _history(tmp_path, most=0)
    fewer.restore([_spec(3)])
    assert _of(fewer) == [3]
    assert log.said == []


def test_a_deploy_that_the_file_does_not_know_is_what_is_served(tmp_path: Path) -> None:
    """The router was killed between the catalogue and the file."""
    history, _ = _history(tmp_path)
    _deploy(history, tmp_path, 1, 2)
    again, _ = _history(tmp_path)
    again.restore([_spec(3)])
    assert _of(again) == [1, 2, 3]


def test_a_version_that_is_served_again_is_no_earlier_one(tmp_path: Path) -> None:
    history, _ = _history(tmp_path)
    _deploy(history, tmp_path, 1, 2, 3)
    assert history.deployed(_spec(4, "s1"), 2000.0) == []
    assert _of(history) == [2, 3, 4]
    assert history.has(_spec(9, "s1"))
    assert not history.has(_spec(9, "s9"))
    assert [each.snapshot for each in history.removed("f")] == ["s2", "s3", "s1"]
    assert history.of("f") == []
    assert history.removed("f") == []


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    history, log = _history(tmp_path)
    _deploy(history, tmp_path, 1, 2)
    (tmp_path / "f" / VERSIONS).write_bytes(b"{")
    again, log = _history(tmp_path)
    again.restore([_spec(2)])
    assert _of(again) == [2]
    assert set(log.said) == {"versions_not_read"}
    lost, log = _history(tmp_path / "nowhere")
    assert lost.deployed(spec(), 1.0) == []
    assert log.said == ["versions_not_kept"]


def test_a_version_beside_is_kept_while_it_is_served(tmp_path: Path) -> None:
    """Whatever is deployed meanwhile, and over a restart; then it is one of the earlier ones."""
    history, _ = _history(tmp_path, most=1)
    _deploy(history, tmp_path, 1)
    (tmp_path / "f" / "s2").mkdir()
    beside = _spec(2, name="f@2")
    assert history.deployed(beside, 0.0) == []
    assert ([each.named for each in history.of("f@2")], _of(history)) == ([False, True], [2, 1])
    assert _deploy(history, tmp_path, 3, 4) == ["s1"]
    assert _of(history) == [2, 3, 4]
    again, _ = _history(tmp_path, most=1)
    again.restore([beside, _spec(4)])
    assert ([each.named for each in again.of("f")], _of(again)) == ([True, False, True], [3, 2, 4])
    assert all(each.spec.name == "f" for each in again.of("f"))
    again.left(beside)
    assert _deploy(again, tmp_path, 5) == ["s3", "s2"]
    assert again.removed("f") == [_spec(4), _spec(5)]


def test_a_version_beside_that_takes_the_name_has_it(tmp_path: Path) -> None:
    history, _ = _history(tmp_path)
    _deploy(history, tmp_path, 1)
    history.deployed(_spec(2, name="f@2"), 0.0)
    history.deployed(_spec(2), 0.0)
    history.left(_spec(2, name="f@2"))
    assert [(each.spec.version, each.named) for each in history.of("f")] == [(1, True), (2, True)]
    history.deployed(_spec(1, name="f@1"), 0.0)
    assert [(each.spec.version, each.named) for each in history.of("f")] == [(1, True), (2, True)]
