"""Functions with libraries of their own on a real node: built from a small index of packages made here."""

import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_disk import node_on_small_disk
from wheels import PackageIndex

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.folder import FunctionFolder
from dormouse.core.node.refusals import CallRefused
from dormouse.core.sandbox.world import PLAIN_ZYGOTE

pytestmark = pytest.mark.timeout(600)

WAIT_S = 120
FUNCTION = """
import colours, torch
def handle(state, request):
    return [colours.VERSION, float(torch.ones(3, device="cuda").sum())]
"""
OF_WARM = """
import shellingham
def handle(state, request):
    return getattr(shellingham, "OWN", "the node's")
"""
GPU = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'


def _packages(folder: Path) -> PackageIndex:
    index = PackageIndex(folder)
    for version in ("1.0", "2.0"):
        index.wheel("colours", version, {"colours/__init__.py": f"VERSION = {version!r}\n"})
    index.wheel("bright", "1.0", {"bright.py": ""}, requires=("colours<2",))
    index.wheel("shellingham", "99.0", {"shellingham/__init__.py": "OWN = 'its own'\n"})
    index.wheel("old-torch", "1.0", {"old_torch.py": ""}, requires=("torch==1.0",))
    index.wheel("torch", "1.0", {"torch/__init__.py": ""})
    index.wheel("gpu-only", "1.0", {"gpu_only.py": ""}, requires=("nvidia-cublas-cu12",))
    index.wheel("nvidia-cublas-cu12", "12.0", {"nvidia/cublas/lib.so": "x"})
    index.wheel("escape", "1.0", {"escape.py": "", "../../../escaped.py": "raise SystemExit"})
    index.wheel("absolute", "1.0", {"absolute.py": "", "/tmp/escaped.py": "raise SystemExit"})
    index.wheel("linked", "1.0", {"linked.py": ""}, links={"linked_to.txt": "/etc/hostname"})
    index.wheel("linked-folder", "1.0", {"linked_folder.py": "", "out/escaped.py": ""}, links={"out": "../../.."})
    index.wheel("bomb", "1.0", {"bomb/data.txt": "0" * (64 << 20)})
    index.wheel("bombs", "1.0", {f"bombs/{number}.txt": "0" * (1 << 20) for number in range(40)})
    index.wheel("other-numpy", "1.0", {"other_numpy.py": ""}, requires=("numpy==1.0",))
    index.wheel("numpy", "1.0", {"numpy/__init__.py": ""})
    index.wheel("large", "1.0", {"large/data.txt": "0123456789abcdef" * (200 << 10)})
    index.wheel("deep", "1.0", {"deep.py": "", "/".join(["d"] * 400) + "/x.py": ""})
    index.sources("compiled", "1.0", SETUP)
    index.sources("sly", "1.0", "", {"pyproject.toml": BACKEND_OF, "backend.py": SLY})
    index.sources("built", "1.0", "", {"pyproject.toml": BACKEND_OF, "backend.py": BACKEND})
    return index


SETUP = "raise SystemExit('the code of a package has run')"
BACKEND_OF = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = """
import os, zipfile
def build_wheel(folder, settings=None, metadata=None):
    info = "built-1.0.dist-info"
    files = {
        "built.py": f"BY = {os.getuid()}, {os.path.exists('/function/requirements.txt')}",
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: built\\nVersion: 1.0\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, "built-1.0-py3-none-any.whl"), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return "built-1.0-py3-none-any.whl"
"""
SLY = """
import json, os, re, signal, time
def stat(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
def installing():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"--target" in open(f"/proc/{pid}/cmdline", "rb").read():
                found.append(int(pid))
        except OSError:
            pass
    return found
def stay():
    # A process that outlives pip: it stops who builds, and changes what is looked over.
    pips = installing()
    if not pips:
        return
    builder = int(stat(pips[0])[1])
    os.kill(builder, signal.SIGSTOP)
    if os.fork():
        return
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.closerange(3, 1000)
    while installing():
        time.sleep(0.01)
    lines = [line.split() for line in open("/proc/self/mountinfo")]
    root = next(line[3] for line in lines if line[4] == "/environment")
    os.rename("/environment/site", "/environment/before")
    os.symlink(re.sub("/environments/.*", "/functions", root), "/environment/site")
    with open("/environment/result.json", "w") as file:
        json.dump({"code": "", "lock": ["sly==1"], "names": []}, file)
    os.chmod("/environment/result.json", 0o400)  # who builds cannot write its own any more
    os.kill(builder, signal.SIGCONT)
    os._exit(0)
""" + BACKEND.replace("    info =", "    stay()\n    info =").replace("built-", "sly-").replace(
    "Name: built", "Name: sly"
)


