"""What a function must be for what it is deployed as: said at its deploy."""

from typing import Any

import pytest

from dormouse.client_shim.instance.user_function import LoadFailure, UserFunction, batch_function, coroutine_function


def function(**parts: Any) -> UserFunction:
    return UserFunction(**{"load": lambda: None, "handle": lambda state, request: request, "unload": None, **parts})


def whole(state: Any, requests: list[Any]) -> list[Any]:
    return requests


def yields(state: Any, requests: list[Any]) -> Any:
    yield from requests


async def awaits(state: Any, request: Any) -> Any:
    return request


async def streams(state: Any, request: Any) -> Any:
    yield request


def test_what_is_right_is_taken() -> None:
    assert batch_function(lambda: function(handle_batch=whole)).handle_batch is whole
    assert coroutine_function(lambda: function(handle=awaits)).handle is awaits


@pytest.mark.parametrize(
    ("handle_batch", "words"),
    [(None, "define handle_batch"), (awaits, "not async def"), (yields, "come whole"), (streams, "come whole")],
)
def test_a_batch_is_answered_whole(handle_batch: Any, words: str) -> None:
    with pytest.raises(LoadFailure, match=words):
        batch_function(lambda: function(handle_batch=handle_batch))


@pytest.mark.parametrize(("handle", "words"), [(whole, "async def handle"), (streams, "come whole")])
def test_many_at_once_are_coroutines_that_return(handle: Any, words: str) -> None:
    with pytest.raises(LoadFailure, match=words):
        coroutine_function(lambda: function(handle=handle))
