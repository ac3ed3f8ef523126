"""What an instance may say to router and store, and leave in its directory: nothing of it raises past that instance."""

import asyncio
import os
import random
import socket
import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from router_rig import Rig, lease, loaded, one, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.directories import remove_tree
from dormouse.core.links.fds import PacketSocket
from dormouse.core.links.link import Link, RawLink
from dormouse.core.log import get_logger
from dormouse.core.masking import SecretMask
from dormouse.core.paths import RunPaths
from dormouse.core.rate import Bucket
from dormouse.router.instances.functionlog import FunctionLog
from dormouse.router.instances.instances import InstanceHost
from dormouse.router.instances.logpipe import LogPipe
from dormouse.schemas import messages as m

NUMBERS = (0, 1, -1, 2, 7, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
TEXTS = ("", "ok", "violation", "function_raised", "\x00", "\u2028", "x" * 70_000, "\U0001f600")


def _value(kind: Any, rng: random.Random, tickets: list[int]) -> Any:
    if kind is int:
        return rng.choice((*NUMBERS, *tickets, *tickets))
    if kind is str:
        return rng.choice(TEXTS)
    if kind is bool:
        return rng.random() < 0.5
    if typing.get_origin(kind) is list:
        return [_value(typing.get_args(kind)[0], rng, tickets) for _ in range(rng.randrange(4))]
    structs = [
        each for each in (kind, *typing.get_args(kind)) if isinstance(each, type) and issubclass(each, m.Message)
    ]
    if structs:
        made = _struct(structs[0], rng, tickets)
        return made if structs[0] is kind else rng.choice((None, made))
    return rng.choice((*(() if kind is bytes else (None,)), b"", b"[1]", b"\xff", b"[" * 2000))


def _message(kinds: Any, rng: random.Random, tickets: list[int]) -> Any:
    return _struct(rng.choice(kinds.__args__), rng, tickets)


def _struct(kind: Any, rng: random.Random, tickets: list[int]) -> Any:
    return kind(**{field.name: _value(field.type, rng, tickets) for field in msgspec.structs.fields(kind)})


def _instances(rig: Rig, function: str) -> list[str]:
    found = rig.policy.picture.instances.items()
    return [name for name, instance in found if instance.spec.name == function]


def test_d3_no_message_of_an_instance_breaks_the_routers_policy() -> None:
    """Also its invariants hold after each; `check()` runs in the rig. The neighbour is served at the end."""
    rng = random.Random(5)
    heard = 0
    for _ in range(120):
        rig = loaded(spec("hostile"), spec("good"))
        for step in range(25):
            tickets = list(rig.policy.picture.tickets)
            names = [name for name, one in rig.policy.picture.instances.items() if one.spec.name == "hostile"]
            if step % 6 == 0:
                rig.arrive(100 + step, "hostile")
            if step % 6 == 2 and tickets:
                granted = m.Granted(
                    request=tickets[-1], lease=m.Lease(gpu=0, epoch=1, serial=1, secret=2), wake_nbytes=0
                )
                rig.hear(granted)
            for name in names:
                rig.say(name, _message(m.InstanceToRouter, rng, tickets))
                heard += 1
            rig.now_s += rng.choice((0.0, 0.1, 3.0))
            rig.do(e.Tick())
        ticket = one(rig.arrive(1, "good"), m.Acquire).request
        rig.hear(m.Granted(request=ticket, lease=lease(9), wake_nbytes=0))
        good = _instances(rig, "good")[0]
        assert one(rig.say(good, m.Returned(request=ticket, body=b"2", nbytes=0)), e.Answer).body == b"2"
    assert heard > 1000


def test_d3_what_raises_when_it_is_heard_ends_its_instance_alone(tmp_path: Path) -> None:
    """A schema that is no text, from a function with a secret, ended the router; so would an error further on."""
    paths = RunPaths(tmp_path)
    (tmp_path / "i").mkdir()
    heard: list[m.InstanceToRouter] = []
    garbage: list[tuple[str, str]] = []

    def hear(_: str, message: m.InstanceToRouter) -> None:
        if isinstance(message, m.Importing):
            raise KeyError("of the router")
        heard.append(message)

    async def main() -> None:
        layout = m.Arena(request_nbytes=4096, response_nbytes=4096, stream_nbytes=4096)
        log, pace = get_logger(), Bucket.full(1.0, 100.0, asyncio.get_running_loop().time())
        host = InstanceHost(
            "1-1", spec(), os.getuid(), paths, layout, hear, lambda *said: garbage.append(said), pace, log
        )
        host.mask = SecretMask({"TOKEN": "hf_abcdef"})
        say = msgspec.msgpack.Encoder().encode
        host.link._decode(say(m.Loaded(version=1, nbytes=5, warning="hf_abcdef", schema=b"\xff hf_abcdef \xc3")))
        host.link._decode(say(m.Importing(confinement="")))
        host.close()

    asyncio.run(main())
    assert heard == [m.Loaded(version=1, nbytes=5, warning="[secret TOKEN]", schema=b"\xff [secret TOKEN] \xc3")]
    assert garbage == [("1-1", "what it sent raised KeyError in the router")]


@pytest.mark.parametrize("union", [m.InstanceToRouter, m.InstanceToStore])
def test_d3_bytes_of_an_instance_are_a_message_or_garbage(tmp_path: Path, union: Any) -> None:
    """Through the link that router and store have: also a text that is not UTF-8, which ended the router."""
    rng = random.Random(7)
    heard: list[Any] = []
    garbage: list[Any] = []

    async def feed() -> None:
        link: Link[Any, Any] = Link(
            str(tmp_path / "x"), bind=True, incoming=union, on_message=heard.append, on_garbage=garbage.append
        )
        for _ in range(5_000):
            link._decode(_bytes(union, rng))
        link.close()

    asyncio.run(feed())
    assert len(heard) + len(garbage) == 5_000
    assert min(len(heard), len(garbage)) > 500
    texts = [str(error) for error in garbage]
    assert union is m.InstanceToStore or any("codec can't decode" in text for text in texts), "no text was broken"


def _bytes(union: Any, rng: random.Random) -> bytes:
    """A message, broken or not."""
    kind = rng.choice(union.__args__)
    fields = {field.name: _value(field.type, rng, [3]) for field in msgspec.structs.fields(kind)}
    parts = msgpack.unpackb(msgspec.msgpack.encode(kind(**fields)), strict_map_key=False)
    at = rng.randrange(len(parts))
    match rng.randrange(5):
        case 0:
            parts[at] = rng.choice((*NUMBERS, None, True, 1.5, "x", b"x", [], {}, [[[]]], msgpack.ExtType(1, b"")))
        case 1:
            del parts[at]
        case 2:
            parts.append(0)
    data = bytes(msgpack.packb(parts))
    if rng.random() < 0.3:
        cut = rng.randrange(len(data))
        changed = data[:cut] + b"\xc1" + data[cut + 1 :]
        data = rng.choice((data[:cut], changed, data + data, b"\x91" * 5000))
    return data


def test_d3_an_empty_packet_keeps_no_descriptor_open() -> None:
    """It reads as the end of the connection; what came with it would stay open for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end: PacketSocket[m.FileOffer, m.FileAnswer] = PacketSocket(ours, m.FileOffer)
    before = set(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file:
        socket.send_fds(theirs, [b""], [file.fileno()] * 8)
    assert end.recv() is None
    assert set(os.listdir("/proc/self/fd")) == before
    theirs.close()
    end.close()


def _deep(folder: Path, depth: int) -> None:
    """Deeper than a path can name."""
    top = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=top)
        below = os.open("d", os.O_RDONLY, dir_fd=top)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=top))
        os.close(top)
        top = below
    os.close(top)


def test_d3_whatever_an_instance_leaves_is_removed(tmp_path: Path) -> None:
    """`shutil.rmtree` raises RecursionError, which ended the router, in a directory of a thousand levels."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    instance = tmp_path / "1-1"
    instance.mkdir()
    _deep(instance, 1200)
    (instance / "gpu0.1").mkdir()
    (instance / "gpu0.1" / "in the way").write_text("")
    (instance / "link").symlink_to(outside)
    (instance / "closed").mkdir()
    (instance / "closed" / "inner").mkdir()
    (instance / "closed").chmod(0)
    os.mkfifo(instance / "pipe")
    remove_tree(str(instance))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert (outside / "kept").read_text() == "kept"
    remove_tree(str(instance))  # that it is gone is no trouble


def test_d3_a_link_closes_whatever_took_its_path(tmp_path: Path) -> None:
    """An instance can put a directory where its endpoint was; that ended the executor that closed it."""

    async def close() -> None:
        link = RawLink(str(tmp_path / "gpu0.1"), bind=True, on_message=lambda _: None)
        os.unlink(link.path)
        os.mkdir(link.path)
        link.close()

    asyncio.run(close())
    assert (tmp_path / "gpu0.1").is_dir()


def test_what_was_printed_before_the_end_of_a_load_is_in_the_log_before_it_is_told(tmp_path: Path) -> None:
    """Both lie in sockets of the loop, and the message may be heard first."""
    paths = RunPaths(tmp_path)
    paths.instances.mkdir(parents=True)
    told: list[tuple[str, bytes]] = []
    log = FunctionLog(tmp_path / "f.log", 1 << 20)

    async def main() -> None:
        layout = m.Arena(request_nbytes=4096, response_nbytes=4096, stream_nbytes=4096)
        pace = Bucket.full(1.0, 100.0, asyncio.get_running_loop().time())

        def hear(_: str, message: m.InstanceToRouter) -> None:
            told.append((type(message).__name__, log.tail(9)))

        host = InstanceHost("1-1", spec(), os.getuid(), paths, layout, hear, lambda *_: None, pace, get_logger())
        host.log_pipe = LogPipe(log)
        os.write(host.log_pipe.write_fd, b"Traceback\n")
        host.link._decode(msgspec.msgpack.Encoder().encode(m.LoadFailed(code="load_failed", text="SyntaxError")))
        host.close()
        log.close()

    asyncio.run(main())
    assert [(kind, b"Traceback\n" in text) for kind, text in told] == [("LoadFailed", True)]
