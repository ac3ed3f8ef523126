"""Earlier versions of a function on a real node: they are kept, deployed again, and go with their function."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dormouse.core.folder import FunctionFolder
from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import HttpAnswer, TestNode, running_node
from dormouse.schemas.admin import Wish

FUNCTION = """
def load():
    return open("part").read()
def handle(part, request):
    return [part, WHICH]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    config = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n[limits]\nversions = 2\n'
    with running_node(config) as running:
        yield running


def _deploy(node: TestNode, which: int, **settings: Any) -> None:
    node.deployed("f", FUNCTION.replace("WHICH", str(which)), {"part": f"part {which}"}, **settings)


def _versions(node: TestNode) -> list[int]:
    return [row["version"] for row in node.admin.versions("f")]


def _trees(node: TestNode) -> int:
    return sum(path.is_dir() for path in (node.state / "functions" / "f").iterdir())


def _refused(node: TestNode, version: int) -> tuple[str, str]:
    with pytest.raises(CallRefused) as caught:
        node.admin.roll_back("f", version)
    return caught.value.code, str(caught.value)


def test_an_earlier_version_is_deployed_again(node: TestNode) -> None:
    for which in (1, 2, 3, 4):
        _deploy(node, which, deadline=f"{which}s")
    assert _versions(node) == [4, 3, 2]
    node.wait(lambda: _trees(node) == 3, 60, "the first version's files to go")
    assert node.admin.roll_back("f", 0) == {"name": "f", "version": 5, "as": 3}
    assert node.result("f", 1) == ["part 3", 3]
    assert node.admin.functions()[0]["deadline_ms"] == 3000
    assert _versions(node) == [5, 4, 2]
    code, text = _refused(node, 1)
    assert code == "unknown_version"
    assert "there are: 2, 4" in text
    node.kill_all()
    node.start()
    assert node.result("f", 1) == ["part 3", 3]
    assert node.admin.roll_back("f", 2)["version"] == 6
    assert node.result("f", 1) == ["part 2", 2]
    node.wait(lambda: _trees(node) == 3, 60, "what is not kept to go")


def test_a_version_that_does_not_load_any_more_leaves_what_is_served(node: TestNode) -> None:
    """And is still there afterwards."""
    before = _versions(node)
    earlier = node.admin.versions("f")[1]
    trees = [path for path in (node.state / "functions" / "f").iterdir() if path.is_dir()]
    (part,) = [tree / "part" for tree in trees if (tree / "part").read_text() == "part 3"]
    part.rename(part.with_name("away"))
    assert earlier["version"] == 5
    assert _refused(node, 5)[0] == "load_failed"
    assert node.result("f", 1) == ["part 2", 2]
    assert _versions(node) == before
    part.with_name("away").rename(part)
    assert node.admin.roll_back("f", 5)["as"] == 5
    assert node.result("f", 1) == ["part 3", 3]


def test_a_removed_function_takes_its_versions_along(node: TestNode) -> None:
    assert node.remove("f").status == 200
    node.wait(lambda: not (node.state / "functions" / "f").exists(), 60, "its files to go")
    assert _refused(node, 0)[0] == "unknown_function"
    with pytest.raises(CallRefused):
        node.admin.versions("f")
    _deploy(node, 1)
    assert _refused(node, 0) == (
        "unknown_version",
        "no earlier version of 'f' is kept; there are: none ([limits] versions says how many are kept)",
    )


