"""A language model on a node: first tokens of models that sleep, neighbours, and what the way to the client costs.

    python -m benchmarks.llm_node [--folder build/smollm2] [--parts front,beside,sleeping,many,fork] [--out FILE]

* ``front``: what router and instance add to a first token, and their processor milliseconds for each step with sixteen
  streams.
* ``beside``: p99 of an ordinary function's requests, alone and beside a language model that always computes.
* ``sleeping``: the first token of a model that is not on the GPU, over a link on which its copy takes as long as its
  prefill.
* ``many``: twelve models of three architectures, asked in turn on a GPU that holds four of them, beside starting
  vLLM's server for one of each architecture (where scripts/llm-peers has installed it).
* ``fork``: time until a blank runtime answers, and memory that is its own once it has computed.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it: threads that wait leave the cores to the others

import torch
from safetensors.torch import load_file

from benchmarks.front import spent_s, summary
from benchmarks.llm import at_once
from benchmarks.llm_alone import Alone
from benchmarks.llm_client import GRANULES, prompt, serving
from benchmarks.llm_many import many
from benchmarks.nodes.testnode import TestNode
from benchmarks.report import Goal, arguments, report
from dormouse.core import procfs
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.schemas import messages as m
from examples import smollm2

NEW: Final = 64
ORDINARY: Final = """
import torch

def load():
    return torch.ones(1 << 18, device="cuda")

def handle(model, request):
    return float(model.sum().item())
"""
LARGE: Final = """
import torch

