"""Every operation that an instance may ask for, with operands that its schema accepts and no sane program would send.

    python -m benchmarks.operands --variants 40
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all \\
        python -m benchmarks.operands --device cuda

On the CPU each operand's bytes end at a page that cannot be read and begin behind one, with known bytes between: what
reads far outside dies, what writes outside is seen in the known bytes. On a GPU each is an allocation of its own, as in
the second command, and NVIDIA's tool looks: there, what reads outside would be silent. Operations are called as
executors call them, after `operand_checks.py` and, on a GPU, `index_checks.py`, in children of this process; one that
dies or does not come back is named with its variant.
"""

import ctypes
import math
import mmap
import os
import random
import resource
import select
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.report import Goal, arguments, report
from dormouse.gpuserver.commands import index_checks, operand_checks
from dormouse.gpuserver.commands.oplist import Allowed, allowed

PAGE: Final = mmap.PAGESIZE
OPERAND_NBYTES: Final = 2 * PAGE
PATTERN: Final = 0xA5
CALL_S: Final = 10.0
GPU_CALL_S: Final = 60.0  # its kernels are loaded at their first use
MEMORY_NBYTES: Final = 256 << 20
"""Of address space beyond what is mapped: what asks for more is out of memory, as it would be on a small GPU."""

SHAPES: Final = (
    (),
    (0,),
    (1,),
    (4,),
    (2, 3),
    (3, 3),
    (2, 0, 3),
    (2, 3, 4),
    (1, 2, 4, 4),
    (2, 3, 5, 5),
    (1, 2, 3, 4, 4),
)
DTYPES: Final = (torch.float32,) * 6 + (torch.int64,) * 4 + (torch.float64, torch.bool, torch.uint8, torch.int32)
DTYPES_RARE: Final = (torch.complex64, torch.float16, torch.bfloat16, torch.int8)
NUMBERS: Final = (0, 1, 1, 2, 2, 3, 4, -1, -2, 5, 7, 64, 1000, 1 << 20, 1 << 31, -(1 << 31), 10**9, 1 << 62, -(1 << 63))
INDICES: Final = (0, 1, 2, 3, -1, -5, 9, 10**6, 10**9, 1 << 40, -(1 << 62))
TEXTS: Final = (
    "",
    "mean",
    "none",
    "sum",
    "nearest",
    "ij,jk->ik",
    "reflect",
    "constant",
    "tanh",
    "same",
    "\x00",
    "x" * 100,
)

_libc = ctypes.CDLL(None, use_errno=True)


