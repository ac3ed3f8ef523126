"""What an instance asks its runtime to compute, and what of that cannot be: no instance is trusted with its numbers."""

from typing import Any

import msgspec
import pytest

from dormouse.gpuserver.runtime.submissions import Submissions, generation_of
from dormouse.schemas import messages as m
from dormouse.schemas.llm import MOST_LOGPROBS

VOCABULARY = 100
GOOD = m.Submit(number=1, tokens=[5, 99], more=False, prompt=2, limit=3, stops=[7], logprobs=MOST_LOGPROBS)


def test_what_is_asked_for_is_what_is_computed() -> None:
    made = generation_of(4, GOOD, GOOD.tokens, VOCABULARY)
    assert made is not None
    assert (made.sequence.number, made.sequence.tokens, made.stops) == (4, [5, 99], frozenset({7}))
    assert made.sampling.logprobs == MOST_LOGPROBS


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ([], {}),
        ([-1, 5], {}),
        ([5, VOCABULARY], {}),
        ([5, 99, 1], {}),  # no room for one more
        ([5, 99], {"logprobs": MOST_LOGPROBS + 1}),
    ],
)
def test_what_cannot_be_computed(tokens: list[int], changes: dict[str, Any]) -> None:
    assert generation_of(4, msgspec.structs.replace(GOOD, **changes), tokens, VOCABULARY) is None


def test_parts_are_put_together_until_the_last() -> None:
    parts = Submissions()
    first, last = (msgspec.structs.replace(GOOD, more=more) for more in (True, False))
    assert parts.whole(first) is None
    assert parts.whole(last) == [5, 99, 5, 99]
    assert parts.whole(first) is None
    parts.forget(1)
    assert parts.whole(last) == [5, 99]
