"""What the controller answers who asks what functions have used, whatever the router passes on of it."""

import math
from typing import Any

import orjson
import pytest

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
