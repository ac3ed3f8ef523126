"""What is printed for a request bears its number, whoever prints it."""

import asyncio
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dormouse.client_shim import patches
from dormouse.client_shim.instance import context, labelled_output
from dormouse.core.loglabels import LABEL_NBYTES, LabelReader, label
from dormouse.schemas.messages import Run


def _run(number: int) -> Run:
    return Run(request=number, lease=None, body=b"", nbytes=0, route="", id=f"mine-{number}")


@contextmanager
def printing() -> Iterator[Callable[[], list[tuple[tuple[int, ...], bytes]]]]:
    """What was printed since the last look, and whose it is. No fixture: pytest has its own streams in each phase."""
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    reader = LabelReader()

    def look() -> list[tuple[tuple[int, ...], bytes]]:
        found = list[tuple[tuple[int, ...], bytes]]()
        for numbers, text in reader.read(os.read(ours, 1 << 16)):
            same = bool(found) and found[-1][0] == numbers
            found[-1:] = [(numbers, found[-1][1] + text)] if same else [*found[-1:], (numbers, text)]
        return found

    with open(theirs, "w", buffering=1) as plain, pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            monkeypatch.setattr(sys, name, plain)
        before = logging.StreamHandler()
        logging.getLogger("before").addHandler(before)
        labelled_output.install()
        context.carry_into_threads()
        context.end()
        try:
            yield look
        finally:
            patches.undo()
            logging.getLogger("before").removeHandler(before)
            context.end()
    os.close(ours)


def test_whatever_prints_it() -> None:
    with printing() as printed:
        print("nobody's")
        context.begin(_run(1))
        print("one", "two")
        sys.stderr.write("an error\n")
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.flush()
        logging.getLogger("before").warning("logged")
        os.write(sys.stdout.fileno(), b"another program's\n")
        context.begin_together([_run(1), _run(2)])
        print("a batch's")
        assert printed() == [
            ((), b"nobody's\n"),
            ((1,), b"one two\nan error\nbytes\nlogged\n"),
            ((), b"another program's\n"),
            ((1, 2), b"a batch's\n"),
        ]


def test_a_line_printed_in_parts_is_whole_whoever_prints_between_them() -> None:
    with printing() as printed:
        context.begin(_run(1))
        print("begun", end=" ")
        context.begin(_run(2))
        print("another's")
        print("left", end="")
        context.end()
        print("nobody's")
        context.begin(_run(1))
        print("and ended")
        print("flushed", end="", flush=True)
        context.begin(_run(3))
        sys.stdout.close()
        assert printed() == [
            ((2,), b"another's\n"),
            ((), b"nobody's\n"),
            ((1,), b"begun and ended\nflushed"),
            ((2,), b"left"),
        ]


def test_lines_without_an_end_have_a_limit() -> None:
    with printing() as printed:
        for number in range(labelled_output.MAX_TEXTS):
            context.begin(_run(number))
            print(".", end="")
        with pytest.raises(BlockingIOError):
            printed()
        context.begin(_run(labelled_output.MAX_TEXTS))
        print("x" * io.DEFAULT_BUFFER_SIZE, end="")
        *left, (numbers, text) = printed()
        assert left == [((number,), b".") for number in range(labelled_output.MAX_TEXTS)]
        assert (numbers, text) == ((labelled_output.MAX_TEXTS,), b"x" * io.DEFAULT_BUFFER_SIZE)


def test_long_text_is_in_parts_that_are_labelled() -> None:
    with printing() as printed:
        context.begin(_run(1))
        print("x" * 30_000)
        assert printed() == [((1,), b"x" * 30_000 + b"\n")]


def test_tasks_and_threads_are_of_the_request_that_began_them() -> None:
    with printing() as printed:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context.begin, _run(9)).result()

            async def handled(number: int) -> None:
                context.begin(_run(number))
                thread = threading.Thread(target=print, args=("thread",))
                thread.start()
                thread.join()
                await asyncio.get_running_loop().run_in_executor(pool, print, "pool")
                await asyncio.create_task(asyncio.to_thread(print, "task's"))
                print(context.current().id)

            async def one_by_one() -> None:
                for number in (1, 2):
                    await asyncio.create_task(handled(number))

            asyncio.run(one_by_one())
            pool.submit(print, "nobody's").result()
        assert printed() == [
            ((1,), b"thread\npool\ntask's\nmine-1\n"),
            ((2,), b"thread\npool\ntask's\nmine-2\n"),
            ((), b"nobody's\n"),
        ]


def test_a_label_has_its_limit() -> None:
    said = label(range(10_000, 20_000))
    assert len(said) <= LABEL_NBYTES + 2
    ((numbers, text),) = LabelReader().read(said + b"x")
    assert (numbers, text) == (tuple(range(10_000, 10_000 + len(numbers))), b"x")
    assert len(numbers) == (LABEL_NBYTES + 1) // 6
