"""The parts of benchmarks/gpu_llm.py that want a node: wakes, adapters over one backbone, two backbones at once.

Each is given ``told``, which keeps what was measured as it comes. Over the fake driver the device is the CPU.
"""

import http.client
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from benchmarks.gpu_llm_models import CONTEXT, DEVICE, SHAPES, adapter_folders, make_folder
from benchmarks.llm_alone import random_prompt
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal
from dormouse.core import modelfolder, procfs
from dormouse.core.folder import FunctionFolder

MIB: Final = 1 << 20
GIB: Final = 1 << 30
BF16: Final = torch.bfloat16
PROMPT: Final = 128
STREAMS: Final = 32
ADAPTERS: Final = 8
RANK: Final = 16
MAX_BYTES: Final = 1.05
MIN_MIXED: Final = 0.65
MIN_TOGETHER: Final = 1.3
LONGEST_S: Final = 120.0


class Told(Protocol):
    def put(self, **found: Any) -> None: ...


class Stream:
    """A greedy completion of so many tokens, over a connection of its own; when each of its parts came."""

    def __init__(self, node: TestNode, name: str, tokens: Sequence[int], new: int) -> None:
        self.times_s: list[float] = []
        self.text = ""
        body = {
            "model": name, "prompt": list(tokens), "max_tokens": new, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        self.began_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=LONGEST_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read().decode(errors="replace"))
            while line := response.readline():
                if line.startswith(b"data: {"):
                    part = json.loads(line[6:])
                    if "error" in part:
                        raise RuntimeError(str(part["error"]))
                    if text := "".join(choice["text"] for choice in part["choices"]):
                        self.times_s.append(time.perf_counter())
                        self.text += text
        finally:
            connection.close()
        self.tokens = len(self.text.split())
        if self.tokens != new:
            raise RuntimeError(f"{self.tokens} of {new} tokens")

    @property
    def first_ms(self) -> float:
        return (self.times_s[0] - self.began_s) * 1e3


