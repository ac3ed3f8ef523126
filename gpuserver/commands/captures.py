"""Sections of templates that are computed as a whole, ahead of the program.

A section that recurs is prepared once, between an instance's frames or after its lease: as a program of the library
(program.h), which is computed in slices, without Python. On a GPU that is captured as a CUDA graph. A graph computes at
addresses of its own: inputs are copied in and remaining results are copied out, so nobody else ever holds its memory.
Weights are read in place; a section is captured anew if they have moved. Its memory is released when memory is short.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

import torch
from msgspec import Struct

from dormouse.gpuserver.commands.definitions import Kernel
from dormouse.gpuserver.commands.fast_path import AHEAD_NBYTES, FastPath
from dormouse.gpuserver.commands.sections import TemplateSection, sections
from dormouse.gpuserver.commands.storages import CommandFailed, HeldStorage, StorageTable, whole
from dormouse.gpuserver.commands.template import Template
from dormouse.gpuserver.device.protocol import Capture, Storages

MAX_TEMPLATES: Final = 16
"""Of one instance with captured sections: beyond that, the least recently used are dropped."""

MAX_BREAKS: Final = 64
"""Places where a program has looked within a section: one that looks at more of them is not captured any more."""

MAX_VAIN: Final = 8
"""Captures of one template with no replay between them, of one whose settings or weights change each time."""

INPUT_NBYTES: Final = 64 << 20
"""Inputs of one section, which are copied at each replay. Results are computed ahead: AHEAD_NBYTES."""

HELD_NBYTES: Final = 256 << 20
"""Inputs and results of one instance's sections: beyond that, again the least recently used are dropped."""

FAILURES: Final = (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError, CommandFailed)
"""Exceptions that operations raise."""

FEWEST_CAPTURED: Final = 8
"""Fewer operations are given to a GPU one by one as fast: a replay takes about six calls beside its copies."""


class Waits(Enum):
    """Why a section is not computed as a whole."""

    NOT_YET = 0  # its first command waits for an input
    NO_ROOM = 1
    NO = 2


class Computing(Protocol):
    """A section that is being computed."""

    def go(self, nanoseconds: int) -> bool:
        """Compute for about so long, below 0: to the end; whether that is reached. Raises exceptions of operations."""

    def results(self) -> list[HeldStorage]:
        """In the section's order, at the end."""


class CaptureCounts(Struct):
    """Ever: sections that were captured, that could not be, that were given up, and replays."""

    captured: int = 0
    refused: int = 0
    dropped: int = 0
    replayed: int = 0


class _Wanted(Struct):
    """A template as it came last."""

    template: Template
    commands: list[Any]
    weights: set[int]
    settings: dict[str, list[Any]]  # of numerics: they choose its kernels
    rest: list[TemplateSection] | None = None  # to be captured; None: not planned yet


class _Graph(Struct):
    settings: dict[str, list[Any]]
    weights: dict[int, tuple[int, int]]  # addresses and bytes that are read there, by place
    inputs: dict[int, torch.Tensor]  # bytes at places of their own, likewise
    nbytes: int  # of results
    replay: Callable[[], Storages]

    def held_nbytes(self) -> int:
        return self.nbytes + sum(each.nbytes for each in self.inputs.values())


class _Known(Struct):
    section: TemplateSection
    program: Any  # the library's
    graph: _Graph | None


class _Replay(Struct):
    """A graph with its inputs."""

    graph: _Graph
    given: list[torch.Tensor]
    made: list[torch.Tensor] = []

    def go(self, _: int) -> bool:
        if self.given:
            torch._foreach_copy_(list(self.graph.inputs.values()), self.given)
        places = [whole(storage) for storage in self.graph.replay()]
        self.made = [torch.empty_like(each) for each in places]
        if places:
            torch._foreach_copy_(self.made, places)
        return True

    def results(self) -> list[HeldStorage]:
        return [HeldStorage.of_bytes(each.untyped_storage()) for each in self.made]


