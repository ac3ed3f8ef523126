"""A runtime's steps as CUDA graphs: captured once, replayed with other numbers.

A step of an 8B model is some hundred kernels, and giving them to a GPU one by one takes the host longer than the GPU
needs to compute them. A graph is given at once. It reads the values that change from step to step, those of the step's
tables, at one place, and has room for more rows, pieces of prompts and pieces of adapters than most steps have; spare
ones do nothing. A graph is forgotten if weights or adapters are no longer where they were at its capture. A step with
an adapter that has parameters of its own is computed without a graph.

Graphs and their memory end with the seat. A step is captured only after it has run, so all that it needs is there.
"""

import importlib.util
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import nn

from dormouse.core.decisions.batches.batch import GPU_STEP_TOKENS, STEP_SEQUENCES
from dormouse.gpuserver.device.cuda.capture import CudaCapture
from dormouse.gpuserver.runtime.forward import Forward, StepInputs
from dormouse.gpuserver.runtime.low_rank import AdapterRows, pieces_of
from dormouse.gpuserver.runtime.packing import FREE, FixedColumns

if TYPE_CHECKING:
    from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

ROWS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, STEP_SEQUENCES + 1, 16))
"""Sequences that graphs of steps without prompts have room for: with few more, products take as long."""

TOKENS: Final = (16, 32, 64, 96, 128, 192, 256, *range(384, GPU_STEP_TOKENS + STEP_SEQUENCES + 1, 128))
"""Tokens that those of other steps have room for."""

KEPT: Final = (32, STEP_SEQUENCES)
"""Rows of logits, likewise."""

SINGLES: Final = (0, 8, 32, STEP_SEQUENCES)
"""Single tokens beside prompts, likewise."""

PIECES: Final = (8, 16, 32, 64, 128, 256)
"""Of prompts, and of rows of one adapter, likewise."""

GRAPHS: Final = 32
"""Graphs of one runtime: beyond that, the least recently used are dropped."""

AFTER: Final = 2
"""A step of a kind that has been computed so often is captured: that takes about as long as one without its graph."""

BLOCKS: Final = 1 << 14
"""Of all sequences in a step together, at first."""

Replay = Callable[[], torch.Tensor]
"""A captured step: computes its logits anew, at one place."""

Capture = Callable[[Callable[[], torch.Tensor]], Replay]
"""Makes a replay of the work that this launches; it is not computed yet. Raises RuntimeError if it cannot be captured.
"""


class Adapted(NamedTuple):
    """Of adapters: the largest rank, the products that they add to, entries of these tables, whether all tensors are
    aligned; and pieces of rows, of all tokens and of those that want logits.
    """

    rank: int
    tables: frozenset[int]
    size: int
    aligned: bool
    pieces: int = 0
    kept_pieces: int = 0


