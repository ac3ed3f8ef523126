"""A state directory in a file, and back: all of it, or a refusal that leaves nothing."""

import io
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dormouse.core.migrations import MIGRATIONS, StateVersion, found_version, migrate
from dormouse.core.node import backup as b
from dormouse.core.node.backup import back_up, restore
from dormouse.core.paths import StatePaths
from dormouse.core.version import package_version
from dormouse.schemas.errors import ConfigError, DormouseError

BLOB = os.urandom(1 << 20)


DATABASES = {
    "catalogue.sqlite3": "functions",
    "jobs.sqlite3": "jobs",
    "usage.sqlite3": "u",
    "index.sqlite3": "segments",
}


def databases(state: StatePaths) -> list[Path]:
    return [state.catalogue, state.jobs, state.usage, state.store_index]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StatePaths]:
    """Of a node that runs: its databases are open, and have not been checkpointed."""
    state = StatePaths(tmp_path / "state")
    state.make()
    open_: list[sqlite3.Connection] = []
    for path, table in zip(databases(state), DATABASES.values(), strict=True):
        path.parent.mkdir(exist_ok=True)
        database = sqlite3.connect(path, isolation_level=None)
        open_.append(database)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"CREATE TABLE {table} (name TEXT PRIMARY KEY, version INTEGER, spec BLOB)")
        database.execute(f"INSERT INTO {table} VALUES ('f', 1, 'spec of f')")
    database.execute("CREATE TABLE identities (dev INTEGER)")
    database.execute("INSERT INTO identities VALUES (7)")
    for version in ("one", "two"):
        tree = state.functions / "f" / version
        (tree / "deep").mkdir(parents=True)
        tree.chmod(0o755)
        (tree / "f.py").write_text(version)
        (tree / "f.py").chmod(0o444)
        (tree / "own.sqlite3").write_text("no database of ours")
    state.blobs.mkdir()
    (state.blobs / "hash").write_bytes(BLOB)
    os.link(state.blobs / "hash", state.functions / "f" / "one" / "deep" / "large")
    os.link(state.blobs / "hash", state.functions / "f" / "two" / "deep" / "large")
    state.store_segments.mkdir()
    (state.store_segments / "segment").write_bytes(b"bytes")
    for path in (state.secrets, state.secrets_key, state.keys, state.store_key, state.settings):
        path.write_text(f"{path.name} has this")
        path.chmod(0o600)
    state.before.mkdir()
    (state.before / "old").write_text("nothing to keep")
    state.function_log("f").write_text("printed\n")
    migrate(state)
    yield state
    for each in open_:
        each.close()


