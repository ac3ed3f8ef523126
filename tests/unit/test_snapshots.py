"""Snapshots of functions' folders, made of descriptors that a stranger could have sent."""

import asyncio
import ctypes
import errno
import fcntl
import io
import os
import queue
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dormouse.core import folder
from dormouse.core.cli import functionfile
from dormouse.core.paths import BLOBS
from dormouse.gpuserver.store.disk.blobs import Blobs
from dormouse.gpuserver.store.ingest.offers import identity_of
from dormouse.router.admin import archive
from dormouse.router.admin.deploying import Deploying
from dormouse.router.admin.keeper import THREADS, Keeper
from dormouse.router.admin.snapshots import BLOB_NBYTES, Snapshots, Upload
from dormouse.router.front.exchange import HttpError

WAIT_S = 90.0
BIG = os.urandom(BLOB_NBYTES)


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    (tmp_path / "functions").mkdir(mode=0o700)
    return Snapshots(tmp_path / "functions", most_nbytes=4 * BLOB_NBYTES, most_files=8)


@pytest.fixture
def upload(snapshots: Snapshots) -> Upload:
    return snapshots.begin("f")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A descriptor of a new file with these bytes."""
    fds = []

    def make(data: bytes = b"x", flags: int = os.O_RDONLY, name: str = "source") -> int:
        (tmp_path / name).write_bytes(data)
        fds.append(os.open(tmp_path / name, flags))
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


def refusal(act: Callable[..., Any], *args: Any) -> tuple[int, str]:
    with pytest.raises(HttpError) as caught:
        act(*args)
    return caught.value.failure.status, caught.value.failure.code


def left(snapshots: Snapshots) -> list[str]:
    return sorted(str(path.relative_to(snapshots.directory)) for path in snapshots.directory.rglob("*"))


def test_files_are_kept_as_they_were(snapshots: Snapshots, upload: Upload, opened: Any, tmp_path: Path) -> None:
    program = opened(b"#!/bin/sh", name="program")
    os.chmod(tmp_path / "program", 0o700)
    upload.take(["f.py", "bin/run", "model/weights"], [opened(b"code"), program, opened(BIG, name="weights")])
    (tmp_path / "source").write_bytes(b"something else")
    (tmp_path / "weights").unlink()
    upload.finish("f.py")
    tree = upload.tree
    assert (tree / "f.py").read_bytes() == b"code"
    assert (tree / "model" / "weights").read_bytes() == BIG
    modes = {path.name: path.stat().st_mode & 0o777 for path in tree.rglob("*")}
    assert modes == {"f.py": 0o444, "bin": 0o755, "run": 0o555, "model": 0o755, "weights": 0o444}
    assert snapshots.tree("f", upload.snapshot) == tree


def test_large_files_are_kept_once(snapshots: Snapshots, opened: Any) -> None:
    first, second = snapshots.begin("f"), snapshots.begin("g")
    for each in (first, second):
        each.take(["f.py", "weights"], [opened(b"code"), opened(BIG, name="weights")])
    (blob,) = (snapshots.directory / BLOBS).iterdir()
    assert {path.stat().st_ino for path in (blob, first.tree / "weights", second.tree / "weights")} == {
        blob.stat().st_ino
    }
    snapshots.remove([first.tree])
    assert (second.tree / "weights").read_bytes() == BIG
    snapshots.remove([second.tree])
    assert left(snapshots) == [BLOBS]


def test_d1_a_large_file_is_known_again_whatever_its_times_say(snapshots: Snapshots, opened: Any) -> None:
    """`link` changes a file's time of change, and a snapshot is always young: the hash is its name instead."""
    blobs = Blobs(snapshots.directory / BLOBS)
    identities = []
    for name in ("f", "g"):
        upload = snapshots.begin(name)
        upload.take(["weights"], [opened(BIG, name="weights")])
        found = (upload.tree / "weights").stat()
        identities.append(identity_of(found, False, 0, BLOB_NBYTES, "node", blobs.name_of(found)))
    assert identities[0] == identities[1] is not None
    other = snapshots.begin("h")
    other.take(["weights"], [opened(bytes(BLOB_NBYTES), name="zeros")])
    found = (other.tree / "weights").stat()
    assert blobs.name_of(found) not in ("", blobs.name_of((upload.tree / "weights").stat()))


