"""A search finds whole records of a log: lines with what is indented below them, and tracebacks as Python has them."""

import io
import logging
from collections.abc import Iterable, Iterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.client_shim.instance import report
from dormouse.client_shim.instance.context import CurrentRequest
from dormouse.core.logrecords import (
    RECORD_LINES,
    LineOrigin,
    LogLine,
    begun,
    having,
    last_mark,
    lines_of,
    mark,
    records,
    searched,
    unmarked,
)


def _raise(*texts: str) -> None:
    """The first one leads to the second, and so on."""
    try:
        if len(texts) > 1:
            _raise(*texts[:-1])
    finally:
        raise ValueError(texts[-1])


def _having(log: bytes, text: str) -> list[bytes]:
    return [b"".join(line.text for line in record) for record in having(log, text)]


def _searched(pieces: Iterable[bytes], text: str) -> Iterator[bytes]:
    return (line.text for line in searched(pieces, text))


def _failed(request: str, *texts: str) -> bytes:
    """As an instance's log has it."""
    try:
        _raise(*texts)
    except ValueError as error:
        return report.record(CurrentRequest(request), report.describe(error)).encode() + b"\n"
    raise AssertionError


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """What a function logs of exceptions itself."""
    stream, logger = io.StringIO(), logging.Logger("function")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


def test_a_requests_id_finds_its_failure_and_no_other() -> None:
    first, second = _failed("mine-1", "one\nof two lines\n\n", "led to this"), _failed("mine-2", "another")
    log = b"told mine-1 here\n" + first + second + b"told mine-2 later\nplain\n"
    assert first.count(b"Traceback") == 2
    assert b"of two lines" in first
    assert _having(log, "MINE-1") == [b"told mine-1 here\n", first]
    assert _having(log, "mine-2") == [second, b"told mine-2 later\n"]
    assert _having(log, "led to this") == [first], "the text may be in any line"
    assert _having(log, "no such") == []


