"""What an instance asks its runtime to compute, and what of that cannot be: no instance is trusted with its numbers."""

from typing import Any

import msgspec
import pytest

from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.gpuserver.runtime.submissions import Submissions, generation_of
from dormouse.schemas import messages as m
from dormouse.schemas.llm import MAX_LOGPROBS

VOCABULARY = 100
GOOD = m.Submit(number=1, tokens=[5, 99], more=False, prompt=2, limit=3, stops=[7], logprobs=MAX_LOGPROBS)


def test_what_is_asked_for_is_what_is_computed() -> None:
    """But for tokens that the model does not have."""
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        bias={0: 1.0, 99: -1.0},
        seed=8,
        logprobs=MAX_LOGPROBS,
    )
    numbers = msgspec.structs.asdict(sampling) | {"bias": [*sampling.bias.items(), (-1, 2.0), (VOCABULARY, 2.0)]}
    asked = msgspec.structs.replace(GOOD, **numbers, masked=True, waited_us=1500)
    made = generation_of(4, asked, asked.tokens, VOCABULARY)
    assert made is not None
    sequence = made.sequence
    assert (sequence.number, sequence.tokens, sequence.prompt, sequence.limit) == (4, [5, 99], 2, 3)
    assert (sequence.waited_s, made.stops, made.masked) == (0.0015, frozenset({7}), True)
    assert made.sampling == sampling


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ([], {}),
        ([-1, 5], {}),
        ([5, VOCABULARY], {}),
        ([5, 99, 1], {}),  # no room for one more
        ([5, 99], {"logprobs": MAX_LOGPROBS + 1}),
    ],
)
def test_what_cannot_be_computed(tokens: list[int], changes: dict[str, Any]) -> None:
    assert generation_of(4, msgspec.structs.replace(GOOD, **changes), tokens, VOCABULARY) is None


def test_parts_are_put_together_until_the_last() -> None:
    parts = Submissions()
    first, last = (msgspec.structs.replace(GOOD, more=more) for more in (True, False))
    assert parts.whole(first) is None
    assert parts.whole(last) == [5, 99, 5, 99]
    assert parts.whole(last) == [5, 99]
    assert parts.whole(first) is None
    parts.forget(1)
    assert parts.whole(last) == [5, 99]
