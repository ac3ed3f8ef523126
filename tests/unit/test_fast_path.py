"""Plain operations by C++ are those by Python: the same replies, storages and violations for whatever frame comes."""

import gc
import random
import weakref
from typing import Any, Final

import pytest
import torch
from fast_paths import built

from benchmarks.both_ways import METAS, SAME, Side, fresh, holes, t
from dormouse.schemas import stream as wire

T, S = [wire.TENSOR, 0], [wire.SCALAR]


def key(name: str, args: list[Any], outputs: Any, kwargs: list[Any] | None = None, dtype: str = "float32") -> list[Any]:
    return [f"aten::{name}", args, kwargs or [], outputs, dtype]


KEYS: Final[list[Any]] = [
    key("relu", [t(0)], fresh(0)),
    key("add.Tensor", [t(0), t(0)], fresh(0)),
    key("add.Tensor", [t(0), t(0)], fresh(0), ["alpha", S]),
    key("mul.Tensor", [t(0), S], fresh(0)),
    key("mul.Scalar", [t(0), 2.5], fresh(0)),
    key("add_.Tensor", [t(0), t(0)], SAME),
    key("relu_", [t(0)], SAME),
    key("add_.Tensor", [t(5), t(0)], SAME),  # its elements share a place
    key("add_.Tensor", [t(0), t(1)], SAME),  # shapes that do not fit
    key("cat", [[wire.LIST, [t(0), t(0)]]], fresh(3)),
    key("cat", [[wire.LIST, [t(0), t(0)]], 0], fresh(0)),  # not what it gives
    key("native_layer_norm", [t(1), [wire.LIST, [2]], None, None, 1e-5], fresh(1, 9, 9)),
    key("native_layer_norm", [t(1), [wire.LIST, [2]], None, None, 1e-5], fresh(1, 9, 10)),  # strides that lead nowhere
    key("embedding", [t(1), t(2)], fresh(1)),
    key("mm", [t(1), t(1)], fresh(1)),
    key("mm", [t(4), t(1)], fresh(1)),
    key("mm", [t(1), t(1)], fresh(4)),  # other strides than are given
    key("t_copy", [t(1)], fresh(4)),
    key("sum", [t(0)], fresh(11), dtype="float64"),
    key("zeros_like", [t(0)], fresh(0), ["dtype", [wire.DTYPE, "float32"], "device", [wire.DEVICE]]),
    key("scaled_dot_product_attention", [t(6), t(6), t(6)], fresh(6)),
    key("native_dropout", [t(0), 0.5, True], fresh(0, 0)),
    key("batch_norm", [t(1), t(7), t(7), t(7), t(7), False, 0.1, 1e-5, True], fresh(1)),
    key("batch_norm", [t(1), t(7), t(7), t(7), t(7), True, 0.1, 1e-5, True], fresh(1)),  # writes its statistics
    key("batch_norm", [t(1), t(0), t(0), t(0), t(0), False, 0.1, 1e-5, True], fresh(1)),  # of other sizes
    key("view_as_complex_copy", [t(1)], fresh(8)),
    key("conj_physical", [t(8)], fresh(8)),
    key("detach", [t(0)], [[[wire.ALIAS, 0, 0]], [], False]),
    key("no_such_operation", [t(0)], fresh(0)),
    key("add.out", [t(0), t(0)], SAME, ["out", t(0)]),
    key("pow.Tensor_Scalar", [t(0), S], fresh(0)),
    key("full_like", [t(0), S], fresh(0)),
    key("view", [t(0), [wire.LIST, [4]]], fresh(0)),  # which lies in its operand
    key("relu", [S], fresh(0)),  # from here on, arguments that are none
    key("sum.dim_IntList", [t(0), t(0)], fresh(11)),
    key("softmax.int", [t(0), [wire.DTYPE, "float32"]], fresh(0)),
    key("add.Tensor", [t(0), [wire.DEVICE]], fresh(0)),
    key("add.Tensor", [t(0), t(0)], fresh(0), ["alpha", t(0)]),
    key("cat", [t(0)], fresh(0)),
    key("cat", [[wire.LIST, [t(0), S]]], fresh(3)),
    key("relu", [[wire.LIST, [t(0)]]], fresh(0)),
    key("gelu", [t(0)], fresh(0), ["approximate", 1]),
    key("add.Tensor", [t(0), t(0), 1], fresh(0)),
    key("relu", [t(0)], fresh(0), ["self", t(0)]),
    key("relu", [t(0), t(0)], fresh(0)),
    key("relu", [2.5], fresh(14)),
    key("pow.Tensor_Tensor", [t(0), S], fresh(0)),
    key("masked_fill_.Tensor", [t(0), t(0), S], SAME),
    key("native_batch_norm", [t(1), 1.5, None, t(7), t(7), False, 0.1, 0.0], fresh(1, 12, 12)),
    key("add_.Tensor", [2.5, S], fresh(14)),
    key("relu", [t(12)], fresh(13)),  # an empty result, behind which there is nothing
    key("cat", [[wire.LIST, [t(0), t(13)]]], fresh(0)),
    key("linalg_inv_ex", [t(1)], [[[wire.FRESH, 1, 0], [wire.FRESH, 2, 1]], [], False]),
]
PLAIN: Final = {*range(7), *range(8, 21), 22, 25, 26, 30, 31, 32, 50, 51, 52}
RIGHT: Final = sorted(PLAIN - {8, 10, 13, 18, 19, 25, 26, 32, 52})
GARBAGE: Final[list[Any]] = [-1, 1 << 62, 1 << 63, 1 << 70, None, True, 1.5, "x", b"x", [], [1, 2], {}, -(1 << 70)]