def test_d1_what_only_looks_like_a_blob_is_none(snapshots: Snapshots, upload: Upload, opened: Any) -> None:
    upload.take(["weights"], [opened(BIG, name="weights")])
    directory = snapshots.directory / BLOBS
    elsewhere = snapshots.directory / "elsewhere"
    elsewhere.write_bytes(BIG)
    os.link(elsewhere, snapshots.directory / "twice")
    elsewhere.chmod(0o444)
    assert Blobs(directory).name_of(elsewhere.stat()) == ""
    # What was a blob when the directory was read, and is no more.
    blobs, found = Blobs(directory), (upload.tree / "weights").stat()
    assert blobs.name_of(found) != ""
    (blob,) = directory.iterdir()
    blob.unlink()
    assert blobs.name_of(found) == ""


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc/passwd", "../f.py", "a/../../b", "a//b", "a/", "./a", "a\0b", "x" * 1025, "a/" + "y" * 256],
)
def test_d1_names_that_are_none(snapshots: Snapshots, upload: Upload, opened: Any, name: str) -> None:
    assert refusal(upload.take, [name], [opened()]) == (400, "bad_name")
    upload.give_up()
    assert left(snapshots) == [BLOBS]


@pytest.mark.parametrize("names", [["a", "a"], ["a", "a/b"], ["a/b", "a"]])
@pytest.mark.parametrize("data", [b"x", BIG])
def test_d1_names_that_were_said_before(upload: Upload, opened: Any, names: list[str], data: bytes) -> None:
    upload.take(names[:1], [opened(b"first")])
    assert refusal(upload.take, names[1:], [opened(data, name="again")]) == (400, "bad_name")
    assert [path.read_bytes() for path in upload.tree.rglob("*") if path.is_file()] == [b"first"]


