"""The fixture for tests that need the fake driver: ``from fake_cuda.fixtures import fake_cuda_library``."""

from pathlib import Path

import pytest
from fake_cuda.build import NoCompiler, build


@pytest.fixture(scope="session")
def fake_cuda_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled fake driver, for ``harness.run_child``; skips where there is no C compiler or no cuda.bindings."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    try:
        return build(cache.mkdir("fake_cuda") if cache else tmp_path_factory.mktemp("fake_cuda"))
    except NoCompiler as error:
        pytest.skip(str(error))
