"""Every operation of the allow-list, with right and wrong arguments, by the fast path and by Python alone: both must do
the same, and neither may die. Each operation runs in a child of this process; one that dies is named.

Numbers in tensors' places, None, tensors in numbers' places, lists of the wrong things: what a client of ours would
never send. Results are first asked for, as of an operation that nobody has seen, and then promised.
"""

import os
import random
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import torch

from benchmarks.report import Goal, arguments, report
from dormouse.core.native import EXECUTOR
from dormouse.gpuserver.commands import fast_path
from dormouse.gpuserver.commands.interpreter import FindFastPath, Interpreter, ProtocolViolation
from dormouse.gpuserver.commands.oplist import Allowed, allowed
from dormouse.schemas import stream as wire

METAS: Final[list[Any]] = [
    ["float32", [4], [1], 0, 0],
    ["float32", [2, 2], [2, 1], 0, 0],
    ["int64", [2], [1], 0, 0],
    ["float32", [8], [1], 0, 0],
    ["float32", [2, 2], [1, 2], 0, 0],
    ["float32", [4], [0], 0, 0],
    ["float32", [1, 2, 2], [4, 2, 1], 0, 0],
    ["float32", [2], [1], 1, 0],
    ["complex64", [2], [1], 0, 1],
    ["float32", [2, 1], [1, 1], 0, 0],
    ["float32", [2, 1], [1, 7], 0, 0],
    ["float32", [], [], 0, 0],
    ["float32", [0], [1], 0, 0],
    ["float32", [0], [1], 5, 0],
    ["float64", [], [], 0, 0],
]


def t(meta: int) -> list[Any]:
    return [wire.TENSOR, meta]


def fresh(*metas: int) -> list[Any]:
    return [[[wire.FRESH, meta, slot] for slot, meta in enumerate(metas)], [], False]


SAME: Final = [[[wire.SAME, 0]], [], False]


class Device:
    torch_device = torch.device("cpu")
    capture = None

    def generator(self) -> torch.Generator:
        return torch.Generator()

    def relieve(self) -> str | None:
        return "and nothing can be evicted"

    def activation_stats(self) -> tuple[int, int, int]:
        return 1, 2, 3

    def synchronize(self) -> None:
        pass


class Side:
    """An interpreter with a lease, which has heard the definitions: METAS, and the keys that are given, from 100 on."""

    def __init__(self, find_fast: FindFastPath, given: Sequence[Any] = ()) -> None:
        self.interpreter = Interpreter(Device(), memoryview(bytearray(4096)), find_fast)
        self.interpreter.begin(1, 2)
        self.frame = 0
        self.pool = {number: torch.arange(8.0) - number for number in range(4)}
        for number, tensor in self.pool.items():
            self.interpreter.table.bind(number, 32, tensor.untyped_storage, lambda grows: False)
        metas = [each for at, meta in enumerate(METAS) for each in (at, meta)]
        keys = [each for at, one in enumerate(given) for each in (100 + at, one)]
        self([wire.UPLOAD_INLINE, 4, 16, 0, bytes(16)], [metas, keys])

    def __call__(self, commands: list[Any], definitions: list[Any] | None = None) -> Any:
        """Replies, or the text of a violation."""
        self.frame += 1
        try:
            replies = self.interpreter.execute(
                msgpack.packb([1, 2, self.frame, definitions or [[], []], commands], default=str)
            )
        except ProtocolViolation as error:
            return str(error)
        return [msgpack.unpackb(reply) for reply in replies]

    def seen(self) -> dict[int, Any]:
        """Each storage, with its bytes."""
        return {
            number: (
                stored.nbytes,
                stored.persistent,
                stored.dirty,
                stored.error and stored.error.told(),
                stored.error is not None or bytes(stored.bytes())[: stored.nbytes],
            )
            for number, stored in self.interpreter.table.by_id.items()
        }


def holes(values: list[Any]) -> list[int]:
    found: list[int] = []
    for value in values:
        if isinstance(value, list) and value and value[0] in (wire.TENSOR, wire.SCALAR):
            found.append(value[0])
        elif isinstance(value, list) and value and value[0] == wire.LIST:
            found += holes(value[1])
    return found


SHAPES: Final = (0, 1, 2, 3, 4, 6, 7, 9, 11)
STORAGES: Final = range(20, 25)
NEW: Final = 60
UNSPECIFIED: Final = ("empty", "resize", "new_")
"""Operations whose results are not what anybody has computed: their bytes are not compared."""

PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "int": (0, 1, 1, 2, -1, 3),
    "SymInt": (0, 1, 1, 2, -1, 3),
    "float": (0.5, 1.0, 0.0, 1e-5, 2),
    "SymFloat": (0.5, 1.0),
    "bool": (True, False),
    "number": (1, 2.5, True, [wire.SCALAR]),
    "Scalar": (1, 2.5, True, [wire.SCALAR]),
    "str": ("mean", "none", "fro", "reflect", "constant", "trunc", "floor", "ij", "sum", "tanh"),
    "ScalarType": ([wire.DTYPE, "float32"], [wire.DTYPE, "int64"]),
    "Device": ([wire.DEVICE],),
    "Layout": ([wire.LAYOUT, "strided"],),
    "MemoryFormat": ([wire.FORMAT, "contiguous_format"],),
}


