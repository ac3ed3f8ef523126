"""Templates: sequences of commands that an instance has sent before, and may send again. Pure."""

from typing import Any, Final

from msgspec import Struct

from dormouse.gpuserver.commands.control import count
from dormouse.gpuserver.commands.definitions import Kernel, ProtocolViolation, brief
from dormouse.schemas import stream as wire

_MOST: Final = 1 << 62
"""The library's numbers have 63 bits."""


class Template(Struct):
    """Commands with the numbers of storages relative to that of the first that was made there."""

    number: int
    words: list[Any]
    relative: list[int]  # places of such numbers
    old: list[tuple[int, int]]  # places of storages that the lease had before, and which these are
    starts: set[int]  # of commands; its end is one, too
    waits: set[int] = set()  # places that are not passed ahead: something was written there that nobody had foreseen
    stalls: set[int] = set()  # commands that were not computed ahead, as far as reported to the instance

    def instance(self, base: int, olds: list[int], steps: Any) -> list[Any]:
        """The commands, where the last storage before them has the number ``base``. ``steps``: the library's, or None.
        Raises IndexError.
        """
        first = base + wire.RELATIVE
        if steps is not None and 0 <= first < _MOST:
            instance: list[Any] = steps.instance(self.words, self.relative, self.old, first, olds)
            return instance
        words = self.words.copy()
        for place in self.relative:
            words[place] += first
        for place, which in self.old:
            words[place] = olds[which]
        return words


def read(number: int, words: list[Any], keys: dict[int, Kernel]) -> Template:
    """Raises ProtocolViolation, and IndexError and TypeError as malformed commands do."""
    starts: set[int] = set()
    relative: list[int] = []
    old: list[tuple[int, int]] = []
    at = 0
    while at < len(words):
        starts.add(at)
        kernel = keys.get(words[at])
        if kernel is not None and kernel.predicted is not None:
            first = at + 1 + kernel.n_operands
            end = first + kernel.n_fresh
            operands = [at + 1 + place for place in kernel.tensors]
        elif words[at] == wire.FREE:
            first = at + 2
            end = first + count(words[at + 1])
            operands = []
        else:
            raise ProtocolViolation(f"{brief(words[at])} in a template is neither a key nor FREE")
        if end > len(words):
            raise ProtocolViolation("a template ends within a command")
        for place in (*operands, *range(first, end)):
            if type(words[place]) is not int:
                raise ProtocolViolation("a storage in a template has no number")
            if words[place] <= wire.OLD:
                old.append((place, wire.OLD - words[place]))
            elif words[place] < 0:
                relative.append(place)
        at = end
    starts.add(at)
    return Template(number, words, relative, old, starts)
