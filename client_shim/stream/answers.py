"""An executor's answers to waiting commands, errors included, and whether a command may have failed unreported.

An answer reports every failure before it. So after an answer, no earlier command needs another. Used under the stream's
lock only.
"""

from itertools import count
from typing import Any

from dormouse.client_shim.stream.call_sites import describe
from dormouse.client_shim.stream.connection import StreamConnection
from dormouse.client_shim.stream.failures import exception
from dormouse.client_shim.stream.remains import Remains
from dormouse.schemas import stream as wire


class Answers:
    """Of one stream. ``remains`` knows errors that were reported in an earlier lease."""

    def __init__(self, remains: Remains) -> None:
        self.round_trips = 0
        self.next_token = count(1).__next__
        self.unanswered = False  # an upload or an empty storage since an answer covered all before it
        self._covered = 0  # commands recorded then
        self._failed = False  # an error was reported in this lease: results of failed commands may be kept
        self._remains = remains

    def begin_lease(self, recorded: int) -> None:
        self._covered, self.unanswered, self._failed = recorded, False, False

    def unheard(self, recorded: int) -> bool:
        """Whether a command's failure might go unreported without another answer."""
        return self._failed or self.unanswered or self._covered != recorded

    def wait(self, connection: StreamConnection, token: int, recorded: int, covers: bool) -> Any:
        """The answer to a waiting command, which is an error if one before it has failed, where it `covers` them."""
        self.round_trips += 1
        kind, *rest = connection.wait(token)
        if kind == wire.VALUE:
            if covers:
                self._covered, self.unanswered = recorded, False
            return rest[0]
        self._failed = True
        raise self.error(connection, *rest)

    def error(
        self, connection: StreamConnection, name: str, text: str, where: list[Any] | None, storage: int | None = None
    ) -> Exception:
        """The exception for an executor's failure; for a storage without a value since an earlier lease, the reason for
        that.
        """
        if storage is not None and (known := self._remains.error(storage)) is not None:
            return known
        site = connection.site(where[0], where[1]) if where else None
        return exception(name, text, where[2] if where else None, describe(site) if site else None)
