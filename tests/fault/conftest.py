"""One node for a module of fault tests; each test deploys functions of its own."""

from collections.abc import Iterator

import pytest
from warm_start import processes_start_warm  # noqa: F401  # for all modules of this folder

from benchmarks.nodes.testnode import TestNode, running_node


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node() as running:
        yield running
