"""Several instances at one runtime: each has its own sequences, and reaches none of the others'."""

import msgspec
from language_models import prompts, wrong_tokens
from played_runtime import Played, played

from dormouse.schemas import messages as m

__all__ = ["played"]

NEW = 20


def check(played: Played, serial: int, number: int, prompt: list[int], new: int = NEW) -> None:
    made = played.made[serial, number]
    assert len(made) == new
    assert wrong_tokens(played.model, prompt + made, len(prompt)) == []


def test_two_instances_use_the_same_numbers_and_each_has_its_own_answer(played: Played) -> None:
    played.join(2)
    first, second = prompts(1, 40, 30)
    played.submit(1, first, 1, NEW)
    played.submit(1, second, 2, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1), (2, 1))
    check(played, 1, 1, first)
    check(played, 2, 1, second)
    assert played.finishes == {(1, 1): "length", (2, 1): "length"}


def test_an_instance_that_names_anothers_sequence_reaches_nothing(played: Played) -> None:
    """Not by the number that its owner has for it, nor by any that the runtime could have."""
    played.join(2)
    first, second = prompts(2, 40, 30)
    played.submit(7, first, 1, NEW)
    for number in range(-1, 8):
        played.tell(m.Abort(number=number), 2)
        played.tell(m.Mask(number=number, position=40, bits=b"\x01" + bytes(39)), 2)
    played.submit(9, second, 2, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    for _ in range(5):
        played.until(m.Tokens)
    for number in range(64):
        if number != 9:
            played.tell(m.Abort(number=number), 2)
    played.compute((1, 7), (2, 9))
    check(played, 1, 7, first)
    check(played, 2, 9, second)
    assert played.made.keys() == {(1, 7), (2, 9)}


def test_its_own_number_ends_its_own_sequence_only(played: Played) -> None:
    """The check of the test before: Abort does reach what is one's own."""
    played.join(2)
    first, second = prompts(3, 40, 30)
    played.submit(1, first, 1, NEW)
    played.submit(1, second, 2, 200)
    played.tell(m.Abort(number=1), 2)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    check(played, 1, 1, first)
    assert played.made.keys() == {(1, 1)}


def test_one_that_leaves_takes_its_own_sequences_with_it(played: Played) -> None:
    played.join(2)
    first, second = prompts(4, 40, 30)
    played.submit(1, first, 2, NEW)  # of the one that did not bind the model
    played.submit(1, second, 1, 500)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.until(m.Tokens, in_step=[m.MemberLeaves(serial=1)])
    played.compute((2, 1))
    check(played, 2, 1, first)
    assert played.made.keys() == {(2, 1)}


def test_another_model_at_the_same_runtime_is_refused_to_who_brings_it(played: Played) -> None:
    moved = [msgspec.structs.replace(each, offset=each.offset + 4) for each in played.weights]
    other = msgspec.structs.replace(played.spec, context=played.spec.context - 1)
    played.join(2, weights=moved)
    played.join(3, spec=other)
    first = prompts(5, 40)[0]
    played.submit(1, first, 1, NEW)
    played.submit(1, first, 2, NEW)
    played.submit(1, first, 3, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    check(played, 1, 1, first)
    assert played.made.keys() == {(1, 1)}
    assert "its weights are not where" in played.refused[2]
    assert "another model" in played.refused[3]
