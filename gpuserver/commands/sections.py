"""Sections of a template: consecutive plain operations that a GPU can be given at once. Pure.

A section reads weights and what was there before it, its inputs, and writes nothing but what it has made itself. So it
can be computed as a whole, at places of its own, as often as the sequence comes. It ends where the program has looked
at a value, or the executor needs Python.
"""

from collections.abc import Container
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

from dormouse.gpuserver.commands.definitions import Kernel
from dormouse.gpuserver.commands.template import Template
from dormouse.schemas import stream as wire

FEWEST_OPERATIONS: Final = 8
"""Fewer are given to a GPU one by one as fast: a replay takes about six calls of the driver beside its copies."""


class TemplateSection(Struct):
    """Commands ``[start, end)`` of a template; all places are those of storages' numbers in it."""

    start: int
    end: int
    operations: int
    words: list[Any]  # the same commands, for themselves: storages numbered from 0 on
    outside: dict[int, tuple[int, int]]  # by such a number: the first place, and bytes that are read
    results: dict[int, int]  # what is left of what was made, likewise: its place
    frees: list[int]  # places of storages from before that are freed


def sections(
    template: Template, keys: dict[int, Kernel], plain: Container[int], breaks: set[int]
) -> list[TemplateSection]:
    """Of at least FEWEST_OPERATIONS, in order. None holds one of ``breaks`` but as its start."""
    found: list[TemplateSection] = []
    draft = _Draft(0)
    for start, end in pairwise(sorted(template.starts)):
        if start in breaks:
            draft = _finished(draft, found, start)
        if not draft.takes(template.words[start:end], start, keys, plain):
            _finished(draft, found, start)
            draft = _Draft(end)
    _finished(draft, found, len(template.words))
    return found


def _finished(draft: "_Draft", found: list[TemplateSection], end: int) -> "_Draft":
    if draft.operations >= FEWEST_OPERATIONS:
        found.append(draft.section())
    return _Draft(end)


class _Draft:
    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.operations = 0
        self._words: list[Any] = []
        self._numbers: dict[int, int] = {}  # ours, by those of the template
        self._made: dict[int, int] = {}  # place, by ours
        self._outside: dict[int, tuple[int, int]] = {}
        self._frees: list[int] = []

    def takes(self, command: list[Any], start: int, keys: dict[int, Kernel], plain: Container[int]) -> bool:
        """Add a command, if it can be part of the section."""
        code = command[0]
        if code == wire.FREE:
            self._free(command, start)
        elif code in plain and all(self._numbers.get(number) in self._made for number in _written(command, keys[code])):
            self._operation(command, start, keys[code])
        else:
            return False
        self.end = start + len(command)
        return True

    def _operation(self, command: list[Any], start: int, kernel: Kernel) -> None:
        word = list(command)
        for place, meta in zip(kernel.tensors, kernel.metas, strict=True):
            number = self._numbers.setdefault(command[1 + place], len(self._numbers))
            word[1 + place] = number
            if number not in self._made:
                first, nbytes = self._outside.get(number, (start + 1 + place, 0))
                self._outside[number] = first, max(nbytes, meta.extent)
        for place in range(1 + kernel.n_operands, len(command)):
            number = self._numbers[command[place]] = len(self._numbers)
            word[place] = number
            self._made[number] = start + place
        self._words += word
        self.operations += 1

    def _free(self, command: list[Any], start: int) -> None:
        own = []
        for place, number in enumerate(command[2:], start + 2):
            if (ours := self._numbers.get(number)) in self._made:
                own.append(ours)
                del self._made[ours]
            else:
                self._frees.append(place)
        if own:
            self._words += [wire.FREE, len(own), *own]

    def section(self) -> TemplateSection:
        return TemplateSection(
            self.start, self.end, self.operations, self._words, self._outside, self._made, self._frees
        )


def _written(command: list[Any], kernel: Kernel) -> list[int]:
    return [command[1 + kernel.tensors[index]] for index in kernel.written]
