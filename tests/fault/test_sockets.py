"""Mutated messages on the sockets of a node that others reach, beside a function whose answers are checked.

The attacker is this process, as a `dormouse run` session: it has an instance's real endpoints, arena and leases, and
the next one costs a packet and no fork. Frames to executors are in test_fuzz.py, HTTP in topology/test_http_fuzz.py.
"""

import os
import pwd
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import msgspec
import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.links.blocking_link import BlockingLink
from dormouse.core.links.fds import PacketSocket
from dormouse.core.paths import RunPaths
from dormouse.schemas import admin as a
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import PeerLost

WAIT_S = 60.0
ADMIN_UID = 12346
GARBAGE = b"\xc1"  # what msgpack never uses
NUMBERS = (0, 1, -1, 2, 63, 64, 4096, 1 << 20, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
THINGS: tuple[Any, ...] = (
    *(None, True, 1.5, float("nan"), "", "x" * 300, "x\x00/../y", b"", b"\xff" * 40, [], [[[]]], [None], {}, {"a": 1}),
    *([0] * 70_000, msgpack.ExtType(1, b""), [1 << 62], [-1, -1]),
)
GOOD = """
    import torch
    def load(): return torch.arange(8.0).to("cuda")
    def handle(state, request): return (state * request["x"]).tolist()
"""


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def broken(message: Any, rng: random.Random) -> bytes:
    """Its fields' types, numbers, count or order, or its bytes; often it is a message still."""
    fields = msgpack.unpackb(encode(message), strict_map_key=False)
    at = rng.randrange(len(fields))
    match rng.choice((*["number"] * 4, *["near"] * 2, "thing", "remove", "append", "swap", "cut", "flip")):
        case "number":
            numbers = [index for index, value in enumerate(fields) if type(value) is int and index] or [at]
            fields[rng.choice(numbers)] = rng.choice(NUMBERS)
        case "near" if isinstance(fields[at], int):
            fields[at] += rng.choice((-1, 1))
        case "near" | "thing":
            fields[at] = rng.choice(THINGS)
        case "remove":
            del fields[at]
        case "append":
            fields.append(rng.choice(THINGS))
        case "swap":
            other = rng.randrange(len(fields))
            fields[at], fields[other] = fields[other], fields[at]
        case "cut":
            data = bytes(msgpack.packb(fields))
            return data[: rng.randrange(len(data))]
        case "flip":
            flipped = bytearray(msgpack.packb(fields))
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
    return bytes(msgpack.packb(fields))


class Attacker:
    """A session, with the ends that an instance has."""

    living: ClassVar[list["Attacker"]] = []

    def __init__(self, node: TestNode) -> None:
        self.attach: PacketSocket[m.FromAttach, m.AttachSession] = PacketSocket.connect(
            RunPaths(str(node.run)).attach, m.FromAttach, WAIT_S
        )
        self.attach.send(m.AttachSession(name="attacker", pid=os.getpid()))
        packet = self.attach.recv()
        assert packet is not None
        attached, fds = packet
        assert isinstance(attached, m.Attached), attached
        os.close(fds[0])
        self.directory = attached.directory
        self.living.append(self)
        self.router = BlockingLink(f"{self.directory}/router")
        self.store = BlockingLink(f"{self.directory}/store")
        self.gpus: dict[int, BlockingLink] = {}

    def hear(self, link: BlockingLink, union: Any) -> Any:
        data = link.recv(WAIT_S)
        assert data is not None, "no answer"
        return msgspec.msgpack.decode(data, type=union)

    def offer(self, fd: int) -> None:
        """A file of 4096 bytes, as number 1."""
        os.ftruncate(fd, 4096)
        self.store.send(encode(m.Commit()))
        self.hear(self.store, m.StoreToInstance)  # so its socket for files is there
        sock: PacketSocket[m.FileAnswer, m.FileOffer] = PacketSocket.connect(f"{self.directory}/files", m.FileAnswer)
        sock.send(m.FileOffer(file=1), [fd])
        packet = sock.recv()
        assert packet is not None
        assert packet[0] == m.FileTaken(file=1), packet
        sock.close()
        os.close(fd)

    def give_back(self, lease: m.Lease) -> None:
        if lease.gpu not in self.gpus:  # one link for all leases: replies go to any of several
            self.gpus[lease.gpu] = BlockingLink(f"{self.directory}/gpu{lease.gpu}.{lease.epoch}")
        gpu = self.gpus[lease.gpu]
        gpu.send(msgpack.packb([lease.serial, lease.secret, 1, [[], []], [wire.END, 1, 0]]))
        assert gpu.recv(WAIT_S) is not None
        self.router.send(encode(m.LeaseEnded(serial=lease.serial, version=0)))

    def ended(self) -> str:
        """Why the node has ended this session; waits for it."""
        packet = self.attach.recv()
        assert packet is not None
        assert isinstance(packet[0], m.SessionEnd), packet
        assert self.attach.recv() is None
        return packet[0].text

    def close(self) -> None:
        self.living.remove(self)
        self.router.close()
        self.store.close()
        for gpu in self.gpus.values():
            gpu.close()
        self.attach.close()


def open_files(node: TestNode) -> dict[int, list[str]]:
    """What descriptors refer to, by process."""
    assert node.process is not None
    found: dict[int, list[str]] = {}
    for pid in (node.process.pid, *node.pids().values()):
        found[pid] = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found[pid].append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    """With one GPU: the neighbour has a connection to each executor that it was ever on."""
    config = '[gpu]\ncount = 1\nmemory = "64MiB"\n'
    with running_node(config, node=f'admins = ["{ADMIN_UID}"]') as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def good(node: TestNode) -> None:
    node.deployed("good", GOOD)
    node.result("good", {"x": 3})
    attacker = Attacker(node)  # what is opened at its first use is open
    attacker.offer(os.memfd_create("weights"))
    attacker.close()


@pytest.fixture(autouse=True)
def unharmed(node: TestNode) -> Iterator[None]:
    """No process has died, none keeps a descriptor, and the neighbour's answers are right."""
    assert node.result("good", {"x": 3}) == [3.0 * k for k in range(8)]
    pids, before = node.pids(), open_files(node)
    yield
    while Attacker.living:  # of a test that failed
        Attacker.living[0].close()
    assert node.result("good", {"x": 3}) == [3.0 * k for k in range(8)]
    assert node.pids() == pids

    def more() -> dict[int, list[str]]:
        return {
            pid: sorted(set(files) - set(before[pid]))
            for pid, files in open_files(node).items()
            if len(files) > len(before[pid])
        }

    try:
        node.wait(lambda: not more(), WAIT_S, "descriptors")
    except AssertionError:
        raise AssertionError(f"descriptors are left open: {more()} of {pids}") from None


def test_d3_what_an_instance_says_to_the_router(node: TestNode) -> None:
    """Up to the message that ends it."""
    rng = random.Random(31)
    whys, granted = Counter[str](), 0
    for _ in range(400):
        attacker = Attacker(node)
        serial = 1
        for _ in range(rng.randrange(3)):  # so often it has a lease, and may have given it back
            attacker.router.send(encode(m.NeedLease(version=0)))
            answer = attacker.hear(attacker.router, m.RouterToInstance)
            assert isinstance(answer, m.LeaseGranted), answer
            serial, granted = answer.lease.serial, granted + 1
            if rng.random() < 0.7:
                break
            attacker.give_back(answer.lease)
        real = (
            *(m.NeedLease(version=0), m.LeaseEnded(serial=serial, version=0), m.LeaseEnded(serial=serial, version=0)),
            *(m.Loaded(version=1, nbytes=64), m.LoadFailed(code="load_failed", text="x"), m.Spoiled(text="x")),
            *(m.Returned(request=1, body=b"1", nbytes=0), m.Raised(request=1, code="cancelled", text="x")),
            m.Importing(confinement="none"),
        )
        with suppress(PeerLost):  # it has been ended, and is asked why
            for _ in range(8):
                message = rng.choice(real)
                attacker.router.send(broken(message, rng) if rng.random() < 0.8 else encode(message))
            attacker.router.send(GARBAGE)
        whys[re.sub(r"/\S*: ", "", attacker.ended())] += 1
        attacker.close()
    attacker = Attacker(node)
    attacker.router.send(encode(m.Spoiled(text="x"))[:-1] + b"\xff")
    whys[attacker.ended()] += 1
    attacker.close()
    assert granted > 200
    for why in ("Raised while idle", "Loaded while idle", "truncated", "Expected `int`", "codec can't decode"):
        assert any(why in text for text in whys), f"{why} in {whys}"
    assert len(whys) > 50
    assert not any(" raised " in text for text in whys), "caught only in the outermost frame: check it where it is read"


def test_d3_what_an_instance_says_to_the_store(node: TestNode) -> None:
    rng = random.Random(32)
    said, answers = 0, Counter[str]()
    for _ in range(300):
        attacker = Attacker(node)
        attacker.offer(os.memfd_create("weights"))
        for _ in range(40):
            storage = rng.randrange(4)
            real = (
                m.StoreUpload(storage=storage, total_nbytes=64, offset=0, arena_offset=0, nbytes=64),
                m.StoreFile(storage=storage + 4, total_nbytes=64, offset=0, file=1, file_offset=0, nbytes=64),
                m.StoreFree(storages=[1, 2]),
                m.Commit(),
            )
            message = rng.choice(real)
            data = broken(message, rng) if rng.random() < 0.3 else encode(message)
            attacker.store.send(data)
            said += 1
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                if isinstance(msgspec.msgpack.decode(data, type=m.InstanceToStore), m.StoreFree):
                    continue  # nothing is said to that
            answer = attacker.hear(attacker.store, m.StoreToInstance)
            answers[type(answer).__name__] += 1
            if isinstance(answer, m.StoreFailed):
                assert " raised " not in answer.text, answer
                break  # it may not be heard any more
        attacker.close()
    assert said > 1_000, said
    assert min(answers[kind] for kind in ("Uploaded", "Committed", "StoreFailed")) > 100, answers


def descriptors(node: TestNode) -> dict[str, Callable[[], list[int]]]:
    """Kinds of descriptors that somebody can send."""
    plain = node.directory / "plain"
    plain.write_bytes(b"1" * 4096)

    def pipe() -> list[int]:
        return list(os.pipe())

    def sock() -> list[int]:
        return [end.detach() for end in socket.socketpair()]

    return {
        "none": list,
        "a file": lambda: [os.open(plain, os.O_RDONLY)],
        "two files": lambda: [os.open(plain, os.O_RDONLY), os.open(plain, os.O_RDONLY)],
        "for writing": lambda: [os.open(plain, os.O_WRONLY)],
        "a path": lambda: [os.open(plain, os.O_PATH)],
        "a directory": lambda: [os.open("/", os.O_RDONLY)],
        "a device": lambda: [os.open("/dev/zero", os.O_RDONLY)],
        "a pipe": pipe,
        "sockets": sock,
        "a deleted file": lambda: [os.memfd_create("x")],
        "too many": lambda: [os.open(plain, os.O_RDONLY) for _ in range(100)],
    }


def send(sock: socket.socket, data: bytes, fds: list[int]) -> bool:
    """Whether it could be sent; the descriptors are closed here."""
    try:
        socket.send_fds(sock, [data], fds)
    except OSError:
        return False
    finally:
        for fd in fds:
            os.close(fd)
    return True


def test_d3_what_an_instance_offers_to_the_store(node: TestNode) -> None:
    rng = random.Random(33)
    kinds = descriptors(node)
    said, answers = 0, Counter[str]()
    for _ in range(60):
        attacker = Attacker(node)
        attacker.offer(os.memfd_create("weights"))
        for _ in range(5):
            sock: PacketSocket[m.FileAnswer, Any] = PacketSocket.connect(f"{attacker.directory}/files", m.FileAnswer)
            for _ in range(10):
                offer = m.FileOffer(file=rng.choice((1, 2, *NUMBERS)) % (1 << 62))
                data = broken(offer, rng) if rng.random() < 0.3 else encode(offer)
                kind = rng.choice(list(kinds))
                said += 1
                answer = None
                with suppress(PeerLost):
                    if send(sock.sock, data, kinds[kind]()):
                        answer = sock.recv()
                answers[f"{kind}: {type(answer[0]).__name__ if answer else 'hung up'}"] += 1
                if answer is None:
                    break
            sock.close()
        attacker.close()
    assert said > 1_000, said
    taken = {kind.split(":")[0] for kind in answers if kind.endswith("FileTaken")}
    assert taken == {"a file", "a deleted file"}
    assert answers["too many: hung up"] > 10


def test_d3_what_is_said_on_the_admin_socket(node: TestNode) -> None:
    rng = random.Random(34)
    kinds = descriptors(node)
    real: tuple[Any, ...] = (
        *(a.Deploy(name="nobody", entry="f.py"), a.Files(names=["f.py"]), a.Finish(), a.Invoke(name="nobody")),
        *(a.Remove(name="nobody"), a.Functions(), a.Status(), a.Logs(name="good", lines=3), a.Keys()),
        *(a.RevokeKey(id="nobody"), a.Restart(name="nobody"), a.CreateKey(wish=a.Wish(scopes=("invoke",)))),
    )
    said, answers = 0, Counter[str]()
    for _ in range(900):
        sock: PacketSocket[a.FromNode, a.ToNode] = PacketSocket.connect(str(node.run / "admin"), a.FromNode, WAIT_S)
        packet = sock.recv()
        assert packet is not None
        assert isinstance(packet[0], a.Welcome)
        if deploys := rng.random() < 0.5:
            sock.send(a.Deploy(name="nobody", entry="f.py"))
        for _ in range(rng.choice((1, 1, 2, 4))):
            message = rng.choice(real[1:3] if deploys and rng.random() < 0.7 else real)
            data = encode(message)
            if rng.random() < 0.6 or isinstance(message, a.CreateKey):  # a key would close the door to who has none
                data = broken(message, rng)
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    if isinstance(msgspec.msgpack.decode(data, type=a.ToNode), a.CreateKey):
                        continue
            said += 1
            if not send(sock.sock, data, kinds[rng.choice(list(kinds) if rng.random() < 0.7 else ["none"])]()):
                break
        if rng.random() < 0.3:  # gone without hearing what is said
            sock.close()
            continue
        sock.sock.shutdown(socket.SHUT_WR)
        last = "hung up"
        with suppress(PeerLost):
            while (packet := sock.recv()) is not None:
                last = packet[0].code if isinstance(packet[0], a.Refused) else type(packet[0]).__name__
        answers[last] += 1
        sock.close()
    assert said > 1_000, said
    assert answers["internal"] == 0, answers
    for code in ("bad_request", "bad_file", "unknown_function", "Done", "hung up"):
        assert answers[code], answers
    node.wait(lambda: "nobody" not in [each["name"] for each in node.admin.functions()], WAIT_S, "no such function")


def callers(node: TestNode, number: int, stack: ExitStack) -> Counter[str]:
    """So many more at the admin socket, until the stack ends; what they were told first."""
    answers = Counter[str]()
    for _ in range(number):
        sock: PacketSocket[a.FromNode, a.ToNode] = PacketSocket.connect(str(node.run / "admin"), a.FromNode, WAIT_S)
        stack.callback(sock.close)
        packet = sock.recv()
        assert packet is not None
        answers[packet[0].text if isinstance(packet[0], a.Refused) else type(packet[0]).__name__] += 1
    return answers


FULL = (
    "{} commands are at work on this node, {} of them user {!r}'s; end some (those that follow logs, or wait), or try "
    "again later"
)


def test_d3_more_callers_than_the_admin_socket_has(node: TestNode) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    with ExitStack() as stack:
        refused = FULL.format(64, 64, user)
        assert callers(node, 100, stack) == {"Welcome": 64, refused: 36}
        if os.getuid() == 0:
            stack.callback(os.seteuid, 0)
            os.seteuid(ADMIN_UID)  # what the kernel says of who connects now
            assert callers(node, 9, stack) == {"Welcome": 4, FULL.format(68, 4, str(ADMIN_UID)): 5}


def test_d3_the_zygote_hears_one_router(node: TestNode) -> None:
    """Its socket is in the node's own directory; who gets there all the same waits until the router is gone."""
    (path,) = Path(RunPaths(str(node.run)).trusted).glob("zygote.*")
    rng = random.Random(35)
    kinds = descriptors(node)
    fork = m.Signal(instance="1-1", signal=9)
    socks = []
    for _ in range(50):
        sock: PacketSocket[m.FromZygote, Any] = PacketSocket.connect(str(path), m.FromZygote)
        sock.sock.setblocking(False)
        for _ in range(4):
            send(sock.sock, broken(fork, rng), kinds[rng.choice(list(kinds))]())
        socks.append(sock)
    node.deployed("after", "def load(): ...\ndef handle(state, request): return 7\n")  # a fork: the zygote has looked
    assert node.result("after", {}) == 7
    for sock in socks:
        with pytest.raises(BlockingIOError):
            sock.recv()
        sock.close()
    assert node.remove("after").status == 200
