"""Decoding of definitions: geometries and keys from the wire, turned into what runs fast, checked once when they are
defined.

A `Kernel` holds an allowed operation, its arguments with holes for the operands, and the promised results. Nothing
here touches a storage.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from dormouse.gpuserver.oplist import Allowed, allowed
from dormouse.schemas import stream as wire

MAX_DIMS: Final = 64
_INT64_MAX: Final = 2**63 - 1

DTYPES: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not any(word in str(value) for word in ("qint", "quint", "bits", "float4"))
}
_FORMATS: Final = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


class ProtocolViolation(Exception):
    """The instance sent what no client of ours would send. It is ended; nothing else is affected."""


class Meta:
    """A geometry whose extent has been computed, and whose lengths and strides are not negative."""

    __slots__ = ("bits", "dtype", "extent", "itemsize", "number", "numel", "offset", "size", "stride")

    def __init__(self, number: int, definition: Any) -> None:
        dtype, size, stride, offset, bits = expect(definition, list, 5)
        if dtype not in DTYPES or len(size) != len(stride) or len(size) > MAX_DIMS:
            raise ProtocolViolation(f"geometry {number} is malformed")
        for value in (*size, *stride, offset, bits):
            if type(value) is not int or not 0 <= value <= _INT64_MAX:
                raise ProtocolViolation(f"geometry {number} has a length, stride or offset of {value!r}")
        self.number = number
        self.dtype = DTYPES[dtype]
        self.size = torch.Size(size)
        self.stride = tuple(stride)
        self.offset = offset
        self.bits = bits
        self.itemsize = self.dtype.itemsize
        self.numel = 1
        for length in size:
            self.numel *= length
        last = (
            offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if self.numel else -1
        )
        self.extent = (last + 1) * self.itemsize

    @property
    def contiguous(self) -> bool:
        expected = 1
        for length, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return False
            expected *= length
        return True


class Kernel:
    """A key: what to call, where the operands go, what was promised."""

    __slots__ = (
        "args",
        "default_dtype",
        "flat",
        "kwargs",
        "metas",
        "n_fresh",
        "n_operands",
        "name",
        "op",
        "operands",
        "predicted",
        "written",
    )

    def __init__(self, definition: Any, metas: dict[int, Meta]) -> None:
        name, args, kwargs, outputs, default_dtype = expect(definition, list, 5)
        if not isinstance(name, str) or not isinstance(args, list) or not isinstance(kwargs, list) or len(kwargs) % 2:
            raise ProtocolViolation("a key is malformed")
        self.name = name
        self.op: Allowed | None = allowed().get(name)
        self.default_dtype = DTYPES.get(default_dtype, torch.float32)
        self.operands: list[tuple[int, Any]] = []  # (TENSOR, meta) | (SCALAR, None) | (HOST, (dtype, size))
        self.metas: list[Meta] = []  # of the tensors among them
        self.args = [self._literal(literal, metas) for literal in args]
        self.kwargs = {_name(kwargs[i]): self._literal(kwargs[i + 1], metas) for i in range(0, len(kwargs), 2)}
        self.n_operands = len(self.operands)
        # Most keys have all their operands among the plain positional arguments: those are filled without recursion.
        places = [index for index, value in enumerate(self.args) if isinstance(value, Hole)]
        static = all(isinstance(value, Hole) or _is_static(value) for value in self.args)
        self.flat = tuple(places) if static and len(places) == self.n_operands else None
        self.predicted: Prediction | None = None if outputs is None else Prediction(outputs, metas, len(self.metas))
        self.n_fresh = self.predicted.n_fresh if self.predicted else 0
        self.written = written(self) if self.op is not None else ()

    def _literal(self, literal: Any, metas: dict[int, Meta], depth: int = 0) -> Any:
        if literal is None or type(literal) in (bool, int, float, str):
            return literal
        if not isinstance(literal, list) or not literal or depth > 3:
            raise ProtocolViolation(f"an argument of {self.name} is malformed")
        try:
            return self._tagged(literal, metas, depth)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ProtocolViolation(f"an argument of {self.name} is malformed") from error

    def _tagged(self, literal: list[Any], metas: dict[int, Meta], depth: int) -> Any:
        tag = literal[0]
        if tag == wire.TENSOR:
            return self._hole(wire.TENSOR, metas[literal[1]])
        if tag == wire.SCALAR:
            return self._hole(wire.SCALAR, None)
        if tag == wire.HOST:
            size = [int(length) for length in literal[2]]
            if any(length < 0 for length in size):
                raise ValueError
            return self._hole(wire.HOST, (DTYPES[literal[1]], size))
        if tag == wire.LIST:
            return [self._literal(item, metas, depth + 1) for item in literal[1]]
        if tag == wire.DTYPE:
            return DTYPES[literal[1]]
        if tag == wire.FORMAT:
            return _FORMATS[literal[1]]
        if tag == wire.LAYOUT and literal[1] == "strided":
            return torch.strided
        if tag == wire.DEVICE:
            return DEVICE
        if tag == wire.GENERATOR:
            return GeneratorHole(int(literal[1]))
        if tag == wire.COMPLEX:
            return complex(literal[1], literal[2])
        raise ValueError

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


class Hole:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class GeneratorHole:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Device:
    """Stands for the executor's own device; the instance cannot name another."""