def commands_of(chance: random.Random, known: list[int]) -> list[Any]:
    """Of a frame; mostly right. ``known``: storages that there may be."""
    words: list[Any] = []
    for _ in range(chance.randrange(1, 12)):
        way = chance.random()
        if way < 0.1:
            gone = [chance.choice(known[3:]) for _ in range(chance.randrange(4))]
            words += [wire.FREE, len(gone), *gone]
            if chance.random() < 0.9:
                known[:] = [number for number in known if number not in gone or number == known[-1]]
        elif way < 0.15:
            words += chance.choice(
                [
                    [wire.DOWNLOAD, 7, chance.choice(known), chance.randrange(len(METAS)), -1],
                    [wire.SYNC, 1],
                    [wire.SEED, 0, 5],
                    [wire.MEMORY, 1],
                    [wire.CREATE, known[-1] + 1, 0],
                    [wire.UPLOAD_INLINE, chance.choice(known), 16, 0, bytes(16)],
                ]
            )
            known.append(known[-1] + 1)
        else:
            number = chance.choice(RIGHT) if chance.random() < 0.95 else chance.randrange(len(KEYS))
            _, args, kwargs, outputs, _ = KEYS[number]
            words.append(100 + number)
            for hole in holes([*args, *kwargs[1::2]]):
                words.append(
                    chance.choice(known[-6:] + known) if hole == wire.TENSOR else chance.choice([2, 0.5, True])
                )
            for _ in range(sum(kind == wire.FRESH for kind, *_ in outputs[0])):
                known.append(max(known) + 1)
                words.append(known[-1])
    if chance.random() < 0.04:
        words[chance.randrange(len(words))] = chance.choice([*GARBAGE, *known])
    if chance.random() < 0.01:
        del words[chance.randrange(len(words)) :]
    return words


@pytest.mark.parametrize("seed", range(24))
def test_whatever_frames_come_both_ways_do_the_same(seed: int) -> None:
    chance = random.Random(seed)
    ran = 0
    for _ in range(4):
        sides = Side(lambda: None, KEYS), Side(built, KEYS)
        known = [0, 1, 2, 3, 4]
        for _ in range(12):
            words = commands_of(chance, known)
            replies = [side(words) for side in sides]
            assert replies[0] == replies[1], words
            assert sides[0].seen() == sides[1].seen(), words
            assert sides[0].interpreter.operations_run == sides[1].interpreter.operations_run
            if isinstance(replies[0], str):
                break
        freed = [side.interpreter.table.freed_persistent for side in sides]
        assert freed[0] == freed[1]
        ran += sides[1].interpreter.operations_run
    assert ran > 20, "it is of frames that run"


def number(name: str, outputs: Any) -> int:
    """Of a key."""
    return 100 + next(at for at, each in enumerate(KEYS) if each[0] == f"aten::{name}" and each[3] == outputs)


def both(*frames: list[Any]) -> tuple[Side, Any]:
    """What both ways make of these frames: that by C++, and its last replies."""
    sides = Side(lambda: None, KEYS), Side(built, KEYS)
    for frame in frames:
        replies = [side(frame) for side in sides]
        assert replies[0] == replies[1]
        assert sides[0].seen() == sides[1].seen()
    assert sides[1].interpreter._plans, "it has what it is to be compared with"
    return sides[1], replies[1]


def test_a_result_that_lies_in_an_operand_is_refused() -> None:
    side, _ = both([number("view", fresh(0)), 4, 50])
    error = side.interpreter.table.by_id[50].error
    assert error is not None
    assert "its shape rule is wrong here" in error.text


