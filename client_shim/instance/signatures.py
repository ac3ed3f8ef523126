"""A function's input and output tensors by name, as the Open Inference Protocol describes a model. Pure.

A function's file declares them in a dict called ``signature``; else they are derived from the type hints, as far as
those are numbers, text and arrays. A function with neither has no known tensors and takes any request.
"""

import collections.abc
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from dormouse.client_shim.instance import pydantic_types
from dormouse.client_shim.instance.codec import BadRequest

NUMBERS: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    **{
        f"{sign}INT{bits}": np.dtype(f"<{sign.lower() or 'i'}{bits // 8}")
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
BF16: Final = "BF16"
"""NumPy has no such numbers: they are a torch.Tensor."""

BYTES: Final = "BYTES"
DATATYPES: Final = (*NUMBERS, BF16, BYTES)
NAMES: Final = {dtype: name for name, dtype in NUMBERS.items()}

SOLE_INPUT: Final = "input"
SOLE_OUTPUT: Final = "output"
"""The name of an input or output that is no dict."""

_PLAIN: Final[dict[Any, str]] = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, bytes: BYTES}
_LISTS: Final = (list, tuple, set, frozenset, Sequence, collections.abc.Iterable, collections.abc.Collection)

Tensors = dict[str, np.ndarray | torch.Tensor]


class TensorSpec(NamedTuple):
    """``datatype`` "": any. ``shape`` None: any; a dimension of -1: any length."""

    name: str
    datatype: str = ""
    shape: tuple[int, ...] | None = None
    optional: bool = False

    def told(self) -> dict[str, Any]:
        shape = (-1,) if self.shape is None else self.shape
        return {"name": self.name, "datatype": self.datatype, "shape": list(shape)}

    def takes(self, shape: Sequence[int]) -> bool:
        if self.shape is None:
            return True
        fits = (ours in (-1, theirs) for ours, theirs in zip(self.shape, shape, strict=False))
        return len(shape) == len(self.shape) and all(fits)


Specs = dict[str, TensorSpec]


class Signature(NamedTuple):
    """By name; None: nothing is known. ``strict``: arrays of other types and shapes are refused; hints are checked
    where they are applied.
    """

    inputs: Specs | None = None
    outputs: Specs | None = None
    strict: bool = False

    def told(self) -> dict[str, Any]:
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        return {side: [spec.told() for spec in (specs or {}).values()] for side, specs in sides.items()}

    def check(self, model: str, tensors: Tensors) -> None:
        """Raises BadRequest."""
        if self.inputs is None:
            return
        if unknown := [name for name in tensors if name not in self.inputs]:
            raise wrong(f"unexpected inference input {unknown[0][:100]!r} for model {model!r}")
        if missing := [name for name, spec in self.inputs.items() if name not in tensors and not spec.optional]:
            text = f"expected {len(self.inputs)} inputs but got {len(tensors)} inputs for model {model!r}"
            raise wrong(f"{text}; missing: {', '.join(missing[:10])}")
        for name, array in tensors.items() if self.strict else ():
            spec, datatype, shape = self.inputs[name], datatype_of(array), list(array.shape)
            if spec.datatype != datatype:
                text = f"inference input {name!r} data-type is {datatype!r}, but model {model!r} expects"
                raise wrong(f"{text} {spec.datatype!r}")
            if not spec.takes(shape):
                text = f"unexpected shape for input {name!r} for model {model!r}. Expected"
                raise wrong(f"{text} {list(spec.shape or ())}, got {shape}")


def wrong(text: str) -> BadRequest:
    return BadRequest(text, "bad_body")


def datatype_of(array: np.ndarray | torch.Tensor) -> str:
    """ "" for a dtype that the protocol has no name for."""
    if isinstance(array, torch.Tensor):
        return BF16
    return BYTES if array.dtype == object else NAMES.get(array.dtype.newbyteorder("<"), "")


# --- the file's dict


def written(said: Any) -> Signature:
    """``{"inputs": {"x": ("FP32", [-1, 16])}, "outputs": {...}}``. Raises ValueError."""
    if not isinstance(said, Mapping) or not said or not said.keys() <= {"inputs", "outputs"}:
        raise ValueError('signature is to be {"inputs": {NAME: (DATATYPE, SHAPE)}, "outputs": {...}}')
    sides = {side: {name: _written(name, each) for name, each in _items(side, said[side])} for side in said}
    return Signature(sides.get("inputs"), sides.get("outputs"), strict=True)


def _items(side: str, said: Any) -> list[tuple[str, Any]]:
    if not isinstance(said, Mapping) or len(said) > 1000 or not all(isinstance(name, str) and name for name in said):
        raise ValueError(f"signature: {side} is to be a dict by name, such as {{'x': ('FP32', [-1, 16])}}")
    return list(said.items())


def _written(name: str, said: Any) -> TensorSpec:
    try:
        datatype, shape = said
        dimensions = tuple(int(each) for each in shape)
    except (TypeError, ValueError):
        raise ValueError(f"signature: {name!r} is to be a pair such as ('FP32', [-1, 16])") from None
    if datatype not in DATATYPES:
        raise ValueError(f"signature: {name!r} is of {datatype!r}; write one of {', '.join(DATATYPES)}")
    if len(dimensions) > 32 or any(each < -1 for each in dimensions):
        raise ValueError(f"signature: {name!r} has the shape {list(dimensions)}; write lengths, and -1 for any")
    return TensorSpec(name, datatype, dimensions)


