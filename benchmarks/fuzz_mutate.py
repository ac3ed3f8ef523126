"""Decides how a recorded frame is broken: by the stream's grammar, from a random generator that it is given. Pure.

A frame has *spots*: each field of its header, of its definitions and of its commands, with the kind of thing that
stands there. A mutation replaces, removes, doubles or swaps what stands at one spot, or breaks the bytes of the frame.
"""

import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import msgpack

from dormouse.schemas import stream as wire

LITERALS: Final = {
    wire.TENSOR: "TENSOR",
    wire.SCALAR: "SCALAR",
    wire.HOST: "HOST",
    wire.DTYPE: "DTYPE",
    wire.LAYOUT: "LAYOUT",
    wire.FORMAT: "FORMAT",
    wire.DEVICE: "DEVICE",
    wire.GENERATOR: "GENERATOR",
    wire.COMPLEX: "COMPLEX",
    wire.LIST: "LIST",
}
RESULTS: Final = {wire.FRESH: "FRESH", wire.ALIAS: "ALIAS", wire.SAME: "SAME", wire.NOTHING: "NOTHING"}
COMMANDS: Final = {  # by code: name, and how many operands it has (None: it says so itself)
    wire.FREE: ("FREE", None),
    wire.UPLOAD: ("UPLOAD", 5),
    wire.UPLOAD_INLINE: ("UPLOAD_INLINE", 4),
    wire.DOWNLOAD: ("DOWNLOAD", 4),
    wire.RESULT_META: ("RESULT_META", None),
    wire.END: ("END", 2),
    wire.SYNC: ("SYNC", 1),
    wire.SEED: ("SEED", 2),
    wire.MEMORY: ("MEMORY", 1),
    wire.CREATE: ("CREATE", 2),
    wire.FORGET_DEFS: ("FORGET_DEFS", 0),
    wire.RNG_GET: ("RNG_GET", 2),
    wire.RNG_SET: ("RNG_SET", 2),
    wire.SET: ("SET", 2),
    wire.TEMPLATE: ("TEMPLATE", 2),
    wire.FOLLOW: ("FOLLOW", 4),
    wire.VALIDATED: ("VALIDATED", 1),
    wire.LEAVE: ("LEAVE", 0),
    wire.CHECK: ("CHECK", 2),
}
_NESTED: Final = {wire.TEMPLATE: "word of a template", wire.FOLLOW: "old storage"}
META_FIELDS: Final = ("meta dtype", "meta size", "meta stride", "meta offset", "meta bits")
KEY_FIELDS: Final = ("key op", "key args", "key kwargs", "key outputs", "key default dtype")
HEADER: Final = ("serial", "secret", "number", "definitions", "commands")
BYTES: Final = "bytes"
"""The kind of a mutation of the encoded frame."""

NUMBERS: Final = (
    *(
        0,
        1,
        2,
        3,
        7,
        -1,
        -2,
        -5,
        -14,
        64,
        4095,
        4096,
        4097,
        65535,
        1 << 20,
        1 << 31,
        (1 << 31) - 1,
        1 << 32,
        -(1 << 31),
    ),
    *(1 << 40, (1 << 40) + 1, 1 << 61, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
)
THINGS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0.0, 0.5, -1.5, 1e300, float("inf"), float("nan"), "", "0", "float32", "aten::add.Tensor"),
    *("strided", "\x00", "x" * 300, b"", b"\x00", b"\xff" * 4, b"\x7f" * 5056, [], [[]], [0], [1, 2], [None], [[0, 0]]),
    *({}, {"a": 1}, {0: [1]}, [0, "float32", [2]], [2, "float32", [1 << 62]], [9, [[9, [[9, [[9, []]]]]]]]),
    *(msgpack.ExtType(5, b"x"), msgpack.ExtType(100, b""), msgpack.Timestamp(1, 2)),
)
OPS: Final = (
    *(
        "aten::relu",
        "aten::add_.Tensor",
        "aten::cat",
        "aten::as_strided",
        "aten::resize_",
        "aten::from_file",
        "__class__",
    ),
    *("aten::index.Tensor", "aten::native_batch_norm", "aten::_fft_c2r", "aten::view_as_real", "aten::nonzero"),
    *(
        "aten::set_.source_Storage",
        "aten::view",
        "aten::split.Tensor",
        "aten::embedding",
        "aten::gather",
        "aten::_conj",
    ),
    *("aten::sort", "aten::lstm.input", "aten::conv2d", "aten::expand", "aten::_to_copy", "aten::add.out", "aten::t"),
)
ENDLESS_NUMEL: Final = 1 << 20
"""More elements than this on few bytes (a stride of 0) only compute for long: that is the watchdog's subject."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A thing of this kind, at this place in the container that the path leads to; ``count`` items belong to it."""

    kind: str
    path: tuple[int, ...]
    index: int
    count: int = 1