@pytest.mark.parametrize("name", ["relu", "native_batch_norm", "add_.Tensor"])
def test_a_number_in_a_tensors_place_is_refused_as_pytorch_refuses_it(name: str) -> None:
    """A kernel would take its one element for as many as there are channels, and read what lies behind it."""
    words = {"relu": [50], "native_batch_norm": [4, 4, 4, 50, 51, 52], "add_.Tensor": [2, 50]}[name]
    literal = next(
        at
        for at, each in enumerate(KEYS)
        if each[0] == f"aten::{name}" and any(isinstance(value, float) for value in each[1][:2])
    )
    side, _ = both([100 + literal, *words])
    assert side.interpreter.table.by_id[50].error is not None


def test_an_empty_storage_lies_nowhere() -> None:
    """Its address may be below 0."""
    relu = number("relu", fresh(13))
    cat = 100 + next(at for at, each in enumerate(KEYS) if each[1] == [[wire.LIST, [t(0), t(13)]]])
    both([relu, 4, 10, cat, 4, 10, 11, 100, 4, 12])
    side = Side(built, KEYS)
    side([relu, 4, 10])
    assert side.interpreter.table.by_id[10].address < 0
    side([cat, 4, 10, 11, 100, 4, 12])
    assert [side.interpreter.table.by_id[made].error for made in (10, 11, 12)] == [None] * 3


def test_other_commands_are_not_read_as_frees() -> None:
    """Nor a number that is none of ours, whatever C makes of it."""
    side, replies = both([100, 4, 50, wire.DOWNLOAD, 1, 50, 0, -1, 100, 50, 51, 1 << 63, 1, 51])
    assert replies == f"{1 << 63} is neither a command nor a key that was defined"
    assert {50, 51} <= side.interpreter.table.by_id.keys()


def test_what_others_share_is_copied_before_it_is_written() -> None:
    """A first write is Python's, and those after it are of the copy."""
    add = number("add_.Tensor", SAME)
    side, _ = both([add, 1, 1], [add, 1, 1])
    assert side.pool[1].tolist() == (torch.arange(8.0) - 1).tolist()
    assert torch.frombuffer(bytearray(side.interpreter.storage(1)), dtype=torch.float32)[:4].tolist() == [-4, 0, 4, 8]


def test_a_models_tensor_that_is_freed_is_told_of_at_the_end() -> None:
    side, _ = both([100, 4, 50, wire.FREE, 2, 50, 3])
    assert side.interpreter.table.freed_persistent == {3: None}


def test_an_id_that_there_is_already_ends_the_instance() -> None:
    for known in (0, 4, 50):
        _, replies = both([100, 4, 50], [100, 4, known])
        assert replies == f"storage {known} is not a new number"
    _, replies = both([wire.FREE, 1, 3], [100, 4, 3])
    assert replies == "storage 3 is not a new number", "its bytes are in the manifest until the lease has ended"


def test_an_operation_that_fails_while_it_writes_spoils_what_it_was_to_write() -> None:
    """With the place in the frame, and the rest of the frame runs."""
    add = number("add_.Tensor", SAME) + 3
    assert KEYS[add - 100][1] == [t(0), t(1)]
    side, replies = both([100, 4, 50, add, 4, 1, 100, 50, 51, wire.SYNC, 1])
    assert replies[0][:3] == [wire.FAILED, 1, "RuntimeError"]
    assert replies[0][4] == [2, 1, "aten::add_.Tensor"]
    assert side.interpreter.table.by_id[4].error is not None
    assert side.interpreter.table.by_id[51].error is None


def test_which_keys_are_plain() -> None:
    side = Side(built, KEYS)
    assert {number - 100 for number in side.interpreter._plans} == PLAIN


def test_a_plan_whose_results_have_other_strides_is_left_to_python() -> None:
    side = Side(built, KEYS)
    mm = number("mm", fresh(4))
    for made in (10, 11):
        side([mm, 4, 4, made])
    assert side.interpreter.repaired_strides == 2
    assert side.interpreter._plans[mm].off


def test_what_is_freed_is_gone_at_once_and_nothing_else_holds_it() -> None:
    side = Side(built, KEYS)
    side([100, 4, 50, 101, 50, 50, 51])
    stored = side.interpreter.table.by_id[51]
    view = stored.views[0]
    gone = weakref.ref(view)
    del stored, view
    gc.disable()
    try:
        side([wire.FREE, 2, 50, 51])
        assert gone() is None
    finally:
        gc.enable()
    assert side.interpreter.table.by_id.keys() == {0, 1, 2, 3, 4}


def test_an_interpreter_that_is_closed_is_collected() -> None:
    side = Side(built, KEYS)
    side([100, 4, 50])
    gone = weakref.ref(side.interpreter)
    side.interpreter.close()
    del side
    gc.collect()
    assert gone() is None
