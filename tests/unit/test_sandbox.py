"""Confinement: each escape of notes/feasibility.md, tried from a confined child of a small stand-in for the zygote."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import needs
import pytest

from dormouse.core import shm
from dormouse.core.sandbox import confinement, environment, linux, mounts, view
from dormouse.core.sandbox.mounts import BoundPath, Cover
from dormouse.schemas import messages
from dormouse.schemas.errors import ProcessFailed

# Runs as a program of its own: it gives up rights that pytest needs. Prints one JSON object.
ZYGOTE = r"""
import ctypes, fcntl, json, mmap, os, signal, socket, sys
from dormouse.client_shim.node import mappings
from dormouse.core.sandbox import confinement, linux, pagetable, view
from dormouse.core.shm import SharedMemory

level_name, folder = sys.argv[1:]
run, state = folder + "/r", folder + "/s"
level = confinement.Level()
if level_name == "best":
    level = confinement.become_authority()
    if level.pid and (child := os.fork()):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    level = confinement.probe(level, view.gather(run, state), run + "/root", 61000)
host_pid = int(os.readlink("/proc/self"))  # as an instance that still sees our /proc would name us
linux.set_dumpable(False)
trusted = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
trusted.bind(run + "/t/zygote.1")
trusted.listen()
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\0dormouse-test-%d" % host_pid)
abstract.listen()
web = socket.socket()
web.bind(("127.0.0.1", 0))
web.listen()
victim = SharedMemory.create("victim", 4096)
arena = SharedMemory.create("arena", 4096)
os.set_inheritable(victim.fd, True)
os.environ["AWS_SECRET"] = "hunter2"
directory = run + "/i/mine"
uid = 61000 if level.own_uid else os.getuid()
os.mkdir(directory, 0o700)
os.chown(directory, uid, uid)
out, sink = os.pipe()
report, report_write = os.pipe()
zygote_pid = os.getpid()
if level.pid:
    linux.unshare(linux.CLONE_NEWPID)
pid = os.fork()
if pid:
    os.close(sink)
    text = b""
    while piece := os.read(out, 65536):
        text += piece
    if not text.startswith(b"{"):
        sys.exit(text.decode() or "the confined child said nothing")
    print(json.dumps({"level": str(level)} | json.loads(text)))
    sys.exit(0)
cell = confinement.Cell(
    directory=directory,
    uid=uid,
    limits={"NOFILE": 64},
    folder=folder + "/s/functions",
    zygote_pid=zygote_pid,
    place=run + "/root",
    scratch_nbytes=1 << 20,
)
own = confinement.confine(level, view.gather(run, state), cell, sink, [arena.fd])

def attempt(what):
    try:
        result = what()
    except (OSError, ValueError) as error:
        return f"refused: {error}"
    return "done: " + repr(result)

def ptrace(target):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, target, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")

def connect(family, kind, address):
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        client.connect(address)

