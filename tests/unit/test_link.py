"""Links and descriptor sockets over real sockets, in one loop; each kind of link meets each."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dormouse.core.links import blocking_link, zmtp
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.core.links.ends import READ_BURST
from dormouse.core.links.fds import Inbox, PacketSocket
from dormouse.core.links.link import LATE_S, Link, RawLink
from dormouse.core.links.loan import Loan
from dormouse.core.links.sockets import listener_at, received
from dormouse.core.links.zmq_link import RawZmqLink, ZmqLink
from dormouse.core.shm import PAGE_NBYTES, SharedMemory
from dormouse.schemas import messages as m
from dormouse.schemas.errors import LocalProtocolError, PeerLost, RemoteProtocolError

KINDS = [pytest.param(Link, RawLink, id="loop"), pytest.param(ZmqLink, RawZmqLink, id="library")]
binds = pytest.mark.parametrize(("Binding", "RawBinding"), KINDS)
connects = pytest.mark.parametrize(("Connecting", "RawConnecting"), KINDS)


@pytest.fixture
def directory() -> Iterator[str]:
    with TemporaryDirectory(prefix="dm") as path:  # short: socket paths end at 107 bytes
        yield path


@binds
@connects
def test_messages_arrive_in_order_whoever_starts_first(
    directory: str, Binding: Any, RawBinding: Any, Connecting: Any, RawConnecting: Any
) -> None:
    async def main() -> None:
        heard: list[m.ToSupervisor] = []
        done = asyncio.Event()

        def on_message(message: m.ToSupervisor) -> None:
            heard.append(message)
            if len(heard) == 2001:
                done.set()

        client: Link[m.FromSupervisor, m.ToSupervisor] = Connecting(
            f"{directory}/l", bind=False, incoming=m.FromSupervisor, on_message=lambda _: None
        )
        client.send(m.Ready())
        for _ in range(1000):
            client.send(m.Heartbeat())
        server: Link[m.ToSupervisor, m.FromSupervisor] = Binding(
            f"{directory}/l", bind=True, incoming=m.ToSupervisor, on_message=on_message
        )
        for _ in range(1000):
            client.send(m.Heartbeat())
        await asyncio.wait_for(done.wait(), 60)
        assert heard[0] == m.Ready()
        client.close()
        server.close()
        assert os.listdir(directory) == []

    asyncio.run(main())


@binds
@connects
def test_what_the_binder_says_before_anyone_connects_is_kept(
    directory: str, Binding: Any, RawBinding: Any, Connecting: Any, RawConnecting: Any
) -> None:
    async def main() -> None:
        heard = asyncio.get_running_loop().create_future()
        server: Link[m.ToSupervisor, m.FromSupervisor] = Binding(
            f"{directory}/l", bind=True, incoming=m.ToSupervisor, on_message=lambda _: None
        )
        server.send(m.Peers(up={"router": 1}))
        client: Link[m.FromSupervisor, m.ToSupervisor] = Connecting(
            f"{directory}/l", bind=False, incoming=m.FromSupervisor, on_message=heard.set_result
        )
        assert await asyncio.wait_for(heard, 60) == m.Peers(up={"router": 1})
        client.close()
        server.close()

    asyncio.run(main())


LAST_WORDS = """
import asyncio, sys
from dormouse.core.links.zmq_link import RawZmqLink, close_context

async def main():
    link = RawZmqLink(sys.argv[1], bind=False, on_message=lambda _: None)
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
        server = RawZmqLink(f"{directory}/l", bind=True, on_message=heard.set_result)
        server.send_raw(b"from the one that binds")  # waits for the other to come
        client = BlockingLink(f"{directory}/l")
        try_send = server._try_send

        def meanwhile(data: bytes) -> bool:
            server._try_send = try_send  # type: ignore[method-assign]
            client.send(b"from the one that connects")
            time.sleep(0.1)  # now it is there, and nobody has looked
            return try_send(data)

        server._try_send = meanwhile  # type: ignore[method-assign]
        assert await asyncio.wait_for(heard, 60) == b"from the one that connects"
        assert await asyncio.to_thread(client.recv, 60.0) == b"from the one that binds"
        client.close()
        server.close()

    asyncio.run(main())


