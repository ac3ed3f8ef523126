"""Earlier versions of a function on a real node: they are kept, deployed again, and go with their function."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core import audit
from dormouse.core.errortext import gist
from dormouse.core.folder import FunctionFolder
from dormouse.core.node.refusals import CallRefused
from dormouse.core.problems import troubles
from dormouse.schemas.admin import Wish

FUNCTION = """
def load():
    return open("part").read()
def handle(part, request):
    return [part, WHICH]
"""

ANSWERS = """
from dormouse import Response
def handle(state, request):
    return Response({})
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    config = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n[limits]\nversions = 2\n'
    with running_node(config) as running:
        yield running


class History:
    """A function of its own on the node, whose versions have been deployed in this order."""

    def __init__(self, node: TestNode, name: str, *parts: int) -> None:
        self.node, self.name = node, name
        for which in parts:
            self.deploy(which)

    def deploy(self, which: int) -> None:
        source, files = FUNCTION.replace("WHICH", str(which)), {"part": f"part {which}"}
        self.node.deployed(self.name, source, files, deadline=f"{which}s")

    @property
    def versions(self) -> list[int]:
        return [row["version"] for row in self.node.admin.versions(self.name)]

    @property
    def trees(self) -> list[Path]:
        return [path for path in (self.node.state / "functions" / self.name).iterdir() if path.is_dir()]

    def keeps(self, count: int) -> None:
        self.node.wait(lambda: len(self.trees) == count, 60, "files that are not kept to go")

    def roll_back(self, version: int) -> Any:
        return self.node.admin.roll_back(self.name, version)

    def refused(self, version: int) -> tuple[str, str]:
        with pytest.raises(CallRefused) as caught:
            self.roll_back(version)
        return caught.value.code, str(caught.value)

    def expect(self, which: int) -> None:
        """What is served; said over the socket, which wants no key."""
        assert orjson.loads(self.node.admin.invoke(self.name, b"1")) == [f"part {which}", which]


def test_a_version_that_fails_is_an_alarm_until_a_mended_one_is_deployed(node: TestNode) -> None:
    """Each request counts for the version that was deployed when it came; what its caller is to blame for does not."""

    def state() -> tuple[list[str], Any]:
        value = node.status()
        return list(troubles({"mended": value["functions"]["mended"]})), value["functions"]["mended"]["recent"]

    node.deployed("mended", "def handle(state, request):\n    return 1 / request\n", deadline="60s")
    for _ in range(5):
        assert node.invoke("mended", 0).status == 500
    assert node.http("POST", "/functions/mended/invoke", raw=b"{").status == 400
    said, recent = state()
    assert said == ["mended fails: its last 5 requests failed (dormouse requests mended --failed)"]
    window = {"seconds": 60.0, "counted": 5, "in_time": 0.0, "failed": 5}
    assert recent == {"counted": 5, "in_time": 0.0, "window": window, "failed_in_a_row": 5}
    node.deployed("mended", "def handle(state, request):\n    return request\n", deadline="60s")
    assert state()[0] == []
    assert node.result("mended", 7) == 7
    said, recent = state()
    assert (said, recent["counted"], recent["in_time"], recent["failed_in_a_row"]) == ([], 1, 1.0, 0)


def test_an_earlier_version_is_deployed_again(node: TestNode) -> None:
    f = History(node, "again", 1, 2, 3, 4)
    assert f.versions == [4, 3, 2]
    f.keeps(3)
    changes = [{"option": "deadline", "old": "4s", "new": "3s"}]
    assert f.roll_back(0) == {"name": "again", "version": 5, "copy_of": 3, "changes": changes}
    f.expect(3)
    assert node.status()["functions"]["again"]["deadline_ms"] == 3000
    assert f.versions == [5, 4, 2]
    code, text = f.refused(1)
    assert code == "unknown_version"
    assert "there are: 2, 4" in text
    node.kill_all()
    node.start()
    f.expect(3)
    assert f.roll_back(2)["version"] == 6
    f.expect(2)
    f.keeps(3)


def test_a_version_that_does_not_load_any_more_leaves_what_is_served(node: TestNode) -> None:
    """And is still there afterwards."""
    f = History(node, "broken", 1, 2)
    (part,) = [tree / "part" for tree in f.trees if (tree / "part").read_text() == "part 1"]
    part.rename(part.with_name("away"))
    assert f.refused(1)[0] == "load_failed"
    f.expect(2)
    assert f.versions == [2, 1]
    part.with_name("away").rename(part)
    f.deploy(3)  # with which what is not needed any more goes
    f.expect(3)
    assert f.roll_back(1)["copy_of"] == 1
    f.expect(1)