class Keys:
    """Operands and results of the keys that a connection has defined, as a client counts them."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[list[str], int]] = {}  # by key id: kinds of the operands, fresh results

    def define(self, flat: list[Any]) -> None:
        for number, key in zip(flat[::2], flat[1::2], strict=True):
            operands = [kind for value in (*key[1], *key[2][1::2]) for kind in _operands(value)]
            slots = [result[2] for result in (key[3] or [[]])[0] if result[0] == wire.FRESH]
            self.shapes[number] = operands, len(set(slots))


def _operands(literal: Any) -> Iterator[str]:
    if isinstance(literal, list):
        if literal[0] in (wire.TENSOR, wire.SCALAR, wire.HOST):
            yield LITERALS[literal[0]]
        elif literal[0] == wire.LIST:
            for item in literal[1]:
                yield from _operands(item)


def spots(frame: list[Any], keys: Keys) -> list[Spot]:
    """All of a well-formed frame, whose definitions ``keys`` knows already."""
    found = [Spot(name, (), index) for index, name in enumerate(HEADER)]
    metas, defined = frame[3]
    for index in range(0, len(metas), 2):
        found += [Spot("meta id", (3, 0), index), Spot("meta", (3, 0), index + 1)]
        found += [Spot(name, (3, 0, index + 1), field) for field, name in enumerate(META_FIELDS)]
        for field in (1, 2):
            values = metas[index + 1][field]
            found += [Spot("length or stride", (3, 0, index + 1, field), k) for k in range(len(values))]
    for index in range(0, len(defined), 2):
        found += [Spot("key id", (3, 1), index), Spot("key", (3, 1), index + 1)]
        found += list(_key_spots(defined[index + 1], (3, 1, index + 1)))
    return found + list(_command_spots(frame[4], keys))


def _key_spots(key: list[Any], path: tuple[int, ...]) -> Iterator[Spot]:
    for field, name in enumerate(KEY_FIELDS):
        yield Spot(name, path, field)
    for part in (1, 2):
        for index in range(len(key[part])):
            yield from _literal_spots(key[part], (*path, part), index)
    if key[3] is not None:
        for index, result in enumerate(key[3][0]):
            kind = f"result {RESULTS[result[0]]}"
            yield Spot(kind, (*path, 3, 0), index)
            for field in range(len(result)):
                yield Spot(kind, (*path, 3, 0, index), field)
        yield Spot("changes", (*path, 3), 1)


def _literal_spots(values: list[Any], path: tuple[int, ...], index: int) -> Iterator[Spot]:
    value = values[index]
    if not isinstance(value, list):
        yield Spot("literal", path, index)
        return
    kind = f"literal {LITERALS[value[0]]}"
    yield Spot(kind, path, index)
    for field in range(len(value)):
        yield Spot(kind, (*path, index), field)
    if value[0] == wire.LIST:
        for item in range(len(value[1])):
            yield from _literal_spots(value[1], (*path, index, 1), item)


def _command_spots(commands: list[Any], keys: Keys) -> Iterator[Spot]:
    path, position = (4,), 0
    while position < len(commands):
        code = commands[position]
        if code in keys.shapes:
            operands, fresh = keys.shapes[code]
            kinds = ["operation", *(f"operand {kind}" for kind in operands), *["fresh id"] * fresh]
        else:
            name, count = COMMANDS[code]
            if code == wire.FREE:
                count = 1 + commands[position + 1]
            elif code == wire.RESULT_META:
                count = 3 + len(keys.shapes[commands[position + 2]][0])
            assert count is not None
            kinds = [name] * (1 + count)
        yield Spot(kinds[0], path, position, len(kinds))
        for offset, kind in enumerate(kinds[1:], 1):
            yield Spot(kind, path, position + offset)
            if code in _NESTED and isinstance(within := commands[position + offset], list):
                yield from (Spot(_NESTED[code], (*path, position + offset), word) for word in range(len(within)))
        position += len(kinds)


class Template:
    """A well-formed frame, whose spots are found once."""

    def __init__(self, frame: list[Any], keys: Keys) -> None:
        self._packed = bytes(msgpack.packb(frame))
        self.spots: dict[str, list[Spot]] = {}  # by kind
        for spot in spots(frame, keys):
            self.spots.setdefault(spot.kind, []).append(spot)
        self._weights: list[float] = []

    def weigh(self, weights: dict[str, float]) -> None:
        """How readily each kind is broken."""
        self._weights = list(accumulate(weights[kind] for kind in self.spots))

    def mutate(self, header: list[int], rng: random.Random) -> tuple[bytes, list[str]]:
        """The frame under this header, broken, and the kinds of what was broken in it."""
        names = list(self.spots)
        while True:
            broken = msgpack.unpackb(self._packed)
            broken[:3] = header
            kinds: list[str] = []
            for _ in range(rng.choice((1, 1, 1, 1, 2))):
                kind = rng.choices(names, cum_weights=self._weights)[0]
                spot = rng.choice(self.spots[kind])
                values = _at(broken, spot.path)
                if isinstance(values, list) and spot.index < len(values):  # else the first mutation took it away
                    _break(values, spot.index, spot.index + spot.count, broken, rng)
                    kinds.append(kind)
            if _endless(broken):
                continue
            try:
                data = bytes(msgpack.packb(broken))
            except (OverflowError, ValueError):  # a number or a depth that msgpack does not have
                continue
            if rng.random() < 0.05:
                kinds.append(BYTES)
                data = _break_bytes(data, rng)
            return data, kinds


def _at(frame: Any, path: tuple[int, ...]) -> Any:
    try:
        for step in path:
            frame = frame[step]
    except (TypeError, IndexError, KeyError):
        return None
    return frame


def _break(values: list[Any], at: int, end: int, frame: list[Any], rng: random.Random) -> None:
    match rng.choice(("near", "near", "near", "near", "number", "number", "thing", "remove", "double", "swap", "grow")):
        case "number":
            values[at] = rng.choice(NUMBERS)
        case "near":
            values[at] = _near(values[at], frame, rng)
        case "thing":
            values[at] = rng.choice(THINGS)
        case "remove":
            del values[at:end]
        case "double":
            values[at:at] = values[at:end]
        case "swap":
            other = rng.randrange(len(values))
            values[at], values[other] = values[other], values[at]
        case "grow":
            values[at] = _grown(values[at], rng)


def _near(value: Any, frame: list[Any], rng: random.Random) -> Any:
    """Of the same type, so that the next check but one is reached."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        others = [item for item in frame[-1] if type(item) is int] if frame and isinstance(frame[-1], list) else []
        return rng.choice((value + 1, value - 1, value * 2, -value, *rng.choices(others or [0], k=4)))
    if isinstance(value, float):
        return value * rng.choice((-1.0, 1e30, 0.0))
    if isinstance(value, str):
        if value.startswith("aten::"):
            return rng.choice(OPS)
        return rng.choice(("int64", "complex64", "bool", "float16", value + "x", value[:-1], "channels_last"))
    if isinstance(value, bytes):
        return rng.choice((value[:-1], value + b"\0", value * 2, bytes(len(value)), b"\xff" * len(value)))
    if isinstance(value, list) and value:
        changed = list(value)
        at = rng.randrange(len(changed))
        changed[at] = rng.choice((*NUMBERS[:8], None, 1.5, "x", []))
        return changed
    return None