def test_last_words_leave_a_process_that_ends(directory: str) -> None:
    """Also when nobody was there to hear them when it closed the link."""

    async def main(child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        assert child.stdout.readline() == b"closed\n"
        heard = asyncio.get_running_loop().create_future()
        server = RawZmqLink(f"{directory}/l", bind=True, on_message=heard.set_result)
        assert await asyncio.wait_for(heard, 60) == b"why"
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
        assert await asyncio.wait_for(good, 60) == m.Ready()
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


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@binds
@connects
def test_a_message_of_many_packets_arrives_whole_between_small_ones(
    directory: str, Binding: Any, RawBinding: Any, Connecting: Any, RawConnecting: Any
) -> None:
    large = [os.urandom(20 << 20), b"", bytes(255), bytes(256), b"x"]

    async def main() -> None:
        heard: list[bytes] = []
        server = RawBinding(f"{directory}/l", bind=True, on_message=heard.append)
        client = RawConnecting(f"{directory}/l", bind=False, on_message=heard.append)
        for message in large:
            client.send_raw(message)
        await until(lambda: len(heard) == len(large))
        assert heard == large
        heard.clear()
        for message in large:
            server.send_raw(message)
        await until(lambda: len(heard) == len(large))
        assert heard == large
        client.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("most", "text"),
    [({"hwm": 10}, "10 messages wait, of "), ({"hwm_nbytes": 95_000}, "9 messages wait, of (8|9).,... bytes")],
)
def test_a_peer_that_does_not_read_is_given_up_and_one_that_reads_later_hears_all(
    directory: str, most: dict[str, Any], text: str
) -> None:
    async def main() -> None:
        server = RawLink(f"{directory}/l", bind=True, on_message=lambda _: None, **most)
        client = BlockingLink(f"{directory}/l")
        sent = 0
        with pytest.raises(PeerLost, match=f"does not read; {text}"):  # noqa: PT012
            while True:
                server.send_raw(sent.to_bytes(8) + bytes(10_000))
                sent += 1
                await asyncio.sleep(0)
        assert sent > 10, "the peer's socket takes some"
        for k in range(sent):
            heard = await asyncio.to_thread(client.recv, 60.0)
            assert heard is not None
            assert int.from_bytes(heard[:8]) == k
        assert server._waiting_nbytes == len(server._outbox) == 0
        client.close()
        server.close()

    asyncio.run(main())


def test_what_may_be_late_goes_with_the_next_message_or_soon(directory: str) -> None:
    async def main() -> None:
        with listener_at(f"{directory}/l") as listener:
            client = RawLink(f"{directory}/l", bind=False, on_message=lambda _: None)
            peer, _ = listener.accept()
        with peer:
            peer.setblocking(False)
            peer.send(zmtp.OPENING)
            client.send_raw(b"first")
            found = b""
            while not found.endswith(b"\0\5first"):
                found += received(peer) or b""
                await asyncio.sleep(0)
            client.send_raw(b"a", late=True)
            client.send_raw(b"b", late=True)
            assert received(peer) is None
            client.send_raw(b"c")
            assert received(peer) == b"\0\1a\0\1b\0\1c"
            client.send_raw(b"d", late=True)
            while (found := received(peer) or b"") != b"\0\1d":
                assert found == b""
                await asyncio.sleep(0)
            client.send_raw(b"lost", late=True)
            client.close()
            await asyncio.sleep(2 * LATE_S)
            assert received(peer) == b"", "it has hung up"

    asyncio.run(main())