class Captures:
    """Of one instance. ``settings``: its own of numerics, as they are now; ``capture`` None: no graphs are made."""

    def __init__(
        self,
        table: StorageTable,
        keys: dict[int, Kernel],
        settings: dict[str, list[Any]],
        capture: Capture | None,
    ) -> None:
        self.counts = CaptureCounts()
        self._table, self._keys, self._settings, self._capture = table, keys, settings, capture
        self._fast: FastPath | None = None
        self._steps: Any = None
        self._plans: dict[int, Any] = {}
        # All by template:
        self._wanted: OrderedDict[int, _Wanted] = OrderedDict()
        self._known: OrderedDict[int, dict[int, _Known | None]] = OrderedDict()  # by start; None: refused
        self._breaks: dict[int, set[int]] = {}  # where the program has looked
        self._vain: dict[int, int] = {}  # captures since the last replay
        self._failures: dict[int, int] = {}

    def compute_by(self, fast: FastPath, steps: Any, plans: dict[int, Any]) -> None:
        self._fast, self._steps, self._plans = fast, steps, plans

    def forget(self) -> None:
        """Definitions are void."""
        for number in list(self._known):
            self._give_up(number)
        self._wanted.clear()
        self._breaks.clear()
        self._vain.clear()
        self._failures.clear()

    def drop(self) -> bool:
        """Give up all memory; whether there was any."""
        graphs = [number for number in self._known if self._held_nbytes(number)]
        for number in graphs:
            self._give_up(number)
        return bool(graphs)

    def came(self, template: Template, commands: list[Any], start: int) -> None:
        """The program has come through this template, which it has followed from ``start`` on."""
        number = template.number
        if self._fast is None or number in self._known or number in self._wanted:
            return
        breaks = self._breaks.setdefault(number, set())
        breaks.add(start)
        vain = max(self._vain.get(number, 0), self._failures.get(number, 0))
        if len(breaks) > MAX_BREAKS or vain > MAX_VAIN:
            return
        weights: set[int] = set()
        if self._capture is not None:
            found = ((n, self._table.by_id.get(n)) for n in commands if type(n) is int)
            weights = {n for n, stored in found if stored is not None and stored.persistent}
        self._wanted[number] = _Wanted(template, commands, weights, dict(self._settings))
        if len(self._wanted) > MAX_TEMPLATES:
            self._wanted.popitem(last=False)

    def looked(self, template: Template, place: int) -> None:
        """The program does something else there: no section may hold it."""
        self._breaks.setdefault(template.number, set()).add(place)
        self._give_up(template.number)

    def failed(self, template: Template) -> None:
        """A section of it could not be computed. If the error is the instance's, its operations raise it again."""
        self._failures[template.number] = self._failures.get(template.number, 0) + 1
        self._give_up(template.number)

    def _give_up(self, number: int) -> None:
        self._wanted.pop(number, None)
        known = self._known.pop(number, {})
        self.counts.dropped += sum(each is not None for each in known.values())

    # --- beforehand

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    def capture(self) -> None:
        """Prepare one section of the newest templates. Under inference mode, in the instance's settings."""
        number, wanted = self._wanted.popitem()
        if self._capture is not None and (wanted.settings != self._settings or not self._all_there(wanted)):
            self._give_up(number)  # until it comes again
            return
        if wanted.rest is None:
            self._known[number] = {}
            self._vain[number] = self._vain.get(number, 0) + 1
            breaks = self._breaks[number] | wanted.template.waits
            wanted.rest = sections(wanted.template, self._keys, self._plans, breaks)
        if wanted.rest:
            section = wanted.rest.pop()
            self._known[number][section.start] = self._ready(section, wanted)
        if wanted.rest:
            self._wanted[number] = wanted
        while len(self._known) > 1 and (len(self._known) > MAX_TEMPLATES or self._held_nbytes() > HELD_NBYTES):
            self._give_up(next(iter(self._known)))

    def _all_there(self, wanted: _Wanted) -> bool:
        found = (self._table.by_id.get(number) for number in wanted.weights)
        return all(each is not None and each.error is None and each.storage is not None for each in found)

    def _held_nbytes(self, *numbers: int) -> int:
        """Of these, or of all."""
        known = (self._known[number] for number in numbers or self._known)
        return sum(each.graph.held_nbytes() for those in known for each in those.values() if each and each.graph)

    def _ready(self, section: TemplateSection, wanted: _Wanted) -> _Known | None:
        assert self._fast is not None
        places = [-1] * section.storages
        for number, (place, _) in section.outside.items():
            places[number] = place
        try:
            program = self._fast.program(section.words, self._plans, places, list(section.results))
        except ValueError:
            program = None
        if program is None or program.nbytes > AHEAD_NBYTES:
            self.counts.refused += 1
            return None
        graph = None
        if self._capture is not None and section.operations >= FEWEST_CAPTURED:
            try:
                graph = self._graph(self._capture, section, program, wanted)
            except FAILURES:
                self.counts.refused += 1
                return _Known(section, program, None)
        self.counts.captured += 1
        return _Known(section, program, graph)

    def _graph(self, capture: Capture, section: TemplateSection, program: Any, wanted: _Wanted) -> _Graph:
        assert self._fast is not None
        table, commands = self._table, wanted.commands
        scratch = StorageTable(table.device, table.contains)
        steps = self._fast.steps(self._plans, scratch)
        weights: dict[int, tuple[int, int]] = {}
        inputs: dict[int, torch.Tensor] = {}
        nbytes = 0

        def compute() -> Storages:
            nonlocal nbytes
            running = steps.begin(program, commands)
            if running is None or type(running) is int:
                raise RuntimeError("what it reads is not there")
            running.go(-1)
            made = [stored.bytes() for stored in running.results()]
            nbytes = sum(each.nbytes() for each in made)
            return made

        read = {place: extent for place, extent in section.outside.values() if commands[place] not in wanted.weights}
        if sum(read.values()) > INPUT_NBYTES:
            raise RuntimeError("its inputs are too large")
        for place, extent in section.outside.values():
            number = commands[place]
            if place in read:
                inputs[place] = torch.zeros(extent, dtype=torch.uint8, device=table.device)
                scratch.by_id[number] = HeldStorage.of_bytes(inputs[place].untyped_storage())
            else:
                scratch.by_id[number] = table.by_id[number]
                weights[place] = table.by_id[number].address, extent
        replay = capture(compute)
        return _Graph(wanted.settings, weights, inputs, nbytes, replay)

    # --- when it comes

    def at(self, template: Template, place: int) -> TemplateSection | None:
        """The section that begins there."""
        known = self._known.get(template.number, {}).get(place)
        return known.section if known is not None else None

    def next_start(self, template: Template, place: int, end: int) -> int:
        """Where the next section behind ``place`` begins; ``end`` if none does before."""
        known = self._known.get(template.number, {})
        return min((start for start, each in known.items() if each and place < start < end), default=end)

    def begin(self, template: Template, section: TemplateSection, commands: list[Any], room: int) -> Computing | Waits:
        """Begin with it, if its results have no more than ``room`` bytes."""
        number = template.number
        known = self._known[number][section.start]
        assert known is not None
        self._known.move_to_end(number)
        if known.program.nbytes > room:
            return Waits.NO_ROOM
        fresh = (commands[place] for place in section.results.values())
        if any(made in self._table.ahead or made in self._table.by_id for made in fresh):
            return Waits.NO
        begun: Computing | int | None
        if known.graph is not None:
            begun = self._replay(known.graph, template, commands)
        else:
            begun = self._steps.begin(known.program, commands)
        if isinstance(begun, int):
            needed = max(start for start in template.starts if start <= begun)
            if needed == section.start:
                return Waits.NOT_YET
            self.looked(template, needed)  # the command that needs it is for another section
            return Waits.NO
        return Waits.NO if begun is None else begun

    def _replay(self, graph: _Graph, template: Template, commands: list[Any]) -> _Replay | int | None:
        """As `Steps.begin`."""
        table = self._table
        if graph.settings != self._settings:
            self._give_up(template.number)
            return None
        for place, (address, extent) in graph.weights.items():
            stored = table.by_id.get(commands[place])
            if stored is None or stored.error is not None or stored.storage is None:
                return None  # it may be on its way: commands that need it last need not wait
            if not stored.persistent or stored.address != address or stored.nbytes < extent:
                self._give_up(template.number)
                return None
        given = []
        for place, fixed in graph.inputs.items():
            number = commands[place]
            stored = table.by_id.get(number) or table.ahead.get(number)
            if stored is None:
                return place
            there = stored.storage is not None or stored.tensor is not None
            if stored.error is not None or not there or stored.nbytes < fixed.nbytes:
                return None
            given.append(whole(stored.bytes())[: fixed.nbytes])
        return _Replay(graph, given)

    def computed(self, template: Template) -> None:
        self.counts.replayed += 1
        self._vain[template.number] = 0
