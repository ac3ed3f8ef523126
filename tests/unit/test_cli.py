"""The `dormouse` command against a node that is made of http.server: what it asks, prints and exits with."""

import fcntl
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click
import pytest

from dormouse.controller.catalogue import CatalogueFile
from dormouse.controller.status import NO_STORE, status
from dormouse.core.cli import completion as cli_completion
from dormouse.core.cli import deploy as cli_deploy
from dormouse.core.cli import dev as cli_dev
from dormouse.core.cli import doctor
from dormouse.core.cli import frame as cli_frame
from dormouse.core.cli import main as cli
from dormouse.core.cli.statusview import OVERVIEW
from dormouse.core.config import GpuSection, NodeConfig, NodeSection, TenantSection
from dormouse.core.decisions.requests.events import Timing
from dormouse.core.decisions.scheduling.events import Asked, ExecutorUp, FunctionKnown
from dormouse.core.decisions.scheduling.functions import LastEviction
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.links.fds import PacketSocket
from dormouse.core.logrecords import mark
from dormouse.core.node import adminclient, nodeprocess
from dormouse.core.node.adminclient import AdminClient
from dormouse.core.node.refusals import CallRefused
from dormouse.core.output import clear, table
from dormouse.core.paths import StatePaths
from dormouse.core.quantities import size
from dormouse.core.startup import keep_node_config
from dormouse.core.terminal import harmless_streams
from dormouse.core.times import utc
from dormouse.router.front.stats import TokenStats
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ProcessFailed
from dormouse.schemas.messages import AnswerBegun, FunctionSpec, LlmSettings, PoolStats, TokenCounts
from dormouse.schemas.options import OPTIONS

FUNCTION = {
    "name": "f",
    "version": 2,
    "state": "idle",
    "tenant": "default",
    "deadline_ms": 80,
    "percentile": 98.0,
    "instances": {"1-1": "idle", "1-4": "busy"},
    "max_instances": 4,
    "requests": 3,
    "errors": 1,
    "p50_ms": 1.5,
    "error": None,
}
PLACES = {
    "wakes": 2,
    "evictions": 1,
    "nbytes": 3 << 30,
    "gpu_nbytes": {"0": 3 << 30, "1": 512 << 20},
    "host_nbytes": 1 << 20,
    "file_nbytes": 3 << 30,
    "shared_nbytes": 2 << 30,
    "shared_with": ["g", "h"],
    "shared_count": 5,
    "last_wake": {
        "gpu": 1,
        "copied_nbytes": 3 << 30,
        "host_nbytes": 2 << 30,
        "peer_nbytes": 1 << 30,
        "file_nbytes": 0,
        "wake_us": 35_500,
    },
}
STATUS: dict[str, Any] = {
    "node": {"name": "default", "address": "http://127.0.0.1:1", "confinement": "own-uid", "missing": []},
    "functions": {"f": FUNCTION | PLACES, "new": {"name": "new", "state": "loading"}},
    "gpus": {
        "0": {
            "epoch": 5,
            "name": "Emulated",
            "pool": "regions",
            "busy_with": "f",
            "turns": [{"function": "f", "idle": False}],
            "seats": ["f"],
            "weights_nbytes": 3 << 30,
            "kv_nbytes": 6 << 20,
            "lost_nbytes": 0,
            "activation_nbytes": 512,
            "free_nbytes": 4000,
            "largest_free_nbytes": 3000,
            "fragmentation": 0.25,
            "moved_nbytes": 1000 << 10,
            "segments": 7,
        },
        "1": {"epoch": 6},
    },
    "store": {
        "answered": True,
        "host_nbytes": 5 << 20,
        "host_budget_nbytes": 8 << 30,
        "file_nbytes": 6 << 30,
        "file_budget_nbytes": None,
        "segments": 40,
        "slabs": 2,
        "trouble": "",
    },
}


LLM: dict[str, Any] = TokenStats().summary(LlmSettings(ttft_ms=400, tpot_ms=50), 95.0)
RUNTIME: dict[str, Any] = {
    "gpu": 1,
    "pid": 77,
    "running": 3,
    "waiting": 4,
    "preempted": 5,
    "kv_blocks": 100,
    "kv_blocks_used": 60,
    "kv_blocks_idle": 7,
    "kv_nbytes": 3 << 20,
    "kv_share": 0.123,
    "reused_nbytes": 5 << 10,
}


VERSIONS: list[dict[str, Any]] = [
    {"version": version, "at": 1000.0, "file": "f.py", "deadline_ms": 80, "tenant": "default"} for version in (7, 5)
]
JOBS: list[dict[str, Any]] = [
    {"id": "j1", "function": "f", "state": "failed", "code": "function_raised", "created": 1000.0, "ended": 1001.0},
    {"id": "j2", "function": "f", "state": "queued", "created": 1000.0},
]
PAST: dict[str, Any] = {
    "function": "f",
    "at": 1000.0,
    "id": "r7",
    "trace": "",
    "outcome": "ok",
    "error": "KeyError: 'x'",
    "ms": 10.0,
    "queue_ms": 1.0,
    "wait_ms": 2.0,
    "run_ms": 7.0,
    "copy_ms": None,
    "model": "host",
    "late": True,
}


TRACEBACK = 'Traceback (most recent call last):\n  File "/function/f.py", line 1, in handle\nValueError: a; b\n'


class Node:
    """Answers what a node would; an unknown function is called nobody, a full one full."""

    def __init__(self, path: Path) -> None:
        self.asked: list[a.ToNode] = []
        self.files: dict[str, bytes] = {}
        self.refusal: a.Refused | None = None
        self.more: dict[str, Any] = {}  # in the answer to a deploy
        self.models = False  # are there, too
        self.spoil = ""  # what each text says that is not the node's own
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            connection: PacketSocket[a.ToNode, a.FromNode] = PacketSocket(sock, a.ToNode)
            connection.send(self.refusal or a.Welcome(protocol=a.PROTOCOL))
            while self.refusal is None and (packet := connection.recv()) is not None:
                self.asked.append(packet[0])
                for said in self._answer(*packet):
                    connection.send(self._spoiled(said) if self.spoil else said)
            connection.close()

    def _spoiled(self, said: a.FromNode) -> a.FromNode:
        if not isinstance(said, a.Said):
            return said
        try:
            value = spoiled(json.loads(said.data), self.spoil)
        except ValueError:
            return a.Said(data=said.data + self.spoil.encode())
        return a.Said(data=json.dumps(value, ensure_ascii=False).encode())

    def _answer(self, act: a.ToNode, fds: list[int]) -> Iterator[a.FromNode]:
        contents = []
        for fd in fds:
            with open(fd, "rb") as file:
                contents.append(os.pread(file.fileno(), 1 << 20, 0))
        match act:
            case a.Deploy():
                yield a.Taken()
                return
            case a.Files(names=names):
                self.files |= dict(zip(names, contents, strict=True))
                yield a.Taken()
                return
            case a.Finish():
                yield a.Said(data=json.dumps({"name": "f", "version": 2, **self.more}).encode())
            case a.Invoke(detach=True):
                yield a.Said(data=json.dumps(JOBS[0]).encode())
            case a.ListJobs():
                yield a.Said(data=json.dumps({"jobs": JOBS, "more": 0}).encode())
            case a.AskJob(id="j9"):
                yield a.Refused(status=404, code="unknown_job", text="there is no job 'j9'")
                return
            case a.AskJob(id=id):
                ended = {"ended": 1001.0} if sum(isinstance(each, a.AskJob) for each in self.asked) > 4 else {}
                row = next(row for row in JOBS if row["id"] == id)
                yield a.Said(data=json.dumps(row | ended).encode())
            case a.CancelJob(id=id):
                yield a.Said(data=json.dumps(JOBS[1]).encode())
            case a.JobResult(id="j1"):
                yield a.Refused(status=500, code="function_raised", text="as asked")
                return
            case a.JobResult():
                yield a.Said(data=b'{"y": 1}')
            case a.Invoke(name=("nobody" | "ff") as name) | a.Remove(name="nobody" as name):
                yield a.Refused(status=404, code="unknown_function", text=f"there is no function {name!r}")
                return
            case a.Invoke(name="full"):
                yield a.Refused(status=429, code="queue_full", text="later")
                return
            case a.Invoke(name="own"):
                yield a.Refused(status=404, code="unknown_function", text="no user 7; ask later", of_function=True)
                return
            case a.Invoke(name="raises"):
                yield a.Refused(status=500, code="function_raised", text=TRACEBACK.strip())
                return
            case a.Invoke(name="breaks"):
                for data in (b'data: {"a": 1}\n\nda', b"ta: two\n\n"):
                    yield a.Said(data=data, kind="text/event-stream")
                yield a.Refused(status=500, code="function_raised", text=f"{TRACEBACK}dormouse: do; or do not\n")
                return
            case a.Invoke(name="bad"):
                yield a.Refused(status=502, code="sandbox_died", text="it died")
                return
            case a.Invoke():
                yield a.Said(data=contents[0])
            case a.Logs(marks=marks):
                yield a.Said(data=mark(1000, "3-16", "mine-1") + b"one\n" if marks else b"one\n")
                yield a.Said(data=b"two\n")
            case a.Versions(name=name):
                shares: dict[int, int] = {7: 90, 5: 10} if name == "shared" else {}
                rows = [row | {"traffic": shares.get(row["version"])} for row in VERSIONS] if shares else VERSIONS
                yield a.Said(data=json.dumps({"versions": rows}).encode())
            case a.Rollback():
                yield a.Said(data=json.dumps({"name": "f", "version": 8, "copy_of": 5}).encode())
            case a.Traffic(shares=shares):
                said = {"name": "f", "version": 7, "traffic": {"7": 100 - shares.get(5, 0), "5": shares.get(5, 0)}}
                yield a.Said(data=json.dumps(said).encode())
            case a.RecentRequests():
                yield a.Said(data=json.dumps({"requests": [PAST]}).encode())
            case a.Status():
                yield a.Said(data=json.dumps(STATUS).encode())
            case a.Functions():
                models = {"name": "chat", "llm": LLM}, {"name": "embed", "embedding": True}
                rows = [FUNCTION, *(FUNCTION | model for model in models)] if self.models else [FUNCTION]
                yield a.Said(data=json.dumps({"functions": rows}).encode())
            case a.Schema(name=name):
                schema = {} if name == "plain" else {"request": {"type": "integer"}}
                yield a.Said(data=json.dumps({"name": name, "version": 1, **schema}).encode())
            case a.DrainGpu(gpu=gpu, undo=undo, waits=waits):
                state = "missing" if undo else "drained" if waits else "drains"
                yield a.Said(data=json.dumps({"gpu": gpu, "state": state, "leases": 2}).encode())
            case a.Remove() | a.Restart() | a.Pin():
                yield a.Said(data=b"{}")
        yield a.Done()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def run() -> Iterator[Path]:
    """A short run directory."""
    directory = Path(tempfile.mkdtemp(prefix="dmc-", dir="/tmp"))
    (directory / "t").mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def node(run: Path) -> Iterator[Node]:
    node = Node(run / "admin")
    yield node
    node.close()


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


