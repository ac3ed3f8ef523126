"""``dormouse.call`` where nobody is asked."""

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from dormouse.client import CallError, OutsideRequest

DORMOUSE: Any = importlib.import_module("dormouse")


def test_a_program_is_told_what_it_has_instead() -> None:
    ways: list[Callable[[], Any]] = [lambda: DORMOUSE.call("f"), lambda: asyncio.run(DORMOUSE.acall("f", {}))]
    for asks in ways:
        with pytest.raises(OutsideRequest, match=r"a program has dormouse\.client\.Client"):
            asks()
    assert issubclass(OutsideRequest, CallError)
