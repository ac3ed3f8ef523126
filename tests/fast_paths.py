"""The fast path of interpreters, built if it can be."""

import pytest

from dormouse.gpuserver.commands import fast_path
from dormouse.schemas.errors import ConfigError


def built() -> fast_path.FastPath:
    """Skips where it cannot be."""
    try:
        fast_path.build()
    except ConfigError:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    found = fast_path.load()
    assert found is not None, "it was built"
    return found
