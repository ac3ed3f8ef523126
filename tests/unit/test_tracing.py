"""What an answer says of its request's way: its trace, its times, and where its model was."""

import logging
import re

import pytest
from router_rig import lease, loaded, one, spec

from dormouse.client_shim.instance import context
from dormouse.core.decisions.requests import events as e
from dormouse.router.front.answers import server_timing
from dormouse.router.front.tracing import NO_TRACE, Trace, traced
from dormouse.schemas import messages as m

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


ABOVE = "00f067aa0ba902b7"


def test_a_trace_goes_on_with_a_part_of_its_own_where_that_is_exported() -> None:
    first, second = traced(GIVEN, (), 0.0), traced(GIVEN, (), 0.0)
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", first.parent)
    assert first.parent != second.parent
    assert ABOVE not in first.parent
    assert (first.number, first.above) == (TRACE, ABOVE)


def test_who_exports_nothing_hands_on_what_the_client_has_said() -> None:
    assert traced(GIVEN, [b"a=1"], None) == Trace(GIVEN.decode(), "a=1")
    unsampled = GIVEN[:-1] + b"0"
    assert traced(unsampled, [b"a=1"], 1.0) == Trace(unsampled.decode(), "a=1"), "the client does not want it"
    later = b"cc" + GIVEN[2:-2] + b"fe-what-comes-later"
    assert traced(later, (), None).parent == f"00-{TRACE}-{ABOVE}-00", "of a later version, what is known"


def test_a_share_of_the_requests_without_a_trace_begins_one() -> None:
    always, never = traced(None, [b"a=1"], 1.0), traced(b"broken", (), 0.0)
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", always.parent)
    assert (always.above, always.state) == ("0" * 16, "")
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", never.parent)
    assert never.above == ""


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        ([b" a=1 ,\t,b=2 3", b"t@v=4"], "a=1,b=2 3,t@v=4"),
        ([], ""),
        ([b"a=1,a=2"], ""),
        ([b"A=1"], ""),
        ([b"a=1=2"], ""),
        ([b"a=\xff"], ""),
        ([b"a"], ""),
        ([b",".join(b"k%d=1" % number for number in range(33))], ""),
        ([b"a=" + b"x" * 200 + b",b=" + b"y" * 200 + b",c=" + b"z" * 200], f"a={'x' * 200},b={'y' * 200}"),
    ],
)
def test_a_tracestate_goes_with_it_if_it_is_well_formed(given: list[bytes], kept: str) -> None:
    assert traced(GIVEN, given, None).state == kept


@pytest.mark.parametrize("trace", [NO_TRACE, traced(GIVEN, [b"a=1 2,b=3"], 1.0), traced(GIVEN, [b"a=1"], None)])
def test_a_job_keeps_it(trace: Trace) -> None:
    assert Trace.read(str(trace)) == trace
    assert Trace.read(GIVEN.decode()) == Trace(GIVEN.decode()), "kept by an earlier version"


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
    assert traced(given, [b"a=1"], None) == NO_TRACE
    assert NO_TRACE.number == ""


def test_records_of_a_log_say_whose_they_are() -> None:
    before = logging.getLogRecordFactory()
    try:
        context.label_log_records()
        context.begin(
            m.Run(request=1, lease=None, body=b"", nbytes=0, id="r1-7", trace=GIVEN.decode(), tracestate="a=1")
        )
        record = logging.getLogger("a").makeRecord("a", logging.INFO, "f", 1, "said", (), None)
        assert (record.__dict__["request_id"], record.__dict__["trace_id"]) == ("r1-7", TRACE)
        assert str(context.current()) == f"request r1-7 of trace {TRACE}"
        assert context.current().tracestate == "a=1"
        context.begin(m.Run(request=1, lease=None, body=b"", nbytes=0, id="r1-8"))
        assert str(context.current()) == "request r1-8"
    finally:
        logging.setLogRecordFactory(before)
        context.end()
    assert context.current() == context.OUTSIDE


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
