"""What an instance sends ends its own session at most: the executor goes on, and the next lease is served."""

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch
from engine_world import META, Reply, Violated, World, close, manifest

from dormouse.gpuserver.commands.interpreter import Interpreter
from dormouse.gpuserver.device.protocol import DeviceLost
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

COMPLEX = ["complex64", [2], [1], 0, 1]
VIEW = ["float32", [4], [1], 0, 1]
RELU: list[Any] = ["aten::relu", [[wire.TENSOR, 0]], [], [[[wire.FRESH, 0, 0]], [], False], "float32"]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.engine.manifest(manifest("a", 10))
    world.engine.manifest(manifest("b", 11))
    world.wake(1)
    yield world
    close(world)


def _key(**changed: Any) -> list[Any]:
    names = ["name", "args", "kwargs", "outputs", "default_dtype"]
    return [changed.get(name, value) for name, value in zip(names, RELU, strict=True)]


SIX_WAYS: dict[str, tuple[list[Any], list[Any], str]] = {
    "a size that is no list": ([5, ["float32", 4, [1], 0, 0]], [], "4 is no size"),
    "a size that is None": ([5, ["float32", None, [1], 0, 0]], [], "None is no size"),
    "a dtype that is a list": ([5, [["float32"], [4], [1], 0, 0]], [], "['float32'] is no dtype"),
    "a default dtype that is a list": ([], [0, _key(default_dtype=["float32"])], "['float32'] is no default dtype"),
    "a real view of a conjugate": ([5, COMPLEX, 6, VIEW], [], "geometry 6 of float32 cannot have the bits 1"),
    "a host buffer of 2^62": (
        [],
        [0, _key(args=[[wire.HOST, "float32", [1 << 62]]])],
        "a CPU operand of the wrong size",
    ),
    "an empty host buffer of 2^62": (
        [],
        [0, _key(args=[[wire.HOST, "float32", [0, 1 << 62, 4]]])],
        "has too many elements",
    ),
    "a length that is a float": ([5, ["float32", [float("inf")], [1], 0, 0]], [], "inf is no length"),
    "a complex number of text": ([], [0, _key(args=[[wire.COMPLEX, "1", 0]])], "is malformed"),
    "a change of no operand": ([], [0, _key(outputs=[[], [["0", 0]], False])], "'0' is none of the 1"),
}


@pytest.mark.parametrize("way", sorted(SIX_WAYS))
def test_d3_a_malformed_definition_is_a_violation(world: World, way: str) -> None:
    metas, keys, text = SIX_WAYS[way]
    world.frame(1, 1, 0, b"", 900, metas=[*META, *metas], keys=keys)  # the key is used, too
    violated = world.until(Violated)
    assert violated.instance == "a"
    assert text in violated.text
    assert violated.story == "", "checked where it is defined, not caught behind"
    assert world.until(m.Done).outcome == "violated"
    world.wake(2, "b")
    assert world.read(2, 1, 0, name="b", metas=META) == bytes([1]) * 16


@pytest.mark.parametrize("storage", [-1, 1 << 63, (1 << 64) - 1, True, 1.0])
def test_d3_a_storage_has_an_id_that_the_store_can_keep(world: World, storage: Any) -> None:
    world.frame(1, 1, wire.CREATE, storage, 16)
    assert "is not a new number" in world.until(Violated).text
    assert world.until(m.Done).outcome == "violated"


@pytest.mark.parametrize(
    "command",
    [[wire.SYNC, [[]]], [wire.MEMORY, "x"], [wire.RNG_GET, None, 0], [wire.DOWNLOAD, -1, 0, 0, -1], [wire.END, {}, 1]],
)
def test_d3_a_token_is_a_number(world: World, command: list[Any]) -> None:
    world.frame(1, 1, *command, metas=META)
    assert "is not a count" in world.until(Violated).text
    assert world.until(m.Done).outcome == "violated"


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dtype", -1), ("dtype", 255), ("layout", 99), ("memory_format", 99), ("device", "meta"), ("device", 0)],
)
def test_d3_a_number_is_no_dtype_layout_format_or_device(world: World, argument: str, value: Any) -> None:
    """PyTorch takes any number for these and follows it: `empty_like(x, dtype=-1)` ends the process, or never ends."""
    key = ["aten::empty_like", [[wire.TENSOR, 0]], [argument, value], [[[wire.FRESH, 0, 0]], [], False], "float32"]
    world.frame(1, 1, 0, 0, 9, wire.SYNC, 3, metas=META, keys=[0, key])
    kind, _, error, text, _ = msgpack.unpackb(world.until(Reply).messages[0])
    assert (kind, error) == (wire.FAILED, "NotImplementedError")
    assert text.startswith(f"aten::empty_like: argument {argument} is no ")


