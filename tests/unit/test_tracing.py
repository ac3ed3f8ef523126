"""What an answer says of its request's way: its trace, its times, and where its model was."""

import logging
import re

import pytest
from router_rig import lease, loaded, one, spec

from dormouse.client_shim.instance import context
from dormouse.router.decisions import events as e
from dormouse.router.front.http import server_timing
from dormouse.router.front.tracing import continued, trace_of
from dormouse.schemas import messages as m

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


def test_a_trace_goes_on_with_a_part_of_its_own() -> None:
    first, second = continued(GIVEN), continued(GIVEN)
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", first)
    assert first != second
    assert "00f067aa0ba902b7" not in first
    assert trace_of(first) == TRACE
    assert continued(b"cc" + GIVEN[2:-2] + b"fe-what-comes-later")[-3:] == "-00", "of a later version, what is known"


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        GIVEN[:-1],
        GIVEN + b"-more",
        b"ff" + GIVEN[2:],
        GIVEN.upper(),
        GIVEN.replace(TRACE.encode(), b"0" * 32),
        GIVEN.replace(b"00f067aa0ba902b7", b"0" * 16),
        b"\xff" * 55,
        GIVEN + b"\n",
    ],
)
def test_what_is_no_trace_is_none(given: bytes | None) -> None:
    assert continued(given) == ""
    assert trace_of("") == ""


def test_records_of_a_log_say_whose_they_are() -> None:
    before = logging.getLogRecordFactory()
    try:
        context.label_log_records()
        context.begin("r1-7", f"00-{TRACE}-00f067aa0ba902b7-01")
        record = logging.getLogger("a").makeRecord("a", logging.INFO, "f", 1, "said", (), None)
        assert (record.__dict__["request_id"], record.__dict__["trace_id"]) == ("r1-7", TRACE)
        assert str(context.current()) == f"request r1-7 of trace {TRACE}"
        context.begin("r1-8", "")
        assert str(context.current()) == "request r1-8"
    finally:
        logging.setLogRecordFactory(before)
        context.begin("", "")


def _answered(*said: m.ControllerToRouter) -> str:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    rig.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=3, source="host"))
    for message in said:
        rig.hear(message)
    answer = one(rig.say("i1", m.Returned(request=ticket, body=b"2", nbytes=0)), e.Answer)
    rig.hear(m.Awoken(request=ticket, wake_us=1, source="disk"))  # too late: nobody is left to tell
    return server_timing(answer.timing)[1].decode()


def test_an_answer_says_where_its_model_was_and_when_it_had_come() -> None:
    times = "queue;dur=0.000, wait;dur=0.000, run;dur=0.000"
    assert _answered() == f"{times}, model;desc=host"
    assert _answered(m.Awoken(request=99, wake_us=2500, source="disk")) == f"{times}, model;desc=host", "another's"
    assert _answered(m.Awoken(request=1, wake_us=2500, source="disk")) == f"{times}, copy;dur=2.500, model;desc=disk"


def test_a_request_that_runs_again_is_told_anew() -> None:
    rig = loaded(spec(idempotent=True))
    ticket = one(rig.arrive(), m.Acquire).request
    rig.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=3, source="host"))
    rig.hear(m.Awoken(request=ticket, wake_us=2500, source="host"))
    again = one(rig.say("i1", m.Raised(request=ticket, code="executor_lost", text="it died")), m.Acquire).request
    rig.hear(m.Granted(request=again, lease=lease(2), wake_nbytes=3, source="peer"))
    answer = one(rig.say("i1", m.Returned(request=again, body=b"2", nbytes=0)), e.Answer)
    assert (answer.timing.source, answer.timing.copy_s) == ("peer", None)
