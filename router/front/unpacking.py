"""Decodes a body's Content-Encoding as it comes, step by step: the caller of the steps bounds their output.

Pure: no I/O. Bodies of the Open Inference Protocol are their instance's to unpack.
"""

import zlib
from typing import Final

CODINGS: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""And zlib's name for each."""

STEP_NBYTES: Final = 256 << 10
"""A millisecond's work, at most."""

USELESS_NBYTES: Final = 64 << 10
"""Of packing that makes a body longer."""


class BadCoding(ValueError):
    """The body is not packed as its header claims."""


class Unpacker:
    """Of one body: pieces are added, and taken off until there is nothing left of them."""

    def __init__(self, coding: bytes) -> None:
        self._coding = coding
        self._machine = zlib.decompressobj(CODINGS[coding])
        self._packed = b""
        self._packed_nbytes = self._nbytes = 0
        self._is_full = False  # the last step was: its machine may have more without another byte

    def add(self, piece: bytes) -> None:
        self._packed += piece

    def step(self) -> bytes:
        """The next of it; nothing if more must be added. Raises BadCoding."""
        while self._packed or self._is_full:
            if self._machine.eof:
                if self._coding == b"deflate":
                    raise self._wrong("it goes on behind its end")
                self._machine = zlib.decompressobj(CODINGS[self._coding])  # a file of gzip may be several, one by one
            before_nbytes = len(self._packed)
            try:
                data = self._machine.decompress(self._packed, STEP_NBYTES)
            except zlib.error as error:
                raise self._wrong(str(error)) from None
            self._packed = self._machine.unused_data if self._machine.eof else self._machine.unconsumed_tail
            self._packed_nbytes += before_nbytes - len(self._packed)
            self._nbytes += len(data)
            self._is_full = len(data) == STEP_NBYTES and not self._machine.eof
            if self._packed_nbytes > self._nbytes + USELESS_NBYTES:
                raise self._wrong("it is longer than what is in it")
            if data:
                return data
        return b""

    def end(self) -> None:
        """Nothing more will be added. Raises BadCoding."""
        if self._packed_nbytes and not self._machine.eof:
            raise self._wrong("it ends too early")

    def _wrong(self, why: str) -> BadCoding:
        return BadCoding(f"the body is not {self._coding.decode()}, as its Content-Encoding says: {why}")
