"""The interpreter against hostile and broken frames: each is refused by name, poisons or ends its sender, and nothing
else happens."""

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from fast_paths import built
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_talk import F4, Talk, unary, values

from dormouse.gpuserver.commands.interpreter import ProtocolViolation
from dormouse.gpuserver.commands.results import Results
from dormouse.gpuserver.device.protocol import DeviceLost
from dormouse.schemas import stream as wire


@pytest.fixture(params=["python", "fast"])
def talk(request: pytest.FixtureRequest) -> Talk:
    return Talk(built) if request.param == "fast" else Talk()


def test_a_command_runs(talk: Talk) -> None:
    talk.put(1, [-1.0, 2.0, -3.0, 4.0])
    assert talk([0, 1, 2], [0, F4], [0, unary("aten::relu")]) == [[wire.ACK, 1, 2]]
    assert values(talk.get(2)) == [0.0, 2.0, 0.0, 4.0]
    assert talk.interpreter.operations_run == 1


@pytest.mark.parametrize(
    "op",
    [
        "aten::from_file",
        "aten::set_.source_Storage",
        "aten::_softmax_backward_data",
        "aten::segment_reduce",
        "aten::sparse_coo_tensor.indices",
        "aten::_sparse_csr_tensor_unsafe",
        "aten::record_stream",
        "prims::convert_element_type",
        "aten::nope",
        "__class__",
        "aten::_unsafe_index.Tensor",
    ],
)
def test_operations_that_are_not_allowed_fail_by_name(talk: Talk, op: str) -> None:
    talk.put(1, [1.0] * 4)
    talk([0, 1, 2], [0, F4], [0, unary(op)])
    kind, _, name, text, where = talk.get(1)
    assert (kind, name) == (wire.FAILED, "NotImplementedError")
    assert op in text
    assert where == [2, 0, op]
    assert values(talk.get(1)) == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten::copy.out", [None, [wire.TENSOR, 0], False], ["out", [wire.TENSOR, 0]]),
        ("aten::copy.out", [[wire.TENSOR, 0], [wire.TENSOR, 0], False], ["out", None]),
        ("aten::cat", [[wire.LIST, [[wire.TENSOR, 0], None]]], []),
    ],
)
def test_none_in_a_tensors_place_reaches_no_kernel(talk: Talk, name: str, args: list[Any], kwargs: list[Any]) -> None:
    """PyTorch lets it pass, and kernels follow the pointer."""
    talk.put(1, [1.0] * 4)
    operands = [1] * (1 if "cat" in name else 2)
    [failed, _] = talk([wire.RESULT_META, 3, 0, *operands, 9], [0, F4], [0, [name, args, kwargs, None, "float32"]])
    assert failed[:3] == [wire.FAILED, 3, "TypeError"]
    assert "must be Tensor, not None" in failed[3]


@pytest.mark.parametrize(
    "meta",
    [
        ["float32", [5], [1], 0, 0],
        ["float32", [4], [1], 1, 0],
        ["float32", [2, 2], [3, 1], 0, 0],
        ["float64", [4], [1], 0, 0],
        ["float32", [1 << 40, 1 << 20], [1, 1], 0, 0],
    ],
)
def test_geometries_beyond_the_storage_are_refused(talk: Talk, meta: Any) -> None:
    talk.put(1, [1.0] * 4)
    talk(
        [], [0, F4, 1, meta], [0, ["aten::relu", [[wire.TENSOR, 1]], [], [[[wire.FRESH, 1, 0]], [], False], "float32"]]
    )
    talk([0, 1, 2])
    assert talk.get(1)[0] == wire.FAILED


@pytest.mark.parametrize(
    "meta",
    [
        ["float32", [4], [-1], 3, 0],
        ["float32", [4], [1], -1, 0],
        ["float32", [-4], [1], 0, 0],
        ["float32", [4], [1, 1], 0, 0],
        ["qint8", [4], [1], 0, 0],
        ["float32", [4], [1], True, 0],
        ["float32", [1] * 65, [1] * 65, 0, 0],
        ["float32", [1 << 40, 1 << 40], [1, 1], 0, 0],
        ["float32", [0, 1 << 62, 1 << 62], [1, 1, 1], 0, 0],
        ["float32", 4, [1], 0, 0],
        ["float32", None, None, 0, 0],
        ["float32", "4", "1", 0, 0],
        [["float32"], [4], [1], 0, 0],
        ["float32", [4], [1], 0, 1],
        ["float32", [4], [1], 0, 4],
        "float32",
        [],
    ],
)
def test_malformed_geometries_end_the_instance(talk: Talk, meta: Any) -> None:
    with pytest.raises(ProtocolViolation):
        talk([], [0, meta])