def test_a_removed_function_takes_its_versions_along(node: TestNode) -> None:
    f = History(node, "removed", 1, 2)
    assert node.remove("removed").status == 200
    node.wait(lambda: not (node.state / "functions" / "removed").exists(), 60, "its files to go")
    assert f.refused(0)[0] == "unknown_function"
    with pytest.raises(CallRefused):
        node.admin.versions("removed")
    f.deploy(1)
    assert f.refused(0) == (
        "unknown_version",
        "no earlier version of 'removed' is kept; there are: none ([limits] versions says how many are kept)",
    )


OPTIONS = """
import os
def handle(state, request):
    return [os.environ.get(name) for name in ("MODE", "FROM_FILE", "TOKEN")]
"""


def test_a_new_deploy_keeps_options_until_it_is_told_otherwise(node: TestNode) -> None:
    node.admin.set_secret("", "TOKEN", "the secret")
    own = node.folder("options")
    (own / "f.py").write_text(OPTIONS)
    found = FunctionFolder(own, "f.py", False)

    def deploy(**more: Any) -> tuple[list[tuple[str, str | None, str | None]], list[str]]:
        options = more.pop("options", {})
        answer = node.admin.deploy("options", found, options, **more)
        return [(row["option"], row["old"], row["new"]) for row in answer.get("changes", [])], answer.get("kept", [])

    def served() -> list[Any]:
        spec = node.admin.functions()
        (row,) = [row for row in spec if row["name"] == "options"]
        return [row["deadline_ms"], *orjson.loads(node.admin.invoke("options", b"1"))]

    said = {"deadline": "50ms", "env": {"MODE": "fast"}, "secrets": ("TOKEN",), "timeout": "5s"}
    deploy(options=said)
    assert served() == [50, "fast", None, "the secret"]
    assert deploy() == ([], ["deadline", "env.MODE", "secret.TOKEN", "timeout"])
    assert served() == [50, "fast", None, "the secret"]
    node.kill_all()
    node.start()
    (own / "dormouse.toml").write_text('deadline = "70ms"\n[env]\nFROM_FILE = "yes"\n')
    changes, kept = deploy(reset=["timeout"])
    assert changes == [("deadline", "50ms", "70ms"), ("env.FROM_FILE", None, "set"), ("timeout", "5s", "1m")]
    assert kept == ["env.MODE", "secret.TOKEN"]
    assert served() == [70, "fast", "yes", "the secret"]
    (own / "dormouse.toml").write_text("dead = 1\n")
    with pytest.raises(CallRefused, match=r"^dormouse\.toml:1: dead is no option of a deploy"):
        deploy()
    (own / "dormouse.toml").unlink()
    assert deploy() == (
        [("deadline", "70ms", "1s"), ("env.FROM_FILE", "set", None)],
        ["env.MODE", "secret.TOKEN"],
    )
    deploy(options={"stateless": True, "max_instances": 2}, note="1a2b3c")
    with pytest.raises(
        CallRefused, match=r"^max_instances is 2.* \(kept of version 5: .*max_instances.*; --reset ends"
    ):
        deploy(reset=["stateless"])
    with pytest.raises(CallRefused, match=r"^percentile is 0.98; .* such as 98$"):
        deploy(options={"percentile": 0.98})
    node.admin.roll_back("options", 3)
    assert served() == [70, "fast", "yes", "the secret"]
    assert [row["note"] for row in node.admin.versions("options")] == ["", "1a2b3c", ""]
    lines = audit.read(node.state / "logs" / "audit.log", 0.0)
    contents = {row["version"]: row["content"] for row in node.admin.versions("options")}
    (fifth,) = [row for row in lines if row["name"] == "options" and row.get("version") == 5]
    assert (fifth["act"], fifth["content"], fifth["note"]) == ("deploy", contents[5], "1a2b3c")
    options = {"max_instances": "2", "stateless": "true", "env.MODE": "set", "secret.TOKEN": "set"}
    assert fifth["options"] == options
    assert [row["options"] for row in node.admin.versions("options")][1] == options, "it was the fifth"
    (back,) = [row for row in lines if row["name"] == "options" and row["act"] == "rollback"]
    assert (back["version"], back["copy_of"], back["content"]) == (6, 3, contents[6])
    starts = [row for row in lines if row["act"] == "up"]
    assert [row["settings"] for row in starts[:1]] == [{}]
    assert all(row["outcome"] == "ok" and row["version"] for row in starts)


