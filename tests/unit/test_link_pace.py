"""A stranger's link is read no faster than its pace, over real sockets; nothing that was said is lost."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
from router_rig import spec

from dormouse.core.config import NodeConfig
from dormouse.core.links import zmtp
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.core.links.ends import STRANGER_BURST
from dormouse.core.links.link import RawLink
from dormouse.core.paths import RunPaths
from dormouse.core.rate import Bucket, SharedBuckets
from dormouse.router.instances.instances import CALL, PARTS, Instances
from dormouse.schemas import messages as m

FEW: Any = 10 * STRANGER_BURST
NEVER_S = 1e-9  # a token in thirty years
PING = b"\x04\x07\x04PING\0\0"


def _paced(path: Path, heard: Callable[[bytes], Any], tokens: float = FEW) -> RawLink:
    pace = Bucket.full(NEVER_S, tokens, asyncio.get_running_loop().time())
    return RawLink(str(path / "l"), bind=True, on_message=heard, pace=pace)


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def _turns(count: int = 200) -> None:
    """Of the loop: each would bring more, if anything came."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _met(path: Path) -> BlockingLink:
    client = BlockingLink(str(path / "l"))
    assert await asyncio.to_thread(client.meet, 60.0)
    return client


def test_a_flood_waits_at_its_sender_and_all_of_it_is_heard_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        server = _paced(tmp_path, heard.append)
        client = await _met(tmp_path)
        words = [k.to_bytes(4) for k in range(4 * FEW)]
        client._push(b"".join(map(zmtp.framed, words)), 60.0)
        await _until(lambda: len(heard) >= FEW)
        await _turns()
        assert FEW <= len(heard) <= FEW + STRANGER_BURST
        server.spend(-len(words))
        await _until(lambda: len(heard) >= 2 * FEW)
        await _turns()
        assert len(heard) <= 2 * FEW + STRANGER_BURST, "no more is kept for later than there was at first"
        for _ in range(4):
            server.spend(-len(words))
            await _turns()
        assert heard == words
        client.close()
        server.close()

    asyncio.run(main())


def test_what_completes_no_message_is_paid_for(tmp_path: Path) -> None:
    async def main(noise: bytes, pieces: int) -> None:
        heard: list[bytes] = []
        server = _paced(tmp_path, heard.append)
        client = await _met(tmp_path)
        for at in range(pieces):
            client._push(noise[at * len(noise) // pieces : (at + 1) * len(noise) // pieces], 60.0)
            await _turns(3)
        client._push(zmtp.framed(b"then"), 60.0)
        await _turns()
        assert heard == []
        server.spend(-2 * FEW)
        await _until(lambda: bool(heard))
        assert heard[-1] == b"then"
        client.close()
        server.close()

    asyncio.run(main(PING * (FEW + 1), 1))
    asyncio.run(main(zmtp.framed(bytes(2 * FEW)), FEW + 8))


def test_who_comes_and_goes_pays_for_that(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        server = _paced(tmp_path, heard.append, tokens=8)
        for _ in range(9):  # who says nothing, too
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(str(tmp_path / "l"))
            await _turns()
        late = BlockingLink(str(tmp_path / "l"))
        await _turns()
        assert not wait_readable([late], 0.0), "nine have come, for eight tokens"
        server.spend(-8)
        assert await asyncio.to_thread(late.meet, 60.0)
        await asyncio.to_thread(late.send, b"here")
        await _until(lambda: heard == [b"here"])
        late.close()
        server.close()

    asyncio.run(main())


def test_what_a_thread_has_heard_waits_for_the_pace_too(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        server = _paced(tmp_path, heard.append, tokens=3)
        client = await _met(tmp_path)
        loan = server.lend()
        assert loan is not None
        client._push(b"".join(zmtp.framed(b"%d" % k) for k in range(2 * FEW)), 60.0)
        while len(loan.heard) < FEW:
            loan.read()
        server.take_back(loan)
        await _turns()
        assert len(heard) == STRANGER_BURST
        assert server.lend() is None, "what was heard first comes first"
        while len(heard) < 2 * FEW:
            server.spend(-3)
            await asyncio.sleep(0)
        assert heard == [b"%d" % k for k in range(2 * FEW)]
        client.close()
        server.close()

    asyncio.run(main())


def test_instances_of_a_tenant_have_one_pace_and_what_they_are_asked_beside_it(tmp_path: Path) -> None:
    heard: list[tuple[str, m.InstanceToRouter]] = []

    def said(function: str) -> int:
        return sum(name == function for name, _ in heard)

    async def main() -> None:
        (tmp_path / "i").mkdir()
        paths = RunPaths(tmp_path)
        instances = Instances(NodeConfig(), paths, lambda *said: heard.append(said), print, structlog.get_logger())
        instances._paces = SharedBuckets(NEVER_S, FEW)
        clients = {}
        for name, tenant in (("a1", "alice"), ("a2", "alice"), ("b1", "bob"), ("c1", "carol")):
            host = instances.open(name, msgspec.structs.replace(spec(), tenant=tenant))
            clients[name] = BlockingLink(os.path.join(host.directory, "router"))
            assert await asyncio.to_thread(clients[name].meet, 60.0)
        progress = zmtp.framed(msgspec.msgpack.encode(m.LoadProgress()))
        clients["a1"]._push(progress * 4 * FEW, 60.0)
        await _until(lambda: said("a1") >= FEW // 2)
        clients["a2"]._push(progress * 4 * FEW, 60.0)
        clients["b1"]._push(progress * (FEW // 2), 60.0)
        await _until(lambda: said("b1") == FEW // 2)
        await _turns()
        assert said("a1") + said("a2") <= FEW + 2 * STRANGER_BURST
        before = said("a1")
        for _ in range(FEW // 2):
            instances.send("a1", m.PartsTaken(request=1, nbytes=1))
        await _until(lambda: said("a1") >= before + FEW // 2)
        parts = m.AnswerParts(parts=[m.AnswerPart(request=1, body=b"")] * (PARTS * FEW))
        clients["b1"]._push(zmtp.framed(msgspec.msgpack.encode(parts)), 60.0)
        await _until(lambda: ("b1", parts) in heard)
        clients["b1"]._push(progress, 60.0)
        await _turns()
        assert said("b1") == FEW // 2 + 1, "parts that come together are paid for"
        call = m.CallFunction(number=1, request=1, function="f", body=b"")
        clients["c1"]._push(zmtp.framed(msgspec.msgpack.encode(call)) * 4 * FEW, 60.0)
        await _until(lambda: said("c1") >= FEW // (CALL + 1))
        await _turns()
        assert said("c1") <= FEW // (CALL + 1) + STRANGER_BURST, "a call costs more than a message"
        for status, more in ((404, 0), (200, 1)):  # an error gives nothing back
            before = said("c1")
            for _ in range(3 * STRANGER_BURST):
                instances.send("c1", m.CallAnswered(number=1, status=status, headers={}, body=b""))
            least = before + more * STRANGER_BURST
            await _until(lambda: said("c1") >= least)  # noqa: B023  # it is waited for here
            await _turns()
            assert more or said("c1") == before
        for name, client in clients.items():
            client.close()
            instances.close(name, "")

    asyncio.run(main())