@pytest.mark.parametrize(
    "commands",
    [
        [77, 1, 2],
        [0],
        [0, 1],
        [0, 1, "2"],
        [0, 1, 1],
        [wire.UPLOAD, 1, 2],
        [wire.UPLOAD, 5, 16, 0, 4095, 16],
        [wire.UPLOAD, 5, 16, 8, 0, 16],
        [wire.UPLOAD, 5, 16, -8, 0, 16],
        [wire.UPLOAD_INLINE, 5, 4, 0, b"12345"],
        [wire.UPLOAD_INLINE, 5, -1, 0, b""],
        [wire.DOWNLOAD, 1, 1, 5, -1],
        [wire.DOWNLOAD, 1, 1, 0, 4090],
        [wire.CREATE, 5, -1],
        [wire.CREATE, 1, 4],
        [wire.CREATE, 5, 1 << 62],
        [wire.FREE, -1],
        [wire.FREE, "x"],
        [wire.RNG_GET, 1, 9],
        [wire.RNG_SET, 0, "no"],
        [wire.SET, "no such setting", [True]],
        [wire.SET, 3, [True]],
        [wire.SET, "cudnn_benchmark", True],
        [wire.SET, "cudnn_benchmark", [1]],
        [wire.SET, "cudnn_benchmark", [True, True]],
        [wire.SET, "float32_matmul_precision", ["lowest"]],
        [wire.SET, "sdp_priority_order", [[10**9]]],
        [wire.SET, "sdp_priority_order", [[0] * 1000]],
        [-99],
        ["x"],
        [None],
        [[0]],
        [wire.RESULT_META, 1, 8, 1, 2],
        [wire.SEED, 0, -1],
        [1.5],
    ],
)
def test_garbage_ends_the_instance(talk: Talk, commands: list[Any]) -> None:
    talk.put(1, [1.0] * 4)
    talk([], [0, F4], [0, unary("aten::relu")])
    with pytest.raises(ProtocolViolation):
        talk(commands)


@pytest.mark.parametrize(
    "key",
    [
        ["aten::relu", [[wire.TENSOR, 9]], [], None, "float32"],
        ["aten::relu", [[99]], [], None, "float32"],
        ["aten::relu", [{}], [], None, "float32"],
        ["aten::relu", [[wire.TENSOR, 0]], ["x"], None, "float32"],
        ["aten::relu", [[wire.TENSOR, 0]], [], [[[wire.FRESH, 0, 3]], [], False], "float32"],
        ["aten::relu", [[wire.TENSOR, 0]], [], [[[wire.ALIAS, 0, 1]], [], False], "float32"],
        ["aten::relu", [[wire.TENSOR, 0]], [], [[], [[4, 0]], False], "float32"],
        ["aten::relu", [[wire.HOST, "float32", [-1]]], [], None, "float32"],
        [
            "aten::relu",
            [[wire.LIST, [[wire.LIST, [[wire.LIST, [[wire.LIST, [[wire.LIST, []]]]]]]]]]],
            [],
            None,
            "float32",
        ],
        [1, [], [], None, "float32"],
        7,
    ],
)
def test_malformed_keys_end_the_instance(talk: Talk, key: Any) -> None:
    with pytest.raises(ProtocolViolation):
        talk([], [0, F4], [0, key])


def test_definitions_cannot_be_replaced(talk: Talk) -> None:
    talk([], [0, F4])
    with pytest.raises(ProtocolViolation):
        talk([], [0, ["float32", [400], [1], 0, 0]])


def test_forgotten_definitions_may_be_defined_again_and_views_are_not_confused(talk: Talk) -> None:
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    talk([0, 1, 2], [0, F4], [0, unary("aten::neg")])
    talk([wire.FORGET_DEFS])
    talk([], [0, ["float32", [2], [1], 2, 0]])
    assert values(talk.get(1)) == [3.0, 4.0]
    assert values(talk.get(2)) == [-3.0, -4.0]


def test_a_wrong_prediction_poisons(talk: Talk) -> None:
    talk.put(1, [1.0] * 4)
    talk([0, 1, 2], [0, F4, 1, ["float32", [2, 2], [2, 1], 0, 0]], [0, unary("aten::relu", result=1)])
    kind, _, _, text, _ = talk.get(1)
    assert kind == wire.FAILED
    assert "shape rule is wrong" in text
    assert talk.get(2, 1)[0] == wire.FAILED, "the result itself stays poisoned"


