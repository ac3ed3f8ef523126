"""Indices that lead out of their tensors: no kernel gets them, and whoever asked for them is told. On the CPU here,
whose kernels would look themselves.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_suite import loaded

from dormouse.gpuserver.commands.index_checks import RULES, IndexGuard
from dormouse.gpuserver.commands.oplist import allowed
from dormouse.schemas import stream as wire

Talk: Any = loaded(Path(__file__).with_name("test_interpreter.py")).Talk
F4 = ["float32", [4], [1], 0, 0]

TABLE = torch.arange(12.0).view(4, 3)
LONG = torch.tensor([[0, 3, 1], [2, 0, 1]])
ONES = torch.ones(2, 3)

CASES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "embedding": ("aten::embedding", [TABLE, LONG], [TABLE, LONG + 1]),
    "embedding, below": ("aten::embedding", [TABLE, LONG], [TABLE, LONG - 1]),
    "embedding_bag": (
        "aten::_embedding_bag",
        [TABLE, LONG.flatten(), torch.tensor([0, 2])],
        [TABLE, LONG.flatten() + 1, torch.tensor([0, 2])],
    ),
    "index_select": ("aten::index_select", [TABLE, 1, LONG[1]], [TABLE, 1, LONG[0]]),
    "gather": ("aten::gather", [TABLE, 0, LONG], [TABLE, 0, LONG + 4]),
    "gather, last dimension": ("aten::gather", [TABLE, -1, LONG[1:]], [TABLE, -1, LONG]),
    "take": ("aten::take", [TABLE, LONG * 3 - 9], [TABLE, LONG * 4]),
    "index": ("aten::index.Tensor", [TABLE, [LONG - 4, None]], [TABLE, [LONG - 5, None]]),
    "index, second": ("aten::index.Tensor", [TABLE, [None, LONG[1]]], [TABLE, [None, LONG[0]]]),
    "scatter_add": ("aten::scatter_add", [TABLE, 0, LONG, ONES], [TABLE, 0, LONG + 1, ONES]),
    "scatter": ("aten::scatter.value", [TABLE, 0, LONG, 5.0], [TABLE, 0, LONG - 1, 5.0]),
    "index_add": (
        "aten::index_add",
        [TABLE, 0, LONG[0], torch.ones(3, 3)],
        [TABLE, 0, LONG[0] + 1, torch.ones(3, 3)],
    ),
    "index_fill": ("aten::index_fill.int_Scalar", [TABLE, 0, LONG[0], 7.0], [TABLE, 0, LONG[0] * 9, 7.0]),
    "one_hot": ("aten::one_hot", [LONG, 4], [LONG, 3]),
    "nll_loss": ("aten::nll_loss_nd", [TABLE, torch.tensor([0, 2, -100, 1])], [TABLE, torch.tensor([0, 3, -100, 1])]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_right_is_as_it_was_and_what_is_wrong_is_noticed(case: str) -> None:
    name, right, wrong = CASES[case]
    operation = allowed()[name]
    rule = RULES[operation.base]
    guard = IndexGuard()
    values = guard.checked(rule, operation.bound(list(right), {}), False)
    expected, got = operation.call(*right), operation.call(**values)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not guard.fault()
    operation.call(**guard.checked(rule, operation.bound(list(wrong), {}), False))  # no kernel has anything to say
    assert guard.fault()
    assert not guard.fault(), "it is said once"
    with pytest.raises(IndexError, match="out of range"):
        guard.checked(rule, operation.bound(list(wrong), {}), True)
    guard.checked(rule, operation.bound(list(right), {}), True)


def test_masks_and_wrong_arguments_are_left_to_the_kernel() -> None:
    guard = IndexGuard()
    for name, args in (
        ("aten::index.Tensor", [TABLE, [TABLE > 3]]),
        ("aten::index.Tensor", [TABLE.view(2, 2, 3), [torch.ones(2, 2, dtype=torch.bool), torch.tensor([2, 0, 1, 2])]]),
        ("aten::index.Tensor", [TABLE, [LONG, LONG, LONG]]),
        ("aten::index_select", [TABLE, 7, LONG[0]]),
        ("aten::embedding", [TABLE, LONG.float()]),
    ):
        operation = allowed()[name]
        values = operation.bound(args, {})
        before = dict(values)
        assert guard.checked(RULES[operation.base], values, False) == before
    with pytest.raises(IndexError):  # nothing could stand in its place
        guard.checked(RULES["embedding"], {"weight": torch.empty(0, 3), "indices": LONG}, False)


EMBED = ["aten::embedding", [[wire.TENSOR, 1], [wire.TENSOR, 2]], [], [[[wire.FRESH, 1, 0]], [], False], "float32"]
FILL = [
    "aten::index_fill_.int_Scalar",
    [[wire.TENSOR, 0], 0, [wire.TENSOR, 2], 1.0],
    [],
    [[[wire.SAME, 0]], [], False],
    "float32",
]
METAS = [0, F4, 1, ["float32", [2, 2], [2, 1], 0, 0], 2, ["int64", [2], [1], 0, 0]]


@pytest.fixture
def guarded() -> Any:
    talk = Talk()
    talk.interpreter._runner.guard = IndexGuard()
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    return talk


def put_indices(talk: Any, number: int, *indices: int, metas: Any = ()) -> None:
    content = torch.tensor(indices).numpy().tobytes()
    talk([wire.UPLOAD_INLINE, number, len(content), 0, content], metas, [0, EMBED, 1, FILL] if metas else ())


def test_a_wrong_index_is_told_at_the_next_answer(guarded: Any) -> None:
    put_indices(guarded, 2, 1, 0, metas=METAS)
    put_indices(guarded, 3, 1, 2)
    guarded([0, 1, 2, 4, 0, 1, 3, 5])
    kind, _, name, text, where = guarded.get(4, 1)
    assert (kind, name, text, where) == (wire.FAILED, "IndexError", "index out of range in self", None)
    assert guarded.get(4, 1)[0] == wire.VALUE, "it is told once, and the executor goes on"


def test_a_wrong_index_of_what_is_written_is_told_before_it_is_written(guarded: Any) -> None:
    put_indices(guarded, 2, 3, 4, metas=METAS)
    guarded([1, 1, 2])
    kind, _, name, text, where = guarded.get(1, 0)
    assert (kind, name, text) == (wire.FAILED, "IndexError", "index out of range in self")
    assert where[2] == "aten::index_fill_.int_Scalar"
    table = guarded.interpreter.table
    assert torch.empty(0).set_(table.by_id[1].bytes()).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_nothing_that_a_wrong_index_gave_is_kept(guarded: Any) -> None:
    put_indices(guarded, 2, 1, 2, metas=METAS)
    guarded([0, 1, 2, 4])
    guarded([wire.END, 8, 1])
    report = guarded.interpreter.report()
    assert report.created == []
