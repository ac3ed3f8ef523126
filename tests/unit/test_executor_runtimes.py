"""What instances send for their runtimes: whatever cannot be passed on is their mistake."""

from typing import Any

import msgspec
import pytest

from dormouse.core.links.fds import MAX_PACKET_NBYTES
from dormouse.gpuserver.executor.runtimes import INNER_NBYTES, Runtimes
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

NOBODY: Any = None


def heard(data: bytes) -> list[Any]:
    """What the instance is answered."""
    answers: list[Any] = []

    class Host:
        def reply(self, instance: str, message: bytes) -> None:
            answers.append(msgspec.msgpack.decode(message, type=m.ExecutorToLlm))

    host: Any = Host()
    Runtimes(host, NOBODY, NOBODY, 1, yield_s=1.0, leave_s=1.0).heard("1-1", data)
    return answers


def test_what_no_packet_can_hold_is_refused() -> None:
    largest = msgspec.msgpack.encode(m.ToRuntime(serial=1, data=bytes(INNER_NBYTES)))
    assert heard(largest) == [m.SeatOver(serial=1)]
    assert len(msgspec.msgpack.encode(m.ForRuntime(data=bytes(INNER_NBYTES)))) <= MAX_PACKET_NBYTES
    with pytest.raises(RemoteProtocolError, match="at most"):
        heard(msgspec.msgpack.encode(m.ToRuntime(serial=1, data=bytes(INNER_NBYTES + 1))))


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xff" * 100])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        heard(data)
