"""The registry of a node's processes, before it has any."""

import asyncio
import socket
from pathlib import Path

from dormouse.core.config import NodeConfig, NodeSection, StartSection
from dormouse.core.node.registry import Registry
from dormouse.core.paths import RunPaths, StatePaths


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