PROWL = """
import os, signal, subprocess
STATE, RUN, OTHER = {state!r}, {run!r}, {other}
def tried(act):
    try:
        return act() or "done"
    except OSError as error:
        return type(error).__name__
def write(path):
    with open(path, "w") as file:
        file.write("prowled")
def prowl():
    acts = dict(
        state=lambda: str(os.listdir(STATE)),
        secrets=lambda: open(STATE + "/secrets.json").read(),
        key=lambda: open(STATE + "/secrets.key").read(),
        other=lambda: str(os.listdir(STATE + "/functions/other")),
        run=lambda: str(os.listdir(RUN + "/t")),
        admin=lambda: __import__("socket").socket(1).connect(RUN + "/admin"),
        environ=lambda: open(f"/proc/{{OTHER}}/environ").read(),
        signal=lambda: os.kill(OTHER, 0),
        python=lambda: write(os.path.join(os.path.dirname(os.__file__), "prowled.py")),
        system=lambda: write("/usr/prowled"),
        root=lambda: os.setuid(0) if os.getuid() else None,
        mount=lambda: os.unshare(0x20000) if hasattr(os, "unshare") else os.chroot("/"),
        device=lambda: os.mknod("/environment/null", 0o20666, os.makedev(1, 3)),
    )
    return {{name: tried(act) for name, act in acts.items()}}
""" + BACKEND.replace('"built.py": f"', '"prowl.py": f"SAW = {prowl()}; ').replace("built-", "prowl-").replace(
    "Name: built", "Name: prowl"
).replace("{", "{{").replace("}", "}}")
HOARD = """
import os, socket, time
def hoard():
    held = []
    host, own = os.environ["HTTPS_PROXY"].removeprefix("http://").split(":")
    with socket.create_connection((host, int(own))) as ours:
        ours.sendall(b"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n")
        assert b" 200 " in ours.recv(1000)
        for number in range(5):
            path = os.path.join(os.environ["DORMOUSE_ENVIRONMENT"], f"hoard{{number}}")
            held.append(os.open(path, os.O_RDWR | os.O_CREAT))
            os.unlink(path)
            for _ in range(12):
                os.write(held[-1], bytes(1 << 20))
                ours.sendall(b"M")
        while True:
            time.sleep(60)
hoard()
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PackageIndex:
    return _packages(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def node(index: PackageIndex) -> Iterator[TestNode]:
    own = f'[environments]\nindex = "{index.url}"\nidle_ms = 500\n[limits]\nversions = 1\n'
    with running_node(f'{GPU}{own}[sandbox]\nwarm = ["shellingham"]\n') as running:
        yield running


def _names(node: TestNode) -> set[str]:
    """Of environments that are kept."""
    return {path.name for path in (node.state / "environments").iterdir() if (path / "environment.json").exists()}


def _kept(node: TestNode) -> int:
    return len(_names(node))


def test_two_versions_of_a_library_side_by_side(node: TestNode) -> None:
    node.deployed("one", FUNCTION, {"requirements.txt": "colours==1.0\n"})
    node.deployed("two", FUNCTION, {"pyproject.toml": '[project]\nname = "two"\ndependencies = ["colours>=2"]\n'})
    node.deployed("third", FUNCTION, requirements="bright  # which needs an old one\n")
    assert [node.result(name, 0) for name in ("one", "two", "third")] == [["1.0", 3.0], ["2.0", 3.0], ["1.0", 3.0]]
    assert "Successfully installed colours-1.0" in node.log_of("one")
    assert _kept(node) == 3
    node.wait(lambda: PLAIN_ZYGOTE not in node.pids(), WAIT_S, "the zygote that builds to be dismissed")
    assert [node.result(name, 0)[0] for name in ("one", "two")] == ["1.0", "2.0"], "who has what it needs, needs it not"


def test_what_a_function_cannot_do_to_its_libraries(node: TestNode) -> None:
    """Others may have the same ones."""
    source = FUNCTION.replace("return [", 'open(colours.__file__, "a")\n    return [')
    node.deployed("writes", source, requirements="colours==1.0\n")
    message = node.invoke("writes", 0).message
    assert "Permission denied" in message or "Read-only file system" in message
    assert node.remove("writes").status == 200


def test_the_same_requirements_are_built_once(node: TestNode) -> None:
    node.deployed("one", FUNCTION, {"requirements.txt": "colours==1.0\n"})
    before = node.log_of("one").count("the node looks")
    node.deployed("one", FUNCTION, {"requirements.txt": "colours==1.0\n"})
    assert node.log_of("one").count("the node looks") == before > 0
    node.wait(lambda: node.http("GET", "/metrics").status == 200, WAIT_S, "metrics")
    assert '\ndormouse_environment_builds_total{outcome="ok"} ' in node.http("GET", "/metrics").body


def _down(node: TestNode) -> list[str]:
    """Of its processes, by /metrics."""
    node.wait(lambda: node.http("GET", "/metrics").status == 200, WAIT_S, "metrics")
    return re.findall(r'\ndormouse_process_up\{process="([^"]+)"\} 0', node.http("GET", "/metrics").body)


def test_a_library_that_the_zygote_has_imported_in_another_version(node: TestNode) -> None:
    """Its function is forked from a zygote that has not, which ends with it."""
    node.deployed("node-s", OF_WARM)
    before = _names(node)
    node.deployed("own", OF_WARM, requirements="shellingham==99.0\n")
    (its_own,) = _names(node) - before
    assert (node.result("own", 0), node.result("node-s", 0)) == ("its own", "the node's")
    zygote = node.pids()[PLAIN_ZYGOTE]
    node.kill(PLAIN_ZYGOTE)
    node.replaced(PLAIN_ZYGOTE, zygote)
    node.wait(lambda: bool(node.invoke("own", 0).body == "its own"), WAIT_S, "the function to be back")
    assert node.result("node-s", 0) == "the node's"
    assert node.restart("own").status == 200
    node.wait(lambda: bool(node.invoke("own", 0).body == "its own"), WAIT_S, "the function to be back")
    assert node.remove("own").status == 200
    node.wait(lambda: PLAIN_ZYGOTE not in node.pids(), WAIT_S, "the zygote to be dismissed")
    assert node.status()["node"]["gone"] == []
    assert _down(node) == [], "nobody is called for a process that nobody wants"
    node.wait(lambda: its_own not in _names(node), WAIT_S, "its environment to go")


@pytest.mark.parametrize(
    ("requirements", "code", "says"),
    [
        ("colours==3.0", "unsolvable", "No matching distribution found for colours==3.0"),
        ("no-such-package", "unsolvable", "No matching distribution found for no-such-package"),
        ("bright\ncolours==2.0", "unsolvable", "conflicting dependencies"),
        ("compiled", "needs_build", "compiled has no wheel for Python"),
        ("torch==1.0", "torch_held", "functions have the node's torch"),
        ("torch==2.13.0+cu126", "cuda_refused", "is a build for GPUs"),
        ("old-torch", "torch_held", "old-torch 1.0 depends on torch==1.0"),
        ("other-numpy", "version_held", "is in use, and another cannot be: The conflict is caused by: other-numpy 1.0"),
        ("gpu-only", "cuda_refused", "nvidia-cublas-cu12 12.0, a part of CUDA"),
        ("gpu-only", "cuda_refused", "gpu-only wants nvidia-cublas-cu12: leave gpu-only out, or write a build of it"),
        ("escape", "build_failed", "outside the target directory"),
        ("absolute", "build_failed", "outside the target directory"),
        ("linked-folder", "build_failed", "Is a directory"),
        ("deep", "bad_wheel", "more than 100 folders in one another"),
        ("--index-url http://127.0.0.1:1/", "bad_requirements", "is an option of pip"),
    ],
)
def test_what_cannot_be_built_is_named_and_the_old_version_goes_on(
    node: TestNode, requirements: str, code: str, says: str
) -> None:
    node.deployed("one", FUNCTION, requirements="colours==1.0")
    answer = node.deploy("one", FUNCTION, requirements=requirements)
    assert answer.code == code, answer
    assert says in answer.message
    assert "the code of a package has run" not in answer.message + node.log_of("one")
    assert node.result("one", 0) == ["1.0", 3.0]
    assert not [path for path in (node.state / "environments").rglob("*") if "escaped" in path.name]
    assert [path for path in (node.state / "environments").iterdir() if path.name.startswith(".")] == []


def test_sources_are_built_only_where_the_node_allows_it(node: TestNode, index: PackageIndex) -> None:
    answer = node.deploy("one", FUNCTION, requirements="built", allow_build=True)
    assert (answer.status, answer.code) == (403, "builds_refused")
    source = "import built\ndef handle(state, request):\n    return built.BY\n"
    with running_node(f'{GPU}[environments]\nindex = "{index.url}"\nbuilds = true\n') as other:
        other.deployed("f", source, requirements="built", allow_build=True)
        by, sees = other.result("f", 0)
        own = "own-uid" in other.status()["node"]["confinement"]
        assert ((by == 60_999), sees) == (own, not own), "it can read nothing that is the node's alone"


def test_code_of_packages_cannot_have_another_folder_taken_for_what_it_builds(index: PackageIndex) -> None:
    config = f'{GPU}[environments]\nindex = "{index.url}"\nbuilds = true\n'
    with running_node(config, node='tenants = "many"\n') as node:
        node.deployed("other", "def handle(state, request):\n    return 1\n", tenant="other")
        before = (node.state / "functions").stat()
        answer = node.deploy("f", FUNCTION, requirements="sly", allow_build=True, tenant="sly")
        assert (answer.status, answer.code) == (422, "bad_wheel"), answer
        after = (node.state / "functions").stat()
        assert (after.st_mode, after.st_uid, after.st_ino) == (before.st_mode, before.st_uid, before.st_ino)
        assert list((node.state / "environments").iterdir()) == []
        assert node.result("other", 0) == 1


@contextmanager
def _process() -> Iterator[int]:
    """One of the node's user, and a number that no process has where they begin with 1."""
    while True:
        with subprocess.Popen(["sleep", "600"]) as process:
            try:
                if process.pid > 1000:
                    yield process.pid
                    return
            finally:
                process.kill()