def test_one_peer_at_a_time(directory: str) -> None:
    """The next is heard when the first has hung up; what the first was to be told is not for it."""

    async def main() -> None:
        heard: list[bytes] = []
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.append)
        first, second = BlockingLink(f"{directory}/l"), BlockingLink(f"{directory}/l")
        later = asyncio.create_task(asyncio.to_thread(second.send, b"second"))
        await asyncio.to_thread(first.send, b"first")
        await until(lambda: heard)
        await asyncio.sleep(0.05)
        assert heard == [b"first"]
        server.send_raw(b"to the first")
        first.close()
        await later
        await until(lambda: len(heard) == 2)
        assert heard == [b"first", b"second"]
        server.send_raw(b"to the second")
        assert await asyncio.to_thread(second.recv, 60.0) == b"to the second"
        server.close()
        with pytest.raises(PeerLost, match="the peer has hung up"):
            await asyncio.to_thread(second.recv, 60.0)
        with pytest.raises(PeerLost, match="the peer has hung up"):
            second.send(b"anybody?")
        second.close()

    asyncio.run(main())


def test_a_flood_leaves_the_loop_to_others_and_keeps_its_order(directory: str) -> None:
    count = 20 * READ_BURST

    async def main() -> None:
        heard: list[bytes] = []
        turns = 0
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.append)
        client = BlockingLink(f"{directory}/l")
        await asyncio.to_thread(client.send, b"first")
        await until(lambda: heard)
        heard.clear()
        client._push(b"".join(zmtp.framed(k.to_bytes(4)) for k in range(count)), 60.0)
        while len(heard) < count:
            before = len(heard)
            await asyncio.sleep(0)
            assert len(heard) - before <= READ_BURST
            turns += 1
        assert heard == [k.to_bytes(4) for k in range(count)]
        assert turns >= 20
        client.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(64), "does not speak ZMTP 3"),
        (zmtp.GREETING[:10] + b"\x01" + zmtp.GREETING[11:], "does not speak ZMTP 3"),
        (zmtp.GREETING.replace(b"NULL\0", b"PLAIN"), "does not speak ZMTP 3"),
        (zmtp.OPENING + b"\x01\x01a\x00\x01b", "several parts"),
        (zmtp.OPENING + b"\x08\x01a", "flags 0x8"),
        (zmtp.OPENING + b"\x02" + (101).to_bytes(8), "a message of 101 bytes; at most 100"),
        (zmtp.OPENING + b"\x00\x65", "a message of 101 bytes; at most 100"),
        (zmtp.OPENING + b"\x02" + bytes([255] * 8), "a message of 18446744073709551615 bytes; at most 100"),
        (zmtp.OPENING + b"\x06" + (513).to_bytes(8), "a message of 513 bytes; at most 512"),
    ],
)
def test_bytes_that_are_no_messages_are_named_and_nothing_more_is_read(
    directory: str, said: bytes, complaint: str
) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        garbage: list[RemoteProtocolError] = []
        server = RawLink(
            f"{directory}/l", bind=True, on_message=heard.append, on_garbage=garbage.append, max_nbytes=100
        )
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(f"{directory}/l")
            attacker.sendall(said)
            await until(lambda: garbage)
            assert complaint in str(garbage[0])
            attacker.settimeout(60)
            while attacker.recv(100):
                pass  # it has hung up
        with BlockingSession(f"{directory}/l") as client:
            await asyncio.to_thread(client.send, b"the next one is heard")
            await until(lambda: heard)
        assert heard == [b"the next one is heard"]
        assert len(garbage) == 1
        server.close()

    asyncio.run(main())


def BlockingSession(path: str) -> "contextlib.closing[BlockingLink]":
    return contextlib.closing(BlockingLink(path))


