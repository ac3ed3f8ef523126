"""Sends an answer in parts to the router: encodes each part, and limits how many are on their way."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from dormouse.client_shim.instance import answer_bodies, codec
from dormouse.schemas import messages as m


class PartSender:
    """The parts of one answer, in order.

    Bytes go as they are. Everything else goes as server-sent events: text as it is, other values as JSON. The first
    part decides which of the two it is.

    Args:
        send: to the router.
        wait_taken: wait until the client has taken more of this request's parts; returns how many bytes.
    """

    def __init__(
        self,
        request: int,
        send: Callable[[m.InstanceToRouter], None],
        wait_taken: Callable[[int], int],
        head: m.AnswerHead | None = None,
    ) -> None:
        self._request, self._head = request, head
        self._send, self._wait_taken = send, wait_taken
        self._kind: m.StreamKind | None = None
        self._room_nbytes = m.STREAM_WINDOW_NBYTES

    def put(self, part: Any) -> None:
        """Raises BadResponse; waits while the client has not taken enough."""
        raw = isinstance(part, bytes | bytearray | memoryview)
        kind: m.StreamKind = m.RAW if raw else m.SSE
        if self._kind not in (None, kind):
            raise codec.BadResponse("handle() yielded bytes and other values in one answer: yield only one of the two")
        self._put(answer_bodies.plain_bytes(part) if raw else memoryview(codec.event(part)), kind)

    def finish(self) -> None:
        """An answer without parts is one, too."""
        if self._kind is None:
            self._put(memoryview(b""), m.SSE)

    def _put(self, data: memoryview, kind: m.StreamKind) -> None:
        for start in range(0, max(1, len(data)), m.CHUNK_NBYTES):
            piece = bytes(data[start : start + m.CHUNK_NBYTES])
            while self._room_nbytes < len(piece):
                self._room_nbytes += self._wait_taken(self._request)
            self._room_nbytes -= len(piece)
            first, self._kind = self._kind is None, kind
            part = m.AnswerPart(request=self._request, body=piece)
            self._send(structs.replace(part, kind=kind, head=self._head) if first else part)
