"""What bodies that wait cost the machine: ``python -m benchmarks.bodies``, on a machine with nothing else to do.

Sixty clients send 16 MB each to a function that answers one request at a time. Measured is by how much the machine's
available memory falls while they wait, all of it: the router, the kernel's socket buffers, the instance. The clients
share one body, made before, and have small send buffers, because theirs would lie on other machines.
"""

import argparse
import json
import mmap
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks.nodes.testnode import TestNode, running_node

FUNCTION = """
    import time
    def load(): pass
    def handle(state, request):
        time.sleep(request if isinstance(request, (int, float)) else 0.2)
        return len(request) if isinstance(request, str) else 0
"""


def meminfo_nbytes(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def parts_nbytes(node: TestNode) -> Counter[str]:
    """What the node's own processes have, shared pages counted once, and TCP's buffers of the whole machine."""
    found: Counter[str] = Counter()
    for pid in node.descendants():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            role = words[words.index("--role") + 1] if "--role" in words else "others"
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found[role] += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    tcp = next(line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:"))
    found["tcp"] = int(tcp.split()[-1]) * mmap.PAGESIZE
    return found


class Watch:
    """The least memory that was available, and the most that the node had, some times a second."""

    def __init__(self, node: TestNode) -> None:
        self._node = node
        self.nbytes = self.first_nbytes = meminfo_nbytes("MemAvailable")
        self.parts = self.first_parts = parts_nbytes(node)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            self.nbytes = min(self.nbytes, meminfo_nbytes("MemAvailable"))
            self.parts = max(self.parts, parts_nbytes(self._node), key=Counter.total)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def send_all(port: int, clients: int, nbytes: int) -> Counter[str]:
    """All at once, from one thread; how often each outcome."""
    body = b'"' + b"x" * (nbytes - 2) + b'"'
    head = b"POST /functions/slow/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % nbytes
    outcomes: Counter[str] = Counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
            sock.connect(("127.0.0.1", port))
            sock.sendall(head)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, [memoryview(body), b""])
        while selector.get_map():
            for key, events in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                sock, state = key.fileobj, key.data
                if events & selectors.EVENT_WRITE:
                    with suppress(BlockingIOError, ConnectionError):  # refused: the answer is still to be read
                        state[0] = state[0][sock.send(state[0][: 1 << 20]) :]
                    if not state[0]:
                        selector.modify(sock, selectors.EVENT_READ, state)
                part = None
                if events & selectors.EVENT_READ:
                    try:
                        part = sock.recv(65536)
                    except ConnectionError:
                        part = b""
                state[1] += part or b""
                if part == b"" or b"\r\n\r\n" in state[1]:
                    outcomes[state[1][9:12].decode() or "closed"] += 1
                    selector.unregister(sock)
                    sock.close()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--mb", type=int, default=16, help="of each body, in MiB")
    parser.add_argument("--budget", default="256MiB", help="[limits] bodies")
    arguments = parser.parse_args()
    config = f'[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nbodies = "{arguments.budget}"\n'
    with running_node(config) as node:
        node.deployed("slow", FUNCTION)
        node.result("slow", "warm")
        time.sleep(2)
        watch = Watch(node)
        start_s = time.monotonic()
        outcomes = send_all(node.port, arguments.clients, arguments.mb << 20)
        took_s = time.monotonic() - start_s
        watch.end()
    found = {
        "outcomes": outcomes,
        "took_s": round(took_s, 1),
        "available_fell_mb": round((watch.first_nbytes - watch.nbytes) / 1e6),
        "node_grew_mb": {
            part: round((nbytes - {**watch.first_parts, "all": watch.first_parts.total()}[part]) / 1e6)
            for part, nbytes in {**watch.parts, "all": watch.parts.total()}.items()
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
