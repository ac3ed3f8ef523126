"""Links and descriptor sockets over real ZeroMQ and Unix sockets, in one loop."""

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dormouse.core.fds import Inbox, PacketSocket
from dormouse.core.link import BlockingLink, Link, RawLink, wait_readable
from dormouse.core.shm import PAGE_NBYTES, SharedMemory
from dormouse.schemas import messages as m
from dormouse.schemas.errors import LocalProtocolError, PeerLost, RemoteProtocolError


@pytest.fixture
def directory() -> Iterator[str]:
    with TemporaryDirectory(prefix="dm") as path:  # short: socket paths end at 107 bytes
        yield path


def test_messages_arrive_in_order_whoever_starts_first(directory: str) -> None:
    async def main() -> None:
        heard: list[m.ToSupervisor] = []
        done = asyncio.Event()

        def on_message(message: m.ToSupervisor) -> None:
            heard.append(message)
            if len(heard) == 2001:
                done.set()

        client: Link[m.FromSupervisor, m.ToSupervisor] = Link(
            f"{directory}/l", bind=False, incoming=m.FromSupervisor, on_message=lambda _: None
        )
        client.send(m.Ready())
        for _ in range(1000):
            client.send(m.Heartbeat())
        server: Link[m.ToSupervisor, m.FromSupervisor] = Link(
            f"{directory}/l", bind=True, incoming=m.ToSupervisor, on_message=on_message
        )
        for _ in range(1000):
            client.send(m.Heartbeat())
        await asyncio.wait_for(done.wait(), 30)
        assert heard[0] == m.Ready()
        client.close()
        server.close()
        assert os.listdir(directory) == []

    asyncio.run(main())


def test_what_the_binder_says_before_anyone_connects_is_kept(directory: str) -> None:
    async def main() -> None:
        heard = asyncio.get_running_loop().create_future()
        server: Link[m.ToSupervisor, m.FromSupervisor] = Link(
            f"{directory}/l", bind=True, incoming=m.ToSupervisor, on_message=lambda _: None
        )
        server.send(m.Peers(up={"router": 1}))
        client: Link[m.FromSupervisor, m.ToSupervisor] = Link(
            f"{directory}/l", bind=False, incoming=m.FromSupervisor, on_message=heard.set_result
        )
        assert await asyncio.wait_for(heard, 30) == m.Peers(up={"router": 1})
        client.close()
        server.close()

    asyncio.run(main())


LAST_WORDS = """
import asyncio, sys
from dormouse.core.link import RawLink, close_context

async def main():
    link = RawLink(sys.argv[1], bind=False, on_message=lambda _: None)
    link.send_raw(b"why")
    link.close(linger_s=50)

asyncio.run(main())
print("closed", flush=True)
close_context()
"""


def test_a_message_that_comes_while_the_first_ones_leave_is_heard(directory: str) -> None:
    """Sending consumes the edge that says that something has come; nothing else is ever said here."""

    async def main() -> None:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.set_result)
        server.send_raw(b"from the one that binds")  # waits for the other to come
        client = BlockingLink(f"{directory}/l")
        try_send = server._try_send

        def meanwhile(data: bytes) -> bool:
            server._try_send = try_send  # type: ignore[method-assign]
            client.send(b"from the one that connects")
            time.sleep(0.1)  # now it is there, and nobody has looked
            return try_send(data)

        server._try_send = meanwhile  # type: ignore[method-assign]
        assert await asyncio.wait_for(heard, 10) == b"from the one that connects"
        assert await asyncio.to_thread(client.recv, 10.0) == b"from the one that binds"
        client.close()
        server.close()

    asyncio.run(main())


