"""Takes over the models that a store of an older version has left, and leaves its own to one of a newer version. The
contents and their format are defined in memory/legacy.py.
"""

import socket
from typing import Any

from dormouse.core.listening import LEGACY_FD, inherited_at
from dormouse.gpuserver.store.memory import legacy
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.slabs import Slabs
from dormouse.gpuserver.store.memory.store_memory import StoreMemory
from dormouse.schemas.errors import RemoteProtocolError


def inherited(budget_nbytes: int, pinnable: bool, log: Any) -> tuple[Slabs, legacy.Legacy | None]:
    """The slabs, and the legacy of a store of an older version in them."""
    slabs = Slabs(budget_nbytes, pinnable=pinnable)
    end = inherited_at(LEGACY_FD)
    if end is None:
        return slabs, None
    left = None
    try:
        with end:
            left = legacy.take(end)
        if left is None:
            return slabs, None
        if left.books.pinnable is not pinnable:
            raise ValueError("they are for other GPUs")
        slabs.adopt(dict(left.books.slabs), (segment.span for segment in left.books.segments))
    except (RemoteProtocolError, ValueError) as error:
        log.warning("legacy_refused", reason=str(error))
        for memory in {} if left is None else left.maps.values():
            memory.close()
        return Slabs(budget_nbytes, pinnable=pinnable), None
    for number in slabs.gone:
        left.maps.pop(number).close()
    slabs.gone.clear()
    return slabs, left


def bequeath(heir: socket.socket, functions: KeptFunctions, memory: StoreMemory, log: Any) -> None:
    """To the owner of the other end of ``heir``. Nothing is copied or hashed here any more."""
    memory.rest()
    books = legacy.books_of(functions, memory.slabs)
    try:
        legacy.scrub(books, memory.slabs, memory.maps)
        legacy.leave(heir, books, memory.maps)
    except OSError as error:  # then it has only the files
        log.warning("nothing_left", reason=str(error))
    else:
        log.info("legacy_left", slabs=len(books.slabs), segments=len(books.segments))