DEVICE: Final = _Device()


class Prediction:
    """The results that a key promises."""

    __slots__ = ("changes", "listed", "n_fresh", "one_fresh", "results")

    def __init__(self, outputs: Any, metas: dict[int, Meta], n_tensors: int) -> None:
        results, changes, self.listed = expect(outputs, list, 3)
        self.results: list[tuple[int, Meta | None, int]] = []
        self.n_fresh = 0
        try:
            for result in results:
                self.results.append(self._result(result, metas, n_tensors))
            self.changes = [(operand, metas[meta]) for operand, meta in changes]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolViolation("a key's results are malformed") from error
        if any(not 0 <= operand < n_tensors for operand, _ in self.changes):
            raise ProtocolViolation("a key's changes are malformed")
        self.one_fresh = (
            self.results[0][1]
            if len(self.results) == 1 and self.results[0][0] == wire.FRESH and not self.listed
            else None
        )

    def _result(self, result: Any, metas: dict[int, Meta], n_tensors: int) -> tuple[int, Meta | None, int]:
        kind = result[0]
        if kind == wire.NOTHING:
            return kind, None, 0
        number = result[1] if kind == wire.SAME else result[2]
        if kind == wire.FRESH:
            if number not in range(self.n_fresh + 1):
                raise ValueError
            self.n_fresh = max(self.n_fresh, number + 1)
            return kind, metas[result[1]], number
        if kind not in (wire.ALIAS, wire.SAME) or number not in range(n_tensors):
            raise ValueError
        return kind, metas[result[1]] if kind == wire.ALIAS else None, number


def written(kernel: Kernel) -> tuple[int, ...]:
    """The operands (counted over tensors) that the operation writes: by its schema, or as running statistics."""
    assert kernel.op is not None
    writes = kernel.op.writes
    if kernel.op.statistics:
        at, name = kernel.op.flag or (0, "")
        flag = kernel.args[at] if at < len(kernel.args) else False
        if kernel.op.flag is None or kernel.kwargs.get(name, flag) is not False:
            writes |= kernel.op.statistics
    tensor_of: dict[int, int] = {}  # index among tensors, by index among operands
    for index, (kind, _) in enumerate(kernel.operands):
        if kind == wire.TENSOR:
            tensor_of[index] = len(tensor_of)
    found = []

    def visit(value: Any) -> None:
        if isinstance(value, Hole) and value.index in tensor_of:
            found.append(tensor_of[value.index])
        elif isinstance(value, list):
            for item in value:
                visit(item)

    for index, value in enumerate(kernel.args):
        if index in writes:
            visit(value)
    for key, value in kernel.kwargs.items():
        if key in writes:
            visit(value)
    return tuple(found)


def _is_static(value: Any) -> bool:
    """Whether an argument is the same at every call."""
    if isinstance(value, list):
        return all(_is_static(item) for item in value)
    return not isinstance(value, Hole | GeneratorHole | _Device)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolViolation("an argument's name is not a string")
    return value


def expect(value: Any, kind: type, length: int) -> Any:
    if not isinstance(value, kind) or len(value) != length:  # type: ignore[arg-type]
        raise ProtocolViolation(f"expected a {kind.__name__} of {length}")
    return value
