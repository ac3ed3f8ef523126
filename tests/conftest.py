"""The loopback world for every folder of tests: a node in this process, and this process's PyTorch connected to it
while a test runs."""

import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

from dormouse.core import native

gc.disable()  # imports and collection leave little garbage, and looking for it takes a fifth of their time

# A shell that starts tests in the background has it ignored, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _loopback_module() -> Any:
    """tests/loopback.py, which pytest's importlib mode does not put on the path."""
    name = "dormouse_tests_loopback"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "loopback.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(params=["python", "cpp"])
def loopback(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A `LoopbackWorld`: two emulated GPUs, no lease held, gradients off as in a function.

    Commands are recorded and run by C++, and by Python; by C++ in sequences that are followed, too, and compared.
    """
    import torch

    module = _loopback_module()
    # Convolutions of one and of two threads differ in the last bit: both sides have one, whatever ran before them.
    torch.set_num_threads(1)
    threads = set(threading.enumerate())
    by_cpp = request.param == "cpp"
    if by_cpp:
        for library in (native.EXECUTOR, native.RECORDER):
            library.build()
    world = module.LoopbackWorld(gpus=2, by_cpp=by_cpp, templates=module.CHECKED)
    assert world.by_cpp == by_cpp
    try:
        with torch.no_grad():
            yield world
    finally:
        world.close()
        left = set(threading.enumerate()) - threads
        for thread in left:
            thread.join(60)  # a queue's feeder ends after whoever has closed it
        assert not [thread for thread in left if thread.is_alive()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and (reason := needs.without_these_rights(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {reason}")
    return report


def _note_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A line for the list at the end of scripts/test: what would make the test run, a tab, and the test."""
    path = os.environ.get("DORMOUSE_SKIPPED")
    if path and report.skipped and isinstance(report.longrepr, tuple):
        with open(path, "a") as file:
            file.write(f"{report.longrepr[2].removeprefix('Skipped: ')}\t{report.nodeid}\n")


pytest_runtest_logreport = pytest_collectreport = _note_skipped
"""The processes among which tests are spread write too: nobody else hears that they have skipped a whole module."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests and what they import live as long as the process: no garbage collection needs to look at them again."""
    collected = yield
    gc.freeze()
    gc.enable()
    return collected
