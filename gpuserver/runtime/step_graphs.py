"""Steps of single tokens as CUDA graphs: captured once, replayed with other numbers.

A step of an 8B model is some hundred kernels, and giving them to a GPU one by one takes the host longer than the GPU
needs to compute them. A graph is given at once. It reads what changes from step to step, all that a step's tables have,
at one place, and has more rows than most steps: those of no token do nothing. Weights and adapters are where they were
when it was captured, or it is forgotten. A step with tokens of a prompt, or with an adapter that has parameters of its
own, is computed without.

Graphs and their memory end with the seat. What is captured has run before, so all that it needs is there.
"""

import importlib.util
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from dormouse.gpuserver.runtime.batch import STEP_SEQUENCES
from dormouse.gpuserver.runtime.forward import Forward, StepInputs
from dormouse.gpuserver.runtime.low_rank import AdapterRows, pieces_of

if TYPE_CHECKING:
    from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

ROWS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, STEP_SEQUENCES + 1, 16))
"""Rows that graphs have: with few more than there are sequences, products take as long."""

GRAPHS: Final = 32
"""Graphs of one runtime: beyond that, those go that were not used for longest."""

AFTER: Final = 2
"""A step of a kind that has been computed so often is captured: that takes about as long as one without its graph."""

BLOCKS: Final = 1 << 14
"""Of all sequences in a step together, at first."""

NOWHERE: Final = -1
"""The place of a token that is none."""


class Replay(Protocol):
    """A captured step: computes its logits anew, at one place."""

    def __call__(self) -> torch.Tensor: ...


Capture = Callable[[Callable[[], torch.Tensor]], Replay]
"""Makes a replay of what this launches; it is not computed yet. Raises RuntimeError if it cannot be captured."""


