"""Run and state directories: what a start refuses, what it removes, and what it leaves alone."""

import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dormouse.core import directories, paths
from dormouse.core.config import NodeConfig
from dormouse.core.directories import MARKER, RunDirectory, remove_tree
from dormouse.core.node import supervisor
from dormouse.core.nodefile import parse_config
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one, wherever pytest has its own: a socket's path ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        yield Path(directory).resolve()


def up(folder: Path, run: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a start that is refused says. Nothing of the node is started before."""
    file = folder / "node.toml"
    file.write_text(f'[node]\nrun = "{run}"\nstate = "{state}"\n')
    assert supervisor.main([str(file)]) == 2
    return capsys.readouterr().err


def tree(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def thesis(folder: Path) -> Path:
    (folder / "t").mkdir(parents=True)
    (folder / "t" / "chapter").write_text("one")
    (folder / "notes").write_text("two")
    return folder


def left_by_a_killed_node(run: Path) -> Path:
    directory = RunDirectory.claim(run)
    directory.make()
    names = ("node.json", "ready", "controller-gpu0.3", "gpu0.fds.3", "switch0")
    for name in (*names, "zygote.1", "zygote.vision2.1", "warming", "warming.new", "warming-vision2+.new"):
        (run / "t" / name).touch()
    (run / "i" / "1-17" / "tmp").mkdir(parents=True)
    (run / "i" / "1-17" / "tmp" / "whatever it liked").touch()
    directory.close()
    return run


def test_d2_a_directory_without_a_marker_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = thesis(tmp_path / "run")
    before = tree(run)
    said = up(tmp_path, run, tmp_path / "state", capsys)
    assert "has 'notes' in it and not the marker of a node" in said
    assert "set [node] run" in said
    assert tree(run) == before


@pytest.mark.parametrize(("run", "state"), [("s", "s"), ("s", "s/run"), ("s/run", "s"), ("link/run", "s")])
def test_d2_run_and_state_directory_may_not_contain_one_another(
    run: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "link").symlink_to("s")
    (tmp_path / "s" / "catalogue.sqlite3").write_text("models")
    before = tree(tmp_path / "s")
    assert "one contains the other" in up(tmp_path, tmp_path / run, tmp_path / state, capsys)
    assert tree(tmp_path / "s") == before


def test_d2_a_run_directory_that_is_a_symbolic_link_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = thesis(tmp_path / "victim")
    (victim / MARKER).write_bytes(directories._MARK)
    (tmp_path / "run").symlink_to(victim)
    (tmp_path / "upper").symlink_to(tmp_path)
    before = tree(victim)
    said = up(tmp_path, tmp_path / "run", tmp_path / "state", capsys)
    assert f"{tmp_path}/run is a symbolic link; write {victim}" in said
    said = up(tmp_path, tmp_path / "upper" / "victim", tmp_path / "state", capsys)
    assert f"{tmp_path}/upper is a symbolic link; write {victim}" in said
    assert tree(victim) == before


@pytest.mark.parametrize("name", ["notes", "t/notes", "t/gpu0-gpu1.x", "i/1-2-3", "i/home"])
def test_d2_names_that_no_node_makes_are_refused_and_kept(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left_by_a_killed_node(tmp_path / "run")
    (run / name).write_text("mine")
    before = tree(run)
    said = up(tmp_path, run, tmp_path / "state", capsys)
    assert f"has '{name}' in it, which no node made" in said
    assert tree(run) == before


def test_d2_a_link_in_the_place_of_a_nodes_folder_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, victim = left_by_a_killed_node(tmp_path / "run"), tmp_path / "victim"
    remove_tree(str(run / "t"))
    victim.mkdir()
    (victim / "ready").write_text("mine")
    (run / "t").symlink_to(victim)
    said = up(tmp_path, run, tmp_path / "state", capsys)
    assert "'t' in it, which is no directory" in said
    assert tree(victim) == {"ready": "mine"}


def test_d2_what_a_killed_node_left_is_removed(tmp_path: Path) -> None:
    run = left_by_a_killed_node(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(ConfigError, match="another user"):
            RunDirectory.claim(run)
    directory = RunDirectory.claim(run)
    with pytest.raises(ConfigError, match="in use by a running node"):
        RunDirectory.claim(run)
    RunDirectory.clean_up(run)  # of another's controller: it is taken
    directory.empty()
    directory.make()
    assert tree(run) == {MARKER: directories._MARK.decode(), "t": None, "i": None, "root": None}
    assert [os.stat(run / name).st_mode & 0o777 for name in ("", "t", "i")] == [0o711, 0o700, 0o711]
    (run / "notes").touch()
    directory.remove()
    assert (run / "notes").exists(), "somebody put it there while the node ran"
    (run / "notes").unlink()
    directory.close()
    RunDirectory.clean_up(run)
    assert not run.exists()


def test_d2_parents_that_others_could_change_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for run, state in ((shared / "run", tmp_path / "s"), (tmp_path / "r", shared / "state")):
        assert f"other users may write to {shared}" in up(tmp_path, run, state, capsys)
    assert list(shared.iterdir()) == []
    shared.chmod(0o1777)  # as /tmp is
    directory = RunDirectory.claim(shared / "run")
    directory.remove()
    directory.close()
    if os.geteuid() == 0:
        os.chown(shared, 4242, -1)
        assert f"{shared} belongs to another user" in up(tmp_path, shared / "run", tmp_path / "s", capsys)


def test_d2_socket_paths_end_at_107_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / ("x" * (paths.MAX_RUN_NBYTES + 1 - len(str(tmp_path)) - 1))
    assert f"at most {paths.MAX_RUN_NBYTES} bytes" in up(tmp_path, run, tmp_path / "s", capsys)
    assert "write an absolute path" in up(tmp_path, Path("run"), tmp_path / "s", capsys)


def test_d2_the_default_run_directory_is_where_nobody_else_can_be_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert parse_config({"node": {"name": "n"}}).run_directory == Path("/run/dormouse/n")
    own, uid = tmp_path.stat().st_uid, 4_000_000_000 + os.getpid()  # nobody's, whose directory nobody has made
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert NodeConfig().run_directory == Path(f"/tmp/dormouse-{uid}/default"), "that of another user is not taken"
    monkeypatch.setattr(os, "geteuid", lambda: own)
    if own > 0:
        assert NodeConfig().run_directory == tmp_path / "dormouse" / "default"
    squatted = Path(f"/tmp/dormouse-{uid}")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    squatted.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigError, match="was made by another user; set XDG_RUNTIME_DIR"):
            _ = NodeConfig().run_directory
    finally:
        squatted.unlink()


def test_a_private_group_may_write_and_another_may_not(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.geteuid())
    assert directories._private_group(0)
    assert directories._private_group(user.pw_gid)
    assert not directories._private_group(4242)


def test_d2_a_tree_is_removed_however_deep_and_never_through_links(tmp_path: Path) -> None:
    victim = thesis(tmp_path / "victim")
    before = tree(victim)
    (tmp_path / "i").mkdir()
    fd = os.open(tmp_path / "i", os.O_RDONLY)
    for depth in range(3000):  # beyond Python's recursion and the length of a path
        os.symlink(victim, f"link{depth}", dir_fd=fd)
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (tmp_path / "i" / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "i" / "dormouse-removes-0").touch()
    (tmp_path / "i" / "closed" / "inner").chmod(0)
    (tmp_path / "i" / "closed").chmod(0)
    os.mkfifo(tmp_path / "i" / "fifo")
    remove_tree(str(tmp_path / "i"))
    assert not (tmp_path / "i").exists()
    assert tree(victim) == before
    (tmp_path / "link").symlink_to(victim)
    remove_tree(str(tmp_path / "link"))
    remove_tree(str(tmp_path / "never was"))
    assert tree(victim) == before
    assert not (tmp_path / "link").is_symlink()


def test_what_others_remove_meanwhile_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store and the executors take their sockets out of an instance's directory as the router removes it."""
    listed = os.listdir

    def overtaken(directory: int) -> list[str]:
        names = listed(directory)
        if "socket" in names:
            os.unlink("socket", dir_fd=directory)
        return names

    for place in (tmp_path / "i", tmp_path / "i" / "deep"):
        place.mkdir()
        (place / "socket").touch()
        (place / "other").touch()
    monkeypatch.setattr(os, "listdir", overtaken)
    remove_tree(str(tmp_path / "i"))
    assert not (tmp_path / "i").exists()


def test_who_has_a_directory_that_no_node_answers_for_is_named(tmp_path: Path) -> None:
    """A supervisor that was stopped as another took its place, and that one has ended."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    directories.lock(fd, tmp_path, "state directory")
    with subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, pass_fds=[fd]) as other:
        os.close(fd)  # as the lock of a node that has ended, it is the other one's alone
        fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(ConfigError) as refused:
            directories.lock(fd, tmp_path, "state directory")
        os.close(fd)
        other.kill()
    assert str(refused.value) == (
        f"state directory {tmp_path} is in use by a running node (pid {other.pid}); stop it with `dormouse down`, "
        f"`kill -KILL {other.pid}` if that finds none, or give this node another name"
    )
