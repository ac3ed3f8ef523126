"""Earlier versions of a function on a real node: they are kept, deployed again, and go with their function."""

from collections.abc import Iterator
from typing import Any

import pytest

from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(240)

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
    node.wait(lambda: _trees(node) == 3, 20, "the first version's files to go")
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
    node.wait(lambda: _trees(node) == 3, 20, "what is not kept to go")


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
    node.wait(lambda: not (node.state / "functions" / "f").exists(), 20, "its files to go")
    assert _refused(node, 0)[0] == "unknown_function"
    with pytest.raises(CallRefused):
        node.admin.versions("f")
    _deploy(node, 1)
    assert _refused(node, 0) == (
        "unknown_version",
        "no earlier version of 'f' is kept; there are: none ([limits] versions says how many are kept)",
    )