def test_d3_nothing_is_written_to_fewer_places_than_elements(world: World) -> None:
    """`triu(out=)` of such a tensor writes behind it."""
    narrow = [5, ["int64", [4, 2], [1, 1], 0, 0], 6, ["int64", [4, 2], [2, 1], 0, 0]]
    key = ["aten::triu.out", [[wire.TENSOR, 6]], ["out", [wire.TENSOR, 5]], [[[wire.SAME, 1]], [], False], "float32"]
    made = [wire.CREATE, 8, 64, wire.CREATE, 9, 40]
    world.frame(1, 1, *made, 0, 8, 9, wire.SYNC, 3, metas=narrow, keys=[0, key])
    kind, _, error, text, _ = msgpack.unpackb(world.until(Reply).messages[0])
    assert (kind, error) == (wire.FAILED, "RuntimeError")
    assert "more than one element of the written-to tensor refers to a single memory location" in text


def test_d3_a_dtype_is_no_operand_either(world: World) -> None:
    key = ["aten::empty_like", [[wire.TENSOR, 0]], ["dtype", [wire.SCALAR]], [[[wire.FRESH, 0, 0]], [], False]]
    world.frame(1, 1, 0, 0, -1, 9, wire.SYNC, 3, metas=META, keys=[0, [*key, "float32"]])
    assert msgpack.unpackb(world.until(Reply).messages[0])[:3] == [wire.FAILED, 3, "NotImplementedError"]


def test_d3_whatever_escapes_ends_the_instance_with_its_story(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours that a frame reaches is not the executor's."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault that nobody knows of")

    monkeypatch.setattr(Interpreter, "_define", broken)
    world.frame(1, 1)
    violated = world.until(Violated)
    assert violated.text == "what it sent raised ZeroDivisionError in the executor"
    assert "a fault that nobody knows of" in violated.story
    assert world.until(m.Done).outcome == "violated"
    monkeypatch.undo()
    world.wake(2, "b")
    assert world.read(2, 1, 0, name="b", metas=META) == bytes([1]) * 16


@pytest.mark.parametrize("method", ["report", "finish_end"])
def test_d3_an_end_that_raises_ends_the_instance(world: World, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(method)

    monkeypatch.setattr(Interpreter, method, broken)
    world.frame(1, 1, wire.END, 7, 1)
    assert "KeyError" in world.until(Violated).text
    assert world.until(m.Done).outcome == "violated"


def test_d3_a_write_back_that_raises_ends_the_instance(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.frame(1, 1, wire.CREATE, 9, 16, wire.END, 7, 1)
    ticket = world.until(m.AskPlace).ticket

    def broken(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(Interpreter, "storage", broken)
    world.engine.placed(m.Placed(ticket=ticket, places=[m.Place(segment=50, slab=0, offset=0, nbytes=16)]))
    assert "ValueError" in world.until(Violated).text
    assert world.until(m.Done).outcome == "violated"


def test_d3_a_lost_device_stays_the_executors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def sticky(*_: Any) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    def lost() -> None:
        raise DeviceLost("cuStreamSynchronize: 700")

    monkeypatch.setattr(Interpreter, "_run", sticky)
    world.frame(1, 1)
    assert world.until(m.Done).outcome == "violated"  # the device can go on
    world.wake(2, "b")
    monkeypatch.setattr(world.device, "synchronize", lost)
    with pytest.raises(DeviceLost):
        world.frame(2, 1, name="b")
    world.heard(lambda: None)
    while not world.effects.empty():  # it is not what this instance has sent
        effect = world.effects.get()
        assert not (isinstance(effect, Violated) and effect.instance == "b")
    monkeypatch.undo()


def test_d3_books_that_do_not_agree_stay_the_executors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose books are wrong could give one function's bytes to another."""
    monkeypatch.setattr(Interpreter, "_run", lambda *_: [][1])
    world.checking = False
    world.engine.residency.seats._doomed.add(999)
    world.frame(1, 1)
    assert [type(error) for error in world.raised] == [AssertionError]
    world.raised.clear()
    world.engine.residency.seats._doomed.clear()


def test_a_reply_is_still_an_answer(world: World) -> None:
    """The world of this file works: its frames reach the interpreter."""
    world.frame(1, 1, wire.SYNC, 3)
    assert msgpack.unpackb(world.until(Reply).messages[0]) == [wire.VALUE, 3, None]