def test_the_same_over_http(node: TestNode) -> None:
    _deploy(node, 2)
    key = node.admin.create_key(Wish(scopes=("deploy",)))["key"]
    auth = {"Authorization": f"Bearer {key}"}

    def asked(method: str, path: str) -> HttpAnswer:
        return node.http(method, f"/admin/{path}", headers=auth)

    newest = _versions(node)[0]
    assert [row["version"] for row in asked("GET", "functions/f/versions").body["versions"]] == _versions(node)
    assert asked("POST", "functions/f/rollback").body == {"name": "f", "version": newest + 1, "as": newest - 1}
    assert asked("POST", "functions/f/rollback?version=999").code == "unknown_version"
    assert asked("POST", "functions/f/rollback?version=two").code == "bad_request"
    assert asked("POST", "functions/f/rollback?to=2").code == "bad_request"
    assert asked("PUT", "functions/f/pin").body == {"name": "f", "pinned": True}
    assert node.status()["functions"]["f"]["pinned"] is True
    assert asked("DELETE", "functions/f/pin").body == {"name": "f", "pinned": False}
    for path in ("functions/g/versions", "requests?name=g"):
        assert asked("GET", path).code == "unknown_function"
    invoked = node.http("POST", "/functions/f/invoke", 1, headers={**auth, "X-Request-Id": "r"})
    assert invoked.code == "scope_missing", "to deploy is not to invoke"
    assert node.admin.invoke("f", b"1") == b'["part 1",1]'
    rows = asked("GET", "requests?name=f&kind=&most=1").body["requests"]
    assert [(row["function"], row["outcome"]) for row in rows] == [("f", "ok")]
    assert asked("GET", "requests?kind=odd").code == "bad_request"
    assert asked("GET", "functions/f/logs?since=never").code == "bad_request"


def test_another_tenants_version_takes_over_no_past() -> None:
    """An administrator may give a name to another tenant; what was before is not shown to it."""
    says = 'def load():\n    print("by WHO")\ndef handle(state, request):\n    print("asked WHO")\n    1 / request\n'
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n', node='tenants = "many"') as node:
        node.deployed("f", says.replace("WHO", "old"), tenant="old")
        assert node.invoke("f", 0).status == 500
        node.deployed("f", says.replace("WHO", "new"), tenant="new")
        key = node.admin.create_key(Wish(scopes=("deploy", "invoke"), tenant="new"))["key"]
        headers = {"Authorization": f"Bearer {key}"}

        def seen(what: str) -> Any:
            return node.http("GET", f"/admin/functions/f/{what}", headers=headers).body

        assert seen("errors") == {"errors": []}
        assert [row["tenant"] for row in seen("versions")["versions"]] == ["new"]
        (row,) = node.http("GET", "/admin/functions", headers=headers).body["functions"]
        assert (row["requests"], row["errors"]) == (0, 0)
        assert node.http("POST", "/functions/f/invoke", 0, headers=headers).status == 500
        node.wait(lambda: "asked new" in node.log_of("f"), 60, "its print")
        assert "old" not in node.log_of("f")
        assert [row["tenant"] for row in node.admin.versions("f")] == ["new", "old"]


def test_of_two_deploys_of_one_name_at_once_the_second_is_refused(node: TestNode) -> None:
    """While the first loads, and with the first's files and settings left as they are."""
    gate = node.shared / "twice"
    waits = f"""
import pathlib, time
def load():
    while not pathlib.Path({str(gate)!r}).exists():
        time.sleep(0.01)
    return open("part").read()
def handle(part, request):
    return part
"""
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(node.admin.deploy, "twice", _folder(node, "first", waits), {})
        try:
            node.wait((node.state / "logs" / "fn-twice.log").exists, 60, "the first one to load")
            with pytest.raises(CallRefused) as caught:
                node.admin.deploy("twice", _folder(node, "second", waits), {"deadline": "9s"})
        finally:
            gate.touch()
        assert (caught.value.code, caught.value.status) == ("change_in_progress", 409)
        assert "wait until that has ended" in str(caught.value)
        assert first.result()["version"] == 1
    assert node.admin.invoke("twice", b"1") == b'"first"'
    assert node.admin.deploy("twice", _folder(node, "second", waits), {})["version"] == 2
    assert node.admin.invoke("twice", b"1") == b'"second"'


def _folder(node: TestNode, part: str, source: str) -> FunctionFolder:
    """Two people's folders of the same function."""
    own = node.folder(f"twice-{part}")
    (own / "twice.py").write_text(source)
    (own / "part").write_text(part)
    return FunctionFolder(own, "twice.py", False)
