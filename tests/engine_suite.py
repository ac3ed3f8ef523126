"""The tests of tests/unit/test_engine.py on a CUDA device, which tests/unit opens over the fake driver and tests/gpu on
a GPU.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MIB: Final = 1 << 20
TOTALS: Final = {"regions": 6 * MIB, "pages": 12 * MIB, "buddy": 128 * MIB}
"""Of a pool with room for six segments of 1 MiB, and of the smallest one of blocks."""

ELSEWHERE: Final = {
    "test_the_first_segments_are_used_while_the_last_are_on_their_way",  # a link of 10 MB/s
    "test_revoked_while_copying",
    "test_rows_of_a_table_are_read_before_the_table_has_come",  # from host memory
    "test_a_peer_gives_what_it_has_and_the_store_the_rest",  # emulated peers
    "test_a_peer_that_dies_or_cannot_be_read_is_passed_over",
    "test_what_a_peer_reads_stays_until_it_is_let_go",
    "test_n5_an_allocation_that_no_eviction_makes_room_for_evicts_nothing",  # activations that share the pool
    "test_captured_memory_makes_room_before_an_idle_model_goes",
    "test_a_value_comes_down_from_a_gpu_that_weights_fill",
}
"""What only an emulated GPU can do."""


def loaded(path: Path) -> Any:
    """A test module, which pytest's importlib mode does not make importable."""
    name = f"suite_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def engine_tests() -> Any:
    return loaded(Path(__file__).parent / "unit" / "test_engine.py")


def cases(tests: ModuleType, pool: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """``(name, test, arguments after the World)`` of those that can run with this pool."""
    for name, test in vars(tests).items():
        wants = list(inspect.signature(test).parameters) if name.startswith("test_") and name not in ELSEWHERE else []
        if wants and (wants[0] == "world" or pool == "regions"):
            for rest in ([True], [False]) if len(wants) > 1 else ([],):
                yield name, test, list(rest)
