"""What the controller answers who asks what functions have used, whatever the router passes on of it."""

import asyncio
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog import get_logger

from dormouse.controller.usage import NodeUsage
from dormouse.schemas import messages as m


@pytest.mark.parametrize("since_s", [math.nan, math.inf, -math.inf, 1e300])
def test_a_since_that_is_no_time_is_refused(since_s: float) -> None:
    log: Any = None
    usage = NodeUsage(log, frozenset(), lambda _: None)
    answer = usage.answer(m.AskUsage(query=7, since_s=since_s))
    assert answer.failure is not None
    assert (answer.query, answer.failure.status, answer.failure.code) == (7, 400, "bad_request")
    assert answer.failure.text.startswith("since is ")


def test_a_since_before_all_time_is_answered() -> None:
    log: Any = None
    usage = NodeUsage(log, frozenset(), lambda _: None)
    answer = usage.answer(m.AskUsage(query=7, since_s=-1e300))
    assert answer.failure is None
    assert orjson.loads(answer.json)["functions"] == []


def test_totals_are_of_this_process_alone(tmp_path: Path) -> None:
    """What a process that was killed has told, and not written, is no reason for a counter to go back."""

    async def main() -> None:
        usages = []
        for requests in (5, 3):
            usage = NodeUsage(get_logger(), frozenset(), lambda _: None)
            usages.append(usage)
            usage.open(tmp_path / "usage.sqlite3")
            usage.deployed([m.FunctionSpec(name="f", version=1, entry="f.py", snapshot="s")])
            assert usage.totals()["f"].requests == 0
            usage.heard(m.Served(functions=[("f", "default", requests), ("other", "default", 1)]))
            assert {name: used.requests for name, used in usage.totals().items()} == {"f": requests}
            usage.close()
        rows = orjson.loads(usages[-1].answer(m.AskUsage(query=1, since_s=0.0)).json)["functions"]
        assert {row["function"]: row["requests"] for row in rows} == {"f": 8, "other": 2}, "all is kept"

    asyncio.run(main())