def test_a_version_that_does_not_answer_its_check_is_not_switched_to(node: TestNode) -> None:
    own = node.folder("checked")
    found = FunctionFolder(own, "f.py", False)

    def deploy(source: str, check: str) -> int:
        (own / "f.py").write_text(source)
        return int(node.admin.deploy("checked", found, {}, check=check)["version"])

    good = "asked = []\ndef handle(state, request):\n    asked.append(request['x'])\n    return asked\n"
    assert deploy(good, '{"x": 1}') == 1
    assert node.admin.invoke("checked", b'{"x": 2}') == b"[1,2]", "by the instance that takes over"
    for source, check, code, says in (
        (good, '{"y": 1}', "check_failed", "KeyError: 'x'"),
        ("def handle(state, request):\n    return object()\n", "1", "check_failed", "type object"),
        ("def handle(state, request):\n    yield 1\n    yield 1 / 0\n", "1", "check_failed", "ZeroDivisionError"),
        ("def handle(state, request):\n    yield object()\n", "1", "check_failed", "type object"),
        (ANSWERS.format("None, request"), "404", "check_failed", "the check was answered with the status 404"),
        (ANSWERS.format("iter([1]), request"), "403", "check_failed", "the check was answered with the status 403"),
        (ANSWERS.format("object()"), "1", "check_failed", "type object"),
        (good, "{x", "bad_request", "the check is not JSON"),
    ):
        with pytest.raises(CallRefused, match=says) as caught:
            deploy(source, check)
        assert caught.value.code == code
        assert "Traceback" not in gist(str(caught.value)), "what was raised, in one line"
        assert node.admin.versions("checked")[0]["version"] == 1, source
    assert node.admin.invoke("checked", b'{"x": 3}') == b"[1,2,3]", "the one before goes on"
    assert deploy(good, '{"x": 4}') == 2
    node.admin.restart("checked")
    assert node.admin.invoke("checked", b'{"x": 5}') == b"[5]", "later instances do without"
    assert deploy(ANSWERS.format("None, request"), "201") == 3
    assert deploy(ANSWERS.format("iter([1]), request"), "202") == 4


def test_the_same_over_http(node: TestNode) -> None:
    f = History(node, "http", 1, 2)
    key = node.admin.create_key(Wish(scopes=("deploy",)))["key"]
    auth = {"Authorization": f"Bearer {key}"}

    def asked(method: str, path: str) -> HttpAnswer:
        return node.http(method, f"/admin/{path}", headers=auth)

    assert [row["version"] for row in asked("GET", "functions/http/versions").body["versions"]] == f.versions == [2, 1]
    assert asked("POST", "functions/http/rollback").body["copy_of"] == 1
    assert asked("POST", "functions/http/rollback?version=999").code == "unknown_version"
    assert asked("POST", "functions/http/rollback?version=two").code == "bad_request"
    assert asked("POST", "functions/http/rollback?to=2").code == "bad_request"
    assert asked("PUT", "functions/http/pin").body == {"name": "http", "pinned": True}
    assert node.status()["functions"]["http"]["pinned"] is True
    assert asked("DELETE", "functions/http/pin").body == {"name": "http", "pinned": False}
    node.admin.pin("http", True)
    node.admin.pin("http", False)
    lines = audit.read(node.state / "logs" / "audit.log", 0.0)
    assert [row["act"] for row in lines if row["name"] == "http"][-4:] == ["pin", "unpin"] * 2
    assert node.admin.jobs("http") == []
    with pytest.raises(CallRefused) as unknown:
        node.admin.jobs("htpp")
    assert unknown.value.code == "unknown_function"
    for path in ("functions/g/versions", "requests?name=g"):
        assert asked("GET", path).code == "unknown_function"
    invoked = node.http("POST", "/functions/http/invoke", 1, headers={**auth, "X-Request-Id": "r"})
    assert invoked.code == "scope_missing", "to deploy is not to invoke"
    assert node.admin.invoke("http", b"1") == b'["part 1",1]'
    rows = asked("GET", "requests?name=http&kind=&most=1").body["requests"]
    assert [(row["function"], row["outcome"]) for row in rows] == [("http", "ok")]
    assert asked("GET", "requests?kind=odd").code == "bad_request"
    assert asked("GET", "functions/http/logs?since=never").code == "bad_request"


