"""Functions' logs stay within their bound, reach followers, and outlive nobody."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from dormouse.core.loglabels import label
from dormouse.core.logrecords import lines_of
from dormouse.core.masking import NO_MASK, SecretMask
from dormouse.router.instances.functionlog import (
    CHUNK_NBYTES,
    FOLLOWER_NBYTES,
    LEFT,
    MAX_MARKS,
    FunctionLog,
    FunctionLogs,
    TimeMarks,
)
from dormouse.router.instances.logpipe import CLOSE_NBYTES, MASKED_NBYTES, MAX_PARTS, READ_NBYTES, LogPipe


def test_a_log_turns_over_and_keeps_its_tail(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    for number in range(50):
        log.write(f"line {number:02}\n".encode())
    names = ["fn-f.log", "fn-f.log.1", "fn-f.log.1.times", "fn-f.log.times"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert log.tail(3) == b"line 47\nline 48\nline 49\n"
    assert log.tail(0) == b""
    log.write(b"\n\n10%\r20%\nlast")
    assert log.tail(1) == b"last"
    assert log.tail(2) == b"10%\r20%\nlast", "a bar of progress is one line"
    assert log.tail(4) == b"\n\n10%\r20%\nlast"
    assert log.tail(10**9).endswith(b"line 49\n\n\n10%\r20%\nlast")
    log.close()


def test_a_log_knows_what_was_written_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(1000 + 10 * (number // 2)) for number in range(40))
    monkeypatch.setattr("time.time", lambda: next(clock))
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    for number in range(20):  # two in each ten seconds
        log.write(f"line {number:02}\n".encode())
    again = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    for each in (log, again):
        assert each.tail(99, 1090.0) == b"line 18\nline 19\n"
        assert each.tail(99, 1081.5) == b"line 18\nline 19\n"
        assert len(each.tail(99, 1080.5).splitlines()) == 4, "what was written in the same second may be of now"
        assert each.tail(1, 1080.0) == b"line 19\n"
        assert each.tail(99, 1001.0).startswith(b"line 02\n"), "in its predecessor"
        assert each.tail(99, 1091.0) == b""
        assert len(each.tail(99).splitlines()) == 20
        each.close()


@pytest.mark.parametrize("limit_nbytes", [1000, 60], ids=["one file", "turned over within the record"])
def test_a_record_that_was_being_written_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_nbytes: int
) -> None:
    written = [
        (1000.0, b"before\n"),
        (1010.0, b"request mine-1 failed\n  Trace"),
        (1012.0, b"back\n  the end\n"),
        (1020.0, b" late words\n"),
        (1030.0, b"after\n"),
    ]
    clock = iter(at_s for at_s, _ in written)
    monkeypatch.setattr("time.time", lambda: next(clock))
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes)
    for _, data in written:
        log.write(data)
    whole = "request mine-1 failed\n  Traceback\n  the end\n late words\nafter\n"
    assert log.tail(99, 1012.5).decode() == whole
    assert log.tail(99, 1009.5).decode() == whole
    assert log.tail(99, 1020.0).decode() == " late words\nafter\n", "nothing that is long before it is told with it"
    assert log.tail(99, 1030.0) == b"after\n"
    assert log.tail(99, 1040.0) == b""
    log.close()


def test_marks_of_time_are_bounded_and_those_that_are_broken_are_none(tmp_path: Path) -> None:
    marks = TimeMarks(tmp_path / "marks")
    for second in range(3 * MAX_MARKS):
        marks.mark(second * 2, float(second * 2))
        marks.mark(second * 2 + 1, second * 2 + 0.5)
    assert MAX_MARKS / 2 <= (tmp_path / "marks").stat().st_size / 16 <= MAX_MARKS
    for known in (marks, TimeMarks(tmp_path / "marks")):
        for since in (16.0, 20000.0, 3.0 * MAX_MARKS):
            assert since - 16 <= known.offset(since) <= since
    (tmp_path / "marks").write_bytes(b"x" * 15)
    assert TimeMarks(tmp_path / "marks").offset(0.0) == 1 << 62


def test_a_log_is_gone_with_its_function(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=10)
    log.write(b"12345678")
    log.write(b"12345678")
    log.remove()
    log.write(b"late words of an instance")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_what_is_printed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "fn-f.log").symlink_to("/dev/full")
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    news = log.follow()
    log.write(b"lost on the disk")
    assert news.get_nowait() == b"lost on the disk"
    log.close()


def test_a_log_that_cannot_turn_over_goes_on_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "fn-f.log"
    log = FunctionLog(path, limit_nbytes=10)
    log.write(b"12345678")
    path.unlink()
    path.mkdir()  # in the way: neither moved over a file nor opened as one
    (tmp_path / "fn-f.log.1").write_bytes(b"")
    log.write(b"lost....")
    path.rmdir()
    log.write(b"found...")
    assert path.read_bytes() == b"found..."
    log.close()


def test_what_an_instance_prints_reaches_the_file_and_followers(tmp_path: Path) -> None:
    async def main() -> None:
        log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1000)
        pipe, news = LogPipe(log), log.follow()
        writer = os.dup(pipe.write_fd)
        pipe.handed()
        os.write(writer, b"hello\n")
        assert await news.get() == b"hello\n"
        log.unfollow(news)
        os.write(writer, b"last words\n")
        pipe.close()  # takes what is left
        os.close(writer)
        assert log.tail(9) == b"hello\nlast words\n"
        log.close()

    asyncio.run(main())


@pytest.mark.parametrize(("mask", "step"), [(NO_MASK, READ_NBYTES), (SecretMask({"S": "hf_abcdef"}), MASKED_NBYTES)])
def test_of_a_flood_so_much_is_taken_at_a_time_and_at_the_end(tmp_path: Path, mask: SecretMask, step: int) -> None:
    async def main() -> None:
        log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1 << 20)
        pipe = LogPipe(log, mask=mask)
        fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, 4 * CLOSE_NBYTES)  # as an instance may
        assert os.write(pipe.write_fd, bytes(4 * CLOSE_NBYTES)) == 4 * CLOSE_NBYTES
        assert pipe._take() == step
        pipe.close()
        assert (tmp_path / "fn-f.log").stat().st_size == step + CLOSE_NBYTES
        log.close()

    asyncio.run(main())


def test_a_slow_follower_loses_some_and_blocks_nobody(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1 << 20)
    news = log.follow()
    most = FOLLOWER_NBYTES // (READ_NBYTES + CHUNK_NBYTES) + 1
    for _ in range(2 * most):
        log.write(bytes(READ_NBYTES))
    assert news.full()
    assert (news.qsize(), news.get_nowait()) == (most, bytes(READ_NBYTES))
    log.write(b"x" * 9)
    assert (news.qsize(), news.full()) == (most, False), "what it takes makes room"
    for _ in range(100_000):
        log.write(b"x")
    assert news.nbytes < FOLLOWER_NBYTES + READ_NBYTES + CHUNK_NBYTES, "also of many small ones"
    log.close()


def test_a_log_of_before_the_start_is_removed_too(tmp_path: Path) -> None:
    """Else whoever has the name next would read it."""
    before = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    before.write(b"printed\n")
    before.close()
    logs = FunctionLogs(lambda name: tmp_path / f"fn-{name}.log", 100)
    logs.remove("f")
    logs.remove("other")
    assert list(tmp_path.iterdir()) == []


def test_a_log_says_when_by_whom_and_for_which_request_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1000.1, 1000.2, 1001.2, 1001.3])
    monkeypatch.setattr("time.time", lambda: next(clock))
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=10_000)
    news = log.follow()
    log.write(b"one\n", "3-16", "mine-1")
    log.write(b"forged \x1e1 3-17 mine-9\x1f\n", "3-16", "mine-1")
    log.write(b"two\n", "3-16")
    log.write(b"three\n", "3-16")
    log.write(b"note\n")
    written = list(lines_of((log.tail(99),)))
    assert [(line.text.strip(), *line.origin) for line in written] == [
        (b"one", "1970-01-01T00:16:40.000Z", "3-16", "mine-1"),
        (b"forged ?1 3-17 mine-9\x1f", "1970-01-01T00:16:40.000Z", "3-16", "mine-1"),
        (b"two", "1970-01-01T00:16:40.200Z", "3-16", ""),
        (b"three", "1970-01-01T00:16:41.200Z", "3-16", ""),
        (b"note", "1970-01-01T00:16:41.300Z", "", ""),
    ]
    for most in range(1, 6):
        assert list(lines_of((log.tail(most),))) == written[-most:], "what is cut off may have had the mark"
    assert list(lines_of(news.get_nowait() for _ in range(5))) == written
    log.close()


def test_a_log_that_turns_over_says_again_by_whom_it_was_written(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=200)
    for number in range(40):
        log.write(b"line %02d\n" % number, "3-16", "mine-1")
    assert {line.origin[1:] for line in lines_of(((tmp_path / "fn-f.log").read_bytes(),))} == {("3-16", "mine-1")}
    log.close()


def test_what_is_in_the_pipe_belongs_to_the_request_that_was_until_then(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=10_000)

    async def scenario() -> None:
        running: dict[int, str] = {}
        pipe = LogPipe(log, instance="3-16", running=running)
        for request in ("mine-1", "", "mine-2"):
            pipe.drain()
            running.clear()
            running |= {7: request} if request else {}
            os.write(pipe.write_fd, f"while {request}\n".encode())
        pipe.close()
        pipe.note("the end")

    asyncio.run(scenario())
    found = [(line.text, *line.origin[1:]) for line in lines_of((log.tail(99),))]
    told = [(f"while {request}\n".encode(), "3-16", request) for request in ("mine-1", "", "mine-2")]
    assert found == [*told, (b"--- the end\n", "3-16", "mine-2")]
    log.close()


def _told(tmp_path: Path, running: dict[int, str], *printed: bytes) -> list[tuple[bytes, str]]:
    """What the log says of this, with the request of each line."""
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1 << 20)

    async def scenario() -> None:
        pipe = LogPipe(log, instance="3-16", running=running)
        for data in printed:
            os.write(pipe.write_fd, data)
            pipe.drain()
        pipe.close()

    asyncio.run(scenario())
    try:
        return [(line.text, line.origin.request) for line in lines_of((log.tail(9999),))]
    finally:
        log.remove()


def test_of_several_requests_labels_say_whose_a_line_is(tmp_path: Path) -> None:
    running = {1: "mine-1", 2: "a,b", 3: "mine-3"}
    whole = b"\x1e1\x1fone\n\x1e\x1fnobody's\n\x1e2\x1ftwo\n\x1e1,3,9\x1fa batch's\n\x1e9\x1fof one that has ended\n"
    told = [
        *((b"one\n", "mine-1"), (b"nobody's\n", ""), (b"two\n", "a,b"), (b"a batch's\n", "mine-1,mine-3")),
        (b"of one that has ended\n", ""),
    ]
    assert _told(tmp_path, running, whole) == told
    assert _told(tmp_path, running, *(bytes([each]) for each in whole)) == told
    odd = b'\x1e{"a": 1}\n\x1e12\n\x1e'
    assert _told(tmp_path, running, odd) == [(b'?{"a": 1}\n', ""), (b"?12\n", ""), (b"?", "")], "those are none"
    many = {number: f"r-{number:0100}" for number in range(99)}
    ((_, said),) = _told(tmp_path, many, label(many) + b"x\n")
    assert said.split(",") == [*list(many.values())[:39], "+60"]


def test_labels_cost_no_more_than_lines_do(tmp_path: Path) -> None:
    told = _told(tmp_path, {1: "a", 2: "b"}, b"\x1e1\x1fx\n\x1e2\x1fy\n" * 2000)
    assert [request for _, request in told] == ["a", "b"] * (MAX_PARTS // 2) + [""] * (4000 - MAX_PARTS)


def test_a_secret_between_two_writes_of_a_request_is_hidden(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1000)

    async def scenario() -> None:
        pipe = LogPipe(log, mask=SecretMask({"S": "hf_abcdef"}), running={1: "a"})
        os.write(pipe.write_fd, b"\x1e1\x1fit is hf_ab\x1e\x1f\x1e1\x1fcdef\n\x1e\x1f")
        pipe.close()

    asyncio.run(scenario())
    assert b"hf_ab" not in log.tail(9)
    log.close()


def test_of_deploys_that_came_to_nothing_a_tenant_s_newest_logs_are_kept_and_nobody_else_reads_one(
    tmp_path: Path,
) -> None:
    served, coming = {"there"}, {"on-its-way"}
    logs = FunctionLogs(lambda name: tmp_path / f"fn-{name}.log", 100, served, coming)

    def there() -> list[str]:
        return sorted(path.name[3:-4] for path in tmp_path.glob("fn-*.log"))

    names = [f"n{number:02}" for number in range(LEFT + 3)]
    for name in ("there", "on-its-way", *names, "other"):
        logs.begin(name, "b" if name == "other" else "a").write(b"said\n")
    assert there() == sorted(["there", "on-its-way", *names[3:], "other"])
    logs.begin("n03", "a").write(b"again\n")
    logs.begin("newest", "a")
    assert "n03" in there(), "its next try"
    assert "n04" not in there()
    assert [logs.hides(name, "b") for name in ("n05", "other", "there", "unknown")] == [True, False, False, False]
    assert not logs.hides("n05", None)
    assert logs.begin("n05", "b").tail(9) == b""
    assert logs.begin("there", "b").tail(9) == b"said\n", "its function goes on"
    assert (logs.hides("n05", "a"), logs.hides("n05", "b")) == (True, False)
    logs.close()
    again = FunctionLogs(lambda name: tmp_path / f"fn-{name}.log", 100, served, coming)
    again.restore({"there", "n06"})
    assert there() == ["n06", "there"]
    again.close()
