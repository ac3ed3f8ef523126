"""Shapes that a request may say of its inputs: one that no array can have is its client's mistake."""

import json
from typing import Any

import pytest

from dormouse.client_shim.instance.codec import BadRequest
from dormouse.client_shim.instance.inference import MOST_ELEMENTS, Inference
from dormouse.client_shim.instance.signatures import Signature
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
    for shape in ([0, 1 << 63], [1 << 62, 0, 1 << 62], [0, MOST_ELEMENTS + 1], [0, 1 << 30, 1 << 30], [0, 10**400]):
        with pytest.raises(BadRequest):
            _read(shape, datatype, binary)
    assert _read([0, MOST_ELEMENTS], datatype, binary) == (0, MOST_ELEMENTS)