class Split:
    """A function whose version 1 is served, and what is asked of it with a key for this name alone."""

    def __init__(self, node: TestNode, name: str) -> None:
        self.node, self.name = node, name
        self.own = node.folder(name)
        wish = Wish(scopes=("deploy", "invoke"), functions=(name,), tenant="default")
        self.auth = {"Authorization": f"Bearer {node.admin.create_key(wish)['key']}"}
        self.deploy(1)

    def deploy(self, which: int, **more: Any) -> Any:
        (self.own / "f.py").write_text(FUNCTION.replace("WHICH", str(which)))
        (self.own / "part").write_text(f"part {which}")
        return self.node.admin.deploy(self.name, FunctionFolder(self.own, "f.py", False), {"deadline": "60s"}, **more)

    def traffic(self, **shares: int) -> dict[str, int]:
        """``v4=10``: version 4 gets 10 %."""
        answer = self.node.admin.traffic(self.name, {int(each[1:]): share for each, share in shares.items()})
        return dict(answer["traffic"])

    def asked(self, method: str, path: str, body: Any = None) -> HttpAnswer:
        return self.node.http(method, path, body, headers=self.auth)

    def answers(self, version: str = "", path: str = "/functions/{}/invoke") -> tuple[int, int]:
        """What a request is answered, and by which version."""
        answer = self.asked("POST", path.format(self.name + version), 1)
        assert answer.status == 200, answer
        return answer.body[1], int(answer.headers["x-dormouse-version"])

    def counts(self, requests: int) -> dict[tuple[int, int], int]:
        return dict(Counter(self.answers() for _ in range(requests)))

    @property
    def history(self) -> dict[int, int | None]:
        return {row["version"]: row["traffic"] for row in self.node.admin.versions(self.name)}

    @property
    def rows(self) -> dict[str, int]:
        functions = self.node.status()["functions"]
        return {name: row["traffic"] for name, row in functions.items() if name.partition("@")[0] == self.name}


def test_two_versions_share_the_requests_exactly(node: TestNode) -> None:
    f = Split(node, "split")
    answer = f.deploy(2, traffic=10, check="1")
    assert (answer["version"], answer["traffic"]) == (2, {"1": 90, "2": 10})
    assert f.counts(100) == {(1, 1): 90, (2, 2): 10}
    assert (f.rows, f.history) == ({"split": 90, "split@2": 10}, {1: 90, 2: 10})
    stats = node.status()["functions"]
    assert (stats["split"]["requests"], stats["split@2"]["requests"]) == (90, 10)
    assert [f.answers("@1"), f.answers("@2")] == [(1, 1), (2, 2)], "whoever names a version gets it"
    node.kill_all()
    node.start()
    assert f.counts(20) == {(1, 1): 18, (2, 2): 2}
    assert f.traffic(v2=50, v1=50) == {"1": 50, "2": 50}
    assert f.counts(20) == {(1, 1): 10, (2, 2): 10}
    assert f.traffic(v2=0) == {"1": 100, "2": 0}
    assert f.counts(5) == {(1, 1): 5}
    assert f.answers("@2") == (2, 2)
    jobs = [orjson.loads(node.admin.result(job)[1])[1] for job in _ended(node, f.name, "@1", "@2")]
    assert jobs == [1, 1, 2], "jobs, too"
    assert f.traffic(v2=100) == {"2": 100}
    assert (f.counts(5), f.rows, f.history) == ({(2, 2): 5}, {"split": 100}, {2: 100, 1: None})
    assert f.asked("POST", "/functions/split@1/invoke", 1).code == "unknown_function"
    assert f.traffic(v1=50) == {"2": 50, "1": 50}, "and back again"
    assert f.traffic(v1=100, v2=0) == {"1": 100, "2": 0}
    assert f.deploy(3)["version"] == 3, "what a new deploy replaces has the name; no number is there twice"
    assert f.traffic(v2=30) == {"3": 70, "2": 30}
    assert f.counts(10) == {(3, 3): 7, (2, 2): 3}
    back = node.admin.roll_back("split", 0)
    assert back == {"name": "split", "version": 3, "ended": 2, "changes": []}
    assert (f.counts(3), f.rows) == ({(3, 3): 3}, {"split": 100})
    assert node.admin.roll_back("split", 0)["copy_of"] == 1, "the one that had the name before 3"
    lines = [row for row in audit.read(node.state / "logs" / "audit.log", 0.0) if row["name"] == "split"]
    assert [row["shares"] for row in lines if row["act"] == "traffic"][:2] == [{"1": 50, "2": 50}, {"2": 0}]
    assert [row["traffic"] for row in lines if row["act"] == "deploy" and "traffic" in row] == [10]


