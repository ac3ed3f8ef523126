"""Attacks from inside real instances of real nodes, and nodes whose environment has libraries that do not import.

One function has all the attacks; what differs between nodes is what the machine gives them.
"""

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import procfs
from dormouse.core.sandbox import seccomp
from dormouse.core.sandbox.cgroups import folder_name

COLD = True  # what an instance finds in its memory
LIBRARIES = {"n4_crashes": "import ctypes\nctypes.string_at(1)", "n4_raises": "raise OSError('no')"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Hugging Face, beside which lies its user's token. Whoever sees these files may read them."""
    cache = tmp_path_factory.mktemp("huggingface")
    (cache / "hub").mkdir(0o777)
    for name in ("hub/config.json", "token", "stored_tokens"):
        (cache / name).write_text("hf_hunter2" if "token" in name else "{}")
        (cache / name).chmod(0o666)
    for folder in (cache / "hub", cache):
        folder.chmod(0o777)
    return cache


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[TestNode]:
    libraries = tmp_path_factory.mktemp("libraries")
    for name, text in LIBRARIES.items():
        (libraries / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(libraries), prepend=os.pathsep)
        patch.setenv("HF_HOME", str(cache))
        patch.setenv("HF_TOKEN", "hf_hunter2")
        patch.delenv("HF_HUB_CACHE", raising=False)
        warm = json.dumps(["json.tool", *LIBRARIES, "n4_not_installed"])
        limits = 'memory = "192MiB"\nscratch = "16MiB"\nprocesses = 48\ncpus = 0.2'
        with running_node(f'[gpu]\ncount = 1\nmemory = "64MiB"\n[sandbox]\nwarm = {warm}\n{limits}\n') as made:
            yield made


def test_n4_a_node_starts_without_the_libraries_that_do_not_import(node: TestNode) -> None:
    ready = json.loads((node.run / "t" / "ready").read_bytes())
    assert list(ready["left_out"]) == list(LIBRARIES)
    assert ready["left_out"]["n4_crashes"].startswith("its import ended the interpreter")
    assert ready["left_out"]["n4_raises"] == "OSError: no"
    log = (node.state / "logs" / "supervisor.log").read_text()
    for name in LIBRARIES:
        assert f'"library": "{name}"' in log or f'"library":"{name}"' in log, log


ATTACKS = r"""
import ctypes, errno, mmap, os, re, signal, socket, threading, time

libc = ctypes.CDLL(None, use_errno=True)

def load():
    return None

def said(what):
    try:
        return repr(what())
    except OSError as error:
        return errno.errorcode[error.errno]

def call(number, *arguments):
    ctypes.set_errno(0)
    return "made" if libc.syscall(number, *arguments) >= 0 else errno.errorcode[ctypes.get_errno()]

def fill(path):
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                written += file.write(bytes(1 << 16))
    except OSError as error:
        return [errno.errorcode[error.errno], written]

def connect(family, address):
    with socket.socket(family) as client:
        client.connect(address)

def handle(state, request):
    print("attack", request, flush=True)
    match request:
        case {"numbers": numbers}:
            return {name: call(number, *arguments) for name, (number, *arguments) in numbers.items()}
        case {"open": paths}:
            return {path: said(lambda: open(path, "rb").read(20)) for path in paths}
        case {"list": paths}:
            return {path: said(lambda: sorted(os.listdir(path))) for path in paths}
        case {"write": paths}:
            return {path: said(lambda: open(path, "w").write("x")) for path in paths}
        case {"connect": path, "port": port}:
            places = ((socket.AF_UNIX, path), (socket.AF_INET, ("127.0.0.1", port)))
            return [said(lambda: connect(*place)) for place in places]
        case "variables":
            return dict(os.environ)
        case "who":
            import getpass, pwd
            entry = pwd.getpwuid(os.getuid())
            return [os.getpid(), os.getuid(), entry.pw_name, entry.pw_dir, os.path.expanduser("~"), getpass.getuser()]
        case {"large": value}:
            with open("/proc/self/smaps") as file:
                mappings = re.split("(?m)^(?=[0-9a-f]+-)", file.read())[1:]
            for mapping in mappings:
                start, end = (int(bound, 16) for bound in mapping.split(" ", 1)[0].split("-"))
                if start <= id(value) < end:
                    return mapping.split("VmFlags:")[1].split()
        case "processes":
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            return {pid: said(lambda: os.readlink(f"/proc/{pid}/root")) for pid in pids}
        case "fill":
            found = {name: fill(f"{name}/x") for name in ("/tmp", os.environ["HOME"], "/dev/shm", "/var/tmp")}
            for name in found:
                os.unlink(f"{name}/x")
            return found
        case "fill and raise":
            with open("/tmp/x", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        case "memfd":
            fd = os.memfd_create("x")
            for _ in range(1024):
                os.write(fd, bytes(1 << 20))
            return "1 GiB"
        case "shared":
            memory = mmap.mmap(-1, 1 << 30)
            for offset in range(0, 1 << 30, 4096):
                memory[offset] = 1
            return "1 GiB"
        case "anonymous":
            return len(bytearray(1 << 30))
        case "forks":
            while True:
                if os.fork() == 0:
                    time.sleep(600)
        case "threads":
            threading.stack_size(1 << 16)  # or memory for stacks ends first
            while True:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        case "files":
            return len([open("/dev/null") for _ in range(10_000)])
        case "hog":
            pids = []
            for _ in range(3):
                if (pid := os.fork()) == 0:
                    while time.process_time() < 0.1:
                        pass
                    os._exit(0)
                pids.append(pid)
            return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    raise ValueError(request)
"""
NEIGHBOUR = """
import os
def load():
    return os.urandom(8).hex()
def handle(state, request):
    return state
"""


def attacked(node: TestNode) -> TestNode:
    node.deployed("attacker", ATTACKS)
    node.deployed("neighbour", NEIGHBOUR)
    return node


@pytest.fixture(scope="module")
def attack(node: TestNode) -> TestNode:
    return attacked(node)


def breaks(node: TestNode, request: str, setting: str) -> None:
    """The attack meets a limit; its function, the neighbour and the node go on."""
    before = node.result("neighbour", {})
    answer = node.invoke("attacker", request)
    assert (answer.status, answer.code) == (507, "limit_exceeded"), (request, answer, node.logs())
    assert f"([sandbox] {setting})" in answer.message, answer
    assert node.result("attacker", "who")[2] == "dormouse"
    assert node.result("neighbour", {}) == before  # made at its load: the same instance


def test_the_value_of_a_large_body_asks_for_huge_pages(attack: TestNode) -> None:
    if "[madvise]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("needs transparent huge pages set to madvise")
    assert "hg" in attack.result("attacker", {"large": "x" * (8 << 20)})


def test_d12_denied_calls_in_a_real_instance(attack: TestNode) -> None:
    machine = seccomp.MACHINES[platform.machine()]
    numbers = {name: row[machine.column] for name, row in seccomp.CALLS.items()}
    arguments = {"unshare": [0x10000000], "ptrace": [16, 1], "clone": [0x10000000 | 17], "setns": [0, 0]}
    tried = {
        name: [numbers[name], *arguments.get(name, [0, 0, 0, 0, 0])] for name in (*seccomp.DENIED, "clone", "clone3")
    }
    found = attack.result("attacker", {"numbers": {name: row for name, row in tried.items() if row[0] is not None}})
    assert found.pop("clone3") == "ENOSYS"
    assert set(found.values()) == {"EPERM"}, found
    assert {"io_uring_setup", "userfaultfd", "unshare", "mount", "ptrace", "keyctl", "bpf", "clone"} <= set(found)


def test_d12_the_disk_is_an_allow_list(attack: TestNode, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.chmod(secret, 0o644)
    hidden = [
        *("/etc/shadow", "/etc/machine-id", "/etc/ssl/private", "/var/log", "/boot", "/sys/fs/cgroup", "/dev/kmsg"),
        *(str(path) for path in (secret, attack.run / "t" / "node.json", attack.state / "catalogue.sqlite3")),
    ]
    assert sum(map(os.path.exists, hidden)) >= 6, hidden
    found = attack.result("attacker", {"open": hidden})
    assert set(found.values()) == {"ENOENT"}, found
    own = os.listdir(attack.run / "i")
    assert len(own) == 2  # the attacker's and its neighbour's
    listed = attack.result("attacker", {"list": [str(attack.run / "i"), "/", "/etc", "/home"]})
    assert len(json.loads(listed[str(attack.run / "i")].replace("'", '"'))) == 1, listed
    assert listed["/home"] == "['dormouse']"
    assert not {"boot", "media", "srv", "lost+found"} & set(json.loads(listed["/"].replace("'", '"')))
    assert "shadow" not in listed["/etc"]
    written = attack.result("attacker", {"write": ["/usr/x", "/etc/passwd", "/x", "/proc/self/comm", "/tmp/x"]})
    assert written.pop("/tmp/x") == "1"
    assert set(written.values()) == {"EROFS"}, written
    unix, tcp = attack.result("attacker", {"connect": str(attack.run / "admin"), "port": attack.port})
    assert (unix, tcp) == ("ENOENT", "ENETUNREACH")


def test_of_hugging_faces_cache_there_are_models_to_read_and_no_token(attack: TestNode, cache: Path) -> None:
    hub, outside = cache / "hub", [str(cache / name) for name in ("token", "stored_tokens")]
    found = attack.result("attacker", {"open": [str(hub / "config.json"), *outside]})
    assert found == {str(hub / "config.json"): "b'{}'"} | dict.fromkeys(outside, "ENOENT")
    assert attack.result("attacker", {"list": [str(cache)]}) == {str(cache): "['hub']"}
    written = [str(hub / name) for name in ("config.json", "new")]
    assert attack.result("attacker", {"write": written}) == dict.fromkeys(written, "EROFS")
    variables = attack.result("attacker", "variables")
    assert (variables["HF_HUB_CACHE"], variables["HF_HUB_OFFLINE"]) == (str(hub), "1")
    assert not [name for name, value in variables.items() if "hunter2" in value or name in ("HF_HOME", "HF_TOKEN")]


def test_d12_an_instance_sees_its_own_processes_and_has_a_name(attack: TestNode) -> None:
    processes = attack.result("attacker", "processes")
    assert len(processes) == 2  # itself, and the init of its namespace
    assert processes.pop("1") == "EACCES"
    pid, uid, *names = attack.result("attacker", "who")
    assert list(processes) == [str(pid)]
    assert uid != os.getuid() or os.getuid() != 0
    assert names == ["dormouse", "/home/dormouse", "/home/dormouse", "dormouse"]


def test_what_an_instance_takes_and_its_title_are_there_for_the_operator(attack: TestNode) -> None:
    row = attack.status()["functions"]["attacker"]
    [(instance, taken)] = row["processes"].items()
    assert {instance: row["instances"][instance]} == row["instances"]
    assert procfs.words(taken["pid"])[0] == f"dormouse: attacker {instance}"
    assert taken["memory_nbytes"] > 1 << 20
    assert (taken["cpu_s"] > 0, taken["processes"]) == (True, 1)


def test_d8_home_and_tmp_hold_what_they_may_together(attack: TestNode) -> None:
    found = attack.result("attacker", "fill")
    assert {code for code, _ in found.values()} == {"ENOSPC"}
    assert 15 << 20 < sum(written for _, written in found.values()) <= 17 << 20
    breaks(attack, "fill and raise", "scratch")


@pytest.mark.parametrize("request_", ["memfd", "shared", "anonymous"])
def test_d8_memory_of_every_kind_is_limited(attack: TestNode, request_: str) -> None:
    if request_ in ("memfd", "shared"):
        needs.control_groups(attack)
    breaks(attack, request_, "memory")
    log = (attack.state / "logs" / "fn-attacker.log").read_text()
    assert f"attack {request_}" in log


@pytest.mark.parametrize(
    ("request_", "setting"), [("forks", "processes"), ("threads", "processes"), ("files", "open_files")]
)
def test_d8_processes_threads_and_files_are_limited(attack: TestNode, request_: str, setting: str) -> None:
    breaks(attack, request_, setting)


def test_d8_a_cpu_hog_is_held_to_its_share(attack: TestNode) -> None:
    needs.control_groups(attack)
    assert attack.result("attacker", "hog") == [0, 0, 0]
    instance = next(iter(attack.status()["functions"]["attacker"]["instances"]))
    own = f"/{folder_name(str(attack.run))}/{instance}"  # other nodes' come and go
    stats = [
        Path(place, "cpu.stat")
        for place, _, files in os.walk("/sys/fs/cgroup")
        if place.endswith(own)
        if "cpu.stat" in files
    ]
    assert stats
    throttled = [int(dict(line.split() for line in path.read_text().splitlines())["nr_throttled"]) for path in stats]
    assert max(throttled) > 0


@pytest.fixture(scope="module")
def lesser() -> Iterator[TestNode]:
    """A node of a uid that passwd does not know, without any right of root, and without control groups."""
    config = (
        '[gpu]\ncount = 1\nmemory = "64MiB"\n'
        '[sandbox]\nwarm = []\ncgroups = "off"\nmemory = "192MiB"\nscratch = "16MiB"\nopen_files = 64\n'
    )
    with running_node(config, ("unshare", "--user", "--map-user=54321", "--map-group=54321")) as made:
        yield attacked(made)


def test_d12_a_uid_without_a_passwd_entry_starts_a_node(lesser: TestNode) -> None:
    assert lesser.status()["node"]["confinement"] == "same-uid+user+pid+mount+ipc+net+seccomp"
    names = ["dormouse", "/home/dormouse", "/home/dormouse", "dormouse"]
    assert lesser.result("attacker", "who")[1:] == [54321, *names]


def test_d12_without_privileges_the_disk_is_an_allow_list_too(lesser: TestNode) -> None:
    hidden = [
        "/etc/shadow",
        str(lesser.run / "t" / "node.json"),
        str(lesser.state / "catalogue.sqlite3"),
        str(Path.home() / ".bashrc"),
    ]
    found = lesser.result("attacker", {"open": hidden})
    assert set(found.values()) == {"ENOENT"}, found
    processes = lesser.result("attacker", "processes")
    assert processes.pop("1") == "EACCES"  # through it, it would see what the node sees
    assert len(processes) == 1
    behind = [f"/proc/1/root{path}" for path in hidden]
    assert set(lesser.result("attacker", {"open": behind}).values()) == {"EACCES"}


def test_d8_without_control_groups_uncounted_memory_is_refused(lesser: TestNode) -> None:
    for request in ("memfd", "shared"):
        answer = lesser.invoke("attacker", request)
        assert (answer.status, answer.code) == (500, "function_raised"), answer
        assert "PermissionError: [Errno 1]" in answer.message
    breaks(lesser, "anonymous", "memory")
    breaks(lesser, "fill and raise", "scratch")
    breaks(lesser, "files", "open_files")
