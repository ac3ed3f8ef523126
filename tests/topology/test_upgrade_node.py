"""`dormouse up --replace` on a real node: nothing is lost under load, and what fails leaves the old node as it was."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.upgrade import loaded, source
from dormouse.core import procfs
from dormouse.core.folder import FunctionFolder
from dormouse.core.node import nodeprocess
from dormouse.core.paths import RunPaths
from dormouse.core.startup import read_node_config
from dormouse.schemas.errors import ConfigError, ProcessFailed

pytestmark = pytest.mark.timeout(400)

CONFIG = '[gpu]\ncount = 1\nmemory = "128MiB"\nthreads = 1\n'


def _deployed(node: TestNode) -> dict[str, int]:
    """Two functions, and what they answer to 0."""
    for seed, name in enumerate(("f", "g")):
        node.deployed(name, source(seed, 1 << 16))
    return {name: int(node.result(name, {"x": 0})["sum"]) for name in ("f", "g")}


def test_nothing_is_lost_while_a_new_node_takes_the_place_of_the_old_one() -> None:
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        assert node.admin.deploy("f", FunctionFolder(node.folder("f"), "f.py", False), {}, traffic=10)["version"] == 2
        assert node.process is not None
        old, processes = node.process.pid, node.pids()
        with loaded(node, sums, next(iter(sums.items())), rate_s=20, lanes=8) as load:
            node.wait(lambda: len(load.took_s) > 40 and load.streams > 0, 120, "some load")
            node.replace()
            came = len(load.took_s)
            node.wait(lambda: len(load.took_s) > came + 40, 120, "more load")
        assert load.failed == []
        assert node.process.pid != old
        assert not processes.keys() - node.pids().keys()
        assert not set(processes.values()) & set(node.pids().values())
        assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums
        shares = {name: row["traffic"] for name, row in node.status()["functions"].items()}
        assert shares == {"f": 90, "f@2": 10, "g": 100}


def _slabs(node: TestNode) -> set[tuple[str, str]]:
    """The store's shared memory for models: the kernel's number and the name of each."""
    lines = [line.split() for line in Path(f"/proc/{node.pids()['store']}/maps").read_text().splitlines()]
    return {(words[4], words[5]) for words in lines if len(words) > 5 and words[5].startswith("/memfd:dormouse-slab")}


def test_models_in_host_memory_go_over_and_are_neither_copied_nor_read() -> None:
    """Their files are broken meanwhile, and the memory is the same."""
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        node.wait(
            lambda: node.status()["store"]["file_nbytes"] >= node.status()["store"]["host_nbytes"] > 0,
            120,
            "models to be in files",
        )
        stored, slabs = node.status()["store"]["host_nbytes"], _slabs(node)
        assert len(slabs) > 0
        for file in (node.state / "store" / "segments").glob("*/*"):
            file.write_bytes(bytes(file.stat().st_size))
        for _ in range(2):
            node.replace()
            assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums
            # What functions make again is elsewhere for a moment.
            node.wait(lambda: slabs <= _slabs(node), 60, "the same memory")
            node.wait(lambda: node.status()["store"]["host_nbytes"] == stored, 60, "no more of it")
        assert "segment_damaged" not in node.logs(1 << 20)
        node.deployed("h", source(5, 1 << 16))  # there is room for others, and it is clean
        assert node.result("h", {"x": 0})["sum"] > 0
        assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums


def _heirs(node: TestNode) -> list[int]:
    assert node.process is not None
    return [pid for pid in procfs.children(node.process.pid) if "--succeed" in procfs.words(pid)]


def _answer(node: TestNode, names: Iterable[str]) -> bool:
    return all(node.invoke(name, {"x": 0}).status == 200 for name in names)


@pytest.mark.parametrize("stage", ["imports", "requests end", "the old processes end", "the new processes start"])
def test_a_new_node_that_dies_leaves_the_old_one_at_work(stage: str) -> None:
    """At any time; while the new one imports, nobody notices."""
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        assert node.process is not None
        old = node.process

        def die(at: str) -> None:
            if at == stage or (stage == "the new processes start" and at == "the old processes end"):
                node.wait(lambda: len(_heirs(node)) == 1, 60, "the new node's supervisor")
                os.kill(_heirs(node)[0], signal.SIGKILL if at == stage else signal.SIGSTOP)  # else it may be done first

        with loaded(node, sums, next(iter(sums.items())), rate_s=10, lanes=4) as load:
            node.wait(lambda: len(load.took_s) > 10, 120, "some load")
            with pytest.raises(ProcessFailed, match="goes on, and was not replaced: it was ended by SIGKILL"):
                node.replace(told=die)
            node.wait(lambda: _answer(node, sums), 120, "answers")
        assert node.process is old
        assert stage != "imports" or load.failed == []
        assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums
        node.replace()
        assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums
        assert node.process is not old


def test_a_node_whose_run_directory_nobody_can_write_ends() -> None:
    """A service manager starts it again; one that neither serves nor ends would stay so."""
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        assert node.process is not None
        everyone = node.descendants()

        def block(at: str) -> None:
            if at == "the old processes end":
                (RunPaths(node.run).trusted / "node.new").mkdir()

        with pytest.raises(ProcessFailed, match="cannot be taken over"):
            node.replace(told=block)
        assert node.process.wait(60) == 1
        node.expect_nothing_left(everyone, 60)
        node.start()
        node.wait(lambda: _answer(node, sums), 120, "answers")


def test_a_node_that_is_stopped_while_its_successor_starts_has_none() -> None:
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        assert node.process is not None
        everyone, stopped = node.descendants(), list[bool]()

        def stop(at: str) -> None:
            if at == "the old processes end":
                (heir,) = _heirs(node)
                everyone.extend([heir, *procfs.children(heir)])
                (store,) = [pid for pid in procfs.children(heir) if "store" in procfs.words(pid)]
                os.kill(store, signal.SIGSTOP)  # the new node is not up before it is stopped
            elif at == "the new processes start":
                node.wait(
                    lambda: (
                        read_node_config(str(node.run)).start.generation == 1 or "not_replaced" in node.logs(1 << 20)
                    ),
                    60,
                    "the new node to have the directory",
                )
                stopped.append(nodeprocess.stop(node.run))

        with pytest.raises(ProcessFailed):
            node.replace(told=stop)
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # what is stopped does not see that its node has ended
        assert stopped == [True]
        assert node.process.wait(60) == 0
        node.expect_nothing_left(everyone, 60)
        node.start()
        node.wait(lambda: _answer(node, sums), 120, "answers")


def test_a_node_file_that_cannot_be_used_is_refused_and_nobody_notices() -> None:
    with running_node(CONFIG) as node:
        sums = _deployed(node)
        text, processes = node.file.read_text(), node.pids()
        for changed, error in (
            (text.replace("count = 1", "count = -1"), "count"),
            (text.replace(f"port = {node.port}", "port = 1"), "`--replace` does not"),
            (text.replace(f'state = "{node.state}"', f'state = "{node.state}2"'), "has the same"),
        ):
            node.file.write_text(changed)
            with pytest.raises(ConfigError, match=error):
                node.replace()
        node.file.write_text(text)
        assert node.pids() == processes
        assert {name: node.result(name, {"x": 0})["sum"] for name in sums} == sums
