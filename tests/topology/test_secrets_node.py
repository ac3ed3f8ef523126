"""Variables and secrets of functions on a real node: who is given them, and that nobody else can read them."""

import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guides import Reader, commands
from small_disk import fill, node_on_small_disk

from benchmarks.nodes.testnode import HttpAnswer, TestNode, kept_running, running_node
from dormouse.core import procfs
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas.admin import Wish

pytestmark = pytest.mark.timeout(240)

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n[limits]\nversions = 2\n[record]\npath = "recording"\n'
MANY = 'tenants = "many"\nopen_loopback = true'
VALUE = "hf_the-secret-of-the-shop"
FUNCTION = """
import os, subprocess, sys
def load():
    print("loads with", os.environ.get("TOKEN"), flush=True)
    os.write(1, os.environ.get("TOKEN", "").encode()[:9])
    os.write(1, os.environ.get("TOKEN", "").encode()[9:] + b" in two parts\\n")
    return {name: os.environ.get(name) for name in ("TOKEN", "MODE", "PLAIN")}
def handle(found, request):
    if request == "raise":
        raise ValueError("cannot use " + found["TOKEN"])
    if request == "print":
        subprocess.run([sys.executable, "-c", "import os; print('child has', os.environ['TOKEN'])"], check=True)
    return found
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG, node=MANY) as running:
        yield running


def _deploy(node: TestNode, **settings: Any) -> HttpAnswer:
    return node.deploy("f", FUNCTION, **settings)


def _anywhere(node: TestNode, value: str) -> list[str]:
    """Files of the node, and environments and arguments of its processes, that have this."""
    files = [path for path in node.state.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]
    found = [str(path) for path in files]
    for pid in node.descendants():
        for kind in ("environ", "cmdline"):
            try:
                data = Path(f"/proc/{pid}/{kind}").read_bytes()
            except OSError:
                continue  # it has ended
            found += [f"{procfs.words(pid)}: {kind}"] if value.encode() in data else []
    return found


def test_a_function_has_its_secrets_and_nobody_sees_them(node: TestNode) -> None:
    answer = _deploy(node, secrets=("TOKEN",))
    assert (answer.status, answer.code) == (400, "unknown_secret")
    assert "dormouse secret set TOKEN" in answer.message
    assert node.admin.set_secret("", "TOKEN", VALUE) == {"set": "TOKEN", "tenant": "default", "functions": []}
    assert _deploy(node, secrets=("TOKEN",), env={"MODE": "fast", "PLAIN": ""}).status == 200
    assert node.result("f", 0) == {"TOKEN": VALUE, "MODE": "fast", "PLAIN": ""}
    failed = node.invoke("f", "raise")
    assert failed.code == "function_raised"
    assert "ValueError: cannot use [secret TOKEN]" in failed.message
    node.result("f", "print")
    node.wait(lambda: "child has [secret TOKEN]" in node.log_of("f"), 60, "what the function's child printed")
    log = node.log_of("f")
    assert "loads with [secret TOKEN]" in log
    assert "[secret TOKEN] in two parts" in log
    assert "cannot use [secret TOKEN]" in log
    said = [node.status(), node.admin.functions(), node.admin.versions("f"), node.admin.secrets()]
    said.append(node.admin.requests("f", "", 50))
    assert VALUE not in repr(said)
    assert VALUE[:9] not in log
    node.wait(lambda: (node.state / "recording").stat().st_size > 1000, 60, "the recording to be written")
    assert _anywhere(node, VALUE) == []
    assert node.admin.versions("f")[0]["env"] == ["MODE", "PLAIN"]
    assert node.admin.versions("f")[0]["secrets"] == ["TOKEN"]
    node.wait(lambda: node.http("GET", "/metrics").status == 200, 120, "metrics")
    count = sum(each["tenant"] == "default" for each in node.admin.secrets())
    assert f'\ndormouse_secrets{{tenant="default"}} {count}.0\n' in node.http("GET", "/metrics").body


def test_a_secret_that_is_used_stays_and_a_new_value_comes_with_a_restart(node: TestNode) -> None:
    node.admin.set_secret("", "TOKEN", VALUE)
    assert _deploy(node, secrets=("TOKEN",)).status == 200
    with pytest.raises(CallRefused, match="'TOKEN' is used by f") as caught:
        node.admin.remove_secret("default", "TOKEN")
    assert caught.value.code == "secret_used"
    assert node.admin.set_secret("default", "TOKEN", "another-value")["functions"] == ["f"]
    assert node.result("f", 0)["TOKEN"] == VALUE
    assert node.restart("f").status == 200
    node.wait(lambda: bool(node.result("f", 0)["TOKEN"] == "another-value"), 60, "the new value")


def test_a_rollback_keeps_variables_and_the_names_of_secrets(node: TestNode) -> None:
    node.admin.set_secret("", "TOKEN", "another-value")
    assert _deploy(node, secrets=("TOKEN",), env={"MODE": "fast", "PLAIN": ""}).status == 200
    assert _deploy(node, env={"MODE": "slow"}).status == 200
    assert node.result("f", 0) == {"TOKEN": None, "MODE": "slow", "PLAIN": None}
    node.admin.roll_back("f", 0)
    assert node.result("f", 0) == {"TOKEN": "another-value", "MODE": "fast", "PLAIN": ""}
    assert _deploy(node).status == 200
    node.admin.remove_secret("default", "TOKEN")
    with pytest.raises(CallRefused) as caught:
        node.admin.roll_back("f", 0)
    assert caught.value.code == "unknown_secret"
    assert node.result("f", 0) == {"TOKEN": None, "MODE": None, "PLAIN": None}


def test_a_key_reaches_the_secrets_of_its_tenant_alone(node: TestNode) -> None:
    shop, bank = (node.admin.create_key(Wish(scopes=("deploy",), tenant=tenant))["key"] for tenant in ("shop", "bank"))
    part = node.admin.create_key(Wish(scopes=("deploy",), tenant="shop", functions=("a-*",)))["key"]
    caller = node.admin.create_key(Wish(scopes=("invoke",), tenant="shop"))["key"]

    def ask(key: str, method: str, path: str, value: bytes | None = None) -> tuple[int, Any]:
        answer = node.http(method, f"/admin/secrets{path}", raw=value, headers={"Authorization": f"Bearer {key}"})
        return answer.status, answer.code or answer.body

    assert ask(shop, "PUT", "/SHOP", b"value of the shop")[0] == 200
    assert ask(bank, "PUT", "/BANK", b"value of the bank")[0] == 200
    assert ask(shop, "PUT", "/BANK?tenant=bank", b"value of the shop") == (403, "forbidden")
    assert ask(shop, "DELETE", "/BANK") == (404, "unknown_secret")
    assert ask(shop, "DELETE", "/BANK?tenant=bank") == (403, "forbidden")
    assert [row["name"] for row in ask(shop, "GET", "")[1]["secrets"]] == ["SHOP"]
    assert ask(shop, "GET", "?tenant=bank") == (403, "forbidden")
    assert ask(part, "GET", "") == (403, "forbidden")
    assert ask(part, "PUT", "/SHOP", b"value of the part") == (403, "forbidden")
    assert ask(caller, "PUT", "/SHOP", b"value of the caller") == (403, "scope_missing")
    assert ask(shop, "PUT", "/SHOP", b"\xff\xff\xff\xff") == (400, "bad_request")
    assert ask(shop, "PUT", "/SHOP", b"x" * 33000) == (413, "body_too_large")
    assert ask(shop, "PUT", "/NO-NAME", b"value of the shop") == (400, "bad_request")
    assert sorted(row["name"] for row in node.admin.secrets()) == ["BANK", "SHOP"]
    source = node.folder("a-own")
    (source / "function.py").write_text("import os\ndef handle(state, request):\n    return dict(os.environ)\n")
    archive = subprocess.run(["tar", "-C", str(source), "-c", "."], check=True, capture_output=True).stdout

    def deploy(key: str, query: str) -> tuple[int, str]:
        path = f"/admin/functions?name=a-own&{query}"
        answer = node.http("POST", path, raw=archive, headers={"Authorization": f"Bearer {key}"})
        return answer.status, answer.code

    assert deploy(shop, "secret=BANK") == (400, "unknown_secret")
    assert deploy(part, "secret=SHOP") == (403, "forbidden"), "it could have every secret of its tenant printed"
    assert deploy(shop, "env=NOTHING") == (400, "bad_request")
    assert deploy(shop, "secret=SHOP&env=MODE=a%3Db&env=EMPTY=") == (200, "")
    headers = {"Authorization": f"Bearer {caller}"}
    found = node.http("POST", "/functions/a-own/invoke", 0, headers=headers).body
    assert {name: found.get(name) for name in ("SHOP", "MODE", "EMPTY")} == {
        "SHOP": "value of the shop", "MODE": "a=b", "EMPTY": ""
    }  # fmt: skip
    lines = (node.state / "logs" / "audit.log").read_text()
    assert '"secret set"' in lines
    assert "value of the shop" not in lines


PEM = "-----BEGIN KEY-----\nfirst line of it\n\tsecond, 'quoted' \\ line\n-----END KEY-----\n"


def test_a_secret_of_several_lines_comes_as_it_is_and_is_not_shown(node: TestNode) -> None:
    node.admin.set_secret("", "PEM", PEM)
    source = """
    import os
    def handle(state, request):
        print("it is", os.environ["PEM"], flush=True)
        if request:
            raise ValueError(os.environ["PEM"])
        return os.environ["PEM"]
    """
    node.deployed("lines", source, secrets=("PEM",))
    assert node.result("lines", 0) == PEM
    failed = node.invoke("lines", 1)
    assert failed.code == "function_raised"
    assert "ValueError: [secret PEM]" in failed.message
    node.wait(lambda: node.log_of("lines").count("it is [secret PEM]") == 2, 60, "what was printed")
    for text in (failed.message, node.log_of("lines")):
        assert not any(line.strip() in text for line in PEM.splitlines())
    assert _anywhere(node, "first line of it") == []
    assert node.remove("lines").status == 200
    node.admin.remove_secret("", "PEM")


@pytest.mark.parametrize(
    ("name", "value", "status", "code", "says"),
    [
        ("NUL", "before\0after", 400, "bad_request", "4 to 32,768 bytes without NUL; this has 12"),
        ("LARGE", "x" * 32_769, 400, "bad_request", "this has 32,769"),
        ("LARGE", "x" * (1 << 20), 413, "body_too_large", "a secret may have 32,768"),
        ("NEW\nLINE", VALUE, 400, "bad_request", "cannot be a secret's name"),
        ("LD-PRELOAD", VALUE, 400, "bad_request", "cannot be a secret's name"),
        ("A" * 65, VALUE, 400, "bad_request", "cannot be a secret's name"),
        ("", VALUE, 400, "bad_request", "cannot be a secret's name"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_and_not_repeated(
    node: TestNode, name: str, value: str, status: int, code: str, says: str
) -> None:
    before = node.admin.secrets()
    with pytest.raises(CallRefused, match=says) as caught:
        node.admin.set_secret("", name, value)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert value[:20] not in str(caught.value)
    assert node.admin.secrets() == before


@pytest.mark.parametrize("name", ["", "A=B", "A\nB", "A\0", "1A", "\u00c4", "A" * 65, "A B"])
def test_what_is_no_name_of_a_variable_is_refused(node: TestNode, name: str) -> None:
    answer = node.deploy("g", FUNCTION, env={name: "value"})
    assert (answer.status, answer.code) == (400, "bad_request")
    assert "cannot be the name of an environment variable" in answer.message


def test_a_neighbour_finds_no_secret_of_another_tenants(node: TestNode) -> None:
    """Whose instance, and a program that it has started, live meanwhile."""
    victim = """
    import os, resource, subprocess, sys
    def load():
        words = [sys.executable, "-c", "input()"]
        return subprocess.Popen(words, stdin=subprocess.PIPE), bytearray(os.environ["TOKEN"].encode())
    def handle(state, request):
        if request == "dump":
            os.kill(state[0].pid, 6)
            return [state[0].wait(), *resource.getrlimit(resource.RLIMIT_CORE)]
        return [state[0].poll(), open(f"/proc/{state[0].pid}/environ").read().count(os.environ["TOKEN"])]
    """
    prowler = """
    import os
    def handle(state, value):
        found, seen = [], 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("environ", "cmdline", "maps", "mem"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        seen += 1
                        if value.encode() in (file.read(1 << 20) if name != "mem" else b""):
                            found.append([pid, name])
                except OSError:
                    pass
        for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), "/function"):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if os.path.isfile(path) and value.encode() in open(path, "rb").read():
                    found.append(path)
        return [found, seen >= 3]
    """
    node.admin.set_secret("bank", "TOKEN", VALUE)
    node.deployed("victim", victim, tenant="bank", secrets=("TOKEN",))
    node.deployed("prowler", prowler, tenant="shop")
    assert node.result("victim", 0) == [None, 1], "it is there to be found"
    assert node.result("prowler", VALUE) == [[], True]
    for pid in node.descendants():
        assert VALUE.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    most = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    dumped = node.result("victim", "dump")
    assert dumped == [-6, most, most], "neither a file nor a program of the machine takes a core of one byte"
    for name in ("victim", "prowler"):
        assert node.remove(name).status == 200
    node.admin.remove_secret("bank", "TOKEN")


def test_a_full_disk_takes_no_secret_and_loses_none() -> None:
    config = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n[limits]\ndisk = "0"\n'
    with node_on_small_disk(config, "3m") as node:
        node.admin.set_secret("", "TOKEN", VALUE)
        node.deployed("f", FUNCTION, secrets=("TOKEN",))
        filled = fill(node.state)
        for name in ("TOKEN", "OTHER"):
            with pytest.raises(CallRefused, match="nothing was changed; free space on its disk") as caught:
                node.admin.set_secret("", name, "another value " * 2000)
            assert (caught.value.status, caught.value.code) == (507, "not_kept")
        assert node.result("f", 0)["TOKEN"] == VALUE
        assert [row["name"] for row in node.admin.secrets()] == ["TOKEN"]
        filled.unlink()
        assert node.restart("f").status == 200
        node.wait(lambda: bool(node.result("f", 0)["TOKEN"] == VALUE), 60, "the function to be back")
        node.admin.set_secret("", "OTHER", "another value")


def test_a_node_without_its_key_says_so_and_serves_the_others(node: TestNode) -> None:
    node.admin.set_secret("shop", "SHOP", "value of the shop")
    node.deployed("f", FUNCTION)
    key = node.state / "secrets.key"
    os.rename(key, node.state / "away")
    try:
        answer = node.deploy("a-own", FUNCTION, tenant="shop", secrets=("SHOP",))
        assert (answer.status, answer.code) == (422, "load_failed")
        assert f"the key of the node's secrets, {key}: No such file or directory; restore it" in answer.message
        assert node.result("f", 0)["TOKEN"] is None
    finally:
        os.rename(node.state / "away", key)
    assert node.deploy("a-own", FUNCTION, tenant="shop", secrets=("SHOP",)).status == 200


def test_a_backup_of_a_node_that_runs_is_another_node(node: TestNode, tmp_path: Path) -> None:
    """With functions and their versions, secrets and keys, in another place."""
    node.admin.set_secret("", "TOKEN", VALUE)
    assert _deploy(node, env={"MODE": "slow"}).status == 200
    assert _deploy(node, secrets=("TOKEN",)).status == 200
    key = node.admin.create_key(Wish(scopes=("invoke",), functions=("f",)))
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)
        other = TestNode(Path(directory), CONFIG, node=MANY)
        reader = Reader(Path(directory), tmp_path / "reader", node)
        write, restore = commands("docs/backup.md")
        assert reader.types(write).startswith("mouse.tar has ")
        assert node.result("f", 0)["TOKEN"] == VALUE, "it goes on"
        assert " start a node on it " in reader.types(restore)
        (Path(directory) / "new").rename(other.state)
        with kept_running(other):
            assert other.result("f", 0) == {"TOKEN": VALUE, "MODE": None, "PLAIN": None}
            other.admin.roll_back("f", 0)
            assert other.result("f", 0) == {"TOKEN": None, "MODE": "slow", "PLAIN": None}
            assert other.admin.revoke_key(key["id"])["id"] == key["id"]
            status, _, said = reader.tries(f"dormouse restore mouse.tar --config {other.file}")
            assert (status, "is not empty (a node's state is in it)" in said) == (1, True)
    assert node.result("f", 0)["TOKEN"] == VALUE
    node.admin.revoke_key(key["id"])
