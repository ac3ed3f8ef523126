"""Sections of templates that the GPU has captured, as CUDA graphs: computed as a whole, ahead of the program.

What comes again is captured once, between an instance's frames or after its lease, and replayed from the next time on.
A graph computes at places of its own: inputs are copied there, and what is left of its results is copied away, so
nobody else ever holds its memory. Weights are read where they are, and a section is captured anew if they are
elsewhere. Its memory is given back when any is short.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch
from msgspec import Struct

from dormouse.gpuserver.commands.definitions import Kernel
from dormouse.gpuserver.commands.fast_path import AHEAD_NBYTES, FastPath
from dormouse.gpuserver.commands.sections import TemplateSection, sections
from dormouse.gpuserver.commands.storages import CommandFailed, HeldStorage, StorageTable, whole
from dormouse.gpuserver.commands.template import Template
from dormouse.gpuserver.device.protocol import Capture, Storages

MAX_TEMPLATES: Final = 16
"""Of one instance with captured sections: beyond that, those go that were not used for longest."""

MAX_BREAKS: Final = 64
"""Places where a program has looked within a section: one that looks at more of them is not captured any more."""

MAX_VAIN: Final = 8
"""Captures of one template with no replay between them, of one whose settings or weights change each time."""

INPUT_NBYTES: Final = 64 << 20
"""Inputs of one section, which are copied at each replay. Results are computed ahead: AHEAD_NBYTES."""

HELD_NBYTES: Final = 256 << 20
"""Inputs and results of one instance's sections: beyond that, again those go that were not used for longest."""

_FAILURES: Final = (RuntimeError, LookupError, ValueError, ArithmeticError, CommandFailed)
"""What operations raise."""


class Replayed(Enum):
    YES = 0
    NOT_YET = 1  # its first command waits for an input
    NO_ROOM = 2
    NO = 3


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


class _Captured(Struct):
    section: TemplateSection
    settings: dict[str, list[Any]]
    weights: dict[int, tuple[int, int]]  # addresses and bytes that are read there, by place
    inputs: dict[int, torch.Tensor]  # bytes at places of their own, likewise
    nbytes: int  # of results
    replay: Callable[[], Storages]

    def held_nbytes(self) -> int:
        return self.nbytes + sum(each.nbytes for each in self.inputs.values())