# --- type hints


def hinted(request: Any, response: Any) -> Signature:
    return Signature(_specs(request, SOLE_INPUT), _specs(response, SOLE_OUTPUT))


def _specs(hint: Any, sole: str) -> Specs | None:
    found = fields(hint)
    named = {sole: (hint, True)} if found is None else found
    specs = {name: _spec(name, each, required) for name, (each, required) in named.items()}
    return None if None in specs.values() else typing.cast(Specs, specs)


def _spec(name: str, hint: Any, required: bool) -> TensorSpec | None:
    bare, optional = _bare(hint)
    if (array := array_hint(bare)) is not None:
        return TensorSpec(
            name, NAMES.get(array.dtype, "") if array.dtype else "", array.shape, optional or not required
        )
    levels = 0
    while typing.get_origin(bare) in _LISTS and typing.get_args(bare):
        levels, bare = levels + 1, _bare(typing.get_args(bare)[0])[0]
    if bare not in _PLAIN:
        return None
    return TensorSpec(name, _PLAIN[bare], (-1,) * levels or (1,), optional or not required)


def fields(hint: Any) -> dict[str, tuple[Any, bool]] | None:
    """Of an object's type: each hint, and whether it must be there. None for any other type."""
    bare, _ = _bare(hint)
    if (model := pydantic_types.fields(bare)) is not None:
        return model
    try:
        found = msgspec.inspect.type_info(bare)
        hints = typing.get_type_hints(bare, include_extras=True)
    except Exception:  # user code, as in hints.py
        return None
    known = getattr(found, "fields", None)
    if not isinstance(known, tuple) or not isinstance(bare, type):
        return None
    return {each.encode_name: (hints.get(each.name, Any), each.required) for each in known}


def _bare(hint: Any) -> tuple[Any, bool]:
    """Without annotations, and without None; whether None was there."""
    optional = False
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            left = [each for each in typing.get_args(hint) if each is not type(None)]
            if len(left) != 1:
                return hint, optional
            hint, optional = left[0], True
        elif typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            hint = typing.get_args(hint)[0]
        else:
            return hint, optional


class ArrayHint(NamedTuple):
    """None: any."""

    kind: type
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


def array_hint(hint: Any) -> ArrayHint | None:
    """Of ``numpy.ndarray``, ``NDArray[numpy.float32]``, ``ndarray[tuple[int, int], ...]``, ``torch.Tensor``."""
    if hint is torch.Tensor:
        return ArrayHint(torch.Tensor)
    if hint is not np.ndarray and typing.get_origin(hint) is not np.ndarray:
        return None
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    if len(arguments := typing.get_args(hint)) == 2:
        lengths = typing.get_args(arguments[0])
        if lengths and all(each is int for each in lengths):
            shape = (-1,) * len(lengths)
        scalar = (*typing.get_args(arguments[1]), None)[0]
        if isinstance(scalar, type) and issubclass(scalar, np.generic):
            try:
                dtype = np.dtype(scalar)
            except TypeError:  # of an abstract one
                dtype = None
    return ArrayHint(np.ndarray, dtype, shape)


# --- tensors as the hints' types


def values(tensors: Tensors, hint: Any) -> Any:
    """Values that msgspec can convert: arrays stay where the hint has arrays, else they become numbers, text and lists.
    Raises BadRequest.
    """
    if (found := fields(hint)) is not None:
        return {name: _value(each, found[name][0] if name in found else Any) for name, each in tensors.items()}
    if typing.get_origin(_bare(hint)[0]) in (dict, Mapping):
        item = typing.get_args(_bare(hint)[0])[1]
        return {name: _value(each, item) for name, each in tensors.items()}
    if tensors.keys() != {SOLE_INPUT}:
        raise wrong(f"this function takes one input, {SOLE_INPUT!r}")
    return _value(tensors[SOLE_INPUT], hint)


def _value(array: np.ndarray | torch.Tensor, hint: Any) -> Any:
    bare, _ = _bare(hint)
    if array_hint(bare) is not None or bare in (Any, object):
        return array
    innermost, lists = bare, 0
    while typing.get_origin(innermost) in _LISTS or innermost in _LISTS:
        innermost, lists = (*(_bare(each)[0] for each in typing.get_args(innermost)), Any)[0], lists + 1
    if isinstance(array, np.ndarray) and array.dtype == object and innermost is not bytes:
        try:
            array = np.array([str(each, "utf-8") for each in array.ravel()], dtype=object).reshape(array.shape)
        except UnicodeDecodeError as error:
            raise wrong(f"an element is to be text, and is not UTF-8: {error}") from None
    return array.reshape(()).tolist() if not lists and _size(array) == 1 else array.tolist()


def _size(array: np.ndarray | torch.Tensor) -> int:
    return array.numel() if isinstance(array, torch.Tensor) else array.size