def files(state: StatePaths) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of all but databases."""
    found = (path for path in state.state.rglob("*") if not path.name.startswith(tuple(DATABASES)))
    return {
        str(path.relative_to(state.state)): (
            stat.S_IMODE(path.stat().st_mode),
            path.read_bytes() if path.is_file() else b"",
        )
        for path in found
        if state.before not in (path, path.parent)
    }


def test_all_of_a_node_that_runs_is_there_again(state: StatePaths, tmp_path: Path) -> None:
    before = files(state)
    file, again = tmp_path / "file.tar", StatePaths(tmp_path / "far" / "again")
    said = back_up(state, file, models=True)
    assert (said["functions"], said["state_version"], said["dormouse"]) == (1, len(MIGRATIONS), package_version())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert files(state) == before, "nothing is left in the node's own directory"
    assert said["nbytes"] < 2 * len(BLOB), "a file with three names is there once"
    assert restore(file, again)["functions"] == 1
    assert files(again) == before
    assert stat.S_IMODE(again.state.stat().st_mode) == 0o700
    for path, table in zip(databases(again), DATABASES.values(), strict=True):
        with closing(sqlite3.connect(path)) as database:
            assert list(database.execute(f"SELECT * FROM {table}")) == [("f", 1, "spec of f")]
            assert path != again.store_index or list(database.execute("SELECT * FROM identities")) == []
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (again.blobs / "hash").stat().st_nlink == 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["far", "file.tar", "state"]


def test_without_models_and_of_an_older_version(state: StatePaths, tmp_path: Path) -> None:
    """Nobody looks at what is in it: the first start brings it to the newer version."""
    state.version.unlink()
    said = back_up(state, tmp_path / "file.tar", models=False)
    again = StatePaths(tmp_path / "again")
    again.state.mkdir()
    restore(tmp_path / "file.tar", again)
    assert said["state_version"] == 0
    assert (again.store.exists(), again.secrets.exists()) == (False, True)
    assert found_version(again) == StateVersion(version=0)
    migrate(again)
    assert found_version(again) == StateVersion(version=len(MIGRATIONS), dormouse=package_version())


def test_a_deploy_meanwhile_begins_it_anew(state: StatePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deploys = iter(range(3))
    link = b._link

    def deploying(*args: object) -> None:
        link(*args)  # type: ignore[arg-type]
        for number in deploys:
            (state.functions / "f" / f"later{number}").mkdir()
            with closing(sqlite3.connect(state.catalogue, isolation_level=None)) as database:
                database.execute("UPDATE functions SET version = version + 1")
            return

    monkeypatch.setattr(b, "_link", deploying)
    back_up(state, tmp_path / "file.tar", models=True)
    restore(tmp_path / "file.tar", StatePaths(tmp_path / "again"))
    assert (tmp_path / "again" / "functions" / "f" / "later2").is_dir()
    deploys = iter(range(3, 99))
    with pytest.raises(DormouseError, match="functions were deployed or removed each of 5 times"):
        back_up(state, tmp_path / "more.tar", models=True)
    assert not (tmp_path / "more.tar").exists()


def test_nothing_is_overwritten(state: StatePaths, tmp_path: Path) -> None:
    back_up(state, tmp_path / "file.tar", models=False)
    with pytest.raises(DormouseError, match=r"file\.tar is there; give another name"):
        back_up(state, tmp_path / "file.tar", models=False)
    with pytest.raises(DormouseError, match=r"state is not empty \(a node's state is in it\): name another directory"):
        restore(tmp_path / "file.tar", state)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "letter").touch()
    with pytest.raises(DormouseError, match=r"own is not empty \(there are files in it\)"):
        restore(tmp_path / "file.tar", StatePaths(tmp_path / "own"))
    with pytest.raises(DormouseError, match="is no node's state directory"):
        back_up(StatePaths(tmp_path / "own"), tmp_path / "own.tar", models=False)
    with pytest.raises(DormouseError, match=r"^there is no folder /.*/nowhere; make it, or name another place$"):
        back_up(state, tmp_path / "nowhere" / "file.tar", models=False)
    with pytest.raises(DormouseError, match=r"^no backup was made: /.*x\.new: File name too long$"):
        back_up(state, tmp_path / ("x" * 253), models=False)


def rewritten(file: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes] | None]) -> Path:
    """Another file, whose members are what ``change`` makes of them."""
    other = file.with_name("other.tar")
    with tarfile.open(file) as source, tarfile.open(other, "w") as target:
        for member in source:
            stream = source.extractfile(member) if member.isreg() else None
            if (kept := change(member, stream.read() if stream is not None else b"")) is not None:
                info, data = kept
                info.size = len(data) if info.isreg() else 0
                target.addfile(info, io.BytesIO(data))
    return other


def said(**changes: object) -> Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        return info, json.dumps(json.loads(data) | changes).encode() if info.name == b.META else data

    return change


def renamed(to: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[..., tuple[tarfile.TarInfo, bytes]]:
    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name == "state/keys.json":
            info.name, info.type, info.linkname = to, kind, link
        return info, data

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (said(format=2, dormouse="9.1"), r"is of Dormouse 9\.1, and this one, .*, is too old for it"),
        (said(state_version=99, dormouse="9.1"), r"is of Dormouse 9\.1, and this one, .*, is too old for it"),
        (said(format="x"), "is no whole backup: it does not begin with dormouse-backup.json"),
        (lambda info, data: None if info.name == b.META else (info, data), "it does not begin with"),
        (lambda info, data: None if info.name == b.END else (info, data), "is no whole backup: its end is missing"),
        (renamed("state/../../escape"), "is not below state"),
        (renamed("/etc/escape"), "is not below state"),
        (renamed("escape"), "is not below state"),
        (renamed("state/l", tarfile.SYMTYPE, "/etc/passwd"), "is neither a file nor a folder"),
        (renamed("state/l", tarfile.LNKTYPE, "../../../etc/passwd"), "is not below state"),
        (renamed("state/l", tarfile.FIFOTYPE), "is neither a file nor a folder"),
        (renamed("state/version"), "nothing was restored: .*version: File exists"),
    ],
)
def test_d1_what_is_no_backup_makes_nothing(
    state: StatePaths, tmp_path: Path, change: Callable[..., tuple[tarfile.TarInfo, bytes] | None], says: str
) -> None:
    back_up(state, tmp_path / "file.tar", models=False)
    other = rewritten(tmp_path / "file.tar", change)
    with pytest.raises((DormouseError, ConfigError), match=says):
        restore(other, StatePaths(tmp_path / "again"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.tar", "other.tar", "state"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_file_that_is_cut_off_makes_nothing(state: StatePaths, tmp_path: Path, share: float) -> None:
    back_up(state, tmp_path / "file.tar", models=False)
    data = (tmp_path / "file.tar").read_bytes()
    (tmp_path / "file.tar").write_bytes(data[: int(share * len(data.rstrip(b"\0")))])
    with pytest.raises(DormouseError, match=r"file\.tar is no whole backup: "):
        restore(tmp_path / "file.tar", StatePaths(tmp_path / "again"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.tar", "state"]
