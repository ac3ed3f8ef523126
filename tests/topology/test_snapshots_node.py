"""Who administrates a node, and what it then runs: deployers of other uids, hostile ones, folders that go away."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.nodes.testnode import TestNode, kept_running
from dormouse.core.links.fds import PacketSocket
from dormouse.core.paths import BLOBS
from dormouse.schemas import admin as a

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
]

FRIEND, STRANGER = 12345, 54321

MOOD = """
import os
import torch
from safetensors.torch import load_file
import neighbour

def load():
    return load_file("./my-model/model.safetensors", device="cuda")

def handle(state, request):
    if request == "where":
        return [__file__, os.getcwd(), neighbour.__file__, sorted(os.listdir("."))]
    if request == "raise":
        raise KeyError("x")
    if request == "write":
        open(__file__, "a")
    return state["weight"].sum().item()
"""

# What the command imports later is imported before: the interpreter may lie where the other user may not look.
AS = """
import difflib, os, sys
import dormouse.core.cli.main, dormouse.core.config, dormouse.core.links.fds, dormouse.core.node.nodeprocess
import dormouse.schemas.admin
uid = int(sys.argv.pop(1))
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
os.environ["HOME"] = sys.argv.pop(1)
dormouse.core.cli.main.main()
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)
        config = '[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nfolder_files = 40\n'
        with kept_running(TestNode(Path(directory), config, node=f'admins = ["{FRIEND}"]')) as running:
            yield running


@pytest.fixture(scope="module")
def home(node: TestNode) -> Path:
    """A user's own, which nobody else may enter, with a function in it; weights of mode 0600."""
    home = node.directory / "home"
    own = home / "mood"
    (own / "my-model").mkdir(parents=True)
    (own / "mood.py").write_text(MOOD)
    (own / "neighbour.py").write_text("")
    weights = {"weight": torch.ones(1 << 19)}
    safetensors.torch.save_file(weights, own / "my-model" / "model.safetensors")
    (own / "my-model" / "model.safetensors").chmod(0o600)
    for path in (home, *home.rglob("*")):
        os.chown(path, FRIEND, FRIEND)
    home.chmod(0o700)
    return home


