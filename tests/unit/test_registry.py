"""The registry of a node's processes: which it may have, and which it ends."""

import asyncio
import socket
from pathlib import Path

from dormouse.core.config import NodeConfig, NodeSection, StartSection
from dormouse.core.node.children import SILENCE_S, START_S, RunningRole
from dormouse.core.node.registry import AWAY_S, Registry
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.startup import keep_drained_gpus


def _registry(path: Path, listening: socket.socket, **epochs: int) -> Registry:
    config = NodeConfig(node=NodeSection(run=str(path / "r"), state=str(path / "s")), start=StartSection(generation=1))
    RunPaths(config.run_directory).make()
    StatePaths(config.state_directory).make()
    return Registry(config, listening, {}, epochs, lambda *_: None, lambda *_: None, lambda *_: None)


def test_what_a_successor_that_did_not_come_to_be_has_imported_is_forgotten(tmp_path: Path) -> None:
    """Its last import ended because it was killed; what the node that runs has written is that one's."""

    async def forgotten() -> None:
        with socket.socket() as listening:
            registry, paths = _registry(tmp_path, listening), RunPaths(tmp_path / "r")
            ours, theirs = (paths.warming("zygote", generation) for generation in (1, 2))
            for file in (ours, theirs):
                file.write_text('{"importing": "numpy", "since_s": 0, "left_out": {}}')
            registry.forget_imports()
            assert (ours.exists(), theirs.exists()) == (False, True)

    asyncio.run(forgotten())


def test_roles_are_added_once_and_only_those_that_may_be(tmp_path: Path) -> None:
    async def added() -> list[bool]:
        with socket.socket() as listening:
            registry = _registry(tmp_path, listening, metrics=7)
            found = [registry.add(role) for role in ("metrics", "metrics", "router", "gpu99")]
            assert registry.epochs["metrics"] == 7
            return found

    assert asyncio.run(added()) == [True, False, False, False]


def test_the_executor_of_a_gpu_that_is_drained_is_none_of_the_node_s(tmp_path: Path) -> None:
    """Neither of this node's, nor of one that takes over; whether it comes up or not."""

    async def dismissed() -> list[object]:
        with socket.socket() as listening:
            registry, found = _registry(tmp_path, listening), list[object]()
            registry.dismiss("gpu0", 0)
            found.append("gpu0" in registry.roles)
            found += [registry.add("gpu0"), "gpu0" in registry.roles]
            keep_drained_gpus(str(tmp_path / "r"), [0])
            return [*found, "gpu0" in _registry(tmp_path, listening).roles]

    assert asyncio.run(dismissed()) == [False, True, True, False]


def test_a_supervisor_that_was_stopped_takes_nobody_for_silent(tmp_path: Path) -> None:
    """What they have said meanwhile waits in its sockets. Who is silent from then on is killed as ever."""
    (tmp_path / "silent").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "silent").chmod(0o755)

    async def watched() -> tuple[str, int]:
        ended = asyncio.get_running_loop().create_future()
        with socket.socket() as listening:
            registry = _registry(tmp_path, listening)
            child = registry.children["metrics"] = RunningRole(
                "metrics",
                1,
                run=tmp_path / "r",
                link_path=str(tmp_path / "link"),
                python=str(tmp_path / "silent"),
                threads=1,
                stderr=tmp_path / "metrics.err",
                inherits={},
                on_message=lambda *_: None,
                on_exit=lambda _, status: ended.set_result(status),
            )
            child.ready, begun_s = True, child.seen_s
            registry.watch(begun_s + 1.0)
            registry.watch(begun_s + 1.0 + START_S)
            assert child.watchdog == ""
            now_s = child.seen_s
            while now_s <= child.seen_s + SILENCE_S:
                assert child.watchdog == ""
                now_s += AWAY_S - 1.0
                registry.watch(now_s)
            return child.watchdog, await asyncio.wait_for(ended, 60)

    assert asyncio.run(watched()) == (f"no sign of life for {SILENCE_S + 2.0:.0f} s", -9)