@given(
    st.lists(st.binary(max_size=600), max_size=8),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
@example([b"x", bytes(300)], [1])
def test_d3_messages_are_the_same_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = zmtp.OPENING + b"".join(zmtp.framed(message) for message in messages)
    reader = zmtp.Reader(1000)
    heard: list[bytes] = []
    at = 0
    for cut in itertools.cycle(cuts):
        if at >= len(stream):
            break
        heard += reader.feed(stream[at : at + cut])
        at += cut
    assert heard == messages


@given(st.binary(max_size=400), st.booleans(), st.integers(1, 50))
@example(b"\x00\xc8" + bytes(200), True, 50)
def test_d3_any_bytes_are_messages_or_a_protocol_error(noise: bytes, greeted: bool, cut: int) -> None:
    reader = zmtp.Reader(100)
    stream = (zmtp.OPENING if greeted else b"") + noise
    with contextlib.suppress(RemoteProtocolError):
        for at in range(0, len(stream), cut):
            assert all(len(message) <= 100 for message in reader.feed(stream[at : at + cut]))


def test_another_thread_has_the_connection_until_it_gives_it_back(directory: str) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.append)
        assert server.lend() is None, "nobody is there"
        client = BlockingLink(f"{directory}/l")
        await asyncio.to_thread(client.send, b"first")
        await until(lambda: heard)
        loan = server.lend()
        assert loan is not None
        assert server.lend() is None, "it is lent"
        server.send_raw(b"waits")
        for word in (b"second", b"third", b"fourth"):
            client.send(word)
        while len(loan.heard) < 3:
            loan.read()
        assert loan.heard.popleft() == b"second"
        loan.send(b"from the other thread")
        assert await asyncio.to_thread(client.recv, 60.0) == b"from the other thread"
        assert client.recv(0.05) is None
        assert heard == [b"first"]
        server.take_back(loan)
        await until(lambda: len(heard) == 3)
        assert heard == [b"first", b"third", b"fourth"]
        assert await asyncio.to_thread(client.recv, 60.0) == b"waits"
        client.send(b"fifth")
        await until(lambda: len(heard) == 4)
        client.close()
        server.close()

    asyncio.run(main())


def test_a_loan_outlives_its_link(directory: str) -> None:
    """The descriptor is closed when nobody can use it any more: else its number could be another's."""

    async def main() -> None:
        heard: list[bytes] = []
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.append)
        client = BlockingLink(f"{directory}/l")
        await asyncio.to_thread(client.send, b"first")
        await until(lambda: heard)
        loan = server.lend()
        assert loan is not None
        server.close()
        assert os.listdir(directory) == []
        os.fstat(loan.fileno())
        client.send(b"second")
        loan.read()
        assert list(loan.heard) == [b"second"]
        server.take_back(loan)
        assert loan.fileno() == -1
        assert heard == [b"first"]
        with pytest.raises(PeerLost):
            client.recv(10.0)
        client.close()

    asyncio.run(main())


def test_what_ends_a_loan_is_reported_when_it_is_given_back(directory: str) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        garbage: list[RemoteProtocolError] = []
        server = RawLink(f"{directory}/l", bind=True, on_message=heard.append, on_garbage=garbage.append)
        for said, trouble in ((b"\x01\x01a", 1), (b"", 0)):
            client = BlockingLink(f"{directory}/l")
            await asyncio.to_thread(client.send, b"first")
            await until(lambda: heard)
            heard.clear()
            loan = server.lend()
            assert loan is not None
            if said:
                client._push(said, 10.0)
            client.close()
            while not loan.over:
                loan.read()
            assert not garbage
            server.take_back(loan)
            assert len(garbage) == trouble
            garbage.clear()
        with BlockingSession(f"{directory}/l") as client:  # the link goes on with whoever comes next
            await asyncio.to_thread(client.send, b"next")
            await until(lambda: heard == [b"next"])
        server.close()

    asyncio.run(main())


