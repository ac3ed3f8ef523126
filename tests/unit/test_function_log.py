"""Functions' logs stay within their bound, reach followers, and outlive nobody."""

import asyncio
import os
from pathlib import Path

from dormouse.router.instances.functionlog import FunctionLog, LogPipe


def test_a_log_turns_over_and_keeps_its_tail(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=100)
    for number in range(50):
        log.write(f"line {number:02}\n".encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fn-f.log", "fn-f.log.1"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert log.tail(3) == b"line 47\nline 48\nline 49\n"
    assert log.tail(0) == b""
    log.close()


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


def test_a_slow_follower_loses_some_and_blocks_nobody(tmp_path: Path) -> None:
    log = FunctionLog(tmp_path / "fn-f.log", limit_nbytes=1 << 20)
    news = log.follow()
    for _ in range(1000):
        log.write(b"x")
    assert news.full()
    log.close()