class Fenced:
    """Memory for one operand, between two pages that nobody may touch."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, OPERAND_NBYTES + 2 * PAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (0, OPERAND_NBYTES + PAGE):
            _libc.mprotect(ctypes.c_void_p(self._address + page), PAGE, 0)
        self._used = 0
        ctypes.memset(self._address + PAGE, PATTERN, OPERAND_NBYTES)

    def take(self, nbytes: int) -> torch.Tensor:
        """The last bytes before the fence, as uint8; what lies before them has the pattern."""
        self._used = nbytes
        ctypes.memset(self._address + PAGE, PATTERN, OPERAND_NBYTES)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=PAGE + OPERAND_NBYTES - nbytes, count=nbytes)

    def intact(self) -> bool:
        before = ctypes.string_at(self._address + PAGE, OPERAND_NBYTES - self._used)
        return before == bytes([PATTERN]) * len(before)


class Maker:
    """Operands of one call."""

    def __init__(self, rng: random.Random, fences: Sequence[Fenced], device: str) -> None:
        self.rng = rng
        self.device = device
        self._fences = iter(fences)
        self.shape = rng.choice(SHAPES)
        self.dtype = rng.choice(DTYPES + DTYPES_RARE)
        self.plain = rng.random() < 0.6  # most operands alike: the first checks pass

    def tensor(self) -> torch.Tensor:
        rng = self.rng
        alike = self.plain and rng.random() < 0.75
        shape = self.shape if alike else rng.choice(SHAPES)
        dtype = self.dtype if alike else rng.choice(DTYPES + DTYPES_RARE)
        strides: list[int] = []
        step = 1
        for length in reversed(shape):
            strides.insert(0, step)
            step *= max(length, 1)
        match rng.choice(("whole", "whole", "whole", "expanded", "overlapping", "mixed")):
            case "expanded":
                strides = [0 if rng.random() < 0.5 else one for one in strides]
            case "overlapping":
                strides = [1] * len(shape)
            case "mixed":
                rng.shuffle(strides)
        offset = rng.choice((0, 0, 0, 1))
        last = offset + sum((length - 1) * one for length, one in zip(shape, strides, strict=True))
        nbytes = (last + 1) * dtype.itemsize if all(shape) else 0
        fence = next(self._fences, None)
        raw = (
            fence.take(nbytes)
            if fence is not None and nbytes <= OPERAND_NBYTES
            else torch.zeros(nbytes, dtype=torch.uint8)
        )
        if nbytes:
            self._fill(raw, dtype)
        raw = raw.to(self.device)
        made = torch.empty(0, dtype=dtype, device=self.device)
        made.set_(raw.untyped_storage(), offset + raw.storage_offset() // dtype.itemsize, shape, strides)
        return made

    def _fill(self, raw: torch.Tensor, dtype: torch.dtype) -> None:
        count = raw.numel() // dtype.itemsize
        if dtype is torch.int64:
            numbers = [self.rng.choice(INDICES[: self.rng.choice((4, len(INDICES)))]) for _ in range(count)]
            data = struct.pack(f"{count}q", *numbers)
        elif dtype is torch.int32:
            data = struct.pack(f"{count}i", *(self.rng.choice((0, 1, 2, -1, 10**9)) for _ in range(count)))
        elif dtype is torch.float32:
            data = struct.pack(
                f"{count}f", *(self.rng.choice((0.0, 1.0, -2.5, 3e38, float("nan"))) for _ in range(count))
            )
        else:
            data = bytes(self.rng.choice((0, 1, 1)) for _ in range(raw.numel()))
        ctypes.memmove(raw.data_ptr(), data, len(data))

    def value(self, kind: str) -> Any:
        rng = self.rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.4 else self.value(kind[9:-1])
        if kind.startswith("List["):
            inner = kind[5:-1]
            if inner == "Tensor" or self.rng.random() < 0.15:
                return [self.value(inner) for _ in range(rng.randrange(4))]
            return [self.value(inner) for _ in range(rng.choice((1, 2, 2, 3, len(self.shape))))]
        match kind:
            case "Tensor":
                return self.tensor()
            case "int" | "SymInt":
                return rng.choice(NUMBERS[:6] if rng.random() < 0.6 else NUMBERS)
            case "float" | "SymFloat":
                return rng.choice((0.0, 0.5, 1.0, -1.0, 1e-5, 1e30, float("nan"), float("inf")))
            case "bool" | "SymBool":
                return rng.random() < 0.5
            case "number" | "Scalar":
                return rng.choice((0, 1, 2, -1, 0.5, 1 << 40, 1e30, complex(1, 2)))
            case "str":
                return rng.choice(TEXTS)
            case "ScalarType":
                return rng.choice(DTYPES + DTYPES_RARE)
            case "Layout":
                return torch.strided
            case "MemoryFormat":
                return rng.choice((torch.contiguous_format, torch.channels_last, torch.preserve_format))
            case "Device":
                return torch.device(self.device)
            case "Generator":
                return torch.Generator(self.device)
        return None


def call(operation: Allowed, seed: str, fences: Sequence[Fenced], device: str = "cpu") -> str:
    """One call; what is wrong with it, if anything. An error is what should happen, but for one that ends a context."""
    rng = random.Random(seed)
    maker = Maker(rng, fences, device)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operation.schema.arguments:
        if argument.has_default_value() and rng.random() < 0.3:
            continue
        value = maker.value(str(argument.real_type))
        if argument.kwarg_only or len(args) < operation.schema.arguments.index(argument):
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        check = operand_checks.CHECKS.get(operation.base)
        if check is not None and check(operation.bound(args, kwargs)) is not None:
            return ""
        if _written_twice(operation, operation.bound(args, kwargs)):
            return ""
        if device != "cpu" and (rule := index_checks.RULES.get(operation.base)) is not None:
            guard = index_checks.IndexGuard()
            args, kwargs = [], guard.checked(rule, operation.bound(args, kwargs), bool(operation.writes))
        with torch.inference_mode():
            operation.call(*args, **kwargs)
    except Exception:  # whatever it says, it has looked
        pass
    if device != "cpu":
        torch.cuda.synchronize()  # raises what a kernel did to the context, and so ends this child
    return "" if all(fence.intact() for fence in fences) else "wrote outside its operands"


def _written_twice(operation: Allowed, values: dict[str, Any]) -> bool:
    """What `definitions.Kernel` refuses: writing to a tensor with fewer places than elements."""
    for name in operation.writes:
        value = values.get(str(name))
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
                if tensor.numel() > last + 1:
                    return True
    return False


@dataclass
class Result:
    calls: int = 0
    died: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    wrote: list[str] = field(default_factory=list)


def _child(operations: list[Allowed], variants: int, seed: int, first: tuple[int, int], pipe: int, device: str) -> None:
    """Call one after the other, and say so before each; never returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fences: list[Fenced] = []
    if device == "cpu":
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE + MEMORY_NBYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        fences = [Fenced() for _ in range(8)]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    else:
        torch.zeros(1, device=device)
    for index in range(first[0], len(operations)):
        for variant in range(first[1] if index == first[0] else 0, variants):
            os.write(pipe, struct.pack("=iib", index, variant, 0))
            if call(operations[index], f"{seed}:{operations[index].name}:{variant}", fences, device):
                os.write(pipe, struct.pack("=iib", index, variant, 1))
    os._exit(0)


