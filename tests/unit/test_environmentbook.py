"""Which environments there are and for whom there is room: a tenant's depends on what it has itself."""

import pytest

from dormouse.router.admin.environmentbook import (
    MAX_ASKED,
    Claim,
    EnvironmentBook,
    EnvironmentRecord,
    EnvironmentState,
)
from dormouse.router.admin.environmentbuild import MIN_FREE_NBYTES, BuildBounds, BuildUse
from dormouse.router.admin.turns import EACH
from dormouse.router.front.exchange import HttpError

VERSIONS = ("3.11.9", "2.13.0+cpu")


def _record(nbytes: int, asked: str = "") -> EnvironmentRecord:
    python, torch = VERSIONS
    return EnvironmentRecord(lock=[], names=[], python=python, torch=torch, nbytes=nbytes, asked=[asked])


def _built(book: EnvironmentBook, claim: Claim, key: str, nbytes: int) -> None:
    build = claim.build
    assert build is not None
    assert book.next() is build
    book.built(build, key, _record(nbytes, build.asked))
    book.ended(build)


def _refusal(book: EnvironmentBook, asked: str, tenant: str) -> tuple[int, str, str]:
    with pytest.raises(HttpError) as caught:
        book.claim(asked, tenant, VERSIONS)
    failure = caught.value.failure
    return failure.status, failure.code, failure.text


def _state(book: EnvironmentBook) -> EnvironmentState:
    return book.environments["k"].state


def test_the_states_of_a_build_and_its_environment() -> None:
    book = EnvironmentBook(100, 100)
    claim = book.claim("a", "shop", VERSIONS)
    assert claim.build is not None
    assert (claim.build.state, claim.key) == (EnvironmentState.WAITING, "")
    _built(book, claim, "k", 10)
    assert claim.build.state is EnvironmentState.BUILDING
    assert (claim.key, _state(book), book.builds) == ("k", EnvironmentState.HELD, {})
    book.kept({"k": {"shop"}})
    book.release(claim)
    assert _state(book) is EnvironmentState.KEPT
    assert book.idle() == []
    again = book.claim("a", "shop", VERSIONS)
    assert (again.build, again.key) == (None, "k")
    book.kept({})
    assert _state(book) is EnvironmentState.HELD
    assert book.idle() == []
    book.release(again)
    assert _state(book) is EnvironmentState.IDLE
    assert book.idle() == ["k"]
    assert book.environments == {}


def test_all_that_wait_for_a_build_have_it_and_who_has_left_has_it_not() -> None:
    book = EnvironmentBook(100, 100)
    first, second, third = (book.claim("a", "shop", VERSIONS) for _ in range(3))
    assert first.build is second.build is third.build
    book.release(second)
    _built(book, first, "k", 10)
    assert [each.key for each in (first, second, third)] == ["k", "", "k"]
    book.release(first)
    assert book.environments["k"].state is EnvironmentState.HELD
    book.release(third)
    assert book.idle() == ["k"]


def test_of_a_build_for_which_nobody_waits_nothing_stays() -> None:
    book = EnvironmentBook(100, 100)
    claim = book.claim("a", "shop", VERSIONS)
    book.release(claim)
    _built(book, claim, "k", 10)
    assert book.idle() == ["k"]


def test_one_of_another_torch_is_not_had() -> None:
    book = EnvironmentBook(100, 100)
    book.known("k", _record(10, "a"))
    assert book.claim("a", "shop", VERSIONS).key == "k"
    assert book.claim("a", "shop", ("3.11.9", "3.0")).key == ""


def test_a_tenant_that_has_its_part_is_refused_and_the_others_are_not() -> None:
    book = EnvironmentBook(100, 40)
    for key in "ab":
        book.known(key, _record(20, key))
    book.kept({"a": {"shop"}, "b": {"shop"}})
    status, code, text = _refusal(book, "c", "shop")
    assert (status, code) == (507, "environments_full")
    assert text == (
        "the libraries of tenant 'shop' would have at least 41 B with those of this deploy, and may have 40 B "
        "([environments] tenant_store); remove functions, or require less"
    )
    assert book.builds == {}, "nothing waits for a turn that nobody awaits"
    assert book.claim("a", "shop", VERSIONS).key == "a", "what it has, it may deploy again"
    assert book.claim("c", "bank", VERSIONS).build is not None
    assert book.store_full(60) is None