def test_d3_a_connection_that_is_to_be_closed_is_not_lent_again(directory: str) -> None:
    """Else another thread would use a descriptor whose number may be another instance's by then."""

    async def main() -> None:
        heard: list[bytes] = []
        loans: list[Loan | None] = []

        def hear(data: bytes) -> None:
            heard.append(data)
            loans.append(server.lend())  # as executors do with each frame

        garbage: list[RemoteProtocolError] = []
        server = RawLink(f"{directory}/l", bind=True, on_message=hear, on_garbage=garbage.append)
        client = BlockingLink(f"{directory}/l")
        await asyncio.to_thread(client.send, b"first")
        await until(lambda: loans)
        loan = loans[0]
        assert loan is not None
        client.send(b"second")
        while not loan.heard:
            loan.read()
        client._push(b"\x01\x01a", 10.0)
        while not loan.over:
            loan.read()
        server.take_back(loan)
        assert heard == [b"first", b"second"]
        assert loans[1] is None
        assert len(garbage) == 1
        assert loan.fileno() == -1
        client.close()
        server.close()

    asyncio.run(main())


def test_a_ping_is_answered(directory: str) -> None:
    reader = zmtp.Reader(1000)
    assert reader.feed(zmtp.OPENING + b"\x04\x0b\x04PING\x00\x0actxt" + zmtp.framed(b"after")) == [b"after"]
    assert reader.answer == b"\x04\x09\x04PONGctxt"


def test_d3_pings_of_a_peer_that_does_not_read_take_no_memory(directory: str) -> None:
    async def main() -> None:
        server = RawLink(f"{directory}/l", bind=True, on_message=lambda _: None, hwm=10)
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(f"{directory}/l")
            attacker.sendall(zmtp.OPENING)
            while len(server._outbox) < 10:  # what its socket takes is full
                attacker.send(b"\x04\x0b\x04PING\x00\x0actxt")
                await asyncio.sleep(0)
            for _ in range(1000):
                attacker.send(b"\x04\x0b\x04PING\x00\x0actxt")
                await asyncio.sleep(0)
            assert len(server._outbox) == 10
        server.close()

    asyncio.run(main())


def test_a_path_that_does_not_fit_a_socket_is_named(directory: str) -> None:
    with pytest.raises(LocalProtocolError, match="shorter run directory"):
        BlockingLink(f"{directory}/{'x' * 120}")


def test_who_finds_a_path_may_connect(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears with its owner and its mode, and in the place of what was there."""
    path, found = f"{directory}/l", []

    def spy(change: Callable[..., None]) -> Callable[..., None]:
        def spied(*arguments: Any, **how: Any) -> None:
            found.append(os.path.exists(path))
            change(*arguments, **how)

        return spied

    for name in ("chown", "chmod"):
        monkeypatch.setattr(os, name, spy(getattr(os, name)))
    owner = 4711 if os.getuid() == 0 else os.getuid()
    with listener_at(path, owner=owner, mode=0o666), socket.socket(socket.AF_UNIX) as client:
        assert found == [False, False]
        assert os.stat(path).st_uid == owner
        assert os.stat(path).st_mode & 0o777 == 0o666
        with listener_at(path) as successor:
            client.connect(path)
            successor.accept()[0].close()
    assert os.listdir(directory) == ["l"]


def test_a_peer_that_hangs_up_while_one_connects_is_told_to_who_sends_or_waits(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(blocking_link, "connected", gone)
    uses: list[Callable[[BlockingLink], object]] = [lambda link: link.send(b"hello"), lambda link: link.recv(1.0)]
    for use in uses:
        with contextlib.closing(BlockingLink(f"{directory}/l")) as link:
            assert link.lost
            with pytest.raises(PeerLost, match="has hung up"):
                use(link)


def test_the_blocking_end_waits_for_the_one_that_speaks(directory: str) -> None:
    async def main() -> None:
        echo: RawLink

        def answer(data: bytes) -> None:
            echo.send_raw(data + b"!")

        echo = RawLink(f"{directory}/a", bind=True, on_message=answer)

        def client() -> bytes | None:
            spoken, silent = BlockingLink(f"{directory}/a"), BlockingLink(f"{directory}/b")
            spoken.send(b"hello")
            heard = None
            while heard is None:
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
        packet, fds = await asyncio.wait_for(arrived, 60)
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