def test_d1_descriptors_that_prove_no_right_to_read(upload: Upload, opened: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader, writer = os.pipe()
    fds = [
        opened(flags=os.O_RDWR),
        opened(flags=os.O_WRONLY),
        opened(flags=os.O_PATH),
        os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY),
        os.open(fifo, os.O_RDONLY | os.O_NONBLOCK),
        os.open("/dev/zero", os.O_RDONLY),
        os.open("/proc/self/environ", os.O_RDONLY),
        os.open("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY),
        reader,
    ]
    for fd in fds:
        assert refusal(upload.take, ["a"], [fd]) == (400, "bad_file"), os.readlink(f"/proc/self/fd/{fd}")
    for fd in (*fds[3:], writer):
        os.close(fd)
    assert refusal(upload.take, ["a", "b"], [opened()]) == (400, "bad_request")
    assert list(upload.tree.iterdir()) == []


@pytest.mark.parametrize("data", [b"x" * 10, BIG])
@pytest.mark.parametrize("change", ["shrinks", "grows", "is written"])
def test_d1_a_file_that_changes_while_it_is_copied(
    snapshots: Snapshots, upload: Upload, opened: Any, tmp_path: Path, data: bytes, change: str
) -> None:
    fd = opened(data)
    size = len(data)

    def read(offset: int, nbytes: int) -> bytes:
        if change == "shrinks":
            os.truncate(tmp_path / "source", size // 2)
        elif change == "grows":
            with open(tmp_path / "source", "ab") as file:
                file.write(b"more")
        return os.pread(fd, nbytes, offset)

    if change == "is written":
        # Between two looks at its size nothing differs but the times.
        step = os.fstat

        def stat_and_write(number: int) -> os.stat_result:
            found = step(number)
            if number == fd:
                with open(tmp_path / "source", "r+b") as file:
                    file.write(b"y")
                os.utime(tmp_path / "source", ns=(1, 1))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dormouse.router.admin.snapshots.os.fstat", stat_and_write)
            assert refusal(upload.take, ["f.py"], [fd]) == (409, "changed_while_read")
    else:
        assert refusal(upload.add, "f.py", size, False, read) == (409, "changed_while_read")
    upload.give_up()
    assert left(snapshots) == [BLOBS]


def test_d1_more_than_a_folder_may_have(snapshots: Snapshots, upload: Upload, opened: Any) -> None:
    upload.take([f"f{number}" for number in range(8)], [opened()] * 8)
    assert refusal(upload.take, ["one more"], [opened()]) == (413, "folder_too_large")
    large = snapshots.begin("g")
    large.take(["a", "b", "c"], [opened(BIG)] * 3)
    assert refusal(large.take, ["d"], [opened(BIG + b"x")]) == (413, "folder_too_large")
    for each in (upload, large):
        each.give_up()
    assert left(snapshots) == [BLOBS]


def test_d1_folders_count_and_are_not_too_deep(snapshots: Snapshots, upload: Upload, opened: Any) -> None:
    """Each takes as much as a small file, and a name may have hundreds."""
    upload.take(["a/b/c/f.py", "a/b/c/g.py", "a/b/h.py"], [opened()] * 3)
    assert refusal(upload.take, ["d/e/f.py"], [opened()]) == (413, "folder_too_large")
    deep = snapshots.begin("g")
    snapshots.most_files = 200
    deep.take([f"{'a/' * 99}f.py"], [opened()])
    assert refusal(deep.take, [f"{'a/' * 100}f.py"], [opened()]) == (400, "bad_name")
    for each in (upload, deep):
        each.give_up()
    assert left(snapshots) == [BLOBS]


def bounded(snapshots: Snapshots) -> Snapshots:
    """Where a tenant may have two large files and half of another, and small ones."""
    return Snapshots(snapshots.directory, 1 << 30, 99, lambda tenant: 5 * BLOB_NBYTES // 2)


def test_d1_what_a_tenants_folders_have_together_is_bounded(snapshots: Snapshots, opened: Any) -> None:
    all_ = bounded(snapshots)
    first, again, more = (all_.begin(name, tenant="a") for name in "ffg")
    other = all_.begin("h", tenant="b")
    for each in (first, again):  # a version that changes little takes little
        each.take(["f.py", "one"], [opened(name="small"), opened(BIG)])
    more.take(["two"], [opened(BIG[::-1])])
    assert refusal(more.take, ["three"], [opened(BIG + b"x")]) == (507, "folders_full")
    other.take(["three"], [opened(BIG + b"x")])
    more.give_up()
    later = bounded(snapshots)  # another process
    later.count([("f", first.snapshot, "a"), ("f", again.snapshot, "a"), ("h", other.snapshot, "b"), ("h", "0", "b")])
    for of in (all_, later):
        with pytest.raises(HttpError) as caught:
            of.charge(Path("x"), "a", 3 * BLOB_NBYTES // 2 - 2 * 4096 + 1)
        said = "tenant 'a' would have 2,621,441 bytes, with versions that are kept, and may have 2,621,440 bytes"
        assert f"the folders of {said} (limits.tenant_folders)" in caught.value.failure.text
        assert of.put(Path("x"), "a", -1) == (5 * BLOB_NBYTES // 2, 0)
        of.drop(Path("x"))
    later.remove([first.tree])
    assert later.put(again.tree, "a", 0) == (BLOB_NBYTES + 4096, 0)
    later.remove([again.tree])
    assert later.put(other.tree, "a", 0) == (0, 0)


def test_d1_an_archive_counts_as_it_comes(snapshots: Snapshots) -> None:
    all_ = bounded(snapshots)
    upload, none = all_.begin("f", tenant="a"), None
    deploying = Deploying(Keeper(all_), none, upload, none)  # type: ignore[arg-type]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield bytes(BLOB_NBYTES // 2)

    assert refusal(lambda: asyncio.run(deploying.unpack(3 * BLOB_NBYTES, pieces()))) == (507, "folders_full")
    assert all_.put(upload.tree, "a", 0) == (0, 0), "nothing of it is there"
    small = tarred((member("f.py"), b"code"))

    async def whole() -> AsyncIterator[bytes]:
        yield small

    asyncio.run(deploying.unpack(len(small), whole()))
    assert all_.put(upload.tree, "a", 0) == (4096, 0), "what came of it is"


def test_a_disk_without_room(snapshots: Snapshots, upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(snapshots.directory)
    nbytes = disk.f_bavail * disk.f_frsize + (1 << 30)
    snapshots.most_nbytes = 2 * nbytes
    assert refusal(upload.add, "f.py", nbytes, False, lambda *_: b"x") == (507, "disk_full")


def test_an_archive_that_the_disk_does_not_take_leaves_nothing(
    snapshots: Snapshots, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = snapshots.directory / "half"
    half.symlink_to("/dev/full")
    monkeypatch.setattr(snapshots, "half", lambda: half)
    none: Any = None
    deploying = Deploying(Keeper(snapshots), none, upload, none)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"small enough for a buffer"

    assert refusal(lambda: asyncio.run(deploying.unpack(25, pieces()))) == (507, "disk_full")
    assert not half.is_symlink()


def test_a_folder_without_the_functions_file(upload: Upload, opened: Any) -> None:
    upload.take(["g.py"], [opened()])
    assert refusal(upload.finish, "f.py") == (400, "bad_request")
    assert refusal(upload.finish, "../f.py") == (400, "bad_name")


def test_what_a_crash_leaves_goes_at_the_next_start(snapshots: Snapshots, opened: Any) -> None:
    kept, lost = snapshots.begin("f"), snapshots.begin("f")
    for each in (kept, lost, snapshots.begin("g")):
        each.take(["f.py"], [opened(BIG)])
    (snapshots.directory / BLOBS / ".half").write_bytes(b"half")
    again = Snapshots(snapshots.directory, 1, 1)
    again.remove(again.strays([("f", kept.snapshot)]))
    (blob,) = (snapshots.directory / BLOBS).iterdir()
    assert left(snapshots) == [f"{BLOBS}", f"{BLOBS}/{blob.name}", "f", f"f/{kept.snapshot}", f"f/{kept.snapshot}/f.py"]


def test_deploys_and_removals_at_the_same_time(snapshots: Snapshots, opened: Any) -> None:
    """No blob goes that another tree is about to have."""
    fd = opened(BIG)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(20):
                upload = snapshots.begin(name)
                upload.take(["f.py"], [fd])
                assert (upload.tree / "f.py").stat().st_size == BLOB_NBYTES
                upload.give_up()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "aabb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert left(snapshots) == [BLOBS]


# --- the caller's side


def travelling(path: Path) -> dict[str, bytes]:
    found = {}
    for name, fd in folder.files(folder.find(path)):
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with open(fd, "rb") as file:
            found[name] = file.read()
    return found


def test_what_travels(tmp_path: Path) -> None:
    own = tmp_path / "own"
    outside = tmp_path / "outside"
    for directory in ("model/deep", ".git", "__pycache__", "venv"):
        (own / directory).mkdir(parents=True)
    outside.mkdir()
    for name in ("mood.py", "model/deep/w", ".git/config", "__pycache__/mood.pyc", "venv/lib.py"):
        (own / name).write_text(name)
    for name in ("venv/pyvenv.cfg", ".env", ".gitignore", "model/.env.local", ".DS_Store"):
        (own / name).touch()
    (outside / "blob").write_text("blob")
    (own / "linked").symlink_to(outside / "blob")
    (own / "elsewhere").symlink_to(outside)
    (own / "dangling").symlink_to("nowhere")
    os.mkfifo(own / "pipe")
    expected = {name: name.encode() for name in ("mood.py", "model/deep/w")} | {"linked": b"blob"}
    assert travelling(own / "mood.py") == expected
    assert folder.left_out(folder.find(own / "mood.py")) == [".env", "model/.env.local"]


def test_what_a_folders_owner_leaves_out_and_takes_along(tmp_path: Path) -> None:
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / ".keep").mkdir()
    for name in ("mood.py", ".env", "old.pt", "best.pt", "data/deep/x", ".keep/y", ".other", ".private"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".dormouseignore").write_text("# mine\n*.pt\n!best.pt\n/data/\n!.env\n!.keep/\n.private\n")
    found = folder.find(tmp_path / "mood.py")
    assert sorted(travelling(tmp_path / "mood.py")) == [".env", ".keep/y", "best.pt", "mood.py"]
    assert folder.left_out(found) == [".other"]  # of what was named, its owner knows
    for content, says in (
        (b"*.py\n", "mood.py is left out by .*; add the line !mood.py"),
        (b"!\n", "Invalid git pattern"),
        (b"\xff", "cannot be read as UTF-8"),
    ):
        (tmp_path / ".dormouseignore").write_bytes(content)
        with pytest.raises(folder.NoFunction, match=says):
            travelling(tmp_path / "mood.py")


@pytest.mark.parametrize(("marker", "what"), [(".dormouse-run", "run"), ("catalogue.sqlite3", "state")])
def test_d2_a_functions_folder_and_a_nodes_directories_do_not_contain_one_another(
    tmp_path: Path, marker: str, what: str
) -> None:
    own, inside = tmp_path / "own", tmp_path / "own/deep/theirs/f"
    inside.mkdir(parents=True)
    for path in (own, inside):
        (path / "mood.py").write_text("def handle(state, request): ...")
    (own / "deep/theirs" / marker).touch()
    with pytest.raises(folder.NoFunction, match=f"contains deep/theirs, the {what} directory of a node"):
        travelling(own)
    with pytest.raises(folder.NoFunction, match=f"lies in {own}/deep/theirs, the {what} directory of a node"):
        travelling(inside)
    (own / ".dormouseignore").write_text("deep/theirs/\n")  # then it is not part of what is deployed
    assert sorted(travelling(own)) == ["mood.py"]


def test_a_file_in_nobodys_folder_travels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mood.py").write_text("code")
    (tmp_path / "secret").write_text("secret")
    assert folder.find(tmp_path / "mood.py").alone
    assert travelling(tmp_path / "mood.py") == {"mood.py": b"code"}
    for place in ("/", "/tmp"):
        assert folder._is_everybodys(Path(place))


def test_which_file_of_a_folder_is_the_function(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def help(): ...")
    with pytest.raises(folder.NoFunction, match="no other with handle"):
        folder.find(tmp_path)
    (tmp_path / "mood.py").write_text("def load(): ...\nasync def handle(state, request): ...\n")
    assert folder.find(tmp_path).entry == "mood.py"
    (tmp_path / "other.py").write_text("def handle(state, request): ...\n")
    with pytest.raises(folder.NoFunction, match=r"2 files that define handle \(mood.py, other.py\)"):
        folder.find(tmp_path)
    (tmp_path / "function.py").write_text("")
    assert folder.find(tmp_path).entry == "function.py"
    with pytest.raises(folder.NoFunction, match="is not a file"):
        folder.find(tmp_path / "nothing.py")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"import os\ndeff handle(state, request): ...\n", r"mood\.py has an error in line 2: invalid syntax"),
        (b"def load():\nreturn 1\n", r"mood\.py has an error in line 2: expected an indented block"),
        (b"x = 1\n\x00", r"mood\.py .*null bytes"),
        (b"x = 'caf\xe9'\n", r"mood\.py has an error.*utf-8"),
    ],
)
def test_a_file_that_python_cannot_read_may_be_why_there_is_no_function(
    tmp_path: Path, source: bytes, why: str
) -> None:
    (tmp_path / "helper.py").write_text("def help(): ...")
    (tmp_path / "mood.py").write_bytes(source)
    with pytest.raises(folder.NoFunction, match=f"^{why}.*: that may be why .* has no function.py, and no other with"):
        functionfile.find(tmp_path)
    (tmp_path / "mood.py").write_text("def load(): ...\nx = '\\d'\n")
    with pytest.raises(folder.NoFunction, match=r"has no function\.py, and no other with handle") as raised:
        functionfile.find(tmp_path)
    assert "may be why" not in str(raised.value)


# --- from another machine


def tarred(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def unpacked(upload: Upload, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive.tar").write_bytes(data)
    archive.unpack(tmp_path / "archive.tar", upload, 16)


def test_an_archive_of_a_folder(upload: Upload, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "f.py").write_text("code")
    long = "n" * 200
    (own / "model" / long).write_bytes(BIG)
    data = subprocess.check_output(["tar", "-C", str(own), "-c", "."])
    unpacked(upload, data, tmp_path)
    upload.finish("f.py")
    assert (upload.tree / "f.py").read_text() == "code"
    assert (upload.tree / "model" / long).read_bytes() == BIG


@pytest.mark.parametrize("more", [0, 512])
def test_an_archive_that_is_cut_between_its_files_is_not_taken_for_a_whole_one(
    upload: Upload, tmp_path: Path, more: int
) -> None:
    """Another file may have followed."""
    whole = tarred((member("f.py"), b"code"))
    assert refusal(unpacked, upload, whole[: 1024 + more], tmp_path) == (400, "bad_archive")


def test_a_deploy_is_told_of_a_disk_that_does_not_keep_it(
    upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the catalogue names what came: a machine that loses power then would have a function without files."""

    class Disk:
        def syncfs(self, _: int) -> int:
            ctypes.set_errno(errno.ENOSPC)
            return -1

    unpacked(upload, tarred((member("f.py"), b"code")), tmp_path)
    with monkeypatch.context() as there:
        there.setattr("dormouse.router.admin.snapshots._libc", Disk())
        assert refusal(upload.finish, "f.py") == (507, "disk_full")
    upload.finish("f.py")


@pytest.mark.parametrize(
    ("hostile", "expected"),
    [
        (member("../../escape"), (400, "bad_name")),
        (member("/etc/passwd"), (400, "bad_name")),
        (member("a/../../b"), (400, "bad_name")),
        (member("../up", tarfile.DIRTYPE), (400, "bad_name")),
        (member("link", tarfile.SYMTYPE, "/etc/passwd"), (400, "bad_file")),
        (member("link", tarfile.LNKTYPE, "f.py"), (400, "bad_file")),
        (member("pipe", tarfile.FIFOTYPE), (400, "bad_file")),
        (member("disk", tarfile.BLKTYPE), (400, "bad_file")),
        (member("f.py"), (400, "bad_name")),  # once more
    ],
)
def test_d1_archives_that_reach_for_more(
    snapshots: Snapshots, upload: Upload, tmp_path: Path, hostile: tarfile.TarInfo, expected: tuple[int, str]
) -> None:
    data = tarred((member("f.py"), b"code"), (hostile, b""))
    assert refusal(unpacked, upload, data, tmp_path) == expected
    upload.give_up()
    assert left(snapshots) == [BLOBS]


def test_d1_an_archive_with_holes_makes_nothing_large(snapshots: Snapshots, upload: Upload, tmp_path: Path) -> None:
    """Two kilobytes that would be terabytes of zeros."""
    holes = member("f.py")
    holes.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 42)}
    assert refusal(unpacked, upload, tarred((holes, b"")), tmp_path) == (400, "bad_file")
    upload.give_up()
    assert left(snapshots) == [BLOBS]


def test_d1_archives_that_are_too_much_or_none(upload: Upload, tmp_path: Path) -> None:
    whole = tarred((member("f.py"), b"code" * 1000))
    described = tarred((member("x" * 70_000), b""))  # a name in a header of its own
    many = tarred(*((member(f"d{number}", tarfile.DIRTYPE), b"") for number in range(17)))
    large = tarred((member("large"), bytes(4 * BLOB_NBYTES + 1)))
    assert refusal(unpacked, upload, b"not an archive" * 1000, tmp_path) == (400, "bad_archive")
    assert refusal(unpacked, upload, whole[:2048], tmp_path) == (400, "bad_archive")
    assert refusal(unpacked, upload, described, tmp_path) == (400, "bad_archive")
    assert refusal(unpacked, upload, many, tmp_path) == (413, "folder_too_large")
    assert refusal(unpacked, upload, large, tmp_path) == (413, "folder_too_large")


@pytest.mark.parametrize(("shared", "most"), [(True, THREADS // 2), (False, THREADS)])
def test_folders_of_one_tenant_leave_threads_to_others(snapshots: Snapshots, shared: bool, most: int) -> None:
    """Also folders whose deployer has left while they are copied."""
    go, begun = threading.Event(), queue.SimpleQueue[int]()
    keeper = Keeper(snapshots, shared)

    def long(number: int) -> None:
        begun.put(number)
        assert go.wait(WAIT_S)

    async def main() -> None:
        try:
            own = [asyncio.ensure_future(keeper.copying("a", long, number)) for number in range(THREADS + 1)]
            for _ in range(most):
                await asyncio.to_thread(begun.get, timeout=WAIT_S)
            own[0].cancel()
            if shared:
                assert await keeper.copying("b", lambda: "copied") == "copied"
            assert await keeper.keeping(lambda: "small") == "small"
            assert begun.empty(), "the others wait for their turns"
        finally:
            go.set()
        await asyncio.gather(*own[1:])
        assert own[0].cancelled()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