class Asked:
    """A node that is asked; no two prompts are equal."""

    def __init__(self, node: TestNode, shape: str) -> None:
        self.node, self._words = node, min(40_000, SHAPES[shape]["vocab_size"])
        self._seeds = iter(range(1, 1 << 20))

    def stream(self, name: str, new: int) -> Stream:
        return Stream(self.node, name, random_prompt(next(self._seeds), PROMPT, self._words), new)

    def at_once(self, names: Sequence[str], new: int) -> tuple[float, list[Stream]]:
        """Seconds until all have ended."""
        found: list[Stream] = []
        errors: list[BaseException] = []

        def one(name: str) -> None:
            try:
                found.append(self.stream(name, new))
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                errors.append(error)

        began_s = time.perf_counter()
        threads = [threading.Thread(target=one, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return time.perf_counter() - began_s, found

    def told(self, name: str) -> dict[str, Any]:
        """When its lease has ended, which is when a wake is told of."""
        self.node.wait(lambda: self.node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
        found: dict[str, Any] = self.node.status()["functions"][name]
        return found

    def wake(self, name: str) -> dict[str, Any]:
        """What its first token took, and the copy, if there was one."""
        before = self.node.status()["functions"][name]["wakes"]
        stream = self.stream(name, 2)
        told = self.told(name)
        if told["wakes"] == before:
            return {"first token ms": stream.first_ms, "copied": 0}
        copied, us = told["last_wake"]["copied_nbytes"], told["last_wake"]["wake_us"] or 0
        rate = copied / us / 1e3 if us else None
        return {"first token ms": stream.first_ms, "copied": copied, "wake ms": us / 1e3, "GB/s": rate}

    def runtimes(self) -> list[int]:
        zygotes = [pid for pid in self.node.descendants() if "dormouse.gpuserver.runtime.zygote" in procfs.words(pid)]
        return [pid for pid in zygotes if any(pid in procfs.children(other) for other in zygotes)]


@contextmanager
def node_of(pool_nbytes: int, quick: bool, more: str = "") -> Iterator[TestNode]:
    pool_mib, activations_mib = max(64, pool_nbytes // MIB), 256 if quick else 4096
    gpu = (
        f'[gpu]\ndevice = "cuda"\ncount = 1\npool = "pages"\nseat_idle_ms = 300\nactivations = "{activations_mib}MiB"\n'
    )
    text = f'{gpu}memory = "{pool_mib + activations_mib}MiB"\n{more}[sandbox]\n'  # with what a node imports once
    with running_node(text) as node:
        try:
            yield node
        except BaseException:
            print(node.logs(), flush=True)
            raise


@contextmanager
def folder_of(shape: str, told: Told, count: int = 1) -> Iterator[tuple[list[Path], int]]:
    """In memory where there is room, for as long as it takes to deploy them."""
    room = shutil.disk_usage("/dev/shm").free if os.access("/dev/shm", os.W_OK) else 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if room > count * 18 * GIB else None) as place:
        began_s, folders = time.perf_counter(), [Path(place) / f"model{number}" for number in range(count)]
        nbytes = max([make_folder(folder, shape, BF16, seed) for seed, folder in enumerate(folders)])
        told.put(bytes=nbytes, **{"models made s": time.perf_counter() - began_s})
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        yield folders, nbytes


def deploy(node: TestNode, name: str, folder: Path, told: Told) -> None:
    began_s = time.perf_counter()
    settings = {"llm": True, "dtype": "bfloat16", "context": CONTEXT}
    node.admin.deploy(name, FunctionFolder(folder, "config.json", False), settings)
    told.put(**{f"{name}: deployed s": time.perf_counter() - began_s})


def wake(told: Told, shape: str, quick: bool) -> list[Goal]:
    """Two models of which one fits, unless they are too large to have two: then the executor ends between wakes."""
    large, rounds = shape == "8b", 1 if quick else 3
    names = ["a"] if large else ["a", "b"]
    with folder_of(shape, told, len(names)) as (folders, nbytes):
        room = 2 * nbytes + 2 * GIB if large else nbytes * 7 // 4  # large: all of it in large granules
        with node_of(room, quick) as node:
            for name, folder in zip(names, folders, strict=True):
                deploy(node, name, folder, told)
                if not large:
                    shutil.rmtree(folder)
            asked = Asked(node, shape)
            for name in names:
                told.put(**{f"{name}: the very first, with kernels to compile": asked.wake(name)})
            if not large:  # each puts the other to sleep
                found = [asked.wake(name) for _ in range(rounds) for name in names]
                told.put(**{"asleep, with a process": found})
            for _ in range(1 if large else rounds):
                _without_process(asked, told)
            if large or quick:
                for number in range(rounds):
                    _end_executor(node)
                    told.put(
                        **{f"asleep, without a process, after another executor's start, {number}": asked.wake("a")}
                    )
            asked.wake("a")
            _served(asked, "a", told, quick)
        if DEVICE.type == "cuda":
            told.put(**{"transformers, from files in the page cache": peers_wake(make_folder, shape, folders[0])})
    return []


def _without_process(asked: Asked, told: Told) -> None:
    for pid in asked.runtimes():
        os.kill(pid, signal.SIGKILL)
    asked.node.wait(lambda: not asked.runtimes(), 30, "the runtimes to be gone")
    told.put(**{"there or not, without a process": asked.wake("a")})


def _served(asked: Asked, name: str, told: Told, quick: bool) -> None:
    """When all is there."""
    firsts = [asked.stream(name, 2).first_ms for _ in range(2 if quick else 7)]
    told.put(**{"awake, first token ms": statistics.median(firsts), "awake, each": firsts})
    for count in (1, STREAMS):
        spent_s, streams = asked.at_once([name] * count, 8 if quick else 64)
        rate, firsts = sum(stream.tokens for stream in streams) / spent_s, [stream.first_ms for stream in streams]
        found = {"tokens/s": rate, "first token, median ms": statistics.median(firsts)}
        told.put(**{f"a node, {count} streams": found})


def _end_executor(node: TestNode) -> None:
    epoch = node.status()["gpus"]["0"]["epoch"]
    os.kill(node.pids()["gpu0"], signal.SIGKILL)
    node.wait(lambda: node.status()["gpus"].get("0", {}).get("epoch", epoch) != epoch, 90, "another executor")
    time.sleep(5.0)  # it pins the host's memory meanwhile


def peers_wake(make: Callable[..., int], shape: str, folder: Path) -> dict[str, Any]:
    """In this process, which has a context; the second time, with all that is done once behind it."""
    from transformers import AutoModelForCausalLM

    if not folder.exists():
        make(folder, shape, BF16)
    torch.zeros(1, device=DEVICE)
    loads: list[float] = []
    firsts: list[float] = []
    made: Any = AutoModelForCausalLM
    words = torch.tensor([random_prompt(1, PROMPT)], device=DEVICE)
    for _ in range(2):
        began_s = time.perf_counter()
        model = made.from_pretrained(folder, dtype=BF16, device_map="cuda")
        torch.cuda.synchronize()
        loads.append(time.perf_counter() - began_s)
        with torch.inference_mode():
            model(words).logits[0, -1].argmax().item()
        firsts.append((time.perf_counter() - began_s) * 1e3)
        del model
        torch.cuda.empty_cache()
    return {"load s": loads, "first token ms": firsts}


def shared(told: Told, shape: str, quick: bool) -> list[Goal]:
    with folder_of(shape, told) as (folders, nbytes), node_of(nbytes + (64 * MIB if quick else GIB), quick) as node:
        deploy(node, "a", folders[0], told)
        asked = Asked(node, shape)
        told.put(**{"a: the very first, with kernels to compile": asked.wake("a")})
        return _adapters(asked, folders[0].parent, shape, told, quick)


def _adapters(asked: Asked, place: Path, shape: str, told: Told, quick: bool) -> list[Goal]:
    """Over the base ``a``, which is there."""
    node, count, copied = asked.node, 2 if quick else ADAPTERS, dict[str, int]()
    names = []
    for folder in adapter_folders(place, shape, BF16, RANK, count):
        names.append(folder.name)
        node.admin.deploy(folder.name, modelfolder.find_adapter(str(folder)), {"base": "a"})
    for name in names:
        found = asked.wake(name)
        copied[name] = found["copied"]
        told.put(**{f"{name}, over a base that is there": found})
    functions = node.status()["functions"]
    base = functions["a"]["nbytes"]
    own = {name: functions[name]["nbytes"] - base for name in names}
    kv, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            kv[0] = max([kv[0], *(each["kv_nbytes"] for each in node.status()["functions"]["a"]["runtimes"])])

    watching = threading.Thread(target=watch)
    watching.start()
    new, found_s = 8 if quick else 48, dict[str, list[float]](base=[], mixed=[])
    for turn in range(2 if quick else 4):
        for side, of in (("base", ["a"]), ("mixed", names)):
            spent_s, _ = asked.at_once([of[each % len(of)] for each in range(4 if quick else STREAMS)], new)
            if turn:
                found_s[side].append(spent_s)
    done.set()
    watching.join()
    ratio = statistics.median(one / other for one, other in zip(found_s["base"], found_s["mixed"], strict=True))
    asked.told("a")
    ideal = sum(own.values()) + sum(row["nbytes"] for name, row in functions.items() if name not in names)
    gpu = node.status()["gpus"]["0"]
    bytes_ratio = (gpu["weights_nbytes"] + kv[0]) / (ideal + kv[0])
    taken_ratio = (gpu["capacity_nbytes"] - gpu["free_nbytes"] + kv[0]) / (ideal + kv[0])
    told.put(backbone=base, adapters=own, copied=copied, KV=kv[0], **{"s, each": found_s, "with granules": taken_ratio})
    off = sum(abs(copied[name] - own[name]) for name in names)
    most, least = MAX_BYTES, MIN_MIXED
    return [
        Goal(name="bytes that waking an adapter copies, beside its own", goal="0", measured=off, met=off == 0),
        Goal(
            name="GPU bytes / (backbones + adapters + KV)",
            goal=f"<= {most}",
            measured=bytes_ratio,
            met=bytes_ratio <= most,
        ),
        Goal(
            name=f"a node, {STREAMS} streams: mixed / base alone",
            goal=f">= {least}",
            measured=ratio,
            met=ratio >= least,
        ),
    ]


TURNS: Final = "[schedule]\nturns = 2\n"


def turns(told: Told, shape: str, quick: bool) -> list[Goal]:
    with (
        folder_of(shape, told, 2) as (folders, nbytes),
        node_of(2 * nbytes + (64 * MIB if quick else 2 * GIB), quick, TURNS) as node,
    ):
        asked = _two(node, folders, shape, told)
        return _together(asked, told, quick)


def _two(node: TestNode, folders: Sequence[Path], shape: str, told: Told) -> Asked:
    asked = Asked(node, shape)
    for name, folder in zip("ab", folders, strict=True):
        deploy(node, name, folder, told)
    for name in "ab":
        told.put(**{f"{name}: the very first, with kernels to compile": asked.wake(name)})
    return asked


def _together(asked: Asked, told: Told, quick: bool) -> list[Goal]:
    """One stream of each, and eight of each."""
    goals, new = [], 16 if quick else 128
    for count in (1, 8):
        ratios = []
        for _ in range(1 if quick else 3):
            alone_s = [asked.at_once([name] * count, new)[0] for name in "ab"]
            ratios.append(sum(alone_s) / asked.at_once(["a", "b"] * count, new)[0])
        ratio = statistics.median(ratios)
        told.put(**{f"together / one alone, {count} streams of each": ratios})
        name = f"turns = 2: two backbones together / one alone, {count} streams of each"
        goals.append(Goal(name=name, goal=f">= {MIN_TOGETHER}", measured=ratio, met=ratio >= MIN_TOGETHER))
    return goals


def brief(told: Told, shape: str, quick: bool) -> list[Goal]:
    """On one node: two backbones and adapters, turns, and wakes without a process, and of all after an executor's."""
    with (
        folder_of(shape, told, 2) as (folders, nbytes),
        node_of(2 * nbytes + (64 * MIB if quick else 3 * GIB), quick, TURNS) as node,
    ):
        asked = _two(node, folders, shape, told)
        _served(asked, "a", told, quick)
        goals = _adapters(asked, folders[0].parent, shape, told, quick)
        goals += _together(asked, told, quick)
        _without_process(asked, told)
        _end_executor(node)
        told.put(**{"asleep, without a process, after another executor's start": asked.wake("a")})
        told.put(**{"asleep, without a process": asked.wake("b")})
        if DEVICE.type == "cuda":
            told.put(**{"transformers, from files in the page cache": peers_wake(make_folder, shape, folders[0])})
    return goals


PARTS: Final[dict[str, Callable[[Told, str, bool], list[Goal]]]] = {
    "wake": wake, "shared": shared, "turns": turns, "brief": brief,
}  # fmt: skip