@pytest.fixture
def dormouse(run: Path, node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process."""
    monkeypatch.setenv("DORMOUSE_RUN", str(run))

    def command(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["dormouse", *arguments])
        try:
            cli.main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return command


def test_ls(dormouse: Any) -> None:
    result = dormouse("ls")
    assert result.status == 0
    assert result.out.splitlines()[0].split("\t")[:3] == ["name", "version", "state"]
    assert result.out.splitlines()[1].split("\t")[:3] == ["f", "2", "idle"]
    assert json.loads(dormouse("ls", "--json").out) == [FUNCTION]


def rows(lines: list[str], first: str) -> list[dict[str, str]]:
    """The tab-separated table whose first column is called ``first``."""
    start = next(number for number, line in enumerate(lines) if line.split("\t")[0] == first)
    columns, found = lines[start].split("\t"), []
    for line in lines[start + 1 :]:
        if len(cells := line.split("\t")) != len(columns):
            break
        found.append(dict(zip(columns, cells, strict=True)))
    return found


def test_status(dormouse: Any) -> None:
    lines = dormouse("status", "--all").out.splitlines()
    assert "http://127.0.0.1:1" in lines[0]
    assert "store: host 5.0 MiB of 8.0 GiB, files 6.0 GiB; 40 segments in 2 slabs" in lines
    assert not [line for line in lines if "trouble" in line or "in time" in line]
    gpu, other = rows(lines, "gpu")
    assert list(gpu.values()) == [
        "0", "Emulated", "regions", "f", "1", "-", "3.0 GiB", "6.0 MiB", "0 B", "512 B", "3.9 KiB",
        "2.9 KiB", "25%", "1.0 MiB", "7", "-",
    ]  # fmt: skip
    assert (other["gpu"], other["turn"], other["seats"], other["weights"]) == ("1", "-", "-", "-")
    function, new = rows(lines, "name")
    assert (function["instances"], new["instances"]) == ("2 of 4", "0")
    assert (function["wakes"], function["evictions"], function["p50_ms"]) == ("2", "1", "1.5")
    (model,) = rows(lines, "function")
    assert model == {
        "function": "f",
        "model": "3.0 GiB",
        "on GPUs": "0: 3.0 GiB, 1: 512 MiB",
        "host": "1.0 MiB",
        "file": "3.0 GiB",
        "shared": "2.0 GiB with g, h and 3 more",
        "last wake": "GPU 1 in 35.5 ms: 2.0 GiB from host, 1.0 GiB from GPUs",
    }


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_status_says_whose_the_time_of_a_gpu_was(
    words: tuple[str, ...], dormouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {"chat": 0.41, "f": 0.2, "g": 0.1, "h": 0.004}
    busy = {"seconds": 60, "share": 0.714, "functions": functions, "others": 2}
    monkeypatch.setitem(STATUS["gpus"], "0", STATUS["gpus"]["0"] | {"busy": busy})
    first, other = rows(dormouse("status", *words).out.splitlines(), "gpu")
    assert (first["busy"], other["busy"]) == ("71% of 60 s: chat 41%, f 20%, g 10%, 3 more", "-")


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_status_says_which_programs_are_linked_to_the_node(
    words: tuple[str, ...], dormouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = {"session": "3-9", "program": "app.py --port 1", "pid": 17, "since_ms": 61400, "tenant": "default"}
    there = session | {"memory_nbytes": 3 << 20, "cpu_s": 2.5, "processes": 2}
    gone = session | {"memory_nbytes": None, "cpu_s": None, "processes": None}
    monkeypatch.setitem(STATUS, "sessions", [there, gone])
    first, other = rows(dormouse("status", *words).out.splitlines(), "program")
    assert list(first.values()) == ["app.py --port 1", "3-9", "17", "default", "61 s", "3.0 MiB", "2.5 s"]
    assert list(other.values())[-2:] == ["-", "-"]


def test_status_says_who_has_a_turn_and_who_a_seat(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"function": "f", "idle": True}, {"function": "g", "idle": False}]
    monkeypatch.setitem(STATUS["gpus"], "0", STATUS["gpus"]["0"] | {"turns": turns, "seats": ["h", "f", "i", "g", "f"]})
    monkeypatch.setitem(STATUS["gpus"], "1", STATUS["gpus"]["1"] | {"turns": [], "seats": ["h"]})
    gpu, other = rows(dormouse("status", "--all").out.splitlines(), "gpu")
    assert (gpu["turn"], gpu["seats"]) == ("f (idle), g", "5, without a turn: h, i, f")
    assert (other["turn"], other["seats"]) == ("-", "1, without a turn: h")


def test_status_says_why_requests_wait_and_models_were_evicted(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = {
        "counted": 200,
        "in_time": 0.975,
        "deadline_ms": 80.0,
        "percentile": 98.0,
        "complies": False,
        "rrc": 50.0,
        "rate_s": 1.25,
        "run_ms": 43.0,
        "wake_ms": 1440.0,
        "heavy": True,
    }
    last = {"gpu": 1, "ago_s": 7.4, "nbytes": 3 << 30, "for": "g", "rule": "used longest ago"}
    monkeypatch.setitem(STATUS["functions"]["f"], "service", service)
    monkeypatch.setitem(STATUS["functions"]["f"], "last_eviction", last)
    oldest = [
        {"function": "f", "waited_ms": 1500.0, "left_ms": 20.0, "reason": "the only GPU is busy; it comes next"},
        {"function": "g", "waited_ms": 1.0, "left_ms": -1.0, "reason": "late already"},
    ]
    waits = {"oldest": oldest, "others": {"busy": 30, "late": 2}}
    monkeypatch.setitem(STATUS, "waits", waits)
    lines = dormouse("status", "--all").out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("function\tin time"))
    (told,) = rows(lines[start:], "function")
    assert told == {
        "function": "f",
        "in time": "97.5% of 200: missed",
        "wanted": "98% in 80 ms",
        "requests/s": "1.25",
        "run": "43 ms",
        "with wake": "1.44 s, heavy",
        "last evicted": "3.0 GiB from GPU 1 for g 7 s ago: used longest ago",
    }
    first, second = rows(lines, "waiting")
    assert list(first.values()) == ["f", "1.5 s", "20 ms", "the only GPU is busy; it comes next"]
    assert second["until its deadline"] == "1 ms late"
    assert lines[-1] == "and more: 30 (busy), 2 (late)"


def test_status_says_what_language_models_take(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = TokenStats()
    begun = AnswerBegun(request=1, queue_us=2000, runtime_us=300_000, wake_us=5000, prefill_us=90_000)
    tokens = TokenCounts(prompt=20, made=30, reused=16, tpot_us=51_000)
    stats.add(Timing(queue_s=0.001, run_s=9.0, first=begun), tokens, LlmSettings(ttft_ms=400, tpot_ms=50))
    chat = FUNCTION | {
        "name": "chat",
        "percentile": 98.0,
        "llm": stats.summary(LlmSettings(ttft_ms=400, tpot_ms=50), 95.0),
    }
    monkeypatch.setitem(STATUS["functions"], "chat", chat | {"runtimes": [RUNTIME]})
    lines = dormouse("status", "--all").out.splitlines()
    (told,) = rows(lines, "model")
    assert list(told.values()) == [
        "chat", "398 ms, 398 ms", "3 ms, 300 ms, 5 ms, 90 ms", "51 ms, 51 ms", "0.0% of 1: missed",
        "98% in 400 ms, then 50 ms", "20", "30", "16",
    ]  # fmt: skip
    start = next(number for number, line in enumerate(lines) if line.startswith("model\tGPU"))
    (runtime,) = rows(lines[start:], "model")
    assert list(runtime.values()) == [
        "chat", "1", "pid 77", "3", "4", "5", "100", "60", "7", "3.0 MiB", "12.3%", "5.0 KiB",
    ]  # fmt: skip


def test_status_for_programs(dormouse: Any) -> None:
    assert json.loads(dormouse("status", "--json").out) == STATUS


def test_status_says_what_is_wrong_with_the_store(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    troubled = STATUS["store"] | {"answered": False, "trouble": "the disk is full"}
    monkeypatch.setitem(STATUS, "store", troubled)
    out = dormouse("status", "--all").out
    assert "store: trouble: the disk is full\n" in out
    assert "did not say in time" in out
    monkeypatch.setitem(STATUS, "store", {})
    assert "nothing is known" in dormouse("status", "--all").out


def test_status_is_a_screen_and_says_what_is_wrong_first(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node with hundreds of functions, some of them in trouble; the window has 30 lines."""
    monkeypatch.setenv("LINES", "30")
    service: dict[str, Any] = {
        "counted": 200,
        "in_time": 0.9,
        "complies": False,
        "percentile": 98.0,
        "deadline_ms": 80.0,
    }
    service |= {"rate_s": 1.0, "run_ms": None, "wake_ms": None, "heavy": None}
    many = {f"f{number:03}": FUNCTION | {"requests": number} for number in range(300)}
    many["f007"] |= {"state": "quarantined", "error": "ValueError: twice\nmore of it"}
    many["f006"] |= {"recent": recent(10, 0.0, failed=10, in_a_row=10)}
    many["f008"] |= {"service": service, "recent": recent(200, 0.9), "percentile": 98.0}
    many["f009"] |= {"service": service, "recent": recent(19, 0.0)}  # too few to say
    many["f010"] |= {"queued": 7, "jobs": {"queued": 5, "failed": 1}}
    many["f011"] |= {"jobs": {"queued": 2, "begun": 1}}
    node = STATUS["node"] | {"down": {"gpu1": "no driver"}, "missing": ["f007"]}
    store = STATUS["store"] | {"host_nbytes": 8 << 30, "trouble": "the disk is full"}
    oldest = [{"function": "f010", "waited_ms": 2500.0, "left_ms": 1.0, "reason": "all are busy"}]
    waits = {"oldest": oldest, "others": {"busy": 30}}
    limits = {"share": 1, "gpu_memory": "", "requests_s": 0, "tokens_s": 0}
    tenant = {"shop": {"functions": 1, "over_share": True, **limits}}
    told = STATUS | {"node": node, "store": store, "waits": waits, "tenants": tenant, "functions": many}
    monkeypatch.setattr(AdminClient, "status", lambda _: told)
    lines = dormouse("status").out.splitlines()
    assert len(lines) <= 30
    assert lines[1:10] == [
        "! gpu1 does not start, and is tried again: no driver",
        "! not ready: waits for f007",
        "! store: trouble: the disk is full",
        "! store: 100% of what models may take (host); remove functions, or raise the limit",
        "! f007 is quarantined: ValueError: twice … (dormouse logs f007)",
        "! f006 fails: its last 10 requests failed (dormouse requests f006 --failed)",
        "! f008 is late: 90.0% of 200 in time within 60 s, 98 % wanted (dormouse requests f008 --slow)",
        "! 31 wait for a GPU, f010 for 2.5 s: all are busy",
        "and 1 more such lines: dormouse status --all",
    ]
    assert "jobs: 7 queued, 1 begun, 1 failed" in lines
    shown = [row["function"] for row in rows(lines, "function")]
    assert shown[:5] == ["f007", "f006", "f008", "f010", "f299"], (
        "broken, failing, late, busy, then those that are asked most"
    )
    assert lines[-1] == f"and {300 - len(shown)} functions more: dormouse status --all"
    assert len(dormouse("status", "--all").out.splitlines()) > 300
    monkeypatch.delenv("LINES")
    whole = rows(dormouse("status").out.splitlines(), "function")
    assert sorted(row["function"] for row in whole) == sorted(many), "as `grep` reads it"


def test_status_says_that_the_disk_is_nearly_full(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATUS, "node", STATUS["node"] | {"disk_free_nbytes": (3 << 20) + 1, "state": "/s"})
    assert "! the disk of /s has 3.0 MiB left: deploys, jobs and logs need it; make room\n" in dormouse("status").out
    monkeypatch.setitem(STATUS, "node", STATUS["node"] | {"disk_free_nbytes": 64 << 20})
    assert "the disk" not in dormouse("status").out


def test_status_says_for_an_hour_that_a_process_has_ended(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {
        "gpu0": {"times": 3, "ago_s": 61.2},
        "store": {"times": 1, "ago_s": 3599.0},
        "router": {"times": 1, "ago_s": 3600.0},
        "gpu1": {"times": 1, "ago_s": 1.0},
    }
    node = STATUS["node"] | {"state": "/s", "peers": {"gpu0": 4, "store": 2, "router": 2}, "ended": ended}
    monkeypatch.setitem(STATUS, "node", node | {"gone": ["gpu1"]})
    assert [line for line in dormouse("status").out.splitlines() if " ended" in line] == [
        "! gpu1 has ended, and is started again",
        "gpu0 ended 61 s ago, and 2 times before, and was started again: /s/logs/supervisor.log",
        "store ended 60 min ago, and was started again: /s/logs/supervisor.log",
    ]


def test_what_somebody_wants_is_no_problem(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain, and an executor that was replaced by one with another pool."""
    left = {"gpu0": {"times": 1, "ago_s": 84.0}, "gpu1": {"times": 1, "ago_s": 3600.0}}
    node = STATUS["node"] | {"draining": True, "requests_open": 2, "peers": {"gpu0": 2, "gpu1": 2}, "left": left}
    monkeypatch.setitem(STATUS, "node", node)
    lines = dormouse("status").out.splitlines()
    assert lines[1:3] == [
        "drained: no new requests are taken until `dormouse drain --undo`; 2 run still",
        "gpu0 was replaced on purpose 84 s ago",
    ]
    assert [line for line in lines if line.startswith("!") or "gpu1 was" in line] == []
    assert dormouse("status", "--check").out == "nothing is wrong\n"


def test_a_gpu_that_somebody_has_drained_is_said_and_is_no_problem(
    dormouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = STATUS["gpus"]["0"]
    empty = {key: type(value)() for key, value in gpu.items()} | {"state": "drained"}
    monkeypatch.setitem(STATUS, "gpus", {"0": gpu | {"state": "drains", "seats": ["f"]}, "1": empty})
    for words in ((), ("--all",)):
        found = dormouse("status", *words).out
        assert found.splitlines()[1:3] == [
            "GPU 0 drains: leases that are to end: 1",
            "GPU 1 is drained until `dormouse gpu undrain 1`",
        ]
        assert re.search(r"^1\t\(?drained", found, re.MULTILINE), found
    assert dormouse("status", "--check").out == "nothing is wrong\n"


@pytest.mark.parametrize(
    ("words", "act", "state", "said"),
    [
        (("drain", "1"), a.DrainGpu(gpu=1, waits=True), "drained", "is drained: nothing of the node is there"),
        (("drain", "1", "--no-wait"), a.DrainGpu(gpu=1), "drains", "drains: leases that are to end: 2"),
        (("undrain", "1"), a.DrainGpu(gpu=1, undo=True), "missing", "serves again"),
    ],
)
def test_gpu_drain_says_what_has_become_of_it(
    words: tuple[str, ...], act: a.DrainGpu, state: str, said: str, dormouse: Any, node: Node
) -> None:
    assert dormouse("gpu", *words).out == f"GPU 1 {said}\n"
    assert json.loads(dormouse("gpu", *words, "--json").out) == {"gpu": 1, "state": state, "leases": 2}
    assert node.asked[-1] == act


def test_status_for_scripts_says_by_its_exit_status_whether_anything_is_wrong(
    dormouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(dormouse("status", "--check", "--json").out) == {"problems": []}
    failing = STATUS["functions"]["f"] | {"recent": recent(10, 0.0, failed=10, in_a_row=10)}
    monkeypatch.setattr(
        AdminClient, "status", lambda _: STATUS | {"functions": {"f": failing, "g": STATUS["functions"]["f"]}}
    )
    said = "f fails: its last 10 requests failed (dormouse requests f --failed)"
    plain = dormouse("status", "--check")
    assert (plain.status, plain.out) == (1, f"{said}\n")
    one = dormouse("status", "f", "--check", "--json")
    assert (one.status, json.loads(one.out)) == (1, {"problems": [said]})
    assert dormouse("status", "g", "--check").out == "nothing is wrong\n"


def recent(counted: int, in_time: float, failed: int = 0, in_a_row: int = 0) -> dict[str, Any]:
    """As router/front/lately.py has it."""
    window = {"seconds": 60.0, "counted": counted, "in_time": in_time, "failed": failed}
    return {"counted": counted, "in_time": in_time, "window": window, "failed_in_a_row": in_a_row}


def test_what_functions_write_commands_no_terminal(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = FUNCTION | {"state": "failed", "error": "\x1b[2J\x1b[Hall is well" + "x" * 500}
    monkeypatch.setattr(AdminClient, "status", lambda _: STATUS | {"functions": {"f": bad}})
    monkeypatch.setattr(AdminClient, "listed", lambda _: {"functions": [bad]})
    for command in (("status",), ("status", "f"), ("status", "--all"), ("ls",)):
        out = dormouse(*command).out
        assert "\x1b" not in out, command
        assert r"\x1b[2J" in out, command
    assert max(map(len, dormouse("status").out.splitlines())) < 320


def test_status_of_one_function(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest = [{"function": name, "waited_ms": 5.0, "left_ms": 1.0, "reason": f"of {name}"} for name in "fg"]
    broken = STATUS["functions"] | {"g": FUNCTION | {"name": "g", "state": "failed"}}
    told = STATUS | {"functions": broken, "waits": {"oldest": oldest, "others": {}}}
    monkeypatch.setattr(AdminClient, "status", lambda _: told)
    out = dormouse("status", "f").out
    assert [row["name"] for row in rows(out.splitlines(), "name")] == ["f"]
    assert "of f" in out
    assert "of g" not in out
    assert "!" not in out
    assert dormouse("status", "g").out.startswith("! g is failed: its log says why (dormouse logs g)\n")
    assert json.loads(dormouse("status", "f", "--json").out) == STATUS["functions"]["f"]
    unknown = dormouse("status", "nobody")
    assert (unknown.status, "there is no function 'nobody'" in unknown.err) == (3, True)


def test_bench(dormouse: Any) -> None:
    result = dormouse("bench", "f", '{"x": 1}', "--rate", "200", "--duration", "200ms", "--json")
    found = json.loads(result.out)
    assert result.status == 0
    assert found["outcomes"] == {"ok": found["sent"]}
    assert found["deadline_ms"] == FUNCTION["deadline_ms"]
    shown = dormouse("bench", "f", "--rate", "200", "--duration", "200ms")
    assert "98% in 80 ms wanted" in shown.out
    assert len(rows(shown.out.splitlines(), "from")) == 10
    assert dormouse("bench", "nobody").status == 3
    assert dormouse("bench", "f", "--rate", "0").status == 2
    assert "'soon' is not a duration" in dormouse("bench", "f", "--duration", "soon").err


def completed(dormouse: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What a shell would offer in the place of the last word."""
    for name, value in (("COMP_WORDS", shlex.join(["dormouse", *words])), ("COMP_CWORD", str(len(words)))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_DORMOUSE_COMPLETE", "bash_complete")
    monkeypatch.setattr(cli_completion, "WAIT_S", WAIT_S)
    result = dormouse()
    monkeypatch.delenv("_DORMOUSE_COMPLETE")
    assert result.err == ""
    return [line.removeprefix("plain,") for line in result.out.splitlines() if line]


def test_a_shell_completes_commands_options_and_functions(
    dormouse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert completed(dormouse, monkeypatch, "st") == ["status"]
    assert completed(dormouse, monkeypatch, "status", "--a") == ["--all"]
    for command in ("status", "logs", "rm", "restart", "invoke", "cost"):
        assert completed(dormouse, monkeypatch, command, "") == ["f"], command
    assert completed(dormouse, monkeypatch, "logs", "g") == []
    assert completed(dormouse, monkeypatch, "rm", "f", "") == [], "which is named already"
    assert completed(dormouse, monkeypatch, "--run", str(tmp_path), "logs", "") == [], "no node, and no complaint"


WAIT_S = 60.0
PATIENT = f"""
from dormouse.core.cli import completion as cli_completion
from dormouse.core.cli import main as cli
cli_completion.WAIT_S = {WAIT_S}
cli.main()
"""
"""The command, whose names of functions do not depend on how fast this machine is."""

TYPED = ("dormouse stat", "dormouse status --a", "dormouse logs ")
COMPLETED = ("dormouse status", "dormouse status --all", "dormouse logs f")


def in_bash(typed: str) -> str:
    *before, last = typed.split(" ")
    words = " ".join(map(shlex.quote, [*before, last]))
    return f"COMP_WORDS=({words}); COMP_CWORD={len(before)}; COMPREPLY=(); _dormouse_completion dormouse; " + (
        f'echo "{" ".join(before)} ${{COMPREPLY[*]}}"'
    )


def in_zsh(typed: str) -> str:
    """Typed, with the key that completes; then what the line has become is printed."""
    return f"{typed}\t\x01print -r -- \n"


def in_fish(typed: str) -> str:
    before = typed.rpartition(" ")[0]
    return f'echo "{before} "(complete -C "{typed}" | string split -f1 \\t)'


@pytest.mark.parametrize(
    ("shell", "options", "loads", "line"),
    [
        ("bash", ("--norc",), "source <(dormouse completion bash)", in_bash),
        ("zsh", ("-f", "-i"), "autoload -U compinit; compinit -u -D; source <(dormouse completion zsh)", in_zsh),
        ("fish", (), "dormouse completion fish | source", in_fish),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_a_real_shell_completes(
    shell: str,
    options: tuple[str, ...],
    loads: str,
    line: Callable[[str], str],
    run: Path,
    node: Node,
    tmp_path: Path,
) -> None:
    """As the help of `dormouse completion` says it, with the command found by its name."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dormouse"
    (tmp_path / "patient.py").write_text(PATIENT)
    command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-P", str(tmp_path / "patient.py")])} "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(tmp_path), "DORMOUSE_RUN": str(run), "TERM": "dumb"}
    script = "\n".join([loads, *(line(typed) for typed in TYPED), "exit", ""])
    if shell == "zsh":  # it completes at a terminal only
        script = f"bindkey -e\n{script}"
        (tmp_path / "typed").write_text(script)
        words = ["script", "-qec", shlex.join([shell, *options]), "/dev/null"]
    else:
        words = [shell, *options]
    done = subprocess.run(words, input=script, env=environment, capture_output=True, text=True, timeout=120)
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in shown if line in COMPLETED] == [*COMPLETED], done.stdout + done.stderr


def test_a_deploy_that_does_not_load_says_why_once_and_what_goes_on(
    dormouse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "function.py").write_text("def handle(s, r): pass\n")
    report = (
        "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'cowsay'\n"
        "dormouse: a requirements.txt beside the file brings libraries (docs/dependencies.md)"
    )

    def deploy(self: AdminClient, *_: Any, **__: Any) -> None:
        _[-1](b"--- instance 1-1 starts\n" + report.encode() + b"\n")
        raise CallRefused(422, "load_failed", report)

    monkeypatch.setattr(AdminClient, "deploy", deploy)
    for name, left in (("f", "version 2 goes on"), ("new", "nothing is deployed")):
        result = dormouse("deploy", name, str(tmp_path))
        assert (result.status, result.err.count("Traceback"), result.err.count("ModuleNotFoundError")) == (1, 1, 2)
        assert "dormouse: load_failed: ModuleNotFoundError: No module named 'cowsay'; a requirements.txt" in result.err
        assert result.err.endswith(f"\n{left}\n")


def test_who_interrupts_a_command_is_told_what_goes_on(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AdminClient, "drain", interrupted)
    monkeypatch.setattr(AdminClient, "status", interrupted)
    drain, status = dormouse("drain"), dormouse("status")
    assert (drain.status, status.status) == (130, 130)
    assert drain.err.endswith("dormouse: interrupted; the drain goes on; `dormouse drain --undo` ends it\n")
    assert status.err.endswith("dormouse: interrupted\n")


def test_a_name_that_is_nearly_one_is_told_of(dormouse: Any) -> None:
    assert dormouse("invoke", "ff", "1").err.endswith("there is no function 'ff' (did you mean f?)\n")
    assert dormouse("status", "ff").err.endswith("says which there are (did you mean f?)\n")
    assert dormouse("invoke", "nobody", "1").err.endswith("there is no function 'nobody'\n")


def test_readme_has_all_commands_and_says_which_print_json(dormouse: Any) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## The command line")[2].partition("A node file looks like this")[0]
    shown = table.partition("\n\nEach command")[0]
    assert [name for name in cli.cli.commands if not re.search(rf"`[^`]*\b{name}\b[^`]*` *[,|]", shown)] == []
    (without,) = re.findall(r"takes\s+`--json`\s+but\s+([^.]*?)\.", table)
    commands = {name: of for name, of in cli.cli.commands.items() if not isinstance(of, click.Group)}
    plain = {name for name, of in commands.items() if not any("--json" in each.opts for each in of.params)}
    assert plain == {*re.findall(r"`([\w-]+)`", without)}


def test_every_key_of_status_is_in_its_help(dormouse: Any) -> None:
    documented = set(dormouse("status", "--help").out.replace(":", " ").split())
    documented |= {word.removesuffix(".N").removesuffix(".NAME") for word in documented}
    core = Scheduler(seed=1, revoke_s=1.0, max_waiting=1)
    core.handle(ExecutorUp(0, 1, PoolStats()), 0.0)
    core.handle(FunctionKnown("f", 1.0, 0.98, 1.0), 0.0)
    for request, instance in enumerate("ab"):
        core.handle(Asked(request, instance, 9.0, 1), 0.0)
    core.functions["f"].counts.last_eviction = LastEviction(0, 0.0, 1, "g")
    told = status(core, {}, ["f"], NO_STORE, None, 1.0)
    function = told["functions"]["f"]
    function["last_wake"] = STATUS["functions"]["f"]["last_wake"]
    keys = {*told, *told["store"], *told["gpus"][0], *told["waits"], *told["waits"]["oldest"][0]}
    keys |= {*function, *function["last_wake"], *function["last_eviction"], *function["service"]}
    keys |= {*LLM, *RUNTIME, *LLM["ttft_ms"], "tenants", *TenantSection.__struct_fields__}
    assert keys - documented == set()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (100 << 10, "100 KiB"),
        (1023 << 20, "1.0 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes_for_people(nbytes: int | None, text: str) -> None:
    assert size(nbytes) == text


def test_deploy(dormouse: Any, node: Node, tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("def load(): ...\n")
    result = dormouse(
        "deploy", "f", str(file), "--deadline", "80ms", "--percentile", "99", "--idempotent", "--stateless"
    )
    assert (result.status, result.out) == (0, "f version 2 is deployed\n")
    (act, *_) = node.asked
    assert isinstance(act, a.Deploy)
    assert (act.name, act.entry) == ("f", "f.py")
    assert node.files == {"f.py": b"def load(): ...\n"}
    wanted = {"deadline": "80ms", "percentile": 99, "idempotent": True, "stateless": True}
    assert act.options == wanted


def test_deploy_says_which_hidden_files_stay(dormouse: Any, node: Node, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("f.py", ".env"):
        (own / name).write_text("def load(): ...\n")
    result = dormouse("deploy", "f", str(own / "f.py"))
    assert result.err == (
        f"left out, being hidden: .env; to take one along, write a line such as !.env into {own}/.dormouseignore\n"
    )
    assert list(node.files) == ["f.py"]
    (own / ".dormouseignore").write_text("!.env\n")
    assert dormouse("deploy", "f", str(own / "f.py")).err == ""
    assert sorted(node.files) == [".env", "f.py"]
    (own / "catalogue.sqlite3").touch()
    asked = len(node.asked)
    result = dormouse("deploy", "f", str(own / "f.py"))
    assert (result.status, len(node.asked)) == (2, asked)
    assert "the state directory of a node" in result.err


def test_every_setting_is_an_option_of_deploy() -> None:
    options = {option.name for option in cli_deploy.deploy.params}
    assert set(OPTIONS) <= options


def test_deploy_of_a_file_that_is_not_there_or_not_text(dormouse: Any, tmp_path: Path) -> None:
    assert dormouse("deploy", "f", str(tmp_path / "no.py")).status == 2
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    result = dormouse("deploy", "f", str(tmp_path / "binary.py"))
    assert result.status == 2
    assert "UTF-8" in result.err


def test_deploy_of_a_language_model(dormouse: Any, node: Node, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", "README.md"):
        (tmp_path / name).write_text(name)
    result = dormouse("deploy", "chat", "--llm", str(tmp_path))
    assert (result.status, node.asked) == (2, [])
    assert "pytorch_model.bin" in result.err
    assert "--convert" in result.err
    result = dormouse("deploy", "chat", "--llm", str(tmp_path), "--convert", "--context", "512", "--ttft", "1s")
    assert result.status == 0
    (act, *_) = node.asked
    assert isinstance(act, a.Deploy)
    assert act.entry == "config.json"
    assert act.options == {"llm": True, "convert": True, "context": 512, "ttft": "1s"}
    assert sorted(node.files) == ["config.json", "pytorch_model.bin", "tokenizer.json"]


def test_deploy_with_a_warning(dormouse: Any, node: Node, tmp_path: Path) -> None:
    node.more = {"warning": "there is room for 100 tokens"}
    (tmp_path / "f.py").write_text("def load(): ...")
    result = dormouse("deploy", "f", str(tmp_path / "f.py"))
    assert (result.status, result.out) == (0, "f version 2 is deployed\n")
    assert "warning: there is room for 100 tokens" in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--llm", "hf:org/nothing"], "hf download org/nothing"),
        (["--llm", "hf:../x"], "names no model"),
        (["--llm", "/nowhere"], "is not there"),
        ([], "name one of these"),
        (["f.py", "--llm", "/nowhere"], "a deploy has one of these alone"),
        (["f.py", "--convert"], "--convert is for language models"),
        (["f.py", "--embedding"], "--embedding is for language models"),
        (["f.py", "--tpot", "60ms"], "--tpot is for language models"),
    ],
)
def test_deploy_of_a_language_model_that_is_none(
    dormouse: Any, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text("def handle(): ...")
    result = dormouse("deploy", "chat", *words)
    assert (result.status, node.asked) == (2, [])
    assert says in " ".join(result.err.split())


def test_invoke(dormouse: Any, tmp_path: Path) -> None:
    assert dormouse("invoke", "f", '{"a": 1}').out == '{"a": 1}\n'
    (tmp_path / "body.json").write_text("[2]")
    assert dormouse("invoke", "f", f"@{tmp_path}/body.json").out == "[2]\n"
    assert dormouse("invoke", "f", "@/no/such").status == 2
    said = json.loads(dormouse("invoke", "f", "[3]", "--json").out)
    assert (said["function"], said["answer"]) == ("f", [3])
    assert said["ms"] > 0


def test_logs_are_searched_and_asked_since_when(dormouse: Any, node: Node) -> None:
    assert dormouse("logs", "f", "--search", "ON").out == "one\n"
    assert dormouse("logs", "f", "--search", "o", "-n", "1").out == "two\n"
    assert dormouse("logs", "f", "--search", "o", "-n", "1", "-f").out == "one\ntwo\n"
    assert dormouse("logs", "f", "--search", "no such").out == ""
    assert dormouse("logs", "f", "--since", "2h", "-f").out == "one\ntwo\n"
    asked = node.asked[-1]
    assert isinstance(asked, a.Logs)
    assert asked.since_s == pytest.approx(time.time() - 7200, abs=60)
    assert asked.lines > 1 << 20
    assert dormouse("logs", "f", "--since", "soon").status != 0


def test_a_command_that_is_told_to_end_does_as_at_ctrl_c_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in cli_frame.ENDS]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # below nohup
    try:
        with cli_frame.ended_in_order():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with cli_frame.ended_in_order():
            cli_frame.ended_as_it_likes()
            assert [signal.getsignal(number) for number in cli_frame.ENDS] == [signal.SIG_DFL, signal.SIG_IGN]
    finally:
        for number, handler in zip(cli_frame.ENDS, before, strict=True):
            signal.signal(number, handler)


def test_history_and_rollback(dormouse: Any, node: Node) -> None:
    rows = [line.split("\t") for line in dormouse("history", "f").out.splitlines()]
    assert rows[0] == ["version", "deployed", "state", "file", "deadline_ms", "tenant", "note"]
    assert [(row[0], row[2]) for row in rows[1:]] == [("7", "served"), ("5", "earlier")]
    assert json.loads(dormouse("history", "f", "--json").out) == [
        row | {"at": "1970-01-01T00:16:40Z"} for row in VERSIONS
    ]
    assert dormouse("rollback", "f").out == "f version 8 is deployed, a copy of version 5\n"
    assert node.asked[-1] == a.Rollback(name="f")
    assert json.loads(dormouse("rollback", "f", "5", "--json").out)["copy_of"] == 5
    assert node.asked[-1] == a.Rollback(name="f", version=5)
    assert dormouse("rollback", "f", "0").status == 2


@pytest.mark.parametrize(
    ("option", "old", "new", "said"),
    [
        ("env.A", None, "set", "env.A: is new"),
        ("env.A", "set", "another value", "env.A: has another value"),
        ("secret.A", "bound", None, "secret.A: is not there any more"),
        ("call.a", None, "allowed", "call.a: is new"),
        ("requirements", None, "a==1", "requirements: none -> a==1"),
        ("deadline", "50ms", "1s", "deadline: 50ms -> 1s"),
    ],
)
def test_what_a_deploy_changed_is_said(option: str, old: str | None, new: str | None, said: str) -> None:
    assert cli_deploy.change(option, old, new) == said


def test_traffic_is_shown_and_set(dormouse: Any, node: Node) -> None:
    assert dormouse("traffic", "shared").out == "shared version 7 gets 90 %\nshared version 5 gets 10 %\n"
    assert json.loads(dormouse("traffic", "shared", "--json").out)["traffic"] == {"7": 90, "5": 10}
    rows = [line.split("\t") for line in dormouse("history", "shared").out.splitlines()]
    assert [row[2] for row in rows[1:]] == ["served (90 %)", "beside (10 %)"]
    assert dormouse("traffic", "f", "5=20", "7=80%").out == "f version 7 gets 80 %\nf version 5 gets 20 %\n"
    assert node.asked[-1] == a.Traffic(name="f", shares={5: 20, 7: 80})
    for wrong in ("5", "5=x", "0=1", "5=1 5=2", "f=3"):
        assert dormouse("traffic", "f", *wrong.split()).status == 2


def told(job: dict[str, Any]) -> dict[str, str]:
    """Its times, as every command tells times."""
    return {name: utc(job[name]) for name in ("created", "ended") if name in job}


def test_jobs(dormouse: Any, node: Node) -> None:
    assert dormouse("invoke", "f", "[1]", "--detach").out == "j1\n"
    assert [*node.asked] == [a.Invoke(name="f", detach=True)]
    made = json.loads(dormouse("invoke", "f", "[1]", "--detach", "--json").out)
    assert made["created"].endswith("Z"), "as `dormouse job` tells it"
    rows = [line.split("\t") for line in dormouse("jobs").out.splitlines()]
    assert rows[0] == ["id", "function", "state", "code", "created", "ended", "expires"]
    assert [row[:4] for row in rows[1:]] == [["j1", "f", "failed", "function_raised"], ["j2", "f", "queued", "-"]]
    assert json.loads(dormouse("jobs", "f", "--json").out) == [row | told(row) for row in JOBS]
    assert node.asked[-1:] == [a.ListJobs(name="f")]
    assert dormouse("job", "j2").out.splitlines()[1].split("\t")[:3] == ["j2", "f", "queued"]
    assert json.loads(dormouse("job", "j1", "--json").out) == JOBS[0] | told(JOBS[0])
    asked = len(node.asked)
    assert dormouse("job", "j2", "--wait").out == '{"y": 1}\n'
    waits = [a.AskJob(id="j2"), *[a.AskJob(id="j2", wait_s=30)] * 2, a.JobResult(id="j2")]
    assert node.asked[asked:] == waits, "it has ended when it is asked for the third time"
    failed = dormouse("job", "j1", "--result")
    assert (failed.status, "as asked" in failed.err) == (1, True)
    assert dormouse("job", "j2", "--cancel").out.splitlines()[1].split("\t")[:3] == ["j2", "f", "queued"]
    assert node.asked[-1:] == [a.CancelJob(id="j2")]
    assert dormouse("job", "j2", "--forget").out == "job j2 is forgotten, and its answer\n"
    assert node.asked[-1:] == [a.CancelJob(id="j2", forget=True)]
    for two in (("--cancel", "--wait"), ("--forget", "--result"), ("--cancel", "--forget")):
        assert dormouse("job", "j2", *two).status == 2
    assert dormouse("job", "j9").status == 3


def test_pin(dormouse: Any, node: Node) -> None:
    assert dormouse("pin", "f").out == "f is pinned\n"
    assert node.asked[-1] == a.Pin(name="f")
    assert json.loads(dormouse("unpin", "f", "--json").out) == {"name": "f", "pinned": False}
    assert node.asked[-1] == a.Pin(name="f", pinned=False)


def test_requests(dormouse: Any, node: Node) -> None:
    out = dormouse("requests", "f", "--slow", "-n", "3").out
    assert node.asked[-1] == a.RecentRequests(name="f", kind="slow", most=3)
    assert out.splitlines()[0] == "at\tfunction\toutcome\tms\tqueue\twait\trun\tcopy\tmodel\tid"
    assert out.splitlines()[1].split("\t")[1:] == ["f", "ok (late)", "10.0", "1.0", "2.0", "7.0", "-", "host", "r7"]
    assert json.loads(dormouse("requests", "--failed", "--json").out) == [PAST | {"at": "1970-01-01T00:16:40Z"}]
    assert node.asked[-1] == a.RecentRequests(kind="failed", most=30)
    head, line = dormouse("requests", "--failed").out.splitlines()
    assert (head.split("\t")[-1], line.split("\t")[-1]) == ("error", "KeyError: 'x'")


def test_logs(dormouse: Any, node: Node) -> None:
    first = {"time": "1970-01-01T00:16:40.000Z", "instance": "3-16", "request": "mine-1", "text": "one"}
    entries = [first, first | {"text": "two"}]
    said = json.loads(dormouse("logs", "f", "-n", "2", "--json").out)
    assert said == {"name": "f", "lines": ["one", "two"], "entries": entries}
    assert node.asked == [a.Logs(name="f", lines=2, marks=True)]
    assert [json.loads(line) for line in dormouse("logs", "f", "--json", "-f").out.splitlines()] == entries
    assert dormouse("logs", "f", "--long").out.splitlines()[0] == "1970-01-01T00:16:40.000Z 3-16 mine-1 | one"
    for options in (("--search", "MINE-1"), ("--search", "3-16"), ()):
        assert dormouse("logs", "f", *options).out == "one\ntwo\n"


def test_rm(dormouse: Any, node: Node) -> None:
    assert dormouse("rm", "f", "g", "-y").out == "f is removed\ng is removed\n"
    assert node.asked == [a.Remove(name="f"), a.Remove(name="g")]


def test_d1_a_stranger_is_told_so(dormouse: Any, node: Node) -> None:
    node.refusal = a.Refused(status=403, code="forbidden", text="user 'eve' may not administrate this node")
    result = dormouse("ls")
    assert (result.status, result.err) == (5, "dormouse: forbidden: user 'eve' may not administrate this node\n")


def test_restart(dormouse: Any, node: Node) -> None:
    assert dormouse("restart", "f").out == "f restarts\n"
    assert node.asked == [a.Restart(name="f")]


def test_d4_rm_without_a_node(run: Path, tmp_path: Path, dormouse: Any) -> None:
    """On the state directory, as a node would have it."""
    state = StatePaths(tmp_path / "state")
    state.make()
    catalogue = CatalogueFile(state.catalogue)
    for name in ("f", "g"):
        catalogue.keep(FunctionSpec(name=name, version=1, entry="f.py", snapshot=""))
        (state.functions / name / "snapshot").mkdir(parents=True)
        state.function_log(name).touch()
    file = tmp_path / "node.toml"
    file.write_text(f'[node]\nrun = "{run}/none"\nstate = "{state.state}"\n')
    with closing(catalogue):
        fd = os.open(state.state, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        refused = dormouse("rm", "f", "-y", "--config", str(file))
        assert (refused.status, "in use by a running node" in refused.err) == (2, True), refused.err
        os.close(fd)
        assert dormouse("rm", "f", "-y", "--config", str(file)).out == "f is removed\n"
        assert catalogue.versions() == [("g", 1)]
    assert [path.name for path in state.functions.iterdir()] == ["g"]
    assert [path.name for path in state.logs.iterdir()] == ["fn-g.log"]
    unknown = dormouse("rm", "f", "-y", "--config", str(file))
    assert (unknown.status, "there is no function 'f'" in unknown.err) == (3, True)
    nowhere = dormouse("--run", str(tmp_path), "rm", "g", "-y")
    assert (nowhere.status, "--config NODE.toml" in nowhere.err) == (4, True)


def test_rm_goes_on_after_a_name_that_is_not_there(dormouse: Any) -> None:
    result = dormouse("rm", "nobody", "g", "-y", "--json")
    assert result.status == 3
    said = json.loads(result.out)
    assert said["removed"] == ["g"]
    assert "no function" in said["failed"]["nobody"]


@pytest.mark.parametrize(
    ("name", "status", "says"), [("nobody", 3, "no function"), ("full", 5, "later"), ("bad", 1, "it died")]
)
def test_exit_statuses(dormouse: Any, name: str, status: int, says: str) -> None:
    result = dormouse("invoke", name)
    assert result.status == status
    assert result.out == ""
    assert says in result.err


def test_text_is_sent_as_models_take_it(dormouse: Any, node: Node) -> None:
    node.models = True
    assert json.loads(dormouse("invoke", "embed", "some text").out) == {"input": "some text"}
    said = {"messages": [{"role": "user", "content": "some text"}], "stream": True}
    assert json.loads(dormouse("invoke", "chat", "some text").out) == said


def test_what_a_function_takes_is_shown(dormouse: Any, node: Node) -> None:
    shown = {"name": "f", "version": 1, "request": {"type": "integer"}}
    assert json.loads(dormouse("invoke", "f", "--schema").out) == shown
    said = dormouse("invoke", "plain", "--schema")
    assert (json.loads(said.out), said.status) == ({"name": "plain", "version": 1}, 0)
    assert said.err == "plain does not say: give handle's request a type (docs/types.md)\n"
    asked = len(node.asked)
    for more in (("1",), ("--detach",), ("--type", "image/png")):
        assert dormouse("invoke", "f", *more, "--schema").status == 2
    assert len(node.asked) == asked


def test_a_functions_own_error_is_no_refusal_of_the_nodes(dormouse: Any) -> None:
    result = dormouse("invoke", "own")
    assert (result.status, result.err) == (1, "dormouse: unknown_function: no user 7; ask later\n")
    said = json.loads(dormouse("invoke", "own", "--json").out)
    assert said == {"error": {"code": "unknown_function", "message": "no user 7; ask later", "hint": None}}


def test_who_has_written_no_request_is_told_what_was_sent(dormouse: Any) -> None:
    assert dormouse("invoke", "raises", "1").err == f"dormouse: function_raised: {TRACEBACK}"
    result = dormouse("invoke", "raises", "--json")
    assert result.err == f"dormouse: function_raised: {TRACEBACK}dormouse: no request was written, so it was null\n"
    assert json.loads(result.out)["error"]["hint"] == "no request was written, so it was null"


def test_parts_of_a_stream_that_fails_are_shown_with_its_error(dormouse: Any) -> None:
    result = dormouse("invoke", "breaks")
    assert (result.status, result.out) == (1, '{"a": 1}\ntwo\n')
    assert result.err == f"dormouse: function_raised: {TRACEBACK}dormouse: do; or do not\n\n"
    result = dormouse("invoke", "breaks", "--json")
    said = json.loads(result.out)
    assert said.pop("ms") > 0
    message = f"{TRACEBACK}dormouse: do; or do not\n"
    error = {"code": "function_raised", "message": message, "hint": "do; or do not"}
    assert (result.status, said) == (1, {"function": "breaks", "parts": [{"a": 1}, "two"], "error": error})


def test_usage(dormouse: Any) -> None:
    empty = dormouse("secret", "set", "TOKEN", "--file", "/dev/null")
    assert (empty.status, "printf %s VALUE | dormouse secret set TOKEN" in empty.err) == (2, True)
    assert dormouse("frobnicate").status == 2
    assert dormouse("frobnicate").err.endswith("No such command 'frobnicate'.\n")
    assert dormouse("lgos").err.endswith("No such command 'lgos'. (Did you mean logs or ls?)\n")
    assert dormouse("list").err.endswith("No such command 'list'. (Did you mean ls?)\n")
    assert set(cli.ELSEWHERE.values()) <= set(cli.cli.commands)
    assert not set(cli.ELSEWHERE) & set(cli.cli.commands)
    unquoted = dormouse("invoke", "f", "{x:", "[1,", "2]}")
    assert unquoted.status == 2
    assert unquoted.err.endswith("""the request is in 3 words; put it in single quotes, such as '{"x": [1, 2]}'\n""")
    named = dormouse("deploy", "nothere.py")
    assert named.err.endswith("a name comes first, for example:  dormouse deploy nothere nothere.py\n")
    assert dormouse("invoke").status == 2
    assert dormouse("--help").status == 0


def test_no_node(dormouse: Any, tmp_path: Path) -> None:
    for command in (("ls",), ("down",), ("run", "x.py"), ("invoke", "f")):
        result = dormouse("--run", str(tmp_path), *command)
        assert result.status == 4, command
        assert "no node" in result.err


def test_up_with_a_bad_file(dormouse: Any, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[node]\ncolour = 1\n")
    result = dormouse("up", str(file))
    assert result.status == 2
    assert f"{file}:2" in result.err


def test_up_with_another_run_directory_than_its_files(dormouse: Any, tmp_path: Path) -> None:
    """Else it would start where no other command with the same words looks for it."""
    file = tmp_path / "node.toml"
    file.write_text(f'[node]\nrun = "{tmp_path}/own"\nstate = "{tmp_path}/state"\n')
    result = dormouse("--run", str(tmp_path / "written"), "up", str(file))
    assert result.status == 2
    assert f"--run names {tmp_path}/written, but this node's is {tmp_path}/own ([node] run of its file)" in result.err
    assert not (tmp_path / "state").exists()


def test_a_node_that_runs_already(dormouse: Any, run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('here', flush=True); input()", nodeprocess.SUPERVISOR]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()  # until it has begun, its command line is still this process's
        (run / "t" / "supervisor.pid").write_text(str(supervisor.pid))
        file = tmp_path / "node.toml"  # if a node were started after all, it would end at once
        file.write_text(f'[node]\nrun = "{run}"\nstate = "{tmp_path}/state"\n[gpu]\ndevice = "cuda"\n')
        result = dormouse("up", str(file))
    assert result.status == 1
    assert f"runs already (pid {supervisor.pid})" in result.err


@pytest.mark.parametrize("words", [[], ["--node", "default"]])
def test_up_goes_where_the_environment_says_and_other_commands_look(
    dormouse: Any, run: Path, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if the command names a node."""
    started: list[tuple[str | None, str | None, str | None]] = []

    def start(file: str | None, node: str | None, run: str | None, options: list[str]) -> None:
        started.append((file, node, run))
        raise ProcessFailed("far enough")

    monkeypatch.setattr(nodeprocess, "start", start)
    assert dormouse(*words, "up").status == 1
    assert started == [(None, "default", None) if words else (None, None, str(run))]


def test_a_run_directory_is_that_of_the_node_file_then_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named, other = tmp_path / "named.toml", tmp_path / "other.toml"
    named.write_text('[node]\nrun = "/own"\n')
    other.write_text('[node]\nname = "other"\n')
    places = [nodeprocess.config_of(str(file), None, "here").run_directory for file in (named, other)]
    assert places == [Path("/own"), tmp_path / "here"]
    assert nodeprocess.config_of(None, None, "here").run_directory == tmp_path / "here"
    assert nodeprocess.config_of(str(other), None).run_directory == cli_frame.run_directory(None, "other")
    assert nodeprocess._placed("here") == ["--run", str(tmp_path / "here")]


def test_dev_has_the_options_of_deploy() -> None:
    """All that are of functions, with the same defaults."""
    deploy, dev = (
        {option.name: option.default for option in command.params if isinstance(option, click.Option)}
        for command in (cli_deploy.deploy, cli_dev.dev)
    )
    of_models = {"llm", "lora", "base", "reset", "note", "check", "traffic", *cli_deploy.OF_MODELS}
    assert dev == {name: default for name, default in deploy.items() if name not in of_models | {"json_"}} | {
        "name": dev["name"]
    }
    assert {"env", "env_file", "secrets", "requirements", "allow_build", "network", "tenant", "batch"} <= dev.keys()


def test_another_process_that_has_a_dead_nodes_pid_is_left_alone(dormouse: Any, run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as other:
        (run / "t" / "supervisor.pid").write_text(str(other.pid))
        assert dormouse("down").status == 4
        other.communicate("\n")
    assert other.returncode == 0


def test_a_node_in_the_foreground_says_to_people_why_it_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "node.toml"
        file.write_text(f'[node]\nport = {port}\nrun = "{tmp_path}/r"\nstate = "{tmp_path}/s"\n')
        words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "up", "--foreground", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"dormouse: port {port} on 127.0.0.1 is in use; ")


def test_a_supervisor_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(nodeprocess._reason(2, '{"error": "config", "message": "line 3"}\n')) == "line 3"
    assert "ended with status 1" in str(nodeprocess._reason(1, ""))
    assert "Traceback" in str(nodeprocess._reason(1, "Traceback\n"))


def test_the_supervisor_is_named_by_its_module_only() -> None:
    """The command line must not import what runs a node: `--help` would pay for it."""
    code = "import sys, dormouse.core.cli.main; print(*sorted(m for m in sys.modules if m.split('.')[0] in {0}))"
    heavy = {"torch", "zmq", "rich", "structlog", "uvicorn", "uvloop", "numpy", "msgspec"}
    assert subprocess.check_output([sys.executable, "-c", code.format(heavy)], text=True).split() == []


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_confinement", lambda _: [doctor.Finding("confinement", "ok", "own-uid")]
    )  # it is slow
    monkeypatch.setattr(doctor, "_libraries", lambda _: [])  # so is this
    (tmp_path / "file").touch()
    node = NodeSection(run=str(tmp_path / ("x" * 120)), state=str(tmp_path / "file" / "state"), port=0)
    findings = {finding.name: finding for finding in doctor.examine(NodeConfig(node=node), running=False)}
    assert findings["python"].state == "ok"
    assert findings["run directory"].state == "fail"
    assert findings["run directory"].advice
    assert findings["state directory"].state == "fail"
    assert not json.loads(doctor.as_json(list(findings.values())))["ok"]


def test_n8_what_is_written_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        """With the run directory."""

    def client(run: Path, patience_s: float) -> None:
        raise Reached(run)

    monkeypatch.setenv("DORMOUSE_RUN", "/from/the/environment")
    monkeypatch.setattr(adminclient, "AdminClient", client)
    for words, run in (
        (["--node", "other", "ls"], cli_frame.run_directory(None, "other")),
        (["--run", "/written", "ls"], Path("/written")),
        (["ls"], Path("/from/the/environment")),
    ):
        with pytest.raises(Reached) as reached:
            cli.cli.main(words, standalone_mode=False)
        assert reached.value.args == (run,)
    with pytest.raises(click.UsageError, match="not both"):
        cli.cli.main(["--run", "/written", "--node", "other", "ls"], standalone_mode=False)


def test_what_loads_is_shown_and_what_waits_to(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = {"function": "h", "version": 1, "tenant": "lab", "for": "deploy", "instance": "3-1", "since_ms": 61_000}
    loads |= {"silent_ms": 60_000, "load_timeout_ms": 300_000, "ends_within_ms": 240_000}
    none = {"instance": None, "since_ms": None, "silent_ms": None, "ends_within_ms": None}
    rows = [loads, loads | none | {"function": "k", "for": "served"}]
    monkeypatch.setattr(AdminClient, "status", lambda _: STATUS | {"loads": rows})
    monkeypatch.setattr(AdminClient, "listed", lambda _: {"functions": [], "loads": rows})
    for command in (("status",), ("status", "--all"), ("ls",)):
        lines = [line.split("\t") for line in dormouse(*command).out.splitlines()]
        assert ["h", "1", "a deploy", "lab", "61 s", "60 s", "5 min", "4 min"] in lines, command
        assert ["k", "1", "what is served", "lab", "waits for a place (limits.loads)", "-", "5 min", "-"] in lines


def test_n8_ls_of_nothing_says_how_to_begin(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdminClient, "listed", lambda _: {"functions": [], "loads": []})
    result = dormouse("ls")
    assert (result.status, result.out) == (0, "")
    assert "begin with:  dormouse deploy NAME FILE.py" in result.err
    assert json.loads(dormouse("ls", "--json").out) == []


def test_n8_rm_without_a_terminal_says_that_it_cannot_ask(dormouse: Any) -> None:
    result = dormouse("rm", "f")
    assert (result.status, result.out) == (2, "")
    assert "add -y" in result.err


def test_tenants_are_shown_with_what_they_may_have(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"gpu_memory": "", "requests_s": None, "tokens_s": 5.0}
    tenants: dict[str, Any] = {
        "shop": limits | {"functions": 2, "share": 3.0, "over_share": True},
        "shpo": limits | {"functions": 0, "share": 1.0, "over_share": False},
        "free": {"functions": 1, "share": None, "over_share": False, "gpu_memory": "", "requests_s": None}
        | {"tokens_s": None},
    }
    monkeypatch.setitem(STATUS, "tenants", tenants)
    said = dormouse("status", "--all").out
    assert "shop\t2\t3.0\tyes\t-\t-\t5.0" in said
    assert "free\t1" not in said
    assert "[tenants.shpo] of the node file: no function is of this tenant (there are: shop, free)" in said
    nobody = {name: row | {"functions": 0} for name, row in tenants.items()}
    monkeypatch.setitem(STATUS, "tenants", nobody)
    assert "no function is of this tenant" not in dormouse("status", "--all").out


def test_a_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `dormouse status` has it at a width of 80: no header is cut, and no value is on two lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    row = {
        "p50": "8.8 ms",
        "p99": "677.6 ms",
        "in time": "94.3%",
        "state": "idle",
        "function": "mood",
        "on GPUs": "0, 1",
    }
    table([row | {"running": 0, "queued": 0, "requests": 53, "errors": 1}], OVERVIEW)
    head, line = (re.sub(r"\x1b\[[0-9;]*m", "", each).rstrip() for each in capsys.readouterr().out.splitlines())
    assert head.split() == " ".join(OVERVIEW).split()
    assert line.split() == ["mood", "idle", "0", "0", "53", "1", "94.3%", "8.8", "ms", "677.6", "ms", "0,", "1"]


def test_a_table_in_a_terminal_that_is_narrower_than_its_headers_shows_all_of_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    row = {"function": "shop-mail-03", "state": "failed", "in time": "88.5%", "p50": "43.0 ms", "p99": "1.5 s"}
    table([row | {"running": 0, "queued": 0, "requests": 42, "errors": 7}], OVERVIEW)
    *_, line = (re.sub(r"\x1b\[[0-9;]*m", "", each).rstrip() for each in capsys.readouterr().out.splitlines())
    assert line.split() == ["shop-mail-03", "failed", "0", "0", "42", "7", "88.5%", "43.0", "ms", "1.5", "s", "-"]


def test_a_deploy_without_a_name_says_how_it_is_written(dormouse: Any, tmp_path: Path) -> None:
    (tmp_path / "mood.py").touch()
    said = dormouse("deploy", str(tmp_path / "mood.py"))
    assert said.status == 2
    assert f"dormouse deploy mood {tmp_path}/mood.py" in said.err


# --- a stranger's text

HOSTILE: Final = "\x1b]0;all is well\x07\x9b31m\u202e\r[bold]x[/]"
ARGUMENTS: Final = {
    "audit": (),
    "backup": ("NOWHERE",),
    "bench": ("f", "1"),
    "completion": ("bash",),
    "cost": (),
    "dashboard": ("--print",),
    "deploy": ("f", "FOLDER"),
    "dev": ("FOLDER",),
    "doctor": (),
    "down": (),
    "drain": (),
    "gpu drain": ("0",),
    "gpu undrain": ("0",),
    "history": ("f",),
    "install-service": ("NOWHERE",),
    "invoke": ("f", "1"),
    "job": ("j2",),
    "jobs": (),
    "keys create": (),
    "keys ls": (),
    "keys revoke": ("x",),
    "logs": ("f",),
    "ls": (),
    "pin": ("f",),
    "policy": (),
    "replay": ("NOWHERE",),
    "requests": (),
    "restore": ("TOKEN", "--state", "NOWHERE"),
    "restart": ("f",),
    "rm": ("f", "-y"),
    "rollback": ("f",),
    "run": ("NOWHERE",),
    "secret ls": (),
    "secret rm": ("X",),
    "secret set": ("X", "--file", "TOKEN"),
    "simulate": ("NOWHERE",),
    "status": (),
    "top": (),
    "traffic": ("f", "4=10"),
    "unpin": ("f",),
    "up": ("--config", "NOWHERE"),
}
CHOSEN: Final = ("error", "warning", "code", "file", "name", "function", "id", "y")
ASK_NO_NODE: Final = {
    *("backup", "restore", "completion", "doctor", "down", "install-service", "replay", "run", "simulate", "top", "up"),
}
"""Or not here: `top` wants a terminal, `run` a node's sockets, the others a file or a node's processes."""


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    for name, of in group.commands.items():
        if isinstance(of, click.Group):
            yield from commands(of, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(each)


def spoiled(value: Any, text: str) -> Any:
    """With this text as each text in it that a function or a deployer chooses."""
    if isinstance(value, dict):
        return {key: text if key in CHOSEN else spoiled(each, text) for key, each in value.items()}
    return [spoiled(each, text) for each in value] if isinstance(value, list) else value


def odd(text: str) -> list[str]:
    return [char for char in text if not char.isprintable() and char not in "\n\t"]


@pytest.fixture
def typed(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command with its arguments."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "function.py").write_text("def handle(s, r): pass\n")
    (tmp_path / "token").write_text("secret")
    places = {each: str(tmp_path / each.lower()) for each in ("FOLDER", "NOWHERE", "TOKEN")}
    return lambda name: [*name.split(), *(places.get(each, each) for each in ARGUMENTS[name])]


def test_each_command_is_known_to_these_tests() -> None:
    assert {*ARGUMENTS} == {*commands(cli.cli)}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_refuses_a_command_commands_no_terminal(
    dormouse: Any, node: Node, typed: Callable[[str], list[str]], name: str
) -> None:
    node.refusal = a.Refused(status=403, code="forbidden", text=HOSTILE)
    result = dormouse(*typed(name))
    assert odd(result.out + result.err) == []
    assert (r"forbidden: \x1b]0;all is well\x07\x9b31m\u202e\r[bold]x[/]" in result.err) == (name not in ASK_NO_NODE)


def test_what_a_function_has_made_commands_no_terminal(
    dormouse: Any, node: Node, typed: Callable[[str], list[str]]
) -> None:
    """Its log, its answers, its errors; and JSON stays JSON."""
    node.spoil = HOSTILE
    for name in ("logs", "deploy", "job", "jobs", "history", "requests", "status", "ls"):
        result = dormouse(*typed(name))
        assert odd(result.out + result.err) == [], name
        assert r"\x1b]0;all is well\x07\x9b31m\u202e" in result.out + result.err, name
        result = dormouse(*typed(name), "--json")
        assert odd(result.out) == [], name
        assert HOSTILE.partition("\r")[0] in "".join(texts(json.loads(result.out))), name
    escaped = r'"\u001b]0;all is well\u0007\u009b31m\u202e\r[bold]x[/]"'
    assert dormouse("invoke", "f", json.dumps(HOSTILE, ensure_ascii=False)).out == f"{escaped}\n"
    assert dormouse("job", "j2", "--result").out == f'{{"y": {escaped}}}\n'


def test_whatever_prints_commands_no_terminal(dormouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a command does not know that it prints; in pieces that end within a character."""

    def ls(*_: Any) -> Any:
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        click.echo(HOSTILE.encode())
        for each in f"{HOSTILE} \u3042\n\xff".encode("utf-8", "surrogateescape"):
            sys.stdout.buffer.write(bytes([each]))
        sys.stdout.buffer.write(b"\xff\r\n")
        sys.excepthook(ValueError, ValueError(HOSTILE), None)
        return {"functions": []}

    monkeypatch.setattr(AdminClient, "listed", ls)
    result = dormouse("ls")
    assert odd((result.out + result.err).replace("\r\n", "")) == []
    assert result.out.count(r"\x9b31m\u202e\r[bold]x[/]") == 3
    assert result.out.endswith("[bold]x[/] \u3042\n\xff\\xff\r\n")
    assert result.err.count(r"\x9b31m\u202e\r[bold]x[/]") == 2


def test_of_lines_a_table_has_what_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    table([{"error": "Traceback (most recent call last):\n  File x\nValueError: no\nsee https://x"}], ["error"])
    assert capsys.readouterr().out == "error\nValueError: no …\n"


def test_an_answer_without_a_body(dormouse: Any, tmp_path: Path) -> None:
    (tmp_path / "none").touch()  # the node of these tests answers what it was asked
    ran = dormouse("invoke", "f", f"@{tmp_path / 'none'}")
    assert (ran.status, ran.out) == (0, "")
    assert json.loads(dormouse("invoke", "f", f"@{tmp_path / 'none'}", "--json").out)["answer"] is None


def test_a_table_on_a_terminal_has_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    table([{"error": f"{HOSTILE} :smile: [link=http://example.org]here[/link]"}], ["error"])
    assert odd(terminal.getvalue()) == []
    with harmless_streams():
        clear()
        assert terminal.getvalue().endswith("\x1b[2J\x1b[1;1H"), "what is the command's own, does what it says"
    assert "[bold]x[/] :smile: [link=http://example.org]here[/link]" in " ".join(terminal.getvalue().split())


# --- failures with --json


def taking_json(group: click.Group = cli.cli, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from taking_json(command, f"{before}{name} ")
        elif any(option.name == "json_" for option in command.params):
            yield f"{before}{name}"


def failure(result: Any) -> tuple[int, str]:
    error = json.loads(result.out)["error"]
    assert error.keys() == {"code", "message", "hint"}
    assert error["message"]
    return result.status, error["code"]


@pytest.mark.parametrize("name", sorted(taking_json()))
def test_with_json_a_failure_is_json_on_the_standard_output(
    name: str, dormouse: Any, node: Node, tmp_path: Path
) -> None:
    """Whichever command it is: a slip, a refusal of the node, and no node."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "f.py").write_text("def handle(state, request): ...\n")
    (tmp_path / "token").write_text("value")
    named = {"FOLDER": str(tmp_path / "own"), "TOKEN": str(tmp_path / "token"), "NOWHERE": str(tmp_path / "no")}
    words = [*name.split(), *(named.get(word, word) for word in ARGUMENTS[name]), "--json"]
    assert failure(dormouse(*words, "--no-such-option")) == (2, "usage")
    assert dormouse(*words[:-1], "--no-such-option").out == "", "who wants no JSON has none"
    if name in ASK_NO_NODE:
        return
    node.refusal = a.Refused(status=403, code="forbidden", text="it may not be; ask whoever runs the node")
    refused = dormouse(*words)
    assert failure(refused) == (5, "forbidden")
    assert json.loads(refused.out)["error"]["hint"] == "ask whoever runs the node"
    assert "forbidden: it may not be" in refused.err
    if not name.startswith("keys"):  # which then work on the state directory
        assert failure(dormouse("--run", str(tmp_path / "none"), *words)) == (4, "unreachable")


def test_the_first_key_is_asked_for_because_it_locks_out_whoever_has_none(
    dormouse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DORMOUSE_RUN")

    def create(name: str, more: str, *words: str) -> Any:
        file = tmp_path / f"{name}.toml"
        file.write_text(f'[node]\nrun = "{tmp_path}/none"\nstate = "{tmp_path}/{name}"\n{more}')
        return dormouse("keys", "create", "--config", str(file), *words)

    refused = create("a", "", "--json")
    assert failure(refused) == (5, "first_key")
    assert "from now on nobody invokes" in refused.err
    assert "open_loopback = true" in refused.err
    assert not (tmp_path / "a" / "keys.json").exists()
    made = create("a", "", "-y")
    assert (made.status, "from now on nobody invokes" in made.err) == (0, True)
    again = create("a", "")
    assert (again.status, "first key" in again.err) == (0, False)
    for name, more in (("b", "open_loopback = true\n"), ("c", "behind_proxy = true\n"), ("d", 'host = "::"\n')):
        other = create(name, more)
        assert (other.status, "first key" in other.err) == (0, False), other.err


def test_doctor_examines_the_node_that_the_other_commands_speak_to(
    dormouse: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[tuple[NodeConfig, bool]] = []

    def examine(config: NodeConfig, running: bool) -> list[doctor.Finding]:
        examined.append((config, running))
        return []

    monkeypatch.setattr(doctor, "examine", examine)
    started = NodeConfig(node=NodeSection(name="own", run=str(run), state=str(tmp_path)), gpu=GpuSection(memory="1GiB"))
    keep_node_config(started)
    assert dormouse("doctor").status == 0
    monkeypatch.setattr(nodeprocess, "running_pid", lambda _: 1)
    assert dormouse("doctor").status == 0
    file = tmp_path / "other.toml"
    file.write_text('[node]\nname = "other"\n')
    assert dormouse("doctor", "--config", str(file)).status == 0
    assert [(config.node.name, running) for config, running in examined] == [
        ("default", False), ("own", True), ("other", True),
    ]  # fmt: skip
    assert examined[1][0] == started


def test_doctor_says_how_much_room_the_disks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig(node=NodeSection(run=str(tmp_path / "run"), state=str(tmp_path / "state")))
    found = []
    for least in ((0, 0), (0, 1 << 62), (1 << 62, 1 << 62)):
        monkeypatch.setattr(doctor, "MIN_FREE", {"run": least, "state": least})
        found += [(doctor._disk(config, what).name, doctor._disk(config, what).state) for what in ("run", "state")]
    assert found == [
        ("run disk", "ok"), ("state disk", "ok"),
        ("run disk", "warn"), ("state disk", "warn"),
        ("run disk", "fail"), ("state disk", "fail"),
    ]  # fmt: skip
    assert " free of " in doctor._disk(config, "run").found