def test_code_of_packages_reaches_nothing_of_the_node_or_of_others(index: PackageIndex) -> None:
    """It runs, and says what it could do."""
    config = f'{GPU}[environments]\nindex = "{index.url}"\nbuilds = true\n'
    with running_node(config, node='tenants = "many"\n') as node, _process() as other:
        if not {"own-uid", "pid", "mount"} <= set(node.status()["node"]["confinement"].split("+")):
            pytest.skip("needs a host that confines builds: root, or namespaces of users")
        node.deployed("other", "def handle(state, request):\n    return 1\n", tenant="other")
        node.admin.set_secret("other", "TOKEN", "of the other tenant")
        backend = PROWL.format(state=str(node.state), run=str(node.run), other=other)
        index.sources("prowl", "1.0", "", {"pyproject.toml": BACKEND_OF, "backend.py": backend})
        source = "import prowl\ndef handle(state, request):\n    return prowl.SAW\n"
        node.deployed("f", source, requirements="prowl", allow_build=True, tenant="sly")
        absent = dict.fromkeys(("state", "secrets", "key", "other", "run", "admin", "environ"), "FileNotFoundError")
        assert node.result("f", 0) == absent | {
            "signal": "ProcessLookupError",
            "python": "OSError",
            "system": "OSError",
            "root": "PermissionError",
            "mount": "PermissionError",
            "device": "PermissionError",
        }