def test_tracebacks_that_a_function_logs_itself_are_records(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    for request, texts in (("mine-1", ["one", "led to this"]), ("mine-2", ["another"])):
        try:
            _raise(*texts)
        except ValueError:
            logger.exception("request %s", request)
    try:
        raise ExceptionGroup("several", [ValueError("first"), ValueError("second")])
    except ExceptionGroup:
        logger.exception("request mine-3")
    log = stream.getvalue().encode()
    first, second, third = records(log)
    assert (first + second + third, first.count(b"Traceback"), second.count(b"Traceback")) == (log, 2, 1)
    assert third.startswith(b"request mine-3\n  + Exception Group Traceback")
    assert _having(log + b"plain\n", "mine-1") == [first]
    assert _having(b"plain\n" + log, "second") == [third]


@pytest.mark.parametrize("before", [b"", b"plain\n"])
def test_two_tracebacks_in_a_row_are_two(before: bytes) -> None:
    one = b'Traceback (most recent call last):\n  File "f.py", line 1\nValueError: one\n'
    other = one.replace(b"one", b"other")
    assert records(before + one + other + b"plain\n") == [before + one, other, b"plain\n"]
    cut = one.rpartition(b"ValueError")[0]
    assert records(cut + other) == [cut, other], "one process ended while it wrote"


def test_other_text_is_found_by_lines() -> None:
    log = b"one\n\ntwo\nthree\n   of three\n\tand this\n\nfour"
    assert records(log) == [b"one\n", b"\n", b"two\n", b"three\n   of three\n\tand this\n", b"\n", b"four"]
    assert _having(log, "and THIS") == [b"three\n   of three\n\tand this\n"]
    assert _having(log, "four") == [b"four"]


def test_indented_lines_are_no_record_without_end() -> None:
    log = b" more\n" * (2 * RECORD_LINES) + b" last\n"
    assert [record.count(b"\n") for record in records(log)] == [RECORD_LINES, RECORD_LINES, 1]


def test_who_follows_has_a_record_as_soon_as_it_is_known_and_then_its_rest() -> None:
    pieces = iter([b"one\nreq", b"uest\n  the", b" cause\n  more\n", b"  and more\nother\n  the", b" end"])
    found = _searched(pieces, "cause")
    assert next(found) + next(found) == b"request\n  the cause\n"
    assert list(pieces) == [b"  and more\nother\n  the", b" end"], "nothing more was waited for"
    assert b"".join(_searched([b"x\n", b"one\n  a\n", b"  b\nx\n"], "one")) == b"one\n  a\n  b\n"


PARTS = st.sampled_from(
    [
        *(b"plain\n", b"x\n", b" indented x\n", b"\n", b"Traceback (most recent call last):\n", b"Error: x\n"),
        b"During handling of the above exception, another exception occurred:\n",
    ]
)


@given(st.lists(PARTS, max_size=15), st.integers(1, 50), st.integers(0, 300))
def test_all_lines_are_in_one_record_and_pieces_do_not_matter(lines: list[bytes], size: int, at: int) -> None:
    log = b"".join(lines)
    assert b"".join(records(log)) == log
    pieces = [log[at : at + size] for at in range(0, len(log), size)]
    assert b"".join(_searched(pieces, "x")) == b"".join(_having(log, "x"))
    if at < len(log):
        starts = accumulate(map(len, records(log)), initial=0)
        assert begun(log[:at], log[at:]) == log[max(start for start in starts if start <= at) : at]


def test_marks_say_of_each_line_when_by_whom_and_for_which_request_it_was_printed() -> None:
    log = (
        b"of before there were marks\n"
        + mark(1000.5, "3-16", "mine-1")
        + b"one\n  two\nh"
        + mark(1000.9, "3-16", "mine-1")
        + b"al"
        + mark(1001, "3-17", "")
        + b"f\nthree\n"
        + mark(1002, "", "")
        + b"--- note\n"
    )
    first = LineOrigin("1970-01-01T00:16:40.500Z", "3-16", "mine-1")
    second, note = LineOrigin("1970-01-01T00:16:41.000Z", "3-17"), LineOrigin("1970-01-01T00:16:42.000Z")
    known = [
        LogLine(b"of before there were marks\n", LineOrigin()),
        *(LogLine(text, first) for text in (b"one\n", b"  two\n", b"hal\n")),
        LogLine(b"f\n", second),
        LogLine(b"three\n", second),
        LogLine(b"--- note\n", note),
    ]
    assert list(lines_of((log,))) == list(lines_of(bytes((each,)) for each in log)) == known
    assert unmarked(log) == b"".join(line.text for line in known).replace(b"hal\nf", b"half")
    assert _having(log, "mine-1") == [b"one\n  two\n", b"hal\n"], "though none says it itself"
    assert list(searched((log,), "mine-1")) == known[1:4]
    assert _having(log, "3-17") == [b"f\n", b"three\n"]
    assert _having(log, "mine") == [], "ids are whole"
    assert _having(mark(1, "3-16", "mine-1,mine-2") + b"one\n", "MINE-2") == [b"one\n"]
    assert (last_mark(log), last_mark(b"none\n"), last_mark(b"")) == (mark(1002, "", ""), b"", b"")
    assert known[1].told() == {"time": first.time, "instance": "3-16", "request": "mine-1", "text": "one"}
    assert known[5].long() == b"1970-01-01T00:16:41.000Z 3-17 - | three\n"
    assert begun(log[: log.index(b"  two")], b"  two\n") == mark(1000.5, "3-16", "mine-1") + b"one\n"
    torn = b"a\n" + mark(1, "3-16", "x")[:9] + mark(2, "3-16", "y") + b"b\n"
    assert [line.text for line in lines_of((torn,))] == [b"a\n", b"b\n"], "a full disk took the rest of one"