def value(chance: random.Random, kind: str) -> Any:
    """One of this type of PyTorch's, mostly."""
    tensor = t(chance.choice(SHAPES))
    if chance.random() < 0.1:
        odd = (None, None, None, 2.5, 1, True, "mean", [wire.SCALAR], tensor, [wire.DTYPE, "float32"], [wire.DEVICE])
        return chance.choice((*odd, [wire.LIST, [1, 2]], [wire.LIST, [tensor]], [wire.LIST, []]))
    if kind.startswith("Optional["):
        return None if chance.random() < 0.45 else value(chance, kind[9:-1])
    if kind.startswith("List["):
        return [wire.LIST, [value(chance, kind[5:-1]) for _ in range(chance.choice((1, 2, 2, 3)))]]
    if kind == "Tensor":
        return tensor if chance.random() < 0.85 else chance.choice((2.5, 1, True, [wire.SCALAR]))
    return chance.choice(PLAIN.get(kind, (None,)))


def call(chance: random.Random, op: Allowed) -> tuple[list[Any], list[Any], list[Any]]:
    """Arguments, those by name, and operands."""
    args: list[Any] = []
    kwargs: list[Any] = []
    for argument in op.schema.arguments:
        if argument.has_default_value() and chance.random() < 0.5:
            if not argument.kwarg_only:
                break
            continue
        found = value(chance, str(argument.real_type))
        if argument.kwarg_only:
            kwargs += [argument.name, found]
        else:
            args.append(found)
    tensors, numbers = (4, *STORAGES), (2, 0.5, True, -1)
    return (
        args,
        kwargs,
        [chance.choice(tensors if h == wire.TENSOR else numbers) for h in holes([*args, *kwargs[1::2]])],
    )


def side(find_fast: FindFastPath) -> Side:
    made = Side(find_fast)
    content = torch.tensor([1.0, 0.5, 2.0, 0.25] * 4).numpy().tobytes()
    made([word for number in STORAGES for word in (wire.UPLOAD_INLINE, number, 64, 0, content)])
    return made


def promise(chance: random.Random, op: Allowed, said: Any) -> tuple[Any, list[Any], int]:
    """Results of a key, their geometries, and how many are new: as they were told, else as somebody may lie."""
    if isinstance(said, str) or said[0][0] != wire.VALUE:
        count = 1 if op.writes else max(1, len(op.schema.returns))
        return (SAME, [], 0) if op.writes else (fresh(*(chance.choice((0, 1, 11)) for _ in range(count))), [], count)
    results, changes, listed, new = said[0][2]
    metas: list[Any] = []

    def numbered(meta: Any) -> int:
        metas.extend((200 + len(metas), meta))
        return int(metas[-2])

    told = [[each[0], numbered(each[1]), each[2]] if each[0] in (wire.FRESH, wire.ALIAS) else each for each in results]
    return [told, [[operand, numbered(meta)] for operand, meta in changes], listed], metas, new


def compared(name: str, variant: int) -> str:
    """How the two ways differ with a variant of an operation, if they do."""
    op, chance = allowed()[name], random.Random(f"{name} {variant}")
    args, kwargs, operands = call(chance, op)
    asked = side(lambda: None)
    said = asked([wire.RESULT_META, 5, 900, *operands, 40], [[], [900, [name, args, kwargs, None, "float32"]]])
    outputs, metas, new = promise(chance, op, said)
    definition = [metas, [901, [name, args, kwargs, outputs, "float32"]]]
    words = [901, *operands, *range(NEW, NEW + new), wire.SYNC, 3]
    sides = [side(find_fast) for find_fast in (lambda: None, fast_path.load)]
    replies = [each(words, definition) for each in sides]
    seen = [seen_of(each, bytes_too=not any(word in name for word in UNSPECIFIED)) for each in sides]
    return "" if replies[0] == replies[1] and seen[0] == seen[1] else f"{name} {args} {kwargs}: {replies} {seen}"


def seen_of(one: Side, bytes_too: bool) -> dict[int, Any]:
    """Each storage with what the views of it show: what lies behind is nobody's."""
    held: Interpreter = one.interpreter
    found: dict[int, Any] = {}
    for number, (_, *facts, _) in one.seen().items():
        stored = held.table.by_id[number]
        views = stored.views.values() if bytes_too and stored.error is None else ()
        found[number] = (
            facts,
            [view.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).tolist() for view in views],
        )
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--variants", type=int, default=14, help="of each operation")
    parser.add_argument("--only", nargs="*", help="these operations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    EXECUTOR.build()
    names = args.only or sorted(allowed())[:: 20 if args.quick else 1]
    differ: list[str] = []
    died: list[str] = []
    for name in names:
        out, told = os.pipe()
        if not (pid := os.fork()):
            os.close(out)
            found = [text for variant in range(args.variants) if (text := compared(name, variant))]
            os.write(told, msgpack.packb([text[:2000] for text in found[:5]]))
            os._exit(0)
        os.close(told)
        with open(out, "rb") as answer:
            said = answer.read()
        if os.waitpid(pid, 0)[1]:
            died.append(name)
        else:
            differ += msgpack.unpackb(said)
    print(*differ, *(f"{name} ended its process" for name in died), sep="\n")
    calls = len(names) * args.variants
    goals = [Goal(name=f"of {calls:,} calls, those that differ", goal="0", measured=len(differ), met=not differ)]
    goals.append(Goal(name="operations that end their process", goal="0", measured=len(died), met=not died))
    report(goals, args, {"metas": len(METAS)})


if __name__ == "__main__":
    main()
