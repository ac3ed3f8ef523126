"""Labels in the output of an instance that serves several requests: they name the requests that printed it. Pure.

The instance writes numbers of requests, as the router has given them, in front of what is printed for these, and after
it a label without numbers::

    \\x1e 12 \\x1f one request's \\x1e \\x1f somebody's \\x1e 12,13 \\x1f a batch's \\x1e \\x1f

Text without one (other programs, C++) is nobody's. A label is a claim: the router believes numbers of requests that the
instance has.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

NOBODYS: Final = b"\x1e\x1f"
LABEL_NBYTES: Final = 2048
"""Of one: so that it and some text are one write to a pipe, which no other parts (PIPE_BUF)."""

_LABEL: Final = re.compile(rb"\x1e([0-9,]{0,%d})\x1f" % LABEL_NBYTES)
_BEGUN: Final = re.compile(rb"\x1e[0-9,]{0,%d}" % LABEL_NBYTES)


def label(numbers: Iterable[int]) -> bytes:
    """Of as many as have room."""
    said = ",".join(map(str, numbers))[: LABEL_NBYTES + 1]
    if len(said) > LABEL_NBYTES:
        said = said.rpartition(",")[0]
    return f"\x1e{said}\x1f".encode()


class LabelReader:
    """Reads them, in pieces that may end anywhere."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()
        self._rest = b""

    def read(self, data: bytes) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Pieces of text with the requests that they belong to, in order."""
        data, self._rest = self._rest + data, b""
        begun = data.rfind(b"\x1e")
        if begun >= 0 and _BEGUN.fullmatch(data, begun):
            data, self._rest = data[:begun], data[begun:]
        for place, part in enumerate(_LABEL.split(data)):
            if place % 2:
                self._numbers = tuple(int(each) for each in part.split(b",") if each)
            elif part:
                yield self._numbers, part

    def rest(self) -> bytes:
        """At the end, the rest that looked like the beginning of one."""
        rest, self._rest = self._rest, b""
        return rest
