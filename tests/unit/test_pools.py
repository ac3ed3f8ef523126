"""Which pool executors have where the node file does not say."""

from pathlib import Path
from typing import Any

import pytest

from dormouse.controller import pools
from dormouse.core import log
from dormouse.core.config import GpuSection, NodeConfig, NodeSection
from dormouse.core.startup import read_node_config
from dormouse.schemas import messages as m


def spec(name: str, llm: bool = False) -> m.FunctionSpec:
    return m.FunctionSpec(
        name=name,
        version=1,
        tenant="default",
        deadline_ms=100,
        percentile=98.0,
        timeout_ms=1000,
        max_queue=1,
        snapshot="s",
        entry="e",
        llm=m.LlmSettings() if llm else None,
    )


def hello(pool: str) -> m.Hello:
    info = m.DeviceInfo(name="x", total_nbytes=1, capability=(8, 0), multiprocessors=1)
    return m.Hello(info=info, pool=pool, reason="", stats=m.PoolStats())


def config(tmp_path: Path, pool: str = "auto") -> NodeConfig:
    (tmp_path / "t").mkdir(exist_ok=True)
    return NodeConfig(node=NodeSection(run=str(tmp_path), state=str(tmp_path)), gpu=GpuSection(pool=pool))


def chosen(given: NodeConfig, tmp_path: Path, *functions: m.FunctionSpec) -> Any:
    return pools.chosen(given, functions, tmp_path / "language-models", log.get_logger())


def test_the_first_language_model_makes_it_pages_and_its_end_does_so_at_the_next_start(tmp_path: Path) -> None:
    before = config(tmp_path)
    hellos = {0: hello("regions"), 1: hello("pages")}
    assert chosen(before, tmp_path, spec("a")) is before
    assert pools.outdated(before, {0: hello("regions")}) == []
    after = chosen(before, tmp_path, spec("a"), spec("b", llm=True))
    assert (before.pool, after.pool) == ("regions", "pages")
    assert pools.outdated(after, hellos) == [0]
    assert read_node_config(str(tmp_path)).pool == "pages"  # what executors read when they start
    assert (tmp_path / "language-models").exists()
    assert chosen(after, tmp_path, spec("a")) is after
    assert not (tmp_path / "language-models").exists()


@pytest.mark.parametrize("pool", ["regions", "buddy", "pages"])
def test_what_the_node_file_says_stays(tmp_path: Path, pool: str) -> None:
    after = chosen(config(tmp_path, pool), tmp_path, spec("b", llm=True))
    assert after.pool == pool
    assert pools.outdated(after, {0: hello(pool)}) == []


def test_a_state_directory_that_takes_nothing_only_costs_the_next_start_a_pause(tmp_path: Path) -> None:
    made = pools.chosen(config(tmp_path), [spec("b", llm=True)], tmp_path / "gone" / "x", log.get_logger())
    assert made.pool == "pages"
