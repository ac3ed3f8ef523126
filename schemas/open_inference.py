"""Content types by which the router describes a request of the Open Inference Protocol to an instance, and the instance
its answer. The instance alone reads the bodies. Pure.

The type carries the facts of the request's line and header: the length of the JSON before the binary tensors, how the
whole is compressed, and the model's name and version for the answer.
"""

import re
from typing import Final, NamedTuple

KIND: Final = "application/x-open-inference"

ENCODINGS: Final = ("gzip", "deflate")

ALL: Final = -1
"""As a length of the JSON: there are no binary tensors."""

_REQUEST: Final = re.compile(
    rf"{KIND}; model=([\w.-]{{1,63}}); version=(\d{{1,18}}); header=(-1|\d{{1,18}}); most=(\d{{1,18}})"
    r"; encoding=(gzip|deflate|); accept=(gzip|deflate|)",
    re.ASCII,
)
_ANSWER: Final = re.compile(rf"{KIND}; header=(-1|\d{{1,18}}); encoding=(gzip|deflate|)", re.ASCII)


class InferenceKind(NamedTuple):
    """Of a request. ``header``: bytes of JSON, 0 if the body is one tensor and nothing else. ``most``: what is
    compressed may have so many bytes. ``accept``: how the answer is to be compressed.
    """

    model: str
    version: int
    header: int
    most: int
    encoding: str = ""
    accept: str = ""

    def __str__(self) -> str:
        numbers = f"version={self.version}; header={self.header}; most={self.most}"
        return f"{KIND}; model={self.model}; {numbers}; encoding={self.encoding}; accept={self.accept}"

    @staticmethod
    def of(kind: str) -> "InferenceKind | None":
        """None for any other content type."""
        if (found := _REQUEST.fullmatch(kind)) is None:
            return None
        return InferenceKind(found[1], int(found[2]), int(found[3]), int(found[4]), found[5], found[6])


class InferredKind(NamedTuple):
    """Of an answer."""

    header: int
    encoding: str = ""

    def __str__(self) -> str:
        return f"{KIND}; header={self.header}; encoding={self.encoding}"

    @staticmethod
    def of(kind: str) -> "InferredKind | None":
        found = _ANSWER.fullmatch(kind)
        return None if found is None else InferredKind(int(found[1]), found[2])
