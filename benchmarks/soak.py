"""A node for half an hour with faults and hostile neighbours: nothing wrong, nothing unanswered, memory flat.

Twelve functions that together do not fit on two emulated GPUs are asked without a pause by six clients; each answer is
compared with native PyTorch's. Ten hostile functions are asked in between: they raise, crash, loop, hoard, fork, flood
and break the protocol. A fault comes every so many seconds: SIGKILL or SIGSTOP for a process of the node, in turn.

A request is *answered* by its result, or by an error that tells the client to come again (503 with Retry-After) and is
then sent again; every other error of a good function, and silence, count against the node. A connection that is cut,
because the router that had accepted it was killed, is made again as any HTTP client does, and counted apart.
Memory is the proportional set size of all the node's processes: the upper quartile of each third of the time, which is
of a node that is whole. The median often is not: each fault takes some of the processes away, for as long as the
machine needs to start them.
"""

import contextlib
import http.client
import json
import random
import signal
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import soak_functions
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

FUNCTIONS: Final = 12
REQUESTS: Final = 4  # different inputs of each function
CLIENTS: Final = 6
RETRY_S: Final = 120.0
"""A good request that is told to come again for so long was not answered."""

SAMPLE_S: Final = 5.0
FAULTS: Final = [
    (role, number)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for role in ("gpu0", "zygote", "gpu1", "store", "controller", "router")
]


class Tally:
    """What all clients have seen."""

    def __init__(self) -> None:
        self.answered = 0
        self.again: Counter[str] = Counter()  # errors after which the request was sent again
        self.cut = 0
        self.wrong: list[str] = []
        self.unanswered: list[str] = []
        self.hostile: Counter[str] = Counter()
        self.latencies_ms: list[float] = []


class Client(threading.Thread):
    """Asks good functions, or hostile ones, until it is told to stop."""

    def __init__(self, port: int, seed: int, tally: Tally, stop: threading.Event, expected: Any) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._random = random.Random(seed)
        self._tally = tally
        self._stop_asking = stop
        self._expected = expected

    def run(self) -> None:
        while not self._stop_asking.is_set():
            if self._expected is not None:
                self._good(self._random.randrange(FUNCTIONS), self._random.randrange(REQUESTS))
            else:
                self._hostile(self._random.choice(sorted(soak_functions.HOSTILE)))

    def _ask(self, name: str, body: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=RETRY_S)
        try:
            connection.request("POST", f"/functions/{name}/invoke", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def _good(self, function: int, number: int) -> None:
        tally, began_s = self._tally, time.monotonic()
        while True:
            try:
                status, headers, body = self._ask(f"f{function}", str(number))
            except (OSError, http.client.HTTPException) as error:
                tally.cut += 1
                status, headers, body = 0, {"retry-after": ""}, repr(error).encode()
            if status == 200:
                mine = torch.tensor(json.loads(body))
                if not torch.allclose(mine, torch.tensor(self._expected[function][number]), atol=1e-4):
                    tally.wrong.append(f"f{function}({number}): {body[:200]!r}")
                tally.answered += 1
                tally.latencies_ms.append((time.monotonic() - began_s) * 1000)
                return
            if status:
                tally.again[_code(body)] += 1
            if "retry-after" not in headers:
                tally.unanswered.append(f"f{function}({number}): {status} {body[:300]!r}")
                return
            if time.monotonic() - began_s > RETRY_S:
                tally.unanswered.append(f"f{function}({number}): for {RETRY_S:g} s, last {status} {body[:300]!r}")
                return
            time.sleep(0.2)

    def _hostile(self, name: str) -> None:
        try:
            status, headers, body = self._ask(f"h-{name}", "null")
        except (OSError, http.client.HTTPException):
            return  # its own connection was cut
        code = "" if status == 200 else _code(body)
        self._tally.hostile[f"{name}: {code or 'answered'}"] += 1
        if code not in soak_functions.HOSTILE[name][1] and "retry-after" not in headers and status != 503:
            self._tally.wrong.append(f"h-{name}: {status} {body[:300]!r}")
        time.sleep(0.5)


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no code"


def node_pss_nbytes(node: TestNode) -> int:
    total = 0
    assert node.process is not None
    for pid in [node.process.pid, *node.descendants()]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--fault-s", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    seconds = 60.0 if args.quick else args.minutes * 60
    expected = soak_functions.native(FUNCTIONS, REQUESTS)
    tally, hostile_tally, stop = Tally(), Tally(), threading.Event()
    samples: list[tuple[float, int]] = []
    faults: Counter[str] = Counter()
    config = """
        [gpu]
        count = 2
        memory = "192MiB"
        threads = 1
        poison = true
        [sandbox]
        memory = "4GiB"
        warm = []
    """
    with running_node(config) as node:
        for number in range(FUNCTIONS):
            node.deployed(f"f{number}", soak_functions.good(number), deadline="5s")
        for name in soak_functions.HOSTILE:
            node.deployed(f"h-{name}", soak_functions.hostile(name), timeout="5s")
        clients = [Client(node.port, args.seed + n, tally, stop, expected) for n in range(CLIENTS)]
        clients.append(Client(node.port, args.seed - 1, hostile_tally, stop, None))
        began_s = time.monotonic()
        for client in clients:
            client.start()
        next_fault_s, turn = began_s + args.fault_s, 0
        while (now_s := time.monotonic()) < began_s + seconds:
            if now_s >= next_fault_s:
                role, number = FAULTS[turn % len(FAULTS)]
                turn += 1
                with contextlib.suppress(KeyError, ProcessLookupError):  # it is being replaced: the next one's turn
                    node.kill(role, number)
                    faults[f"{role} {number.name}"] += 1
                next_fault_s = now_s + args.fault_s
            samples.append((now_s - began_s, node_pss_nbytes(node)))
            time.sleep(SAMPLE_S)
        stop.set()
        for client in clients:
            client.join(RETRY_S + 10)
        assert not any(client.is_alive() for client in clients), "a client waits for ever"
    first = statistics.quantiles([nbytes for at_s, nbytes in samples if at_s < seconds / 3])[2]
    last = statistics.quantiles([nbytes for at_s, nbytes in samples if at_s > 2 * seconds / 3])[2]
    bad = [*tally.wrong, *hostile_tally.wrong]
    for line in [*tally.unanswered[:20], *bad[:20]]:
        print(line)
    print(f"answered {tally.answered}, p50 {statistics.median(tally.latencies_ms):.1f} ms; sent again {tally.again}")
    print(f"faults {sum(faults.values())}: {dict(faults)}; connections cut by a router's death: {tally.cut}")
    print(f"hostile: {dict(hostile_tally.hostile)}")
    goals = [
        Goal(name="wrong answers", goal="0", measured=len(bad), met=not bad),
        Goal(name="unanswered", goal="0", measured=len(tally.unanswered), met=not tally.unanswered),
        Goal(name="memory, last third / first", goal="<= 1.05", measured=last / first, met=last <= 1.05 * first),
    ]
    report(
        goals,
        args,
        {
            "answered": tally.answered,
            "again": dict(tally.again),
            "cut": tally.cut,
            "faults": dict(faults),
            "hostile": dict(hostile_tally.hostile),
            "memory_nbytes": samples,
        },
    )


if __name__ == "__main__":
    main()