ROAM = """
import os, socket, urllib.error, urllib.request
def directly(port):
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
        return "connected"
    except OSError as error:
        return type(error).__name__
def asked(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{{port}}{page}", timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
def tunnel(port):
    host, own = os.environ["HTTPS_PROXY"].removeprefix("http://").split(":")
    with socket.create_connection((host, int(own)), 10) as connection:
        connection.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n" % port)
        return int(connection.recv(1000).split()[1])
SAW = {{name: [directly(port), asked(port), tunnel(port)] for name, port in {ports}.items()}}
"""


def roaming(ports: dict[str, int], page: str) -> str:
    """A build backend that tries to reach these of this machine, and whose package tells what came of it."""
    plain = "f\"BY = {os.getuid()}, {os.path.exists('/function/requirements.txt')}\""
    assert plain in BACKEND
    return ROAM.format(ports=ports, page=page) + BACKEND.replace("built", "roam").replace(plain, 'f"SAW = {SAW!r}"')


class CountingServer(ThreadingHTTPServer):
    """Serves a folder on a port of this machine. ``connections``: how many came."""

    def __init__(self, folder: Path) -> None:
        self.connections = 0
        super().__init__(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[CountingServer]:
    with CountingServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("granted", [False, True], ids=["refused", "granted"])
def test_a_build_reaches_the_index_and_hosts_that_the_node_names(index: PackageIndex, granted: bool) -> None:
    """By its way out, and nothing of the machine's network directly; its code says what it could do."""
    with served(index.folder.parent) as server, served(index.folder.parent) as other:
        index_port, other_port = server.server_port, other.server_port
        own = f'index = "http://127.0.0.1:{index_port}/{index.folder.name}"\nbuilds = true\n'
        hosts = f'hosts = ["127.0.0.1:{other_port}"]\n' if granted else ""
        with running_node(f"{GPU}[environments]\n{own}{hosts}") as node:
            if "net" not in node.status()["node"]["confinement"].split("+"):
                pytest.skip("needs network namespaces")
            ports = {"index": index_port, "other": other_port, "node": node.port}
            roam = roaming(ports, f"/{index.folder.name}/colours/")
            index.sources("roam", "1.0", "", {"pyproject.toml": BACKEND_OF, "backend.py": roam})
            source = "import roam\ndef handle(state, request):\n    return roam.SAW\n"
            node.deployed("f", source, requirements="roam\ncolours", allow_build=True)
            refused = "ConnectionRefusedError"
            assert node.result("f", 0) == {
                "index": [refused, 200, 200],
                "other": [refused, 200, 200] if granted else [refused, 403, 403],
                "node": [refused, 403, 403],
            }
            assert server.connections > 2
            assert (other.connections > 0) is granted


def test_files_on_another_host_are_refused_by_its_name(index: PackageIndex, tmp_path: Path) -> None:
    with served(index.folder.parent) as files, served(tmp_path) as server:
        page = tmp_path / "simple" / "colours"
        page.mkdir(parents=True)
        link = f"http://127.0.0.1:{files.server_port}/{index.folder.name}/colours/colours-1.0-py3-none-any.whl"
        (page / "index.html").write_text(f'<a href="{link}">colours-1.0-py3-none-any.whl</a>')
        own = f'index = "http://127.0.0.1:{server.server_port}/simple"\n'
        with running_node(f"{GPU}[environments]\n{own}") as node:
            answer = node.deploy("f", FUNCTION, requirements="colours")
            assert (answer.status, answer.code) == (422, "host_refused"), answer
            assert f"'127.0.0.1:{files.server_port}'" in answer.message
            assert files.connections == 0


def test_files_that_a_build_has_open_and_removed_count(index: PackageIndex) -> None:
    """By no look at its folder they could be seen."""
    with socket.create_server(("127.0.0.1", 0)) as told:
        port = told.getsockname()[1]
        own = f'index = "{index.url}"\nhosts = ["127.0.0.1:{port}"]\n'
        own += 'builds = true\nsize = "16MiB"\ntime_ms = 300000\n'
        config = f'{GPU}[limits]\ndisk = "0"\n[environments]\n{own}'
        index.sources("hoard", "1.0", HOARD.format(port=port))
        told.settimeout(WAIT_S)
        with node_on_small_disk(config, "160m") as node, ThreadPoolExecutor(1) as thread:
            node.deployed("f", FUNCTION, requirements="colours==1.0")
            answer = thread.submit(node.deploy, "f", FUNCTION, requirements="hoard", allow_build=True)
            with told.accept()[0] as theirs:
                theirs.settimeout(WAIT_S)
                held = b"".join(iter(partial(theirs.recv, 100), b""))  # until it is ended
            assert 8 <= len(held) <= 60, "MiB that have no name, when it was ended"
            refused = answer.result(WAIT_S)
            assert (refused.status, refused.code) == (413, "environment_too_large"), refused
            assert "code of a package keeps files that it has removed" in refused.message
            disk = os.statvfs(node.state)
            assert disk.f_bavail * disk.f_frsize > 140 << 20, "it keeps nothing"
            assert node.result("f", 0) == ["1.0", 3.0]
            assert [path.name for path in (node.state / "environments").glob(".[0-9]*")] == []


def test_a_link_in_a_wheel_is_text(node: TestNode) -> None:
    """Else its function, or another of the tenant, could be given what the node can read."""
    source = """
    import os, linked
    def handle(state, request):
        path = os.path.join(os.path.dirname(linked.__file__), "linked_to.txt")
        return [os.path.islink(path), open(path).read()]
    """
    node.deployed("reads", source, requirements="linked")
    assert node.result("reads", 0) == [False, "/etc/hostname"]
    assert node.remove("reads").status == 200


def test_a_tenant_fills_its_own_part_alone(index: PackageIndex) -> None:
    config = f'{GPU}[limits]\nversions = 0\n[environments]\nindex = "{index.url}"\ntenant_store = "4MiB"\n'
    with running_node(config, node='tenants = "many"\n') as node:
        node.deployed("first", FUNCTION, requirements="large\ncolours==1.0", tenant="shop")
        node.deployed("first", FUNCTION, requirements="large\ncolours==1.0", tenant="shop")
        refused = node.deploy("second", FUNCTION, requirements="large\ncolours==2.0", tenant="shop")
        assert (refused.status, refused.code) == (507, "environments_full"), refused
        assert "the libraries of tenant 'shop' would have at least " in refused.message
        assert "may have 4.0 MiB ([environments] tenant_store); remove functions" in refused.message
        node.wait(lambda: _kept(node) == 1, WAIT_S, "what was refused to go")
        node.deployed("third", FUNCTION, requirements="large\ncolours==2.0", tenant="bank")
        assert [node.result(name, 0)[0] for name in ("first", "third")] == ["1.0", "2.0"]
        assert node.remove("first").status == 200
        node.deployed("second", FUNCTION, requirements="large\ncolours==2.0", tenant="shop")
        assert node.result("second", 0) == ["2.0", 3.0]


def test_requirements_are_read_in_bounds(node: TestNode) -> None:
    answer = node.deploy("one", FUNCTION, {"requirements.txt": "#" * (1 << 20)})
    assert (answer.status, answer.code) == (400, "bad_requirements"), answer
    assert "requirements.txt has more than 32,768 bytes" in answer.message


def test_code_of_packages_does_not_get_the_password_of_an_index() -> None:
    own = '[environments]\nindex = "http://u:password@127.0.0.1:1/simple"\nbuilds = true\n'
    with running_node(f"{GPU}{own}") as node:
        answer = node.deploy("f", FUNCTION, requirements="built", allow_build=True)
        assert (answer.status, answer.code) == (403, "builds_refused"), answer
        assert "password" in answer.message


def test_two_deploys_of_one_name_at_once(node: TestNode) -> None:
    answers: list[HttpAnswer] = []
    ready = threading.Barrier(2)

    def deploy(version: str) -> None:
        folder = node.folder(f"both-{version}")
        ready.wait()
        (folder / "both.py").write_text(FUNCTION)
        try:
            settings = {"requirements": f"colours=={version}"}
            answer = node.admin.deploy("both", FunctionFolder(folder, "both.py", False), settings)
            answers.append(HttpAnswer(200, answer, {}))
        except CallRefused as error:
            answers.append(HttpAnswer(error.status, {"error": {"code": error.code, "message": str(error)}}, {}))

    threads = [threading.Thread(target=deploy, args=(version,)) for version in ("1.0", "2.0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status for answer in answers} <= {200, 409}, answers
    assert 200 in {answer.status for answer in answers}
    assert node.result("both", 0) in (["1.0", 3.0], ["2.0", 3.0])
    assert node.remove("both").status == 200


def test_a_node_that_starts_again_has_its_environments(node: TestNode) -> None:
    node.deployed("two", FUNCTION, requirements="colours>=2")
    node.kill_all()
    (node.state / "environments" / ".17" / "built").mkdir(parents=True)
    node.start()
    assert node.result("two", 0) == ["2.0", 3.0]
    node.wait(lambda: not (node.state / "environments" / ".17").exists(), WAIT_S, "what was cut short to go")
    for row in node.admin.functions():
        assert node.remove(row["name"]).status == 200
    node.wait(lambda: _kept(node) == 0, WAIT_S, "what nobody has to go")


def test_a_build_is_bounded_in_time_and_in_bytes(index: PackageIndex) -> None:
    """By an index that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        with running_node(f'{GPU}[environments]\nindex = "{url}"\ntime_ms = 3000\n') as node:
            node.deployed("f", "def handle(state, request):\n    return 1\n")
            answer = node.deploy("f", FUNCTION, requirements="colours")
            assert (answer.status, answer.code) == (504, "build_timed_out")
            assert "longer than 3 s ([environments] time_ms)" in answer.message
            assert node.result("f", 0) == 1
            assert list((node.state / "environments").iterdir()) == []
            assert [path for path in (node.run / "i").iterdir() if path.name.startswith("0-")] == []
    with running_node(f'{GPU}[environments]\nindex = "{index.url}"\nsize = "1MiB"\n') as node:
        answer = node.deploy("f", FUNCTION, requirements="large\ncolours")
        assert (answer.status, answer.code) == (413, "environment_too_large")
        assert list((node.state / "environments").iterdir()) == []
        for name in ("bomb", "bombs"):
            answer = node.deploy("f", FUNCTION, requirements=f"{name}\ncolours")
            assert (answer.status, answer.code) == (413, "environment_too_large"), answer
            assert list((node.state / "environments").iterdir()) == []
        node.deployed("f", FUNCTION, requirements="colours==1.0")


def test_a_full_disk_is_said_and_leaves_what_is_there(index: PackageIndex) -> None:
    config = f'{GPU}[limits]\ndisk = "0"\n[environments]\nindex = "{index.url}"\n'
    with node_on_small_disk(config, "3m") as node:
        node.deployed("f", FUNCTION, requirements="colours==1.0")
        answer = node.deploy("f", FUNCTION, requirements="large\ncolours==2.0")
        assert (answer.status, answer.code) == (507, "disk_full"), answer
        assert "free space" in answer.message
        assert node.result("f", 0) == ["1.0", 3.0]
        assert _kept(node) == 1
        node.deployed("f", FUNCTION, requirements="colours==2.0")


@pytest.mark.parametrize("granted", [False, True])
def test_a_network_only_where_the_node_grants_it(granted: bool) -> None:
    source = """
    import socket
    def handle(state, request):
        socket.create_connection(("127.0.0.1", request), timeout=20).close()
        return "connected"
    """
    config = f"{GPU}[sandbox]\nwarm = []\nnetwork = {str(granted).lower()}\n"
    with running_node(config) as node:
        without: dict[str, Any] = {} if granted else {"network": True}
        refused = node.deploy("f", source, **without)
        assert refused.status == (200 if granted else 403)
        node.deployed("f", source)
        if "net" in node.status()["node"]["confinement"]:
            assert "in create_connection" in node.told("f", node.port).message
        if granted:
            node.deployed("f", source, network=True)
            assert node.result("f", node.port) == "connected"


def test_a_network_that_the_node_takes_back() -> None:
    source = """
    import socket
    def handle(state, request):
        socket.create_connection(("127.0.0.1", request), timeout=20).close()
        return "connected"
    """
    with running_node(f"{GPU}[sandbox]\nwarm = []\nnetwork = true\n") as node:
        node.deployed("f", source, network=True)
        assert node.result("f", node.port) == "connected"
        node.deployed("f", source)
        node.deployed("g", source, network=True)
        node.kill_all()
        node.file.write_text(node.file.read_text().replace("network = true", "network = false"))
        node.start()
        if "net" in node.status()["node"]["confinement"]:
            assert "in create_connection" in node.told("g", node.port).message
        with pytest.raises(CallRefused) as refused:
            node.admin.roll_back("f", 0)
        assert refused.value.code == "network_refused"