def load():
    return torch.ones({nbytes} // 4, device="cuda")

def handle(model, request):
    return float(model[:8].sum().item())
"""


def front(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Sixteen streams at once; a step is a token of each, so steps are tokens / 16."""
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        client.first_ms()
        added = [client.added_ms() for _ in range(10 * rounds)]
        router, steps = node.pids()["router"], 0
        instances = [pid for pid in node.descendants() if _is_instance(node, pid)]
        assert instances
        before_s, before = spent_s([router]), spent_s(instances)
        for _ in range(rounds):
            at_once(lambda _: client.speak(NEW), range(16), 16)
            steps += NEW
        return {
            "router, ms of a step": (spent_s([router]) - before_s) / steps * 1e3,
            "instance, ms of a step": (spent_s(instances) - before) / steps * 1e3,
            "added to a first token, ms": statistics.median(added),
            "as the node tells": node.status()["functions"]["chat"]["llm"],
        }


def _is_instance(node: TestNode, pid: int) -> bool:
    """Forked by the node's zygote, whose command line it has."""
    zygote = node.pids()["zygote"]
    return pid != zygote and procfs.words(pid) == procfs.words(zygote)


def beside(folder: Path, dtype: str, seconds: float) -> dict[str, Any]:
    """Requests of an ordinary function one after the other, beside four clients that never stop asking the model."""
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        node.deployed("ninth", ORDINARY)
        client.first_ms()

        def asked() -> dict[str, float]:
            times, end_s = [], time.monotonic() + seconds
            while time.monotonic() < end_s:
                began_s = time.perf_counter()
                assert node.result("ninth", {}) == float(1 << 18)
                times.append((time.perf_counter() - began_s) * 1e3)
            return summary(times)

        time.sleep(3)  # until the seat is left
        alone = asked()
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                client.speak(NEW)

        talking = [threading.Thread(target=talk) for _ in range(4)]
        for thread in talking:
            thread.start()
        busy = asked()
        stop.set()
        for thread in talking:
            thread.join()
    return {"alone": alone, "beside": busy}


def sleeping(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """The link is as wide as makes the copy as long as the prefill is in this process."""
    nbytes = sum(each.numel() for each in load_file(folder / "model.safetensors").values()) * torch_size(dtype)
    alone = Alone(folder, dtype)
    prefill_ms = statistics.median(alone.prefill_ms(prompt(seed)) for seed in range(5))
    other_nbytes = nbytes + GRANULES
    memory_nbytes = other_nbytes + GRANULES
    link = int(nbytes / prefill_ms * 1e3)
    with serving(folder, dtype, f'memory = "{memory_nbytes}"\nlink = "{link}"') as (node, client):
        client.first_ms()
        resident, asleep, prefills = [], [], []
        for number in range(rounds):  # before an ordinary function has computed: steps are brief for a while then
            resident.append(client.first_ms())
            prefills.append(alone.prefill_ms(prompt(100 + number)))
        node.deployed("large", LARGE.format(nbytes=other_nbytes))
        for number in range(rounds):
            node.result("large", {})  # all of the model leaves
            asleep.append(client.first_ms())
            prefills.append(alone.prefill_ms(prompt(200 + number)))
    copy_ms = nbytes / link * 1e3
    return {
        "copy, ms": copy_ms,
        "prefill alone, ms": statistics.median(prefills),
        "first token, on the GPU, ms": statistics.median(resident),
        "first token, asleep, ms": statistics.median(asleep),
        "all asleep, ms": asleep,
    }


def torch_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


# --- the process


def fork(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """From the wish for a runtime to its first answer, of a zygote in this process's place of an executor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "dormouse.gpuserver.runtime.zygote", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "DORMOUSE_PARENT": str(os.getpid())}
        )
    zygote: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote] = PacketSocket(ours, m.FromRuntimeZygote)
    zygote.sock.setblocking(True)
    try:
        assert zygote.recv() is not None
        times = [_blank_ms(zygote, number) for number in range(1, rounds + 1)]
    finally:
        process.kill()
        process.wait()
        zygote.close()
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        client.first_ms()
        pids = [pid for pid in node.descendants() if _is_runtime(pid)]
        own_kib = [_private_kib(pid) for pid in pids]
    return {"fork to first answer, ms": statistics.median(times), "private memory, MiB": max(own_kib) / 1024}


def _blank_ms(zygote: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote], number: int) -> float:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runtime: PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime] = PacketSocket(ours, m.RuntimeToExecutor)
    runtime.sock.setblocking(True)
    began_s = time.perf_counter()
    with theirs:
        spawn = m.SpawnRuntime(number=number, uid=os.getuid(), address_nbytes=1 << 30, threads=2)
        zygote.send(spawn, [theirs.fileno()])
    runtime.send(m.SeatEnds())
    packet = runtime.recv()
    took_ms = (time.perf_counter() - began_s) * 1e3
    assert packet is not None
    assert packet[0] == m.SeatLeft()
    said = zygote.recv()
    assert said is not None
    signal.pidfd_send_signal(said[1][0], signal.SIGKILL)
    close_all(said[1])
    runtime.close()
    return took_ms


def _is_runtime(pid: int) -> bool:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return all("dormouse.gpuserver.runtime.zygote" in procfs.words(each) for each in (pid, parent))


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


# --- all


def goals(results: dict[str, Any]) -> list[Goal]:
    found = []

    def goal(name: str, wanted: str, measured: float, met: bool) -> None:
        found.append(Goal(name=name, goal=wanted, measured=measured, met=met))

    if (each := results.get("front")) is not None:
        total = each["router, ms of a step"] + each["instance, ms of a step"]
        goal("router and instance, processor ms of a step, 16 streams", "<= 1.6", total, total <= 1.6)
        added = each["added to a first token, ms"]
        goal("router and instance, added to a first token, ms", "<= 2", added, added <= 2)
    if (each := results.get("beside")) is not None:
        over = each["beside"]["p99 ms"] - 1.5 * each["alone"]["p99 ms"]
        goal("p99 beside a saturated model, over 1.5 x alone, ms", "<= one turn of one brief step", over, over <= 75)
    if (each := results.get("sleeping")) is not None:
        longer = max(each["copy, ms"], each["prefill alone, ms"])
        over = each["first token, asleep, ms"] - 1.1 * longer
        goal("first token of a sleeping model, over 1.1 x max(copy, prefill), ms", "<= 120", over, over <= 120)
        over = each["first token, on the GPU, ms"] - 1.2 * each["prefill alone, ms"]
        goal("first token, on the GPU, over 1.2 x prefill, ms", "<= 40", over, over <= 40)
    if (each := results.get("many")) is not None:
        goal("12 models on a GPU for 4: wrong answers", "0", len(each["wrong"]), not each["wrong"])
        goal("12 models on a GPU for 4: first token, p50, ms", "", each["p50 ms"], True)
        goal("12 models on a GPU for 4: first token, p99, ms", "", each["p99 ms"], True)
        if starts_s := each["starts of vLLM's server, s"]:
            least = min(starts_s) * 1e3
            goal("the fastest start of vLLM's server to a first token, s", "", least / 1e3, True)
            goal("that / our p50", ">= 30", least / each["p50 ms"], least >= 30 * each["p50 ms"])
            goal("that / our p99", "", least / each["p99 ms"], True)
    if (each := results.get("fork")) is not None:
        took_ms = each["fork to first answer, ms"]
        goal("fork of a blank runtime, ms", "<= 60", took_ms, took_ms <= 60)
        goal("private memory of a runtime that has computed, MiB", "", each["private memory, MiB"], True)
    return found


def main(args: argparse.Namespace) -> None:
    folder, rounds = smollm2.build(args.folder), 3 if args.quick else 10
    torch.set_num_threads(2)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "front": lambda: front(folder, args.dtype, 1 if args.quick else 4),
        "beside": lambda: beside(folder, args.dtype, 5.0 if args.quick else 20.0),
        "sleeping": lambda: sleeping(folder, args.dtype, rounds),
        "many": lambda: many(folder, 1 if args.quick else 4),
        "fork": lambda: fork(folder, args.dtype, rounds),
    }
    chosen: Sequence[str] = args.parts.split(",")
    if unknown := set(chosen) - set(parts):
        sys.exit(f"there are no parts {sorted(unknown)}; there are {', '.join(parts)}")
    results = {}
    for part in chosen:
        results[part] = parts[part]()
        print(part, results[part], flush=True)
    report(goals(results), args, {"results": results})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--parts", default="front,beside,sleeping,many,fork")
    main(parser.parse_args())