def test_a_result_that_aliases_an_operand_is_not_taken_for_a_fresh_one(talk: Talk) -> None:
    talk.put(1, [1.0] * 4)
    talk([0, 1, 2], [0, F4], [0, unary("aten::alias")])
    assert "shape rule is wrong" in talk.get(1)[3]


def test_wrong_strides_are_repaired_and_counted(talk: Talk) -> None:
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    square, transposed = ["float32", [2, 2], [2, 1], 0, 0], ["float32", [2, 2], [1, 2], 0, 0]
    key = ["aten::relu", [[wire.TENSOR, 1]], [], [[[wire.FRESH, 2, 0]], [], False], "float32"]
    talk([0, 1, 2], [0, F4, 1, square, 2, transposed], [0, key])
    assert values(talk.get(2, 2)) == [1.0, 2.0, 3.0, 4.0]
    assert values(talk.get(2, 0)) == [1.0, 3.0, 2.0, 4.0]
    assert talk.interpreter.repaired_strides == 1


def test_a_repair_out_of_memory_is_relieved_and_else_the_functions_error(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allocated around an operation must not end the executor."""
    calls: list[int] = []
    repair = Results._repair

    def exhausted(results: Results, output: torch.Tensor, meta: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) != 2:
            raise torch.OutOfMemoryError("no room")
        return repair(results, output, meta)

    monkeypatch.setattr(Results, "_repair", exhausted)
    talk.device.relief = 1
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    square, transposed = ["float32", [2, 2], [2, 1], 0, 0], ["float32", [2, 2], [1, 2], 0, 0]
    key = ["aten::relu", [[wire.TENSOR, 1]], [], [[[wire.FRESH, 2, 0]], [], False], "float32"]
    talk([0, 1, 2], [0, F4, 1, square, 2, transposed], [0, key])
    assert values(talk.get(2, 2)) == [1.0, 2.0, 3.0, 4.0]
    talk.device.relief = 0
    talk([0, 1, 3])
    kind, _, name, text, _ = talk.get(3, 2)
    assert (kind, name, text) == (wire.FAILED, "OutOfMemoryError", "no room and nothing can be evicted")


def test_dependents_of_a_failure_do_not_run(talk: Talk) -> None:
    talk.put(1, [1.0] * 4)
    index = ["aten::select.int", [[wire.TENSOR, 0], 0, 77], [], [[[wire.FRESH, 0, 0]], [], False], "float32"]
    talk([1, 1, 2, 0, 2, 3, 0, 3, 4], [0, F4], [0, unary("aten::relu"), 1, index])
    assert talk.interpreter.operations_run == 1
    kind, _, name, _, where = talk.get(1)
    assert (kind, name, where) == (wire.FAILED, "IndexError", [2, 0, "aten::select.int"])
    assert talk.get(4)[2] == "IndexError"


def test_a_sticky_error_that_torch_meets_first_loses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch cannot say whether the next operation would work; the driver can. An error of the operation alone is its
    function's."""
    talk = Talk()
    talk.put(1, [1.0] * 4)
    talk([], [0, F4], [0, unary("aten::relu")])
    op = talk.interpreter._keys[0].op
    assert op is not None

    def call(*operands: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(op, "call", call)
    talk([0, 1, 2])
    assert talk.get(2)[2] == "AcceleratorError"
    talk.device.lost = True
    with pytest.raises(DeviceLost, match="ASSERT"):
        talk([0, 1, 3])


def test_a_download_that_meets_a_sticky_error_loses_the_device(talk: Talk) -> None:
    """The error of an earlier kernel, which nobody has waited for before."""

    def broken() -> torch.UntypedStorage:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    talk([], [0, F4])
    talk.interpreter.table.bind(5, 16, broken)
    assert talk.get(5)[2] == "AcceleratorError"
    talk.device.lost = True
    with pytest.raises(DeviceLost):
        talk.get(5)


def test_a_device_that_is_lost_before_a_write_is_no_functions_error(talk: Talk) -> None:
    def lost() -> torch.UntypedStorage:
        raise DeviceLost("the copy failed")

    talk.interpreter.table.bind(5, 16, lost, lambda grows: False)
    with pytest.raises(DeviceLost):
        talk.put(5, [1.0] * 4)


def test_out_of_memory_is_relieved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()
    talk.put(1, [1.0] * 4)
    talk([], [0, F4], [0, unary("aten::relu")])
    op = talk.interpreter._keys[0].op
    assert op is not None
    calls = []

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) < 2:
            raise torch.OutOfMemoryError("full")
        return x.relu()

    monkeypatch.setattr(op, "call", call)
    talk.device.relief = 1
    talk([0, 1, 2])
    assert values(talk.get(2)) == [1.0] * 4
    assert (len(calls), talk.device.relieved) == (2, 1)
    talk.device.relief = 0
    calls.clear()
    talk([0, 1, 3])
    assert talk.get(1)[2] == "OutOfMemoryError"
    assert len(calls) == 1


def test_ending_reports_what_changed(talk: Talk) -> None:
    pool = {7: torch.ones(4), 8: torch.ones(4), 9: torch.ones(4)}
    for number, tensor in pool.items():
        talk.interpreter.table.bind(number, 16, tensor.untyped_storage)
    add = ["aten::add_.Scalar", [[wire.TENSOR, 0], [wire.SCALAR]], [], [[[wire.SAME, 0]], [], False], "float32"]
    talk([0, 7, 2.0, 1, 9, 20, wire.FREE, 1, 8, wire.END, 5, 1], [0, F4], [0, add, 1, unary("aten::relu")])
    assert talk.interpreter.ending is not None
    report = talk.interpreter.report()
    assert (report.dirty, report.created, report.freed, report.spoiled) == ([7], [(20, 16)], [8], [])
    assert pool[7].tolist() == [3.0] * 4
    replies = [msgpack.unpackb(reply) for reply in talk.interpreter.finish_end(42)]
    assert replies == [[wire.VALUE, 5, [42, None, []]], [wire.ACK, 1, 2 - 1]]
    assert msgpack.unpackb(talk.interpreter.execute(msgpack.packb([1, 2, 3, [[], []], []]))[0])[0] == wire.REFUSED


ANSWERED, READ = [wire.VALUE, 5, [42, None, []]], [wire.ACK, 1, 2]


@pytest.mark.parametrize(
    ("how", "replies"), [(wire.END_ACK, [READ]), (wire.END_WAIT, [ANSWERED, READ]), (wire.END_QUIET, [])]
)
def test_an_end_says_how_it_is_answered(talk: Talk, how: int, replies: list[Any]) -> None:
    talk.put(1, [1.0] * 4)
    assert talk([wire.END, 5, how]) == [], "nothing before it is over"
    assert talk.interpreter.ending is not None
    report = talk.interpreter.report()
    assert report.created == ([(1, 16)] if how == wire.END_WAIT else [])
    assert [msgpack.unpackb(reply) for reply in talk.interpreter.finish_end(42)] == replies
    assert list(talk.interpreter.table.by_id) == ([1] if how == wire.END_WAIT else [])


@pytest.mark.parametrize("how", [True, None, 3, -1, "x", [1], 1 << 63])
def test_an_end_of_no_known_kind_keeps_nothing_unless_it_waits(talk: Talk, how: Any) -> None:
    talk.put(1, [1.0] * 4)
    talk([wire.END, 5, how])
    waits = how is True
    assert talk.interpreter.report().created == ([(1, 16)] if waits else [])
    replies = [msgpack.unpackb(reply) for reply in talk.interpreter.finish_end(42)]
    assert replies == ([ANSWERED, READ] if waits else [READ])


def test_after_an_end_nothing_is_run(talk: Talk) -> None:
    talk.put(1, [1.0] * 4)
    assert talk([wire.END, 5, wire.END_QUIET, wire.DOWNLOAD, 9, 1, 0, -1], [0, F4]) == []
    with pytest.raises(ProtocolViolation, match="frame 3 does not follow frame 2"):
        talk([wire.SYNC, 6])


def test_settings_are_those_of_whoever_has_the_turn(talk: Talk) -> None:
    other = Talk()
    before = torch.get_float32_matmul_precision()
    other.interpreter.pause()
    talk.interpreter.resume()
    talk([wire.SET, "float32_matmul_precision", ["medium"]])
    assert torch.get_float32_matmul_precision() == "medium"
    talk.interpreter.pause()
    assert torch.get_float32_matmul_precision() == before
    other.interpreter.resume()
    assert torch.get_float32_matmul_precision() == before
    talk.interpreter.pause()  # it has no turn
    other([wire.SET, "float32_matmul_precision", ["high"]])
    talk.interpreter.pause()
    assert torch.get_float32_matmul_precision() == "high"
    other.interpreter.pause()
    talk.interpreter.resume()
    assert torch.get_float32_matmul_precision() == "medium"
    talk([wire.END, 5, wire.END_QUIET])
    talk.interpreter.report()
    talk.interpreter.finish_end(1)
    assert torch.get_float32_matmul_precision() == before
    other.interpreter.resume()
    talk.interpreter.pause()
    assert torch.get_float32_matmul_precision() == "high", "who has no turn takes nobody's"
    other.interpreter.abort()
    assert torch.get_float32_matmul_precision() == before


def test_what_was_made_before_a_pause_is_there_after_it(talk: Talk) -> None:
    talk.put(1, [1.0, -2.0, 3.0, -4.0])
    talk.interpreter.pause()
    talk.interpreter.resume()
    assert talk([0, 1, 2], [0, F4], [0, unary("aten::relu")]) == [[wire.ACK, 1, 2]]
    assert values(talk.get(2)) == [1.0, 0.0, 3.0, 0.0]


def test_storages_are_materialised_at_first_use_only(talk: Talk) -> None:
    asked = []

    def materialise(number: int) -> Callable[[], torch.UntypedStorage]:
        def make() -> torch.UntypedStorage:
            asked.append(number)
            return torch.ones(4).untyped_storage()

        return make

    for number in (7, 8):
        talk.interpreter.table.bind(number, 16, materialise(number))
    talk([0, 7, 20, 0, 7, 21], [0, F4], [0, unary("aten::relu")])
    assert asked == [7]
    talk.interpreter.table.unbind([7])
    assert talk.get(7)[0] == wire.FAILED


def test_an_aborted_lease_leaves_nothing(talk: Talk) -> None:
    talk.interpreter.table.bind(7, 16, torch.ones(4).untyped_storage)
    add = ["aten::add_.Scalar", [[wire.TENSOR, 0], [wire.SCALAR]], [], [[[wire.SAME, 0]], [], False], "float32"]
    talk([0, 7, 2.0, 1, 7, 20], [0, F4], [0, add, 1, unary("aten::relu")])
    assert talk.interpreter.abort().dirty == [7]
    assert talk.interpreter.table.by_id == {}


def test_a_norm_with_too_short_weights_is_refused(talk: Talk) -> None:
    """The kernel would read the neighbouring floats."""
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    talk.put(2, [1.0])
    data, one = ["float32", [2, 2], [2, 1], 0, 0], ["float32", [1], [1], 0, 0]
    operands = [
        [wire.TENSOR, 1],
        [wire.TENSOR, 2],
        [wire.TENSOR, 2],
        [wire.TENSOR, 2],
        [wire.TENSOR, 2],
        False,
        0.1,
        1e-5,
        False,
    ]
    key = ["aten::batch_norm", operands, [], [[[wire.FRESH, 1, 0]], [], False], "float32"]
    talk([0, 1, 2, 2, 2, 2, 3], [0, F4, 1, data, 2, one], [0, key])
    assert "should contain 2 elements" in talk.get(1)[3]


_leaf = st.none() | st.booleans() | st.integers(-100, 100) | st.floats() | st.text(max_size=5) | st.binary(max_size=9)
_tree = st.recursive(_leaf, lambda inner: st.lists(inner, max_size=6), max_leaves=30)


@settings(deadline=None, max_examples=200)
@given(st.lists(_tree, max_size=12) | st.lists(st.integers(-14, 5), max_size=25), _tree)
def test_no_frame_does_anything_but_run_or_end_the_instance(commands: list[Any], definitions: Any) -> None:
    talk = Talk()
    talk.put(1, [1.0] * 4)
    talk([], [0, F4], [0, unary("aten::relu")])
    both: list[Any] = [[[], []], definitions]
    for defs in both:
        interpreter = talk.interpreter
        if interpreter.ending is not None:
            return
        frame = msgpack.packb([1, 2, interpreter._replies.frame + 1, defs, commands])
        try:
            interpreter.execute(frame)
        except ProtocolViolation:
            return


def test_strides_that_lead_nowhere_are_not_repaired(talk: Talk) -> None:
    """Along dimensions of size 1: the result gets the ones that the client counts on, without a copy."""
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    given, expected = ["float32", [2, 2, 1], [2, 1, 1], 0, 0], ["float32", [2, 2, 1], [2, 1, 2], 0, 0]
    key = ["aten::relu", [[wire.TENSOR, 1]], [], [[[wire.FRESH, 2, 0]], [], False], "float32"]
    talk([0, 1, 2], [0, F4, 1, given, 2, expected], [0, key])
    assert values(talk.get(2, 2)) == [1.0, 2.0, 3.0, 4.0]
    assert talk.interpreter.table.view(talk.interpreter.table.get(2), talk.interpreter._metas[2]).stride() == (2, 1, 2)
    assert talk.interpreter.repaired_strides == 0
