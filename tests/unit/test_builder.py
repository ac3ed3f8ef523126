"""What a build of libraries says when pip has failed: with pip itself."""

import pytest

from dormouse.core.node.ports import reserved_port
from dormouse.core.sandbox.builder import BuildFailed, _Pip
from dormouse.schemas.messages import BuildOrder


def test_an_index_that_cannot_be_reached_is_no_fault_of_the_requirements() -> None:
    with reserved_port() as nobody:
        index = f"http://127.0.0.1:{nobody.getsockname()[1]}/simple"
        pip = _Pip(BuildOrder(index=index, variables={"PIP_RETRIES": "1"}))
        with pytest.raises(BuildFailed) as raised:
            pip.run("install", "--dry-run", "emoji==2.15.0")
    assert (raised.value.code, str(raised.value)) == (
        "index_unreachable",
        "the package index cannot be reached ([Errno 111] Connection refused); [environments] index in the node file "
        "names it",
    )