class CudaCapture:
    """Graphs of CUDA, all with one memory between them: no two run at once, and no logits outlive their step."""

    def __init__(self) -> None:
        stream: Any = torch.cuda.Stream
        self._stream, self._pool = stream(), torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], torch.Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = call()
            finally:
                graph.capture_end()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class FixedColumns:
    """Where the numbers of steps are on the device, at the same place each time: columns of a number for each row,
    filled up with zeros, but the first one with NOWHERE, and one of any length, ``free``.
    """

    def __init__(self, device: torch.device, count: int, free: int, room: int) -> None:
        self._starts = [index * ROWS[-1] for index in range(count)]
        self._starts[free:] = [start - ROWS[-1] for start in self._starts[free:]]
        self._starts[free] = self._end = (count - 1) * ROWS[-1]  # last, so that all that is used is one copy
        self._free, self.room = free, room
        self._here = torch.zeros(self._end + room, dtype=torch.int64)
        if device.type == "cuda":
            self._here = self._here.pin_memory()
        self._numbers = self._here.numpy()
        self._there = torch.zeros_like(self._here, device=device)

    def put(self, rows: int, columns: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """Those without any number stay so. Nobody may be about to read the last ones."""
        found = []
        for index, (start, column) in enumerate(zip(self._starts, columns, strict=False)):
            width = len(column) if index == self._free or not column else rows
            self._numbers[start : start + len(column)] = column
            self._numbers[start + len(column) : start + width] = 0 if index else NOWHERE
            found.append(self._there[start : start + width])
        used = self._end + len(columns[self._free])
        self._there[:used].copy_(self._here[:used], non_blocking=True)
        return tuple(found)


class Kind(NamedTuple):
    """What is the same in all steps that one graph computes. Of adapters: ``rank``, ``tables``, ``size`` of these, and
    whether they are ``aligned``.
    """

    rows: int
    splits: int
    rank: int = 0
    size: int = 0
    tables: frozenset[int] = frozenset()
    aligned: bool = True


class StepGraphs:
    """Of one runtime, whose attention is by ``backend``."""

    COLUMNS: Final = 1 + 10 + 3 + 1 + 3
    """Places, the backend's, the model's inputs, and of adapters each row's and the pieces."""

    def __init__(self, forward: Forward, backend: "TritonBackend", capture: Callable[[], Capture]) -> None:
        self._forward, self._backend, self._new_capture = forward, backend, capture
        self.replayed = 0  # steps
        self._fixed: FixedColumns | None = None
        self._version = -1  # of adapters, of which the next two are
        self._mixed: frozenset[int] = frozenset()
        self._adapted = Kind(0, 0)
        self.forget()

    def forget(self) -> None:
        """Weights are elsewhere from now on, or their seat ends: its memory is another's."""
        self._graphs: OrderedDict[Kind, Replay] = OrderedDict()
        self._steps: Counter[Kind] = Counter()  # without a graph
        self._capture: Capture | None = None
        self.trouble = ""  # why no step is captured any more

    def logits(self, given: StepInputs) -> torch.Tensor | None:
        """A row for each part; None for a step that is to be computed otherwise."""
        kind = None if self.trouble else self._kind(given)
        if kind is None:
            return None
        replay = self._graphs.get(kind)
        if replay is None and self._steps[kind] < AFTER:
            if len(self._steps) > 4 * GRAPHS:
                self._steps.clear()
            self._steps[kind] += 1
            return None
        if self._make_room(given):
            replay = None
        with self._begun(kind, given) as call:
            if replay is None:
                logits = call()
                self._keep(kind, call)
            else:
                self._graphs.move_to_end(kind)
                self.replayed += 1
                logits = replay()
        return logits[: len(given.parts)]

    def _kind(self, given: StepInputs) -> Kind | None:
        if any(part.tokens > 1 for part in given.parts):
            return None
        rows = ROWS[bisect_left(ROWS, len(given.parts))]
        kind = Kind(rows, self._backend.splits(given.parts, rows))
        if not (numbers := given.adapters):
            return kind
        self._follow()
        if not numbers <= self._mixed:
            return None
        return self._adapted._replace(rows=kind.rows, splits=kind.splits)

    def _follow(self) -> None:
        """Adapters that have come and gone."""
        adapters = self._forward.adapters
        if self._version == adapters.version:
            return
        self._version, self._mixed, tables = adapters.version, adapters.mixed, adapters.tables
        rank, size = adapters.most_rank(self._mixed), max((len(table.native) for table in tables), default=0)
        self._adapted = Kind(0, 0, rank, size, frozenset(map(id, tables)), adapters.aligned(self._mixed))
        self._backend.follow(tables)

    def _make_room(self, given: StepInputs) -> bool:
        """For all of its blocks: whether there are no graphs any more, because they read other memory."""
        blocks, device = sum(len(part.blocks) for part in given.parts), self._forward.attention.memory.device
        if self._fixed is not None and blocks <= self._fixed.room:
            return False
        self.forget()
        self._fixed = FixedColumns(device, self.COLUMNS, 1, max(BLOCKS, 1 << blocks.bit_length()))
        return True

    @contextmanager
    def _begun(self, kind: Kind, given: StepInputs) -> Iterator[Callable[[], torch.Tensor]]:
        fixed = self._fixed
        assert fixed is not None

        def pack(_: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
            return fixed.put(kind.rows, columns)

        owners = given.owners if kind.rank else []
        more = (owners, *pieces_of(owners, self._backend.PIECE_ROWS)) if kind.rank else ()
        with self._forward.begun(given, pack, *more) as (call, of_adapters):
            if kind.rank:
                tokens, *pieces = of_adapters
                known = {(kept, self._backend.PIECE_ROWS): tuple(pieces) for kept in (False, True)}
                rows = (owners, owners), self._mixed, kind.rank, known, kind.aligned
                self._forward.mix(AdapterRows(tokens, tokens, *rows))
            yield call

    def _keep(self, kind: Kind, call: Callable[[], torch.Tensor]) -> None:
        """From now on such steps are replayed."""
        if self._capture is None:
            self._capture = self._new_capture()
        try:
            self._graphs[kind] = self._capture(call)
        except RuntimeError as error:
            self.trouble = f"{type(error).__name__}: {error}"
            print(f"steps are computed without graphs: {self.trouble}", file=sys.stderr)
        if len(self._graphs) > GRAPHS:
            self._graphs.popitem(last=False)


def graphs_for(forward: Forward) -> StepGraphs | None:
    """None where steps are not computed by Triton's kernels on a CUDA device."""
    attention = forward.attention
    if attention.memory.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

    backend = attention.backend
    return StepGraphs(forward, backend, CudaCapture) if isinstance(backend, TritonBackend) else None