def dormouse(node: TestNode, uid: int, home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command, as another user."""
    command = [sys.executable, "-P", "-c", AS, str(uid), str(home), "--run", str(node.run), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), cwd="/")


def kept(node: TestNode) -> set[str]:
    """What lies in the directory of snapshots, and in that of blobs; what others have left may go while we look."""
    top = node.state / "functions"
    paths = (Path(folder, name) for folder, folders, files in os.walk(top) for name in (*folders, *files))
    return {str(path.relative_to(top)) for path in paths if path.relative_to(top).parts[0] != "mood"} - {BLOBS}


def test_n3_weights_that_only_their_owner_may_read(node: TestNode, home: Path) -> None:
    """In a folder that only their owner may enter, deployed by that owner to a node of root's; then the folder goes."""
    done = dormouse(node, FRIEND, home, "deploy", "mood", str(home / "mood"))
    assert (done.returncode, done.stdout) == (0, "mood version 1 is deployed\n"), done.stderr
    assert node.result("mood", "sum") == float(1 << 19)
    where = ["/function/mood.py", "/function", "/function/neighbour.py"]
    assert node.result("mood", "where") == [*where, ["mood.py", "my-model", "neighbour.py"]]
    failed = node.invoke("mood", "raise")
    assert (failed.code, "mood.py" in failed.message) == ("function_raised", False)
    assert 'File "/function/mood.py", line' in node.told("mood", "raise").message
    assert "Permission denied" in node.invoke("mood", "write").message
    (home / "mood").rename(home / "gone")
    (home / "gone" / "mood.py").write_text("raise SystemExit")
    node.kill_all()
    node.start()
    assert node.result("mood", "sum") == float(1 << 19)
    (home / "gone" / "mood.py").write_text(MOOD)
    (home / "gone").rename(home / "mood")


def test_d1_a_deployer_gives_only_what_it_may_read(node: TestNode, home: Path) -> None:
    secret = node.directory / "secret"
    secret.write_text("root's own")
    secret.chmod(0o600)
    thief = home / "thief"
    thief.mkdir()
    (thief / "function.py").write_text("def load(): ...\ndef handle(state, request): return open('secret').read()\n")
    (thief / "secret").symlink_to(secret)
    os.chown(thief, FRIEND, FRIEND)
    before = kept(node)
    done = dormouse(node, FRIEND, home, "deploy", "thief", str(thief))
    assert (done.returncode, "Permission denied" in done.stderr) == (2, True), done.stderr
    assert node.invoke("thief").status == 404
    node.wait(lambda: kept(node) <= before, 60, "nothing of it to stay")


def test_d1_a_user_who_is_not_named_does_nothing(node: TestNode, home: Path) -> None:
    file = node.directory / "f" / "f.py"
    file.parent.mkdir()
    file.write_text("def load(): ...\ndef handle(state, request): return 1\n")
    node.deployed("prey", file.read_text())
    for words in (["ls"], ["status"], ["logs", "prey"], ["rm", "prey", "-y"], ["deploy", "x", str(file)]):
        done = dormouse(node, STRANGER, Path("/"), *words)
        assert (done.returncode, done.stderr[:20]) == (5, "dormouse: forbidden:"), (words, done.stderr)
    assert node.result("prey", {}) == 1
    assert dormouse(node, FRIEND, home, "rm", "prey", "-y").returncode == 0


def hears(sock: PacketSocket[a.FromNode, a.ToNode]) -> Any:
    packet = sock.recv()
    return packet[0] if packet is not None else None


def test_d1_hostile_descriptors(node: TestNode) -> None:
    """What snapshots refuse (tests/unit/test_snapshots.py) ends the caller's deploy, and leaves nothing."""
    before, pids = kept(node), node.pids()
    (node.directory / "plain").write_text("plain")
    plain = os.open(node.directory / "plain", os.O_RDONLY)
    writable = os.open(node.directory / "plain", os.O_RDWR)
    directory = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
    attacks: dict[str, tuple[a.ToNode, list[int], str]] = {
        "a directory": (a.Files(names=["etc"]), [directory], "bad_file"),
        "for writing": (a.Files(names=["f.py"]), [writable], "bad_file"),
        "upwards": (a.Files(names=["../../escape"]), [plain], "bad_name"),
        "more names": (a.Files(names=["a", "b"]), [plain], "bad_request"),
        "more descriptors": (a.Files(names=["a"]), [plain, plain], "bad_request"),
        "another act": (a.Remove(name="mood"), [], "bad_request"),
        "an end with descriptors": (a.Finish(), [plain], "bad_request"),
        "no function": (a.Finish(), [], "bad_request"),
        "too many": (a.Files(names=[f"f{n}" for n in range(41)]), [plain] * 41, "folder_too_large"),
    }
    for name, (message, fds, code) in attacks.items():
        sock: PacketSocket[a.FromNode, a.ToNode] = PacketSocket.connect(str(node.run / "admin"), a.FromNode, 60)
        assert isinstance(hears(sock), a.Welcome)
        sock.send(a.Deploy(name="hostile", entry="f.py"))
        assert isinstance(hears(sock), a.Taken)
        sock.send(message, fds)
        said = hears(sock)
        assert isinstance(said, a.Refused), (name, said)
        assert said.code == code, (name, said)
        assert hears(sock) is None
        sock.close()
    # One that leaves in the middle, with files on their way.
    sock = PacketSocket.connect(str(node.run / "admin"), a.FromNode, 60)
    hears(sock)
    sock.send(a.Deploy(name="hostile", entry="f.py"))
    hears(sock)
    sock.send(a.Files(names=["f.py"]), [plain])
    sock.close()
    # Garbage, and acts with descriptors that have no place there.
    for data, fds in ((b"\xc1", []), (b"\x91\x06", [plain]), (b"x" * 70_000, [])):
        sock = PacketSocket.connect(str(node.run / "admin"), a.FromNode, 60)
        hears(sock)
        sock.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        socket.send_fds(sock.sock, [data], fds)
        said = hears(sock)
        assert said is None or (isinstance(said, a.Refused) and said.code == "bad_request"), said
        sock.close()
    for fd in (plain, writable, directory):
        os.close(fd)
    node.wait(lambda: kept(node) <= before, 60, "nothing of them to stay")  # what others have left may go meanwhile
    assert node.pids() == pids
    assert node.invoke("hostile").status == 404