class StepKind(NamedTuple):
    """Properties of all steps that one graph computes: their capacities, and the split of contexts."""

    tokens: int
    kept: int
    singles: int
    pieces: int
    splits: int = 1
    adapted: Adapted | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the columns of a step: places, the backend's for single tokens and for pieces of prompts, the inputs of
        the model; and for all tokens, and for those kept, their owners and the pieces of adapters.
        """
        of_prompts = FREE, *[self.pieces] * 4
        columns = self.tokens, FREE, *[self.singles] * 4, *of_prompts, self.tokens, self.tokens, self.kept
        if self.adapted is None:
            return columns
        more = self.tokens, *[self.adapted.pieces] * 3, self.kept, *[self.adapted.kept_pieces] * 3
        return *columns, *more


def room_for(number: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, number)]


LARGEST: Final = StepKind(
    TOKENS[-1], KEPT[-1], SINGLES[-1], PIECES[-1], 1, Adapted(0, frozenset(), 0, False, PIECES[-1], PIECES[-1])
)


class StepGraphs:
    """Of one runtime, whose attention is by ``backend``."""

    def __init__(self, forward: Forward, backend: "TritonBackend", capture: Callable[[], Capture]) -> None:
        self._forward, self._backend, self._new_capture = forward, backend, capture
        self.replayed = 0  # steps
        self._version = -1  # of adapters, of which the next two are
        self._mixed: frozenset[int] = frozenset()
        self._adapted: Adapted | None = None
        self.forget()

    def forget(self) -> None:
        """Weights are elsewhere from now on, or their seat ends: its memory is another's."""
        self._graphs: OrderedDict[StepKind, Replay] = OrderedDict()
        self._steps: Counter[StepKind] = Counter()  # without a graph
        self._logits: dict[int, torch.Tensor] = {}  # where those of all graphs with so much room for them are
        self._capture: Capture | None = None
        self._fixed: FixedColumns | None = None
        self.trouble = ""  # why no step is captured any more

    def stop(self, why: str) -> bool:
        """No step is captured or replayed before the next `forget`, and the memory of graphs is free: whether they held
        any.
        """
        held = bool(self._graphs)
        self.forget()
        self.trouble = why
        print(f"steps are computed without graphs: {why}", file=sys.stderr)
        return held

    def logits(self, given: StepInputs) -> torch.Tensor | None:
        """A row for each that is kept; None for a step that is to be computed otherwise."""
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
                logits = call(None)
                self._keep(kind, call, logits)
            else:
                self._graphs.move_to_end(kind)
                try:
                    logits = replay()
                except RuntimeError as error:  # the driver had no room for it; worse errors show again
                    self.stop(f"{type(error).__name__}: {error}")
                    return None
                self.replayed += 1
        return logits[: len(given.kept)]

    def _kind(self, given: StepInputs) -> StepKind | None:
        tokens, kept = len(given.tokens), len(given.kept)
        prompts = [part.tokens for part in given.parts if part.tokens > 1]
        if prompts:
            pieces = sum(-(-each // self._backend.PIECE_TOKENS) for each in prompts)
            rooms = room_for(tokens, TOKENS), room_for(kept, KEPT), room_for(len(given.parts) - len(prompts), SINGLES)
            kind = StepKind(*rooms, room_for(pieces, PIECES))
        else:
            rows = room_for(tokens, ROWS)
            kind = StepKind(rows, rows, rows, 0)
        kind = kind._replace(splits=self._backend.splits(given.parts, kind.singles))
        if not (numbers := given.adapters):
            return kind
        self._follow()
        if self._adapted is None or not numbers <= self._mixed:
            return None
        found = found_kept = kind.tokens  # of single tokens there may be as many
        if prompts:
            own = given.owners, given.owners_kept
            found, found_kept = (room_for(len(pieces_of(each, self._backend.PIECE_ROWS)[0]), PIECES) for each in own)
        return kind._replace(adapted=self._adapted._replace(pieces=found, kept_pieces=found_kept))

    def _follow(self) -> None:
        """Adapters that have come and gone."""
        adapters = self._forward.adapters
        if self._version == adapters.version:
            return
        self._version, self._mixed, tables = adapters.version, adapters.mixed, adapters.tables
        if mixed := [table for table in tables if not self._mixed.isdisjoint(table.by_number)]:
            rank, aligned = adapters.most_rank(self._mixed), adapters.aligned(self._mixed)
            self._adapted = Adapted(rank, frozenset(map(id, mixed)), len(mixed[0].native), aligned)
        self._backend.follow(tables)

    def _make_room(self, given: StepInputs) -> bool:
        """For all of its blocks: whether there are no graphs any more, because they read other memory."""
        blocks, device = sum(len(part.blocks) for part in given.parts), self._forward.attention.memory.device
        if self._fixed is not None and blocks <= self._fixed.room:
            return False
        self.forget()
        self._fixed = FixedColumns(device, LARGEST.widths, max(BLOCKS, 1 << blocks.bit_length()))
        return True

    @contextmanager
    def _begun(self, kind: StepKind, given: StepInputs) -> Iterator[Callable[[torch.Tensor | None], torch.Tensor]]:
        fixed, rows, of = self._fixed, self._backend.PIECE_ROWS, kind.adapted
        assert fixed is not None

        def pack(_: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
            return fixed.put(kind.widths, columns)

        owners = (given.owners, given.owners_kept) if of is not None else ([], [])
        more = [column for each in owners for column in (each, *pieces_of(each, rows))] if of is not None else []
        with self._forward.begun(given, pack, *more) as (call, of_adapters):
            if of is not None:
                tokens, *pieces, kept = of_adapters[:5]
                known = {(False, rows): tuple(pieces), (True, rows): tuple(of_adapters[5:])}
                self._forward.mix(AdapterRows(tokens, kept, owners, self._mixed, of.rank, known, of.aligned))
            yield call

    def _keep(self, kind: StepKind, call: Callable[[torch.Tensor | None], torch.Tensor], logits: torch.Tensor) -> None:
        """From now on such steps are replayed, with logits like these."""
        if self._capture is None:
            self._capture = self._new_capture()
        try:
            most = room_for(kind.kept, KEPT)
            if most not in self._logits:
                self._logits[most] = logits.new_empty(most, logits.shape[-1])
            out = self._logits[most][: kind.kept]
            self._graphs[kind] = self._capture(lambda: call(out))
        except RuntimeError as error:
            self.stop(f"{type(error).__name__}: {error}")
        if len(self._graphs) > GRAPHS:
            gone, _ = self._graphs.popitem(last=False)
            del self._steps[gone]


def capturable(model: nn.Module) -> bool:
    """Whether it asks the device for nothing in a step: some rotary embeddings ask for the largest position."""
    return all(getattr(module, "rope_type", "") not in ("dynamic", "longrope") for module in model.modules())


def graphs_for(forward: Forward) -> StepGraphs | None:
    """None where steps are not computed by Triton's kernels on a CUDA device, or the model cannot be captured."""
    attention = forward.attention
    if attention.memory.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if not capturable(forward.model):
        return None
    from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

    backend = attention.backend
    return StepGraphs(forward, backend, CudaCapture) if isinstance(backend, TritonBackend) else None