def test_one_that_is_shared_counts_for_each_who_has_it() -> None:
    book = EnvironmentBook(100, 40)
    book.known("shared", _record(30, "shared"))
    book.known("own", _record(20, "own"))
    book.kept({"shared": {"shop"}, "own": {"bank"}})
    status, code, text = _refusal(book, "shared", "bank")
    assert (status, code) == (507, "environments_full")
    assert "would have at least 50 B with those of this deploy, and may have 40 B " in text
    book.kept({"shared": {"shop"}})
    claim = book.claim("shared", "bank", VERSIONS)
    assert book.tenant_full("bank") is None
    assert book.tenant_full("bank", 11) is not None, "while a deploy claims it, it counts"
    book.release(claim)
    assert book.tenant_full("bank", 40) is None
    assert book.tenant_full("shop", 11) is not None


def test_what_was_built_may_be_too_much_for_one_that_waited_for_it_and_not_for_another() -> None:
    book = EnvironmentBook(100, 40)
    book.known("own", _record(20, "own"))
    book.kept({"own": {"bank"}})
    shop, bank = (book.claim("a", tenant, VERSIONS) for tenant in ("shop", "bank"))
    _built(book, shop, "k", 30)
    assert (shop.key, bank.key) == ("k", "k")
    assert book.tenant_full("shop") is None
    assert (failure := book.tenant_full("bank")) is not None
    assert "would have at least 50 B with those of this deploy, and may have 40 B " in failure.failure.text


def test_all_together_are_bounded() -> None:
    book = EnvironmentBook(100, 100)
    book.known("a", _record(90, "a"))
    assert book.store_full(10) is None
    failure = book.store_full(11)
    assert failure is not None
    assert (failure.failure.status, failure.failure.code) == (507, "environments_full")
    assert "100 B ([environments] store)" in failure.failure.text


def test_ways_to_ask_are_remembered_in_bounds() -> None:
    book = EnvironmentBook(100, 100)
    for number in range(MAX_ASKED + 1):
        claim = book.claim(str(number), "shop", VERSIONS)
        _built(book, claim, "k", 10)
    asked = book.environments["k"].record.asked
    assert asked == [str(number) for number in range(MAX_ASKED, 0, -1)]


def test_builds_that_wait_are_bounded_and_one_that_ends_before_its_turn_ends_no_other() -> None:
    book = EnvironmentBook(100, 100)
    claims = [book.claim(str(number), "shop", VERSIONS) for number in range(EACH)]
    assert _refusal(book, "more", "shop")[:2] == (429, "queue_full")
    first = book.next()
    assert first is not None
    assert first is claims[0].build
    assert claims[1].build is not None
    book.ended(claims[1].build)
    assert book.next() is None, "the first one runs yet"
    book.ended(first)
    assert book.next() is claims[2].build


FREE = MIN_FREE_NBYTES


@pytest.mark.parametrize(
    ("taken", "sources", "code"),
    [
        (BuildUse(1 << 20, 1 << 20, FREE, 1.0), True, ""),
        (BuildUse((1 << 20) + 1, 0, FREE, 1.0), True, "environment_too_large"),
        (BuildUse(100, (1 << 20) + 101, FREE, 1.0), True, "environment_too_large"),
        (BuildUse(100, (1 << 20) + 100, FREE, 1.0), True, ""),
        (BuildUse(100, (1 << 20) + 101, FREE, 1.0), False, ""),
        (BuildUse(100, -(1 << 30), FREE, 1.0), True, ""),
        (BuildUse(100, 100, FREE - 1, 1.0), True, "disk_full"),
        (BuildUse(100, 100, FREE, 60.0), True, "build_timed_out"),
    ],
)
def test_when_a_build_is_ended(taken: BuildUse, sources: bool, code: str) -> None:
    failure = BuildBounds("1MiB", 60.0, sources).excess(taken)
    assert (failure.failure.code if failure is not None else "") == code
