"""Jobs without a node: which begin, what there is room for, what is forgotten; and what headers wish."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dormouse.router.front.bodies import SMALL_NBYTES
from dormouse.router.front.exchange import HttpError
from dormouse.router.jobs.book import AGAIN_MOST_S, AGAIN_S, MAX_BEGUN, Job, JobBook, JobLimits, JobState
from dormouse.router.jobs.prefer import MAX_WAIT_S, Preferences, wished

LIMITS = JobLimits(keep_s=100.0, tenant_jobs=4, tenant_nbytes=50, nbytes=80, begun_nbytes=40)


def _job(name: str, function: str = "f", tenant: str = "a", nbytes: int = 5, scope: str = "") -> Job:
    return Job(name, function, tenant, 1000.0, nbytes, scope=scope)


def _asked(name: str, function: str = "f") -> Job:
    """That somebody waits for."""
    job = _job(name, function)
    job.patient = False
    return job


def _any(_: str) -> int:
    return 1


def _book(*jobs: Job, limits: JobLimits = LIMITS) -> JobBook:
    book = JobBook(limits)
    for job in jobs:
        book.add(job)
    book.check()
    return book


def _next(book: JobBook, room: Callable[[str], int] = _any, now_s: float = 0.0) -> str:
    job = book.next(room, now_s)
    book.check()
    return "" if job is None else job.id


def test_jobs_of_a_function_begin_in_order_and_functions_in_turn() -> None:
    book = _book(_job("1"), _job("2"), _job("3", "g"), _job("4", "g", tenant="b"))
    assert [_next(book, lambda _: 2) for _ in range(5)] == ["1", "3", "4", "2", ""], (
        "then that tenant's of which least have begun"
    )


def test_jobs_are_counted_by_function_and_tenant() -> None:
    book = _book(_job("1"), _job("2"), _job("3"), _job("4"), _job("5", tenant="b"))
    assert book.words("f", "a") == {"queued": 4}
    _next(book)
    assert book.words("f", "a") == {"begun": 1, "queued": 3}
    for name, status, code in (("1", 200, ""), ("2", 500, "function_raised"), ("3", 503, "cancelled")):
        book.end(book.jobs[name], 3, status, code, 1.0, 2000.0)
    assert book.words("f", "a") == {"queued": 1, "succeeded": 1, "failed": 1, "cancelled": 1}
    assert book.words("f", "b") == {"queued": 1}, "another tenant's of the same name are not its own"
    for name in ("1", "2", "3", "4"):
        book.forget(book.jobs[name])
    book.check()
    assert book.words("f", "a") == {}


def test_a_function_has_only_so_many_that_have_begun() -> None:
    book = _book(_job("1"), _job("2"), _job("3", "g"))
    assert [_next(book), _next(book), _next(book)] == ["1", "3", ""]
    book.end(book.jobs["1"], 3, 200, "", 1.0, 2000.0)
    assert [_next(book), _next(book)] == ["2", ""]


def test_what_somebody_waits_for_begins_at_once() -> None:
    book = _book(_job("1"), _job("2"), _asked("3"), _asked("4"))
    book.jobs["3"].due_s = 5.0  # it is not in the file yet
    assert [_next(book, lambda _: 1) for _ in range(3)] == ["4", "1", ""]
    assert [_next(book, lambda _: 1, 5.0) for _ in range(2)] == ["3", ""]
    book.end(book.jobs["4"], 3, 200, "", 6.0, 2000.0)
    book.forget(book.jobs["3"])
    book.check()
    assert _next(book, lambda _: 1, 6.0) == "", "2 waits for 1"


def test_a_node_has_only_so_many_that_have_begun() -> None:
    limits = JobLimits(100.0, 1000, 10_000, 10_000, 10_000)
    book = _book(*(_job(str(number), f"f{number}") for number in range(MAX_BEGUN + 1)), limits=limits)
    assert [_next(book) for _ in range(MAX_BEGUN + 1)][-2:] == [str(MAX_BEGUN - 1), ""]


LARGE = 1 << 20


def test_bodies_of_jobs_that_have_begun_leave_room_for_others() -> None:
    limits = JobLimits(100.0, 1000, 1 << 30, 1 << 30, begun_nbytes=4 * LARGE)
    sizes = {"1": 9 * LARGE, "2": 2 * LARGE, "3": 2 * LARGE, "4": LARGE, "5": SMALL_NBYTES}
    book = _book(*(_job(name, f"f{name}", nbytes=nbytes) for name, nbytes in sizes.items()), limits=limits)
    assert [_next(book) for _ in range(3)] == ["1", "5", ""], "one alone may be larger, and a small one takes no room"
    book.end(book.jobs["1"], 7, 200, "", 1.0, 2000.0)
    assert [_next(book) for _ in range(3)] == ["2", "3", ""]


def test_a_tenants_jobs_leave_room_for_another_tenants() -> None:
    limits = JobLimits(100.0, 1000, 1 << 30, 1 << 30, begun_nbytes=4 * LARGE, parts=2)
    book = _book(*(_job(f"a{number}", f"f{number}", nbytes=LARGE) for number in range(4)), limits=limits)
    assert [_next(book) for _ in range(3)] == ["a0", "a1", ""], "half of the bodies' room"
    book.add(_job("b0", "g0", "b", nbytes=2 * LARGE))
    assert [_next(book) for _ in range(2)] == ["b0", ""]
    many = (_job(f"a{number}", f"f{number}") for number in range(MAX_BEGUN))
    book = _book(*many, limits=limits)
    assert len(list(iter(lambda: _next(book), ""))) == MAX_BEGUN // 2
    for number in range(3):
        book.add(_job(f"b{number}", f"g{number}", "b"))
    book.end(book.jobs["a0"], 7, 200, "", 1.0, 2000.0)
    assert [_next(book) for _ in range(5)] == ["b0", "b1", "b2", f"a{MAX_BEGUN // 2}", ""], "who has least is next"


def test_what_was_turned_away_is_first_again_after_a_while() -> None:
    book = _book(_job("1"), _job("2"))
    pauses = []
    now_s = 0.0
    for _ in range(8):
        assert _next(book, now_s=now_s) == "1"
        book.back(book.jobs["1"], now_s)
        assert _next(book, now_s=now_s) == "", "the second does not pass it"
        pauses.append(book.next_due_s(now_s) - now_s)
        now_s += pauses[-1]
    assert pauses == [AGAIN_S * 2**n for n in range(6)] + [AGAIN_MOST_S] * 2


def _refused(book: JobBook, tenant: str, nbytes: int) -> str:
    forgotten, failure = book.room(tenant, nbytes)
    assert failure is None or (forgotten == [] and failure.status == 429 and failure.retryable)
    return "" if failure is None else failure.text.split(";")[0]


def test_each_tenant_has_limits_and_so_has_the_node() -> None:
    book = _book(*(_job(str(number)) for number in range(4)))
    assert _refused(book, "a", 1) == "tenant 'a' has 4 jobs already (jobs.tenant_jobs)"
    book.forget(book.jobs["0"])
    assert _refused(book, "a", 35) == ""
    assert _refused(book, "a", 36) == "jobs of tenant 'a' may have 50 B (jobs.tenant_store)"
    book.add(_job("b", tenant="b", nbytes=50))
    book.check()
    assert _refused(book, "c", 15) == ""
    assert _refused(book, "c", 16) == "jobs of this node may have 80 B (jobs.store)"


def test_what_has_ended_makes_room_for_what_comes_the_oldest_first_and_of_the_same_tenant() -> None:
    book = _book(*(_job(str(number), f"f{number}") for number in range(4)))
    for number in (2, 1):
        book.end(book.jobs[str(number)], 10, 200, "", float(number == 1), 2000.0)
    assert [job.id for job in book.room("a", 5)[0]] == ["2"]
    assert [job.id for job in book.room("a", 40)[0]] == ["2", "1"]
    assert book.room("b", 5) == ([], None), "there is room for that"
    assert _refused(book, "a", 41) == "jobs of tenant 'a' may have 50 B (jobs.tenant_store)"
    assert [job.id for job in book.room_for_answer(book.jobs["0"], 25)[0]] == []
    assert [job.id for job in book.room_for_answer(book.jobs["0"], 26)[0]] == ["2"]


def test_what_has_ended_is_kept_so_long() -> None:
    book = _book(_job("1"), _job("2"), _job("3"))
    book.end(book.jobs["2"], 0, 200, "", 10.0, 2000.0)
    book.end(book.jobs["1"], 0, 500, "function_raised", 11.0, 2001.0)
    assert book.next_due_s(20.0) == 110.0
    assert [job.id for job in book.expired(109.9)] == []
    assert [job.id for job in book.expired(110.0)] == ["2"]
    assert [job.id for job in book.expired(1000.0)] == ["2", "1"]
    for job in book.expired(1000.0):
        book.forget(job)
    book.check()
    assert (list(book.jobs), book.next_due_s(1000.0)) == (["3"], float("inf"))


def test_a_key_means_its_job_until_that_is_forgotten() -> None:
    book = _book(_job("1", scope="f//k"))
    assert book.keyed["f//k"].id == "1"
    book.forget(book.jobs["1"])
    assert book.keyed == {}


LARGE_LIMITS = JobLimits(100.0, 4, 50 * LARGE, 80 * LARGE, begun_nbytes=40 * LARGE, parts=2)


class Lives(RuleBasedStateMachine):
    """Every job meets one fate, and no limit is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.book = JobBook(LARGE_LIMITS)
        self.now_s, self.made, self.gone = 0.0, 0, set[str]()

    @rule(function=st.sampled_from("fg"), tenant=st.sampled_from("ab"), size=st.integers(0, 30))
    def arrives(self, function: str, tenant: str, size: int) -> None:
        nbytes = size * LARGE
        forgotten, failure = self.book.room(tenant, nbytes)
        if failure is not None:
            return
        for job in forgotten:
            assert job.tenant == tenant
            self._forget(job)
        self.made += 1
        job = _job(str(self.made), function + tenant, tenant, nbytes)
        job.patient = function == "f"
        self.book.add(job)

    def _forget(self, job: Job) -> None:
        self.book.forget(job)
        self.gone.add(job.id)

    @rule(room=st.integers(0, 3))
    def begins(self, room: int) -> None:
        self.book.next(lambda _: room, self.now_s)

    def _begun(self) -> list[Job]:
        return [job for job in self.book.jobs.values() if job.state is JobState.BEGUN and job.patient]

    @precondition(lambda self: self._begun())
    @rule(data=st.data())
    def comes_back(self, data: Any) -> None:
        self.book.back(data.draw(st.sampled_from(self._begun())), self.now_s)

    @precondition(lambda self: any(job.state is not JobState.ENDED for job in self.book.jobs.values()))
    @rule(data=st.data(), size=st.integers(0, 30))
    def ends(self, data: Any, size: int) -> None:
        nbytes = size * LARGE
        open_ = [job for job in self.book.jobs.values() if job.state is not JobState.ENDED]
        job = data.draw(st.sampled_from(open_))
        forgotten, failure = self.book.room_for_answer(job, nbytes)
        for old in forgotten:
            self._forget(old)
        self.book.end(job, nbytes if failure is None else 0, 200, "", self.now_s, 0.0)

    @rule(seconds=st.floats(0, 60))
    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        for job in self.book.expired(self.now_s):
            assert job.ended_s + LIMITS.keep_s <= self.now_s
            self._forget(job)
        assert self.book.next_due_s(self.now_s) > self.now_s

    @invariant()
    def holds(self) -> None:
        self.book.check()
        assert len(self.gone) + len(self.book.jobs) == self.made


