"""Models that somebody waits for to be moved: each is answered once, when all have said that it is so."""

from dormouse.controller import moves
from dormouse.controller.moves import MAX, ModelLeaves, ModelMoves


def test_all_who_wait_for_a_model_are_told_at_once() -> None:
    known = ModelMoves()
    for query, name in ((1, "a"), (2, "b"), (3, "a")):
        known.brings(query, name, 50.0)
    assert known.bringing(0.0) == {"a", "b"}
    assert known.brought("a") == [1, 3]
    assert known.brought("a") == []
    assert known.bringing(0.0) == {"b"}


def test_who_has_waited_for_too_long_waits_no_more() -> None:
    known = ModelMoves()
    known.brings(1, "a", 50.0)
    known.brings(2, "b", 60.0)
    assert known.bringing(50.0) == {"b"}
    assert known.brought("a") == []


def test_who_waits_for_a_gpu_is_known_when_that_dies() -> None:
    known = ModelMoves()
    for query, gpus in ((1, {0, 1}), (2, {1}), (3, {0})):
        known.leaves(query, ModelLeaves("a", ["i"], gpus, down=False))
    assert known.waits_for(1) == [1, 2]
    assert known.left_gpu(1, 1, 0) is None
    assert known.left_gpu(2, 1, 0) is not None
    assert known.waits_for(1) == []


def test_a_model_has_left_when_all_gpus_have_said_so() -> None:
    known = ModelMoves()
    known.leaves(1, ModelLeaves("a", ["i"], {0, 1}, down=False))
    assert known.left_gpu(1, 0, 0) is None
    gone = known.left_gpu(1, 1, 7)
    assert gone is not None
    assert (gone.function, gone.left_nbytes) == ("a", 7)
    assert known.left_gpu(1, 1, 0) is None, "it was answered"


def test_what_stays_on_a_gpu_stays_in_host_memory() -> None:
    known = ModelMoves()
    for query, left_nbytes in ((1, 0), (2, 5)):
        known.leaves(query, ModelLeaves("a", ["i"], {0}, down=True))
        assert known.left_gpu(query, 0, left_nbytes) is not None
    assert known.left_host(1) is not None
    assert known.left_host(1) is None
    assert known.left_host(2) is None


def test_there_are_not_too_many() -> None:
    known = ModelMoves()
    for query in range(MAX + 1):
        known.brings(query, f"f{query}", 50.0)
        known.leaves(query, ModelLeaves("a", [], {0}, down=False))
    assert len(known.bringing(0.0)) == MAX
    assert known.left_gpu(0, 0, 0) is None
    assert known.left_gpu(1, 0, 0) is not None


def test_why_it_is_not_so() -> None:
    assert moves.in_use("a", 0, "on a GPU") is None
    stays = moves.in_use("a", 3, "on a GPU")
    assert stays is not None
    assert (stays.status, stays.code, stays.retryable) == (409, "in_use", True)
    assert (moves.removed("a").status, moves.removed("a").code) == (404, "unknown_function")
    assert (moves.no_room("a", "refused").status, moves.no_room("a", "failed").status) == (507, 503)
