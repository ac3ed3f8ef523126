"""An open loop of requests: when they are due, and what is said of them."""

import time
from collections.abc import Iterable
from threading import Barrier

import pytest

from dormouse.core.cli import load
from dormouse.core.cli.load import Sent
from dormouse.core.node.refusals import CallRefused, Unreachable


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_for_a_seed() -> None:
    due = load.arrivals(50.0, 100.0, seed=3)
    assert due == load.arrivals(50.0, 100.0, seed=3) != load.arrivals(50.0, 100.0, seed=4)
    assert due == sorted(due)
    assert 0 < due[0] < due[-1] < 100.0
    assert 4_600 < len(due) < 5_400  # six deviations of a Poisson process


def test_none_waits_for_the_answer_to_another() -> None:
    """Each is answered only when all are there."""
    together = Barrier(8)

    def send() -> Iterable[bytes]:
        together.wait(60)
        return [b"1"]

    sent = load.run(send, [0.0] * 8, lambda _: None)
    assert [each.outcome for each in sent] == ["ok"] * 8


def test_time_counts_from_when_a_request_was_due() -> None:
    """Also where nobody was free to send it."""
    due = [-5.0, -4.0]  # they were due before the loop began
    sent = load.run(lambda: [b"1"], due, lambda _: None)
    assert [each.due_s for each in sent] == due
    assert sent[0].latency_s > 5.0
    assert sent[1].latency_s > 4.0


def test_an_error_is_its_code_and_its_gist() -> None:
    def send() -> Iterable[bytes]:
        raise CallRefused(500, "function_raised", "Traceback\n  line 1\nKeyError: 'x'\n\n  issued by\n")

    (sent,) = load.run(send, [0.0], lambda _: None)
    assert (sent.outcome, sent.why, sent.first_s) == ("function_raised", "KeyError: 'x' …", None)
    found = load.summary([sent], 1.0, streamed=False)
    assert (found["outcomes"], found["errors"]) == ({"function_raised": 1}, {"function_raised": "KeyError: 'x' …"})
    assert (found["in_time"], found["latency_ms"]) == (0.0, None)


def test_a_node_that_is_gone_ends_it() -> None:
    def send() -> Iterable[bytes]:
        raise Unreachable("no node")

    began_s = time.monotonic()
    with pytest.raises(Unreachable):
        load.run(send, [0.0, *range(1, 600)], lambda _: None)
    assert time.monotonic() - began_s < 300, "it does not go on for ten minutes"


def test_what_is_late_and_when() -> None:
    sent = [Sent(float(at), at + 0.01, at + (0.5 if at == 7 else 0.05), "ok") for at in range(10)]
    sent.append(Sent(9.5, None, 9.6, "queue_full", "later"))
    found = load.summary(sent, 0.1, streamed=False)
    assert (found["sent"], found["in_time"]) == (11, round(9 / 11, 4))
    assert found["latency_ms"] == {"p50": 50.0, "p90": 500.0, "p99": 500.0, "max": 500.0}
    assert found["first_ms"] is None
    rows = load.slices(sent, 0.1, streamed=False)
    assert len(rows) == load.SLICES
    assert sum(row["sent"] or 0 for row in rows) == 11
    assert [row["late"] for row in rows] == [0, 0, 0, 0, 0, 0, 0, 1, 0, 1]
    first = load.summary(sent, 0.1, streamed=True)
    assert (first["in_time"], first["first_ms"]) == (
        round(10 / 11, 4),
        dict.fromkeys(("p50", "p90", "p99", "max"), 10.0),
    )


def test_nothing_was_sent() -> None:
    found = load.summary([], 0.1, streamed=False)
    assert (found["sent"], found["in_time"], found["latency_ms"]) == (0, None, None)