status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
def page_table():
    with open(os.__file__, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping[0]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    asked = mappings.Mappings()
    entry = int.from_bytes(os.pread(asked._page_table_fd, 8, address // mmap.PAGESIZE * 8), sys.byteorder)
    found = asked.file_at(address, len(mapping))
    asked.close()
    return {"path": found and found.path.decode(), "present": entry >> 63, "frame": entry & (1 << 55) - 1}

found = {
    "kill parent": attempt(lambda: os.kill(host_pid, 0)),
    "kill parent by its own name": attempt(lambda: os.kill(zygote_pid, 0)) if zygote_pid != 1 else "refused: it is 1",
    "kill everything": attempt(lambda: os.kill(-1, 0)) if level_name == "best" else "",
    "trace parent": attempt(lambda: ptrace(host_pid)),
    "parent's descriptors": attempt(lambda: os.listdir(f"/proc/{host_pid}/fd")),
    "parent's memory file": attempt(lambda: os.open(f"/proc/{host_pid}/fd/{victim.fd}", os.O_RDWR)),
    "parent's environment": attempt(lambda: open(f"/proc/{host_pid}/environ", "rb").read()),
    "trusted socket": attempt(lambda: connect(socket.AF_UNIX, socket.SOCK_SEQPACKET, run + "/t/zygote.1")),
    "abstract socket": attempt(lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0dormouse-test-%d" % host_pid)),
    "network": attempt(lambda: connect(socket.AF_INET, socket.SOCK_STREAM, web.getsockname())),
    "neighbour": attempt(lambda: os.listdir(run + "/i/other")),
    "state": attempt(lambda: open(state + "/catalogue.sqlite3").read()),
    "shrink arena": attempt(lambda: os.ftruncate(arena.fd, 0)),
    "grow arena": attempt(lambda: os.ftruncate(arena.fd, 8192)),
    "become root": attempt(lambda: os.setresuid(0, 0, 0)) if uid else "refused: we are",
    "write to the system": attempt(lambda: open("/etc/dormouse-was-here", "w").close()),
    "raise a limit": attempt(lambda: __import__("resource").setrlimit(7, (4096, 4096))),
    "own file": attempt(lambda: open(os.environ["HOME"] + "/x", "w").write("x")),
    "scratch file": attempt(lambda: open(os.environ["TMPDIR"] + "/x", "w").write("x")),
    "file beside the function": attempt(lambda: open(own + "/data.txt").read()),
    "devices": sorted(os.listdir("/dev")),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "arena": arena.fd,
    "page table": pagetable._kept[1],
    "mapped file": page_table(),
    "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    "environment": dict(os.environ),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "uid": os.getuid(),
    "groups": os.getgroups(),
    "session": os.getsid(0) == os.getpid(),
    "status": {name: status[name].strip() for name in ("NoNewPrivs", "CapEff", "CapPrm", "CapBnd")},
    "stdin": os.read(0, 1).decode(),
}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def try_escapes(level: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dms-") as folder:
        os.chmod(folder, 0o755)
        for path, mode in (("r", 0o711), ("r/t", 0o700), ("r/i", 0o711), ("r/i/other", 0o700), ("s", 0o700)):
            os.mkdir(f"{folder}/{path}")
            os.chmod(f"{folder}/{path}", mode)
        os.mkdir(f"{folder}/r/root")
        Path(folder, "s", "catalogue.sqlite3").write_text("secret")
        Path(folder, "s/functions").mkdir(mode=0o755)
        Path(folder, "s/functions/data.txt").write_text("weights")
        command = [sys.executable, "-P", "-c", ZYGOTE, level, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert "status" in found, (found, done.stderr)
        return found


@pytest.fixture(scope="module")
def escapes() -> dict[str, Any]:
    return try_escapes("best")


def test_this_host_gives_more_than_trust(escapes: dict[str, Any]) -> None:
    if "trusted functions only" in escapes["level"]:
        pytest.skip("needs a host that allows namespaces or uids of our own")
    assert escapes["level"].split("+")[0] in ("own-uid", "same-uid")


@pytest.mark.parametrize(
    "what",
    [
        "kill parent",
        "kill parent by its own name",
        "kill everything",
        "trace parent",
        "parent's descriptors",
        "parent's memory file",
        "parent's environment",
        "trusted socket",
        "neighbour",
        "state",
        "shrink arena",
        "grow arena",
        "become root",
        "write to the system",
        "raise a limit",
    ],
)
def test_escape_is_refused(escapes: dict[str, Any], what: str) -> None:
    if "trusted functions only" in escapes["level"]:
        pytest.skip("needs a host that allows namespaces or uids of our own")
    assert escapes[what].startswith("refused"), escapes


def test_network_is_refused(escapes: dict[str, Any]) -> None:
    if "+net" not in escapes["level"]:
        pytest.skip("needs network namespaces")
    assert escapes["network"].startswith("refused")
    assert escapes["abstract socket"].startswith("refused")


def test_only_own_processes_and_plain_devices(escapes: dict[str, Any]) -> None:
    if "+pid+mount" not in escapes["level"]:
        pytest.skip("needs namespaces")
    assert len(escapes["processes"]) == 1
    assert escapes["devices"] == [
        "fd",
        "full",
        "null",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "urandom",
        "zero",
    ]


@pytest.mark.parametrize("level", ["best", pytest.param("none", marks=needs.ROOT)])
def test_an_instance_knows_which_of_its_pages_are_a_files_and_not_where_they_are(
    level: str, escapes: dict[str, Any]
) -> None:
    found = escapes if level == "best" else try_escapes("none")
    assert found["mapped file"] == {"path": os.__file__, "present": 1, "frame": 0}


@pytest.mark.parametrize("level", ["best", pytest.param("none", marks=needs.ROOT)])
def test_what_every_level_gives(level: str, escapes: dict[str, Any]) -> None:
    found = escapes if level == "best" else try_escapes("none")
    known = {0, 1, 2, found["arena"], found["page table"]}
    assert len(set(found["descriptors"]) - known) <= 1  # that with which they were listed
    assert not found["dumpable"]
    assert "AWS_SECRET" not in found["environment"]
    assert found["environment"]["HF_HUB_OFFLINE"] == "1"
    home = found["environment"]["HOME"]
    assert home == view.HOME if "+mount" in found["level"] else home.endswith("/r/i/mine/home")
    assert found["status"]["NoNewPrivs"] == "1"
    assert {int(found["status"][name], 16) for name in ("CapEff", "CapPrm")} == {0}
    assert found["shrink arena"].startswith("refused")
    assert found["session"]
    assert found["stdin"] == ""
    for path in ("own file", "scratch file"):
        assert found[path] == "done: 1"
    assert found["file beside the function"] == "done: 'weights'"


def test_an_environment_that_is_a_link_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "state" / "KEY" / "site").mkdir(parents=True)
    (tmp_path / "by").symlink_to(tmp_path / "state")  # above it the node's owner may have links
    confinement.expect_no_link(str(tmp_path / "by" / "KEY" / "site"))
    (tmp_path / "state" / "KEY" / "site").rmdir()
    (tmp_path / "state" / "KEY" / "site").symlink_to("..")
    with pytest.raises(ProcessFailed, match="is a link"):
        confinement.expect_no_link(str(tmp_path / "by" / "KEY" / "site"))


def test_a_window_opens_only_what_a_cover_hides() -> None:
    steps = mounts.plan(
        [
            Cover(path="/"),
            Cover(path="/home/me"),
            Cover(path="/run/node"),
            Cover(path="/run/node/state"),
            Cover(path="/tmp", scratch=True),
        ],
        [
            BoundPath(path="/usr"),
            BoundPath(path="/home/me/project"),
            BoundPath(path="/usr/lib"),
            BoundPath(path="/run/node/i/a"),
            BoundPath(path="/tmp/f"),
            BoundPath(path="/usr/function", source="/var/snapshots/f"),
        ],
    )
    assert steps == [
        Cover(path="/tmp", scratch=True),
        BoundPath(path="/usr"),
        BoundPath(path="/tmp/f"),
        BoundPath(path="/usr/function", source="/var/snapshots/f"),
        BoundPath(path="/home/me/project"),
        BoundPath(path="/run/node/i/a"),
    ]


def test_an_instance_can_import_what_it_runs_from(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [path for path in sys.path if "site-packages" in path or path.startswith(sys.base_prefix)]
    monkeypatch.setattr(sys, "path", installed)  # without the checkout, which pytest may have put there
    windows = [window.path + os.sep for window in view.gather("/run/d", "/var/d").windows]
    for module in (confinement, messages, shm, pytest):
        file = os.path.realpath(str(module.__file__))
        assert any(file.startswith(path) for path in windows), file


def test_a_secret_below_a_window_is_covered_again() -> None:
    steps = mounts.plan([Cover(path="/"), Cover(path="/tmp"), Cover(path="/tmp/x/run")], [BoundPath(path="/tmp/x")])
    assert steps == [BoundPath(path="/tmp/x"), Cover(path="/tmp/x/run")]


def test_a_cover_wins_over_a_window_of_the_same_path() -> None:
    assert mounts.plan([Cover(path="/"), Cover(path="/root")], [BoundPath(path="/root")]) == []


def test_links_on_the_way_are_found(tmp_path: Path) -> None:
    (tmp_path / "data" / "env" / "bin").mkdir(parents=True)
    (tmp_path / "home").symlink_to("data")
    (tmp_path / "data" / "env" / "python").symlink_to("../../home/env/bin")
    path = str(tmp_path / "home" / "env" / "python" / "x")
    here = os.path.realpath(tmp_path)
    known = {link: to for link, to in mounts.links_on(path).items() if link.startswith(here)}
    assert known == {f"{here}/home": "data", f"{here}/data/env/python": "../../home/env/bin"}


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    here = os.path.realpath(tmp_path)
    assert {f"{here}/a": "b", f"{here}/b": "a"}.items() <= mounts.links_on(str(tmp_path / "a")).items()


def test_environment_is_an_allow_list() -> None:
    given = {"PATH": "/bin", "LC_ALL": "C", "TOKEN": "t", "HF_TOKEN": "t", "HTTP_PROXY": "p", "LD_PRELOAD": "x"}
    assert environment.scrubbed(given) == {"PATH": "/bin", "LC_ALL": "C"}
    assert environment.scrubbed(given, ["TOKEN"])["TOKEN"] == "t"


def test_level_names() -> None:
    assert str(confinement.Level()) == "same-uid (trusted functions only)"
    assert str(confinement.Level(own_uid=True)) == "own-uid"
    full = confinement.Level(own_uid=True, pid=True, mount=True, ipc=True, net=True, seccomp=True)
    assert str(full) == "own-uid+pid+mount+ipc+net+seccomp"
    assert full.flags == linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWNET


def test_host_pid() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert linux.host_pid(pidfd) == os.getpid()
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)
