"""Attacks from inside real instances of real nodes, and nodes whose environment has libraries that do not import.

One function has all the attacks; what differs between nodes is what the machine gives them.
"""

import json
from collections.abc import Iterator

import pytest

from dormouse.core.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(240)
LIBRARIES = {"n4_crashes": "import ctypes\nctypes.string_at(1)", "n4_raises": "raise OSError('no')"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    libraries = tmp_path_factory.mktemp("libraries")
    for name, text in LIBRARIES.items():
        (libraries / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(libraries))
        warm = json.dumps(["json.tool", *LIBRARIES, "n4_not_installed"])
        with running_node(f'[gpu]\ncount = 1\nmemory = "64MiB"\n[sandbox]\nwarm = {warm}\n') as made:
            yield made


def test_n4_a_node_starts_without_the_libraries_that_do_not_import(node: TestNode) -> None:
    ready = json.loads((node.run / "t" / "ready").read_bytes())
    assert list(ready["left_out"]) == list(LIBRARIES)
    assert ready["left_out"]["n4_crashes"].startswith("its import ended the interpreter")
    assert ready["left_out"]["n4_raises"] == "OSError: no"
    log = (node.state / "logs" / "supervisor.log").read_text()
    for name in LIBRARIES:
        assert f'"library": "{name}"' in log or f'"library":"{name}"' in log, log
