"""The plan of a command, known before it runs: its form on the wire, and its predicted results.

One `Plan` per signature, interned with its operation: `prediction` makes it from a call, `definitions` from an
executor's answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.operations import Operation
from dormouse.schemas import stream as wire

Way = tuple[Any, ...]
"""The properties that decide whether there is a kernel for a call."""

Result = tuple[int, Meta | None, int]  # FRESH meta slot | ALIAS meta operand | SAME operand | NOTHING


class Call(NamedTuple):
    """One call of an operation. `remotes` are its remote tensors in the order of the key's TENSOR literals."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    remotes: list[Any]
    is_remote: Callable[[Any], bool]


@dataclass(slots=True, eq=False)
class Plan:
    """A key with its predicted results. `shape` says which fast path serves it."""

    VIEW, FRESH, SAME, GENERAL, ASK = range(5)

    id: int = -1
    shape: int = ASK
    believed: bool = False  # an answer holds for all calls with this signature
    results: list[Result] = field(default_factory=list)
    changes: list[tuple[int, Meta]] = field(default_factory=list)
    bulky: bool = False
    nbytes: int = 0  # of the definition and the largest operands, about
    listed: bool = False  # the results are a list or tuple
    tells: bool = False  # waits for its outcome
    way: Way | None = None  # of calling the operation that has not succeeded yet: it waits once
    fresh_nbytes: list[int] = field(default_factory=list)  # by slot
    writes: tuple[int, ...] = ()  # operands written, counted over tensors
    written_at: tuple[int, ...] = ()  # their places among all operands
    definition: list[Any] = field(default_factory=list)
    metas: list[Meta] = field(default_factory=list)  # that the definition names
    single: Meta | None = None  # the one result's

    def tell(self, way: Way | None = None) -> None:
        """Wait for the outcome, each time or until a call in this way has succeeded."""
        self.shape, self.tells, self.way = Plan.GENERAL, True, way

    def succeeded(self, operation: Operation) -> None:
        if self.way is not None:
            operation.taken.add(self.way)
            self.tells, self.way = False, None
            if not self.bulky:
                self.choose_path()

    def choose_path(self) -> None:
        """Of the fast paths, by its results."""
        self.shape = Plan.GENERAL
        if self.changes:
            return
        if not self.writes and self.results and all(kind in (wire.ALIAS, wire.SAME) for kind, _, _ in self.results):
            self.shape, self.single = Plan.VIEW, self.results[0][1]
        elif len(self.results) == 1 and not self.listed:
            kind, meta, _ = self.results[0]
            if kind == wire.FRESH:
                self.shape, self.single = Plan.FRESH, meta
            elif kind == wire.SAME:
                self.shape = Plan.SAME