def test_last_words_leave_a_process_that_ends(directory: str) -> None:
    """Also when nobody was there to hear them when it closed the link."""

    async def main(child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        assert child.stdout.readline() == b"closed\n"
        heard = asyncio.get_running_loop().create_future()
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.set_result)
        assert await asyncio.wait_for(heard, 30) == b"why"
        server.close()

    words = [sys.executable, "-P", "-c", LAST_WORDS, f"{directory}/l"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        try:
            asyncio.run(main(child))
        finally:
            child.kill()


def test_garbage_is_reported_and_the_link_lives_on(directory: str) -> None:
    async def main() -> None:
        garbage: list[RemoteProtocolError] = []
        good = asyncio.get_running_loop().create_future()
        server: Link[m.ToSupervisor, m.FromSupervisor] = Link(
            f"{directory}/l", bind=True, incoming=m.ToSupervisor, on_message=good.set_result, on_garbage=garbage.append
        )
        client = RawLink(f"{directory}/l", bind=False, on_message=lambda _: None)
        client.send_raw(b"\xc1")
        client.send_raw(b"")
        client.send_raw(b"\x93\x01\x02\x03")
        client.send_raw(b"\x91\x01")
        assert await asyncio.wait_for(good, 30) == m.Ready()
        assert len(garbage) == 3
        client.close()
        server.close()

    asyncio.run(main())


def test_a_peer_that_never_comes_does_not_eat_all_memory(directory: str) -> None:
    async def main() -> None:
        server = RawLink(f"{directory}/l", bind=True, on_message=lambda _: None, hwm=10)
        for _ in range(10):
            server.send_raw(b"x")
        with pytest.raises(PeerLost, match="does not read"):
            server.send_raw(b"x")
        server.close()

    asyncio.run(main())


def test_a_path_that_does_not_fit_a_socket_is_named(directory: str) -> None:
    with pytest.raises(LocalProtocolError, match="shorter run directory"):
        BlockingLink(f"{directory}/{'x' * 120}")


def test_the_blocking_end_waits_for_the_one_that_speaks(directory: str) -> None:
    async def main() -> None:
        echo: RawLink

        def answer(data: bytes) -> None:
            echo.send_raw(data + b"!")

        echo = RawLink(f"{directory}/a", bind=True, on_message=answer)

        def client() -> bytes | None:
            spoken, silent = BlockingLink(f"{directory}/a"), BlockingLink(f"{directory}/b")
            spoken.send(b"hello")
            assert wait_readable([silent, spoken], 30.0) == [spoken]
            heard = spoken.recv(0)
            assert spoken.recv(0.01) is None
            spoken.close()
            silent.close()
            return heard

        assert await asyncio.to_thread(client) == b"hello!"
        echo.close()

    asyncio.run(main())


def test_descriptors_arrive_with_their_message(directory: str) -> None:
    async def main() -> None:
        arrived = asyncio.get_running_loop().create_future()
        inbox: Inbox[m.InboxPacket] = Inbox(
            f"{directory}/i", m.InboxPacket, lambda packet, fds: arrived.set_result((packet, fds))
        )
        ours = SharedMemory.create("test", 2 * PAGE_NBYTES)
        ours.view[:5] = b"hello"
        sender: PacketSocket[m.InboxPacket, m.InboxPacket] = PacketSocket.connect(f"{directory}/i", m.InboxPacket)
        sender.send(m.SlabMade(slab=3, nbytes=ours.nbytes, pinnable=True), [ours.fd])
        packet, fds = await asyncio.wait_for(arrived, 30)
        assert packet == m.SlabMade(slab=3, nbytes=ours.nbytes, pinnable=True)
        theirs = SharedMemory.adopt(fds[0], packet.nbytes)
        assert bytes(theirs.view[:5]) == b"hello"
        for memory in (ours, theirs):
            memory.close()
        sender.close()
        inbox.close()
        assert os.listdir(directory) == []

    asyncio.run(main())


def test_memory_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_NBYTES)
    with pytest.raises(RemoteProtocolError, match="sealed"):
        SharedMemory.adopt(fd, PAGE_NBYTES)


def test_shared_memory_cannot_be_shrunk_and_gives_holes_back() -> None:
    memory = SharedMemory.create("test", 16 * PAGE_NBYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, PAGE_NBYTES)
    assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    memory.populate()
    assert os.fstat(memory.fd).st_blocks * 512 == 16 * PAGE_NBYTES
    memory.view[PAGE_NBYTES] = 7
    memory.punch(1, 3 * PAGE_NBYTES)
    assert os.fstat(memory.fd).st_blocks * 512 == 14 * PAGE_NBYTES
    assert memory.view[PAGE_NBYTES] == 0
    memory.close()


def test_a_busy_path_is_an_error_that_names_it(directory: str) -> None:
    Path(directory, "l").mkdir()
    with pytest.raises(PeerLost, match=f"{directory}/l"):
        asyncio.run(_bind(f"{directory}/l"))


async def _bind(path: str) -> None:
    RawLink(path, bind=True, on_message=lambda _: None)
