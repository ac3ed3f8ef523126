"""Decoding of definitions: geometries and keys from the wire, checked once and turned into objects that run fast.

A `Kernel` holds an allowed operation, its arguments with holes for the operands, and the promised results. Nothing
here touches a storage.
"""

import reprlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import torch
from msgspec import Struct

from dormouse.gpuserver.commands import operators
from dormouse.gpuserver.commands.oplist import Allowed, Misfit, allowed
from dormouse.schemas import stream as wire

MAX_DIMS: Final = 64
MAX_NAME: Final = 200
"""Letters in an operation's name, which is part of error texts; three times the longest."""

MAX_DEPTH: Final = 4
"""Lists in lists among an operation's arguments; schemas have at most two."""

_INT64_MAX: Final = 2**63 - 1

DTYPES: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not any(word in str(value) for word in ("qint", "quint", "bits", "float4"))
}
_DEFAULT_DTYPES: Final = ["float32", "float64", "float16", "bfloat16"]
_FORMATS: Final = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


class ProtocolViolation(Exception):
    """The instance sent something that no client of ours would send. It is ended; nothing else is affected."""


class CheckedMeta:
    """A geometry whose extent has been computed, and whose lengths and strides are not negative."""

    __slots__ = ("bits", "contiguous", "dtype", "extent", "itemsize", "number", "numel", "offset", "size", "stride")

    def __init__(self, number: int, definition: Any) -> None:
        dtype, size, stride, offset, bits = expect(definition, list, 5)
        self.number = number
        self.dtype = _dtype(dtype)
        self.size, self.numel = _size(size)
        self.stride = tuple(_index(step) for step in expect(stride, list, len(size)))
        self.offset = _index(offset)
        if _index(bits) & ~3 or (bits & 1 and not self.dtype.is_complex):
            raise ProtocolViolation(f"geometry {number} of {dtype} cannot have the bits {bits}")
        self.bits = bits
        self.itemsize = self.dtype.itemsize
        steps = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        self.extent = (offset + steps + 1) * self.itemsize if self.numel else 0
        self.contiguous = not bits and self.extent == (offset + self.numel) * self.itemsize and self._dense()

    def _dense(self) -> bool:
        expected = 1
        for length, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length > 1 and step != expected:
                return False
            expected *= length
        return True

    @property
    def overlaps(self) -> bool:
        """Whether it has more elements than places for them."""
        return self.numel > max(self.extent // self.itemsize - self.offset, 0)


class Kernel:
    """A key: the operation to call, the places of its operands, the promised results."""

    def __init__(self, definition: Any, metas: dict[int, CheckedMeta]) -> None:
        name, args, kwargs, outputs, default_dtype = expect(definition, list, 5)
        if type(name) is not str or type(args) is not list or type(kwargs) is not list or len(kwargs) % 2:
            raise ProtocolViolation("a key is malformed")
        if default_dtype not in _DEFAULT_DTYPES:
            raise ProtocolViolation(f"{brief(default_dtype)} is no default dtype")
        if len(name) > MAX_NAME:
            raise ProtocolViolation(f"an operation whose name has {len(name)} letters")
        self.name = name
        self.op: Allowed | None = allowed().get(name) or operators.find(name)
        self.default_dtype = DTYPES[default_dtype]
        self.operands: list[tuple[int, Any]] = []  # (TENSOR, meta) | (SCALAR, None) | (HOST, (dtype, size, nbytes))
        self.metas: list[CheckedMeta] = []  # of the tensors among them
        self.args = [self._literal(literal, metas) for literal in args]
        self.kwargs = {_name(kwargs[i]): self._literal(kwargs[i + 1], metas) for i in range(0, len(kwargs), 2)}
        self.n_operands = len(self.operands)
        self.tensors = [place for place, (kind, _) in enumerate(self.operands) if kind == wire.TENSOR]
        # Most keys have all their operands among the plain positional arguments: those are filled without recursion.
        places = [index for index, value in enumerate(self.args) if isinstance(value, Hole)]
        static = all(isinstance(value, Hole) or _is_static(value) for value in self.args)
        self.flat = tuple(places) if static and len(places) == self.n_operands else None
        self.predicted: Prediction | None = None if outputs is None else Prediction(outputs, metas, len(self.metas))
        self.n_fresh = self.predicted.n_fresh if self.predicted else 0
        self.written = written(self) if self.op is not None else ()
        self.refusal = self._refusal()
        if self.refusal is not None:
            self.op, self.written = None, ()

    def _refusal(self) -> tuple[str, str] | None:
        """Why this may not run, if so: an error's kind and text."""
        if self.op is None:
            return "NotImplementedError", operators.refusal(self.name)
        try:
            self.op = self.op.fitted(self)
        except Misfit as error:
            return "RuntimeError", str(error)
        given: dict[int | str, Any] = dict(enumerate(self.args))
        given.update(self.kwargs)
        for key in self.op.tensors & given.keys():
            if given[key] is None or (isinstance(given[key], list) and None in given[key]):
                return "TypeError", f"{self.name}: argument {key} must be Tensor, not None"
        for key, kind in self.op.enumerations.items():
            value = given.get(key)
            if value is not None and not isinstance(value, _ENUMERATED[kind]):
                return "NotImplementedError", f"{self.name}: argument {key} is no {kind}"
        if any(self.metas[index].overlaps for index in self.written):
            # Some kernels write as many elements as there are, one behind the other: beyond the end of fewer bytes.
            return "RuntimeError", (
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
        return None

    def _literal(self, literal: Any, metas: dict[int, CheckedMeta], depth: int = 0) -> Any:
        if literal is None or type(literal) in (bool, int, float, str):
            return literal
        match literal:
            case [wire.TENSOR, number]:
                return self._hole(wire.TENSOR, _meta(number, metas))
            case [wire.SCALAR]:
                return self._hole(wire.SCALAR, None)
            case [wire.HOST, dtype, size]:
                return self._hole(wire.HOST, _host_operand(dtype, size))
            case [wire.LIST, [*items]] if depth < MAX_DEPTH:
                return [self._literal(item, metas, depth + 1) for item in items]
            case [wire.DTYPE, dtype]:
                return _dtype(dtype)
            case [wire.FORMAT, str(name)] if name in _FORMATS:
                return _FORMATS[name]
            case [wire.LAYOUT, "strided"]:
                return torch.strided
            case [wire.DEVICE]:
                return DEVICE
            case [wire.GENERATOR, number]:
                return GeneratorHole(_index(number))
            case [wire.COMPLEX, int() | float() as real, int() | float() as imaginary]:
                return complex(real, imaginary)
        raise ProtocolViolation(f"an argument of {brief(self.name)} is malformed: {brief(literal)}")

    def _hole(self, kind: int, what: Any) -> "Hole":
        self.operands.append((kind, what))
        if kind == wire.TENSOR:
            self.metas.append(what)
        return Hole(len(self.operands) - 1)

    def fill(self, value: Any, operands: list[Any], special: Callable[[Any], Any]) -> Any:
        """An argument with its holes filled."""
        if isinstance(value, Hole):
            return operands[value.index]
        if isinstance(value, list):
            return [self.fill(item, operands, special) for item in value]
        if value is DEVICE or isinstance(value, GeneratorHole):
            return special(value)
        return value


class Hole(Struct, frozen=True, gc=False):
    index: int


class GeneratorHole(Struct, frozen=True, gc=False):
    number: int


class _Device:
    """Stands for the executor's own device; the instance cannot name another."""


DEVICE: Final = _Device()
_ENUMERATED: Final[dict[str, type]] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": _Device,
    "Generator": GeneratorHole,
}
"""Values allowed for an argument of such a type: PyTorch takes any number for most of them, and follows it."""


class Prediction:
    """The results that a key promises."""

    __slots__ = ("changes", "listed", "n_fresh", "one_fresh", "results")

    def __init__(self, outputs: Any, metas: dict[int, CheckedMeta], n_tensors: int) -> None:
        results, changes, self.listed = expect(outputs, list, 3)
        if type(results) is not list or type(changes) is not list or type(self.listed) is not bool:
            raise ProtocolViolation("a key's results are malformed")
        self.n_fresh = 0
        self.results = [self._result(result, metas, n_tensors) for result in results]
        self.changes: list[tuple[int, CheckedMeta]] = []
        for change in changes:
            operand, meta = expect(change, list, 2)
            self.changes.append((_below(operand, n_tensors), _meta(meta, metas)))
        self.one_fresh = (
            self.results[0][1]
            if len(self.results) == 1 and self.results[0][0] == wire.FRESH and not self.listed
            else None
        )

    def _result(
        self, result: Any, metas: dict[int, CheckedMeta], n_tensors: int
    ) -> tuple[int, CheckedMeta | None, int]:
        """Kind, geometry if it has one of its own, and slot or operand."""
        match result:
            case [wire.FRESH, meta, slot]:
                self.n_fresh = max(self.n_fresh, _below(slot, self.n_fresh + 1) + 1)
                return wire.FRESH, _meta(meta, metas), slot
            case [wire.ALIAS, meta, operand]:
                return wire.ALIAS, _meta(meta, metas), _below(operand, n_tensors)
            case [wire.SAME, operand]:
                return wire.SAME, None, _below(operand, n_tensors)
            case [wire.NOTHING]:
                return wire.NOTHING, None, 0
        raise ProtocolViolation(f"a key's result is malformed: {brief(result)}")


def written(kernel: Kernel) -> tuple[int, ...]:
    """The operands (counted over tensors) that the operation writes: by its schema, or as running statistics."""
    assert kernel.op is not None
    writes = kernel.op.writes
    if kernel.op.statistics:
        at, name = kernel.op.flag or (0, "")
        flag = kernel.args[at] if at < len(kernel.args) else False
        if kernel.op.flag is None or kernel.kwargs.get(name, flag) is not False:
            writes |= kernel.op.statistics
    tensor_of = {place: index for index, place in enumerate(kernel.tensors)}
    arguments = [*enumerate(kernel.args), *kernel.kwargs.items()]
    places = [place for key, value in arguments if key in writes for place in _places(value)]
    return tuple(tensor_of[place] for place in places if place in tensor_of)


def _places(value: Any) -> Iterator[int]:
    """Of the operands in an argument."""
    if isinstance(value, Hole):
        yield value.index
    elif isinstance(value, list):
        for item in value:
            yield from _places(item)


def _is_static(value: Any) -> bool:
    """Whether an argument is the same at every call."""
    if isinstance(value, list):
        return all(_is_static(item) for item in value)
    return not isinstance(value, Hole | GeneratorHole | _Device)


def _name(value: Any) -> str:
    if type(value) is not str:
        raise ProtocolViolation("an argument's name is not a string")
    return value


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in DTYPES:
        raise ProtocolViolation(f"{brief(name)} is no dtype")
    return DTYPES[name]


def _index(value: Any) -> int:
    """A number from the wire that torch takes as a length, stride, offset or number."""
    if type(value) is not int or not 0 <= value <= _INT64_MAX:
        raise ProtocolViolation(f"{brief(value)} is no length, stride, offset or number")
    return value


def _below(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ProtocolViolation(f"{brief(value)} is none of the {limit} that a key has")
    return value


def _meta(number: Any, metas: dict[int, CheckedMeta]) -> CheckedMeta:
    if type(number) is not int or number not in metas:
        raise ProtocolViolation(f"geometry {brief(number)} was not defined")
    return metas[number]


def _size(lengths: Any) -> tuple[torch.Size, int]:
    """A size and its number of elements. Strides that torch computes for it must not overflow, also if it is empty."""
    if type(lengths) is not list or len(lengths) > MAX_DIMS:
        raise ProtocolViolation(f"{brief(lengths)} is no size")
    if prod(max(_index(length), 1) for length in lengths) > _INT64_MAX:
        raise ProtocolViolation(f"a size of {brief(lengths)} has too many elements to be counted")
    return torch.Size(lengths), prod(lengths)


def _host_operand(dtype: Any, lengths: Any) -> tuple[torch.dtype, torch.Size, int]:
    """Type, size and number of bytes of an operand that travels in the frame."""
    kind, (size, numel) = _dtype(dtype), _size(lengths)
    return kind, size, numel * kind.itemsize


def expect(value: Any, kind: type, length: int) -> Any:
    if type(value) is not kind or len(value) != length:  # type: ignore[arg-type]
        raise ProtocolViolation(f"expected a {kind.__name__} of {length}")
    return value


def brief(value: Any) -> str:
    """A value that the instance sent, abbreviated for a message."""
    return reprlib.repr(value)