def _grown(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return value * rng.choice((2, 17, 65)) if value else [0] * rng.choice((1, 5, 65, 1000))
    if isinstance(value, str | bytes):
        return value * rng.choice((2, 100))
    deep: Any = value
    for _ in range(rng.choice((1, 4, 600))):
        deep = [deep]
    return deep


def _break_bytes(data: bytes, rng: random.Random) -> bytes:
    match rng.choice(("cut", "flip", "extend", "empty", "fill", "repeat")):
        case "cut":
            return data[: rng.randrange(len(data))]
        case "flip":
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case "extend":
            return data + bytes([rng.randrange(256)]) * rng.choice((1, 4096))
        case "fill":
            at = rng.randrange(len(data))
            return data[:at] + b"\xc1\xdd\xff\xff\xff\xff"[: rng.randrange(1, 7)] + data[at:]
        case "repeat":
            return data + data
    return b""


def _endless(frame: Any) -> bool:
    """Whether it asks for hours of computing on a few bytes."""
    try:
        metas = frame[3][0][1::2]
    except (TypeError, IndexError, KeyError):
        return False
    for meta in metas:
        try:
            _, size, stride, _, _ = meta
            numel, last = 1, 0
            for length, step in zip(size, stride, strict=True):
                numel *= operator.index(length)
                last += (length - 1) * operator.index(step)
        except (TypeError, ValueError):
            continue
        if numel > ENDLESS_NUMEL and last < ENDLESS_NUMEL * 16:
            return True
    return False