def _ended(node: TestNode, name: str, *versions: str) -> list[str]:
    """Jobs of a function and of versions of it, once they have ended."""
    jobs = [node.admin.detach(name + version, b"1")["id"] for version in ("", *versions)]
    for job in jobs:
        assert node.admin.job(job, 60)["state"] == "succeeded"
    return jobs


def test_a_version_beside_that_does_not_load_changes_nothing(node: TestNode) -> None:
    f = Split(node, "beside")
    f.deploy(2, traffic=50)
    for refused, code in (
        (lambda: f.deploy(3, traffic=10, check='{"x": 1'), "bad_request"),
        (lambda: node.admin.deploy("beside", _broken(node), {}, traffic=10), "load_failed"),
        (lambda: f.traffic(v7=10), "unknown_version"),
        (lambda: f.traffic(v2=10, v1=10), "bad_request"),
        (lambda: node.admin.deploy("nobody", _broken(node), {}, traffic=10), "bad_request"),
        (lambda: node.admin.traffic("beside@2", {1: 1}), "bad_request"),
        (lambda: node.admin.roll_back("beside@2", 0), "bad_request"),
    ):
        with pytest.raises(CallRefused) as caught:
            refused()
        assert caught.value.code == code
        assert f.rows == {"beside": 50, "beside@2": 50}
    assert f.deploy(3, traffic=20)["traffic"] == {"1": 80, "3": 20}, "another one takes the place of the one beside"
    assert (f.rows, f.history) == ({"beside": 80, "beside@3": 20}, {1: 80, 3: 20, 2: None})
    assert "of version 3 starts" in node.log_of("beside@3"), "its function's log"
    assert node.remove("beside@3").status == 200
    assert (f.rows, f.history) == ({"beside": 100}, {1: 100, 3: None, 2: None})
    f.traffic(v3=10)
    assert node.admin.roll_back("beside", 2)["version"] == 4, "no number is there twice"
    assert f.rows == {"beside": 90, "beside@3": 10}
    assert node.remove("beside").status == 200
    assert f.rows == {}
    node.wait(lambda: not (node.state / "functions" / "beside").exists(), 60, "its files to go")


def _broken(node: TestNode) -> FunctionFolder:
    own = node.folder("does-not-load")
    (own / "f.py").write_text("def load():\n    return 1 / 0\ndef handle(state, request):\n    return 1\n")
    return FunctionFolder(own, "f.py", False)


def test_versions_over_http(node: TestNode) -> None:
    """With a key for this function, which its versions are."""
    f = Split(node, "weighed")
    f.deploy(2)
    traffic = f.asked("PUT", "/admin/functions/weighed/traffic?1=25")
    assert traffic.body == {"name": "weighed", "version": 2, "traffic": {"2": 75, "1": 25}}
    assert f.counts(8) == {(2, 2): 6, (1, 1): 2}
    for query in ("1=2&1=3", "1=x", "x=1", "1=101", ""):
        assert f.asked("PUT", f"/admin/functions/weighed/traffic?{query}").code == "bad_request"
    assert f.asked("GET", "/v2/models/weighed").body["versions"] == ["2", "1"]
    tensors = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}
    for version in ("1", "2"):
        inferred = f.asked("POST", f"/v2/models/weighed/versions/{version}/infer", tensors)
        assert inferred.headers["x-dormouse-version"] == version, inferred
    unserved = f.asked("POST", "/v2/models/weighed/versions/9/infer", tensors)
    assert unserved.body["error"].startswith("unknown_version: version '9' of 'weighed' is not served"), unserved
    assert f.asked("GET", "/functions/weighed@1/schema").body["version"] == 1
    assert [path for path in f.asked("GET", "/openapi.json").body["paths"] if "weighed" in path] == [
        "/functions/weighed/invoke"
    ]


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
