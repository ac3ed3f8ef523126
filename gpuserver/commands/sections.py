"""Sections of a template: consecutive plain operations that a GPU can be given at once. Pure.

A section reads weights and earlier storages, its inputs, and writes only storages that it has made itself. So it can be
computed as a whole, at addresses of its own, each time the sequence recurs. It ends where the program has looked at a
value, or the executor needs Python.
"""

from collections.abc import Container
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

from dormouse.gpuserver.commands.definitions import Kernel
from dormouse.gpuserver.commands.template import Template
from dormouse.schemas import stream as wire

FEWEST_OPERATIONS: Final = 4
"""Fewer are computed one by one as fast."""


class TemplateSection(Struct):
    """Commands ``[start, end)`` of a template; all places are those of storages' numbers in it."""

    start: int
    end: int
    operations: int
    words: list[Any]  # the same commands, for themselves: storages numbered from 0 on
    storages: int  # so many
    outside: dict[int, tuple[int, int]]  # by such a number: the first place, and bytes that are read
    results: dict[int, int]  # of storages made here that remain, likewise: the place
    frees: list[int]  # places of storages from before that are freed


def sections(
    template: Template, keys: dict[int, Kernel], plain: Container[int], breaks: set[int]
) -> list[TemplateSection]:
    """Of at least FEWEST_OPERATIONS, in order. None holds one of ``breaks`` but as its start."""
    found: list[TemplateSection] = []
    draft = _Draft(0)
    for start, end in pairwise(sorted(template.starts)):
        if start in breaks:
            draft.finish(found)
            draft = _Draft(start)
        if not draft.takes(template.words[start:end], start, keys, plain):
            draft.finish(found)
            draft = _Draft(end)
    draft.finish(found)
    return found


class _Draft:
    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.operations = 0
        self._words: list[Any] = []
        self._count = 0  # of our numbers
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
            number = word[1 + place] = self._number(command[1 + place])
            if number not in self._made:
                first, nbytes = self._outside.get(number, (start + 1 + place, 0))
                self._outside[number] = first, max(nbytes, meta.extent)
        for place in range(1 + kernel.n_operands, len(command)):
            self._numbers.pop(command[place], None)
            number = word[place] = self._number(command[place])
            self._made[number] = start + place
        self._words += word
        self.operations += 1

    def _number(self, number: int) -> int:
        if number not in self._numbers:
            self._numbers[number] = self._count
            self._count += 1
        return self._numbers[number]

    def _free(self, command: list[Any], start: int) -> None:
        own = []
        for place, number in enumerate(command[2:], start + 2):
            if (ours := self._numbers.get(number)) in self._made:
                own.append(ours)
                del self._made[ours], self._numbers[number]
            else:
                self._frees.append(place)
        if own:
            self._words += [wire.FREE, len(own), *own]

    def finish(self, found: list[TemplateSection]) -> None:
        if self.operations >= FEWEST_OPERATIONS:
            own = self._words, self._count, self._outside, self._made, self._frees
            found.append(TemplateSection(self.start, self.end, self.operations, *own))


def _written(command: list[Any], kernel: Kernel) -> list[int]:
    return [command[1 + kernel.tensors[index]] for index in kernel.written]
