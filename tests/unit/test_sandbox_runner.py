"""The pure parts of an instance's main loop: JSON, reports of exceptions, cancellation, importing a function."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from dormouse.client_shim.instance import codec, report, runner
from dormouse.client_shim.instance.cancel import Cancellation, RequestCancelled
from dormouse.client_shim.instance.coroutines import Coroutines
from dormouse.client_shim.instance.user_function import LoadFailure, import_function
from dormouse.client_shim.node.router_port import interruptible
from dormouse.client_shim.stream.failures import ExecutorLost, exception


def levels(count: int, inside: Any) -> Any:
    """More than the fast encoder takes."""
    for _ in range(count):
        inside = [inside]
    return inside


@pytest.mark.parametrize(
    ("value", "json"),
    [
        ({"a": [1, 2.5, None, "é"]}, '{"a":[1,2.5,null,"é"]}'),
        ((1, 2), "[1,2]"),
        ({1: "x"}, '{"1":"x"}'),
        (np.arange(4).reshape(2, 2).T, "[[0,2],[1,3]]"),
        (np.float16(0.5), "0.5"),
        (np.array(["a", "b"]), '["a","b"]'),
        (np.int64(3), "3"),
    ],
)
def test_encode(value: object, json: str) -> None:
    assert codec.encode(value, 1000).decode() == json


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), ".tolist()"),
        ({"loss": torch.tensor(1.0)}, ".item()"),
        ({1, 2}, "type set"),
        (object(), "type object"),
        ("x" * 2000, "returned 2.0 KiB of JSON; at most 1.0 KiB fit"),
        ("\ud800", "not Unicode (it has a lone surrogate): decode bytes"),
        ({(1, 2): 3}, "a key that is neither text nor a number: make the keys strings"),
        (10**400, "a number in it has more than 64 bits: return it as a string"),
        (levels(300, "\ud800"), "not JSON"),
        ({math.nan: 1}, "NaN"),
    ],
)
def test_what_is_not_json(value: object, words: str) -> None:
    with pytest.raises(codec.BadResponse) as caught:
        codec.encode(value, 1000)
    assert words in str(caught.value)
    assert report.code(caught.value, "function_raised") == "bad_response"


def test_a_model_that_stays_on_the_cpu_is_told_to_the_deployer() -> None:
    assert runner._of_host_model(torch.nn.Linear(1, 1)).endswith(
        'on the CPU, and computes there: return model.to("cuda")'
    )
    assert [runner._of_host_model(state) for state in (torch.nn.ReLU(), None, [1])] == ["", "", ""]


def test_decode() -> None:
    assert codec.decode(memoryview(b'{"a": 1}')) == {"a": 1}
    assert codec.decode(b"123456789012345678901234567890") == 123456789012345678901234567890
    for body in (b"{", b"NaN", b"1e999", b"[" * 100_000):
        with pytest.raises(codec.BadRequest, match="not JSON"):
            codec.decode(body)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"NaN",
        b"[1,]",
        b"1 2",
        b"{1:2}",
        b'"\x01"',
        b'"\\x"',
        b"01",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf1",
    ],
)
def test_d16_what_is_not_json(text: bytes) -> None:
    for body in (text, memoryview(b"[" + b"1," * 100_000 + text + b"]")):
        with pytest.raises(codec.BadRequest, match=r"^the body is not JSON: .*; "):
            codec.decode(body)


def test_d16_deep_json_is_not_json() -> None:
    with pytest.raises(codec.BadRequest, match=r"^the body is not JSON: it is nested too deeply; send a JSON value$"):
        codec.decode(nested(100_000))


def test_json_that_python_cannot_hold() -> None:
    with pytest.raises(codec.BadRequest, match=r"^the body is not JSON that Python can hold: .*; send a simpler"):
        codec.decode(b'["' + "\U0001f600".encode() * 100_000 + b'", 1e999]')  # characters across the pieces of a check


def nested(levels: int, inside: bytes = b"") -> bytes:
    return b"[" * levels + inside + b"]" * levels


@pytest.mark.parametrize("body", [nested(20_000), nested(100_000), b"1" * 10**6, b'"\xff"'])
def test_d16_what_python_cannot_hold_is_no_error_of_the_function(body: bytes) -> None:
    with pytest.raises(codec.BadRequest) as caught:
        codec.decode(body)
    assert report.code(caught.value, "function_raised") == "bad_json"


def test_d16_what_came_in_can_go_out() -> None:
    for body in (nested(700), nested(700, b"null,1.5")):
        assert codec.encode(codec.decode(body), 10_000) == body
    with pytest.raises(codec.BadResponse, match="NaN"):
        codec.encode([codec.decode(nested(300)), float("nan")], 10_000)
    with pytest.raises(codec.BadResponse, match="tensor"):
        codec.encode([codec.decode(nested(300)), torch.ones(1)], 10_000)
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(codec.BadResponse, match="nested too deeply, or contains itself: return a flat value"):
        codec.encode(endless, 10_000)


@dataclass
class Point:
    x: float
    y: float | None = None


@pytest.mark.parametrize(
    "value",
    [math.nan, {"a": [1.0, -math.inf]}, (None, np.float32("inf")), {"x": np.array([1, np.nan])}, Point(math.nan)],
)
def test_numbers_that_json_cannot_say(value: object) -> None:
    with pytest.raises(codec.BadResponse, match="NaN or infinity"):
        codec.encode(value, 1000)


def test_null_where_nothing_is_wrong() -> None:
    value = {"none": None, "text": "null", "point": Point(1.0), "n": np.array([1.5])}
    assert orjson.loads(codec.encode(value, 1000)) == {
        "none": None,
        "text": "null",
        "point": {"x": 1.0, "y": None},
        "n": [1.5],
    }


def test_codes() -> None:
    def wrapped() -> None:
        try:
            raise ExecutorLost("gone")
        except ExecutorLost as error:
            raise ValueError("user's words") from error

    with pytest.raises(ValueError, match="words") as caught:
        wrapped()
    assert report.code(caught.value, "function_raised") == "executor_lost"
    assert report.code(torch.OutOfMemoryError("full"), "function_raised") == "out_of_memory"
    assert report.code(KeyError("k"), "load_raised") == "load_raised"
    for kind, code in (("WakeFailed", "wake_failed"), ("ModelDamaged", "model_damaged"), ("Exit", "load_raised")):
        assert report.code(exception(kind, "text", None, None), "load_raised") == code


def test_a_report_is_bounded_and_says_what_exit_means() -> None:
    long = report.describe(ValueError("x" * 100_000))
    assert len(long) < report.MAX_CHARS + 100
    assert "left out" in long
    assert "handle() asked to exit" in report.describe(SystemExit(1), "handle()")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


def test_of_an_error_that_cannot_say_itself_there_is_a_report() -> None:
    odd = SyntaxError("odd")
    odd.lineno, odd.text = 1, 5  # type: ignore[assignment]
    for error in (Mute(), ExceptionGroup("all", [Mute()]), odd):
        assert report.limit(error) == ""
        assert type(error).__name__ in report.describe(error)
    memory = type("Memory", (MemoryError, Mute), {})()
    assert report.limit(memory) == "memory"


def test_a_report_can_travel() -> None:
    text = report.describe(ValueError("half \ud800 of a pair"))
    assert text.encode().decode() == "ValueError: half \\ud800 of a pair"
    assert len(report.describe(ValueError("\ud800" * 100_000)).encode()) < report.MAX_CHARS + 100


def test_a_report_of_thousands_of_causes_is_one() -> None:
    last = error = ValueError("first of them")
    for number in range(5000):
        last.__context__ = ValueError(number)
        last = last.__context__
    text = report.describe(error)
    assert text.endswith("ValueError: first of them")
    assert len(text) < report.MAX_CHARS + 100


def test_a_report_of_errors_in_a_circle_has_each_once() -> None:
    first, second, group = ValueError("first"), ValueError("second"), ExceptionGroup("all", [KeyError("third")])
    first.__cause__, second.__context__, group.__cause__ = second, first, first
    group.exceptions[0].__context__ = group
    text = report.describe(group)
    said = ("ValueError: first", "ValueError: second", "ExceptionGroup: all", "KeyError: 'third'")
    assert [text.count(each) for each in said] == [1, 1, 1, 1]


def test_import_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(tmp_path)  # and back: a function's working directory is its folder
    origin = str(tmp_path / "my_function.py")
    (tmp_path / "helper_beside.py").write_text("VALUE = 7\n")
    source = (
        b"import helper_beside\ndef load(): return helper_beside.VALUE\ndef handle(s, r): return [s, r, __file__]\n"
    )
    function = import_function(source, origin)
    assert function.handle(function.load(), 1) == [7, 1, origin]
    assert sys.modules.pop("my_function").__name__ == "my_function"
    sys.modules.pop("helper_beside")
    with pytest.raises(LoadFailure, match="define handle"):
        import_function(b"", origin)
    sys.modules.pop("my_function")


CURRENT = 7
"""The request that runs in these tests."""


@pytest.fixture
def word() -> bytearray:
    return bytearray(CURRENT.to_bytes(8, "little"))


@pytest.fixture
def cancellation(word: bytearray) -> Iterator[Cancellation]:
    before = signal.getsignal(signal.SIGUSR1), sys.unraisablehook
    made = Cancellation(memoryview(word), Coroutines())
    made.install()
    yield made
    signal.signal(signal.SIGUSR1, before[0])
    sys.unraisablehook = before[1]


def interrupted(cancellation: Cancellation, word: bytearray, work: Callable[[], object]) -> None:
    """``work`` sends the signal; then the main thread waits in user code."""

    def run() -> None:
        word[:] = bytes(8)
        with cancellation.window(CURRENT):
            word[:] = CURRENT.to_bytes(8, "little")
            work()
            time.sleep(10)

    with pytest.raises(RequestCancelled):
        run()


def test_cancel_reaches_user_code_only(cancellation: Cancellation, word: bytearray) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)  # nothing runs: nothing happens
    interrupted(cancellation, word, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with cancellation.window(CURRENT + 1):
        pass


def test_a_late_signal_spares_the_next_request(cancellation: Cancellation) -> None:
    with cancellation.window(CURRENT + 1):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)


def test_a_client_that_left_before_the_request_began(cancellation: Cancellation) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(RequestCancelled), cancellation.window(CURRENT):
        pytest.fail("the request ran")


def test_cancel_waits_for_the_shim_to_leave(cancellation: Cancellation, word: bytearray) -> None:
    shim = os.path.join(os.path.dirname(codec.__file__), "stream.py")
    scope: dict[str, Any] = {"os": os, "signal": signal, "done": []}
    exec(compile("def record():\n os.kill(os.getpid(), signal.SIGUSR1)\n done.append(1)", shim, "exec"), scope)
    interrupted(cancellation, word, scope["record"])
    assert scope["done"] == [1]


def test_cancel_holds_back_a_signal_that_meets_its_own_handler(
    cancellation: Cancellation, word: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start the thread that sends it again may take longer than the thread waits."""
    met: list[int] = []

    class Slow(threading.Thread):
        def start(self) -> None:
            if not met:
                met.append(1)
                os.kill(os.getpid(), signal.SIGUSR1)
            super().start()

    monkeypatch.setattr(threading, "Thread", Slow)
    test_cancel_waits_for_the_shim_to_leave(cancellation, word)
    assert met


def test_cancel_interrupts_a_wait_of_the_shim(cancellation: Cancellation, word: bytearray) -> None:
    interrupted(cancellation, word, lambda: interruptible(os.kill, os.getpid(), signal.SIGUSR1))


def test_encode_agrees_with_json() -> None:
    value = {"n": np.arange(3), "x": [np.float32(0.25)], "d": {"k": (True, None)}}
    assert orjson.loads(codec.encode(value, 1000)) == {"n": [0, 1, 2], "x": [0.25], "d": {"k": [True, None]}}
