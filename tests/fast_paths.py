"""The fast path of interpreters, built. A source that does not compile fails; needs.py excuses a machine without a
compiler.
"""

from dormouse.core.native import EXECUTOR
from dormouse.gpuserver.commands import fast_path


def built() -> fast_path.FastPath:
    EXECUTOR.build()
    found = fast_path.load()
    assert found is not None, "it was built, and cannot be loaded"
    return found