def _reports(pipe: int, seconds: float) -> Iterator[tuple[int, int, int] | None]:
    """What the child says; None when it is silent for too long. Ends with it."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], seconds)[0]:
            yield None
            return
        data = os.read(pipe, 9 * 1000)
        if not data:
            return
        rest += data
        whole = len(rest) // 9 * 9
        yield from struct.iter_unpack("=iib", rest[:whole])
        rest = rest[whole:]


def sweep(
    operations: list[Allowed], variants: int, seed: int, device: str = "cpu", spend_s: float = math.inf
) -> Result:
    """Every operation so many times, or as many as that can be begun in time."""
    torch.set_num_threads(1)
    result, first = Result(), (0, 0)
    end_s = time.monotonic() + spend_s
    while first[0] < len(operations):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            try:
                _child(operations, variants, seed, first, writer, device)
            finally:
                os._exit(1)
        os.close(writer)
        at = first
        silent = False
        late = False
        for said in _reports(reader, CALL_S if device == "cpu" else GPU_CALL_S):
            if late := time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
                break
            if said is None:
                silent = True
                os.kill(pid, signal.SIGKILL)
                break
            at = said[0], said[1]
            name = f"{operations[at[0]].name}:{at[1]}"
            if said[2]:
                result.wrote.append(name)
            else:
                result.calls += 1
        os.close(reader)
        status = os.waitpid(pid, 0)[1]
        if status == 0 or late:
            break
        name = f"{operations[at[0]].name}:{at[1]}"
        if silent:
            result.hung.append(name)
        else:
            result.died.append(f"{name} ({signal.Signals(status & 127).name if status & 127 else status >> 8})")
        first = (at[0], at[1] + 1) if at[1] + 1 < variants else (at[0] + 1, 0)
    return result


def main() -> None:
    parser = arguments("Hostile operands for every operation on the allow-list.")
    parser.add_argument("--variants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="operations whose names contain this")
    parser.add_argument("--checked", action="store_true", help="only those whose operands are looked at")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no call later")
    args = parser.parse_args()
    looked_at = operand_checks.CHECKS.keys() | index_checks.RULES.keys()
    operations = [
        operation
        for name, operation in sorted(allowed().items())
        if (not args.only or args.only in name) and (not args.checked or operation.base in looked_at)
    ]
    began_s = time.perf_counter()
    result = sweep(operations, 3 if args.quick else args.variants, args.seed, args.device, args.seconds)
    for kind, names in (("died", result.died), ("hung", result.hung), ("wrote", result.wrote)):
        for name in names:
            print(f"{kind}: {name}")
    goals = [
        Goal(name="calls that ended the process", goal="0", measured=len(result.died), met=not result.died),
        Goal(name="calls that wrote elsewhere", goal="0", measured=len(result.wrote), met=not result.wrote),
        Goal(name="calls of more than 10 s", goal="0", measured=len(result.hung), met=not result.hung),
    ]
    seconds = round(time.perf_counter() - began_s, 1)
    told = {"operations": len(operations), "calls": result.calls, "seconds": seconds, "seed": args.seed}
    report(goals, args, {"results": told | {"ended": result.died + result.hung, "wrote": result.wrote}})


if __name__ == "__main__":
    main()
