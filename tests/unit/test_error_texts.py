"""What is said of an exception in one line, and to those who may not read its frames."""

import errno
import socket
from pathlib import Path

import pytest

from dormouse.client_shim.instance import advice
from dormouse.core.errortext import GIST_CHARS, gist, hints, outward

FRAME = '  File "/function/f.py", line 3, in handle\n    x = request["x"]\n        ~~~~~~~^^^^^\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("the GPU died\nand more", "the GPU died …"),
        (f"Traceback (most recent call last):\n{FRAME}KeyError: 'x'\n", "KeyError: 'x'"),
        (f"Traceback (most recent call last):\n{FRAME}ValueError: one\n  two\nthree", "ValueError: one …"),
        (f"Traceback:\n{FRAME}OSError: a\n\nDuring that:\n\nTraceback:\n{FRAME}KeyError: 'x'", "KeyError: 'x'"),
        (f"Traceback (most recent call last):\n{FRAME}", "        ~~~~~~~^^^^^"),
        ("x" * 300, "x" * GIST_CHARS),
    ],
)
def test_the_gist_of_an_error(text: str, said: str) -> None:
    assert gist(text) == said


PYDANTIC = (
    f"Traceback (most recent call last):\n{FRAME}pydantic_core._pydantic_core.ValidationError: 2 errors for Req\nx\n"
    "  Field required\n    For further information visit https://errors.pydantic.dev/2.14/v/missing\ndormouse: a hint"
)


def test_a_message_of_many_lines_is_its_first() -> None:
    assert gist(PYDANTIC) == "pydantic_core._pydantic_core.ValidationError: 2 errors for Req …"
    assert hints(PYDANTIC) == ["a hint"]
    assert gist("ValueError: no\ndormouse: a hint") == "ValueError: no"


def test_where_a_command_was_issued_follows_what_was_raised() -> None:
    text = f"Traceback (most recent call last):\n{FRAME}IndexError: out of range\nissued by aten.index:\n{FRAME}"
    assert gist(text) == "IndexError: out of range …"
    assert outward(text) == "IndexError: out of range\nissued by aten.index:\nthe function's log has the rest"


def test_nobody_is_promised_a_frame_that_is_left_out() -> None:
    issued = f"  in aten::linear on cuda:0, issued by\n{FRAME}"
    text = f"Traceback (most recent call last):\n{FRAME}RuntimeError: no\n{issued}"
    assert outward(text) == "RuntimeError: no\n  in aten::linear on cuda:0\nthe function's log has the rest"


def test_a_group_of_exceptions_is_its_own_line() -> None:
    import traceback

    group = ExceptionGroup("two of them", [ValueError("one"), KeyError("two")])
    try:
        raise group
    except ExceptionGroup as error:
        text = "".join(traceback.format_exception(error))
    assert gist(text) == "ExceptionGroup: two of them (2 sub-exceptions)"


def test_what_others_read_has_no_frame_and_no_path() -> None:
    text = f"Traceback (most recent call last):\n{FRAME}OSError: no '/srv/c/d.bin' at https://a.b/c\ndormouse: a hint"
    assert outward(text) == "OSError: no 'd.bin' at https://a.b/c\na hint\nthe function's log has the rest"
    assert gist('File "/x/f.py", line 3\n    a b\n      ^\nSyntaxError: bad') == "SyntaxError: bad"  # as it is sent
    assert outward('  File "/x/f.py", line 3\n    a b\n      ^\nSyntaxError: bad') == (
        "SyntaxError: bad\nthe function's log has the rest"
    )
    assert outward("handle() returned NaN") == "handle() returned NaN"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


HUB = OSError(
    "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
    "Check your internet connection or see how to run the library in offline mode"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'cowsay'"), advice.MODULE),
        (HUB, advice.HUB),
        (ValueError("no model", HUB), advice.HUB),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), advice.NETWORK),
        (socket.gaierror(-3, "Temporary failure in name resolution"), advice.NETWORK),
        (raised(RuntimeError("no answer"), socket.gaierror(-2, "Name or service not known")), advice.NETWORK),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/weights.bin"), advice.OUTSIDE),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "weights.bin"), ""),
        (OSError(errno.EROFS, "Read-only file system", "/usr/lib/cache"), advice.WRITES),
        (PermissionError(errno.EACCES, "Permission denied", "/nowhere/cache"), advice.WRITES),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), advice.COMPILER),
        (RuntimeError("No CUDA GPUs are available"), advice.DRIVER),
        (OSError(errno.ENOSYS, "sem_open: Function not implemented"), advice.SEMAPHORE),
        (KeyError("x"), ""),
        (raised(KeyError("x"), ModuleNotFoundError("No module named 'y'")), ""),
    ],
)
def test_the_errors_that_authors_meet_first_say_what_helps(error: BaseException, said: str) -> None:
    assert advice.hint(error, network=False) == said


@pytest.mark.parametrize(("program", "said"), [("gcc", advice.COMPILER), ("no-such-ffmpeg", advice.PROGRAM)])
def test_a_program_that_is_not_there(program: str, said: str) -> None:
    import subprocess

    with pytest.raises(FileNotFoundError) as caught:
        subprocess.run([f"/nowhere/{program}", "-v"])
    assert advice.hint(caught.value, network=False) == said


def test_who_has_a_network_is_not_told_that_there_is_none(tmp_path: Path) -> None:
    for error in (HUB, OSError(errno.ENETUNREACH, "Network is unreachable")):
        assert advice.hint(error, network=True) == ""
