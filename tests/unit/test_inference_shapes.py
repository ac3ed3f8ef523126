"""Shapes that a request may say of its inputs: one that no array can have is its client's mistake. Answers that cannot
be said: those are the function's.
"""

import json
from typing import Any

import pytest

from dormouse.client_shim.instance.codec import BadRequest, BadResponse
from dormouse.client_shim.instance.inference import MAX_ELEMENTS, Inference
from dormouse.client_shim.instance.signatures import Signature, written
from dormouse.schemas.open_inference import InferenceKind


def _read(shape: list[int], datatype: str, binary: bool) -> tuple[int, ...]:
    one: dict[str, Any] = {"name": "x", "shape": shape, "datatype": datatype}
    if binary:
        one["parameters"] = {"binary_data_size": 0}
    else:
        one["data"] = []
    data = json.dumps({"inputs": [one]}).encode()
    read = Inference(data, InferenceKind("m", 1, len(data), 1 << 20), Signature())
    return tuple(read.tensors["x"].shape)


@pytest.mark.parametrize("datatype", ["FP64", "INT8", "BF16", "BYTES"])
@pytest.mark.parametrize("binary", [True, False])
def test_a_shape_with_a_zero_is_bounded_too(datatype: str, binary: bool) -> None:
    for shape in ([0, 1 << 63], [1 << 62, 0, 1 << 62], [0, MAX_ELEMENTS + 1], [0, 1 << 30, 1 << 30], [0, 10**400]):
        with pytest.raises(BadRequest):
            _read(shape, datatype, binary)
    assert _read([0, MAX_ELEMENTS], datatype, binary) == (0, MAX_ELEMENTS)


def _answered(result: Any, outputs: dict[str, Any] | None = None) -> Any:
    data = b'{"inputs": []}'
    signature = Signature() if outputs is None else written({"outputs": outputs})
    body, _ = Inference(data, InferenceKind("m", 1, len(data), 1 << 20), signature).answer(result, 1 << 20)
    return json.loads(bytes(body))["outputs"]


@pytest.mark.parametrize(
    ("datatype", "values", "held"),
    [
        ("INT32", [1.0, -2], [1, -2]),
        ("INT32", [1.5, 2.0], None),
        ("INT32", [1 << 31, 0], None),
        ("UINT8", [-1, 0], None),
        ("BOOL", [1, False], [True, False]),
        ("BOOL", [2, 0], None),
        ("UINT64", [(1 << 64) - 1, 0], [(1 << 64) - 1, 0]),
    ],
)
def test_numbers_that_the_signature_cannot_hold_are_not_made_others(
    datatype: str, values: list[Any], held: list[Any] | None
) -> None:
    if held is not None:
        assert _answered({"y": values}, {"y": (datatype, [2])})[0]["data"] == held
        return
    with pytest.raises(BadResponse, match="returned something as 'y'"):
        _answered({"y": values}, {"y": (datatype, [2])})


def test_a_name_that_is_no_text_is_no_output() -> None:
    assert _answered({"y": 1})[0]["name"] == "y"
    with pytest.raises(BadResponse, match="names that are no Unicode"):
        _answered({"\ud800": 1})