class Captures:
    """Of one instance. ``settings``: its own of numerics, as they are now; ``capture`` None: nothing is captured."""

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
        self._plans: dict[int, Any] = {}
        # All by template:
        self._wanted: OrderedDict[int, _Wanted] = OrderedDict()
        self._known: OrderedDict[int, dict[int, _Captured | None]] = OrderedDict()  # by start; None: refused
        self._breaks: dict[int, set[int]] = {}  # where the program has looked
        self._vain: dict[int, int] = {}  # captures since the last replay

    def compute_by(self, fast: FastPath, plans: dict[int, Any]) -> None:
        self._fast, self._plans = fast, plans

    def forget(self) -> None:
        """Definitions are void."""
        self.drop()
        self._breaks.clear()
        self._vain.clear()

    def drop(self) -> bool:
        """Give up all memory; whether there was any."""
        before = self.counts.dropped
        for number in list(self._known):
            self._give_up(number)
        self._wanted.clear()
        return self.counts.dropped > before

    def came(self, template: Template, commands: list[Any], start: int) -> None:
        """The program has come through this template, which it has followed from ``start`` on."""
        number = template.number
        if self._capture is None or self._fast is None or number in self._known or number in self._wanted:
            return
        breaks = self._breaks.setdefault(number, set())
        breaks.add(start)
        if len(breaks) > MAX_BREAKS or self._vain.get(number, 0) > MAX_VAIN:
            return
        found = ((n, self._table.by_id.get(n)) for n in commands if type(n) is int)
        weights = {n for n, stored in found if stored is not None and stored.persistent}
        self._wanted[number] = _Wanted(template, commands, weights, dict(self._settings))
        if len(self._wanted) > MAX_TEMPLATES:
            self._wanted.popitem(last=False)

    def looked(self, template: Template, place: int) -> None:
        """The program does something else there: no section may hold it."""
        self._breaks.setdefault(template.number, set()).add(place)
        self._give_up(template.number)

    def _give_up(self, number: int) -> None:
        self._wanted.pop(number, None)
        known = self._known.pop(number, {})
        self.counts.dropped += sum(captured is not None for captured in known.values())

    # --- capture

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    def capture(self) -> None:
        """Capture one section, of what has come last. Under inference mode, in the instance's settings."""
        number, wanted = self._wanted.popitem()
        if wanted.settings != self._settings or not self._all_there(wanted):
            self._give_up(number)  # until it comes again
            return
        if wanted.rest is None:
            self._known[number] = {}
            self._vain[number] = self._vain.get(number, 0) + 1
            breaks = self._breaks[number] | wanted.template.waits
            wanted.rest = sections(wanted.template, self._keys, self._plans, breaks)
        if wanted.rest:
            section = wanted.rest.pop()
            self._known[number][section.start] = self._captured(section, wanted)
        if wanted.rest:
            self._wanted[number] = wanted
        while len(self._known) > 1 and (len(self._known) > MAX_TEMPLATES or self._held_nbytes() > HELD_NBYTES):
            self._give_up(next(iter(self._known)))

    def _all_there(self, wanted: _Wanted) -> bool:
        found = (self._table.by_id.get(number) for number in wanted.weights)
        return all(each is not None and each.error is None and each.storage is not None for each in found)

    def _held_nbytes(self) -> int:
        return sum(each.held_nbytes() for known in self._known.values() for each in known.values() if each)

    def _captured(self, section: TemplateSection, wanted: _Wanted) -> _Captured | None:
        assert self._capture is not None
        assert self._fast is not None
        table, commands = self._table, wanted.commands
        scratch = StorageTable(table.device, table.contains)
        steps = self._fast.steps(self._plans, scratch)
        weights: dict[int, tuple[int, int]] = {}
        inputs: dict[int, torch.Tensor] = {}
        fixed: dict[int, HeldStorage] = {}
        results = list(section.results)
        nbytes = 0

        def compute() -> Storages:
            nonlocal nbytes
            scratch.by_id.clear()
            scratch.by_id.update(fixed)
            if steps.run(section.words, 0) < len(section.words):
                raise RuntimeError("a command that is not plain")
            made = [scratch.by_id[number].bytes() for number in results]
            scratch.by_id.clear()  # what is not left of a graph is free within it
            nbytes = sum(each.nbytes() for each in made)
            return made

        try:
            read = {
                place: extent for place, extent in section.outside.values() if commands[place] not in wanted.weights
            }
            if sum(read.values()) > INPUT_NBYTES:
                raise RuntimeError("its inputs are too large")
            for number, (place, extent) in section.outside.items():
                if place in read:
                    inputs[place] = torch.zeros(extent, dtype=torch.uint8, device=table.device)
                    fixed[number] = HeldStorage.of_bytes(inputs[place].untyped_storage())
                else:
                    fixed[number] = table.by_id[commands[place]]
                    weights[place] = fixed[number].address, extent
            replay = self._capture(compute)
            if nbytes > AHEAD_NBYTES:
                raise RuntimeError("its results are too large")
        except _FAILURES:
            self.counts.refused += 1
            return None
        self.counts.captured += 1
        return _Captured(section, wanted.settings, weights, inputs, nbytes, replay)

    # --- replay

    def at(self, template: Template, place: int) -> TemplateSection | None:
        """The captured section that begins there."""
        captured = self._known.get(template.number, {}).get(place)
        return captured.section if captured is not None else None

    def next_start(self, template: Template, place: int, end: int) -> int:
        """Where the next captured section behind ``place`` begins; ``end`` if none does before."""
        known = self._known.get(template.number, {})
        return min((start for start, captured in known.items() if captured and place < start < end), default=end)

    def replay(self, template: Template, section: TemplateSection, commands: list[Any], room: int) -> Replayed:
        """Compute it into `StorageTable.ahead`, at most ``room`` bytes."""
        captured = self._known[template.number][section.start]
        assert captured is not None
        self._known.move_to_end(template.number)
        if captured.settings != self._settings:
            self._give_up(template.number)
            return Replayed.NO
        if captured.nbytes > room:
            return Replayed.NO_ROOM
        table = self._table
        fresh = [commands[place] for place in section.results.values()]
        if any(number in table.ahead or number in table.by_id for number in fresh):
            return Replayed.NO
        for place, (address, extent) in captured.weights.items():
            stored = table.by_id.get(commands[place])
            if stored is None or stored.error is not None or stored.storage is None:
                return Replayed.NO  # it may be on its way: what needs it last need not wait
            if not stored.persistent or stored.address != address or stored.nbytes < extent:
                self._give_up(template.number)
                return Replayed.NO
        given = []
        for place, fixed in captured.inputs.items():
            number = commands[place]
            stored = table.by_id.get(number) or table.ahead.get(number)
            if stored is None:  # it comes between
                needed = max(start for start in template.starts if start <= place)
                if needed == section.start:
                    return Replayed.NOT_YET
                self.looked(template, needed)  # what needs it is for another section
                return Replayed.NO
            there = stored.storage is not None or stored.tensor is not None
            if stored.error is not None or not there or stored.nbytes < fixed.nbytes:
                return Replayed.NO
            given.append(whole(stored.bytes())[: fixed.nbytes])
        try:
            copies = self._computed(captured, given)
        except _FAILURES:  # they are met again, if they are the instance's
            self._give_up(template.number)
            return Replayed.NO
        table.ahead |= {n: HeldStorage.of_bytes(copy.untyped_storage()) for n, copy in zip(fresh, copies, strict=True)}
        self.counts.replayed += 1
        self._vain[template.number] = 0
        return Replayed.YES

    def _computed(self, captured: _Captured, given: list[torch.Tensor]) -> list[torch.Tensor]:
        if given:
            torch._foreach_copy_(list(captured.inputs.values()), given)
        made = [whole(storage) for storage in captured.replay()]
        copies = [torch.empty_like(each) for each in made]
        if made:
            torch._foreach_copy_(copies, made)
        return copies