TestLives = Lives.TestCase

# --- headers


@pytest.mark.parametrize(
    ("prefer", "wish"),
    [
        ("respond-async", Preferences(respond_async=True)),
        ("Respond-Async, wait=10", Preferences(respond_async=True, wait_s=10)),
        (' wait = 5 ; x="a, b" ,respond-async', Preferences(respond_async=True, wait_s=5)),
        ("return=minimal; foo; bar=1", Preferences()),
        ("wait=99999", Preferences(wait_s=MAX_WAIT_S)),
        ("wait=3, wait=4", Preferences(wait_s=3)),
        ('foo="respond-async"', Preferences()),
        ("", Preferences()),
    ],
)
def test_preferences_are_read_as_the_rfc_has_them(prefer: str, wish: Preferences) -> None:
    assert wished([(b"host", b"x"), (b"prefer", prefer.encode())]) == wish


@pytest.mark.parametrize(
    "prefer", ["respond async", '"respond-async"', "=3", "wait=soon", "wait", 'a="', "é", "wait=-1"]
)
def test_what_cannot_be_read_is_refused(prefer: str) -> None:
    with pytest.raises(HttpError) as refused:
        wished([(b"prefer", prefer.encode())])
    assert (refused.value.failure.status, refused.value.failure.code) == (400, "bad_headers")
    assert refused.value.close, "its body has not been read"


@pytest.mark.parametrize("part", ["; ", ";  ", ";a= ", "; a =\t", ';a="b" ', "; ;", "\t= "])
def test_a_header_takes_as_long_as_it_is(part: str) -> None:
    """With two ways to read each part, the first of these would hold up the router for ever."""
    for text in ("a" + part * 5000 + "@", "wait=1" + part * 40 + "@"):
        with pytest.raises(HttpError):
            wished([(b"prefer", text.encode())])
    if "=" not in part:
        assert wished([(b"prefer", b"wait=7" + part.encode() * 5000)]) == Preferences(wait_s=7)


def test_several_headers_count_together_and_a_key_stands_once() -> None:
    two = [(b"prefer", b"respond-async"), (b"prefer", b"wait=1"), (b"idempotency-key", b'"a-1"')]
    assert wished(two) == Preferences(True, 1, '"a-1"')
    for wrong in (b"", b"a b", b"x" * 256, b"\xff"):
        with pytest.raises(HttpError):
            wished([(b"idempotency-key", wrong)])
    with pytest.raises(HttpError):
        wished([(b"idempotency-key", b"a"), (b"idempotency-key", b"b")])
