"""Instances of a real zygote: how long one takes to start, and what it costs while it does nothing.

Start: from the moment the router sends Fork until it hears that the function's module starts importing. Memory: private
pages of an instance with an empty ``load()``, and of the init of its pid namespace, some time after it has loaded.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Goal, arguments, report
from dormouse.core.config import NodeConfig, NodeSection
from dormouse.core.links.fds import PacketSocket
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m

START_GOAL_MS = 40.0
MEMORY_GOAL_MB = 15.0
SETTLE_S = 1.0  # until the links of an instance have connected and their first heartbeats have passed
LAYOUT = m.Arena(request_nbytes=16 << 20, response_nbytes=16 << 20, stream_nbytes=32 << 20)
DEVICE = m.DeviceInfo(name="benchmark", total_nbytes=1 << 30, capability=(8, 0), multiprocessors=1)
SOURCE = "def load():\n    return None\n\n\ndef handle(state, request):\n    return request\n"


def private_nbytes(pid: int) -> int:
    """Pages that nobody shares: what one more such process costs."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) << 10
    return total


def inits_of(pids: list[int]) -> list[int]:
    """The zygote's other children."""
    stat = Path(f"/proc/{pids[0]}/stat").read_text()
    zygote = int(stat.rsplit(")", 1)[1].split()[1])
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    return [int(child) for child in children if int(child) not in pids]


class Rig:
    """The router's side: a zygote and the instances it has forked."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / "r")
        self.paths.make()
        config = NodeConfig(node=NodeSection(run=str(self.paths.run), state=str(folder / "s")))
        self.paths.node_json.write_bytes(msgspec.json.encode(config))
        self.source = folder / "function.py"
        self.source.write_text(SOURCE)
        self.log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
        self.pids: dict[str, int] = {}
        ready, theirs = os.pipe()
        command = [sys.executable, "-P", "-m", "dormouse.core.sandbox.zygote", "--run", str(self.paths.run)]
        environment = os.environ | {"DORMOUSE_READY_FD": str(theirs), "DORMOUSE_PARENT": str(os.getpid())}
        begun_s = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--role", "zygote", "--epoch", "1"], pass_fds=[theirs], env=environment
        )
        os.close(theirs)
        assert os.read(ready, 16) == b"ready\n", "the zygote did not start"
        self.warm_s = time.perf_counter() - begun_s
        self.zygote: PacketSocket[m.FromZygote, m.ToZygote] = PacketSocket.connect(self.paths.zygote(1), m.FromZygote)
        greeting = self.zygote.recv()
        assert greeting is not None
        assert isinstance(greeting[0], m.ZygoteReady)
        self.confinement = greeting[0].confinement

    def told(self, message: m.FromZygote, _: list[int]) -> None:
        if isinstance(message, m.Forked):
            self.pids[message.instance] = message.pid
        else:
            sys.exit(f"{message}; the log is in {self.source.parent}")

    async def start(self, number: int) -> float:
        """Milliseconds from Fork to Importing; returns after the instance has loaded."""
        name, loop = f"f{number}", asyncio.get_running_loop()
        directory = self.paths.instance(name)
        uid = 61_000 + number if self.confinement.startswith("own-uid") else os.getuid()
        os.mkdir(directory, 0o700)
        arena = SharedMemory.create(name, LAYOUT.nbytes)
        importing: asyncio.Future[float] = loop.create_future()
        loaded: asyncio.Future[None] = loop.create_future()

        def heard(message: m.InstanceToRouter) -> None:
            if isinstance(message, m.Importing):
                importing.set_result(time.perf_counter())
            elif isinstance(message, m.Loaded):
                loaded.set_result(None)

        router: Link[m.InstanceToRouter, m.RouterToInstance] = Link(
            f"{directory}/router", bind=True, incoming=m.InstanceToRouter, on_message=heard
        )
        store: Link[m.InstanceToStore, m.StoreToInstance] = Link(
            f"{directory}/store",
            bind=True,
            incoming=m.InstanceToStore,
            on_message=lambda _: store.send(m.Committed(version=1, nbytes=0)),
        )
        for path in (directory, router.path, store.path):
            os.chown(path, uid, uid)
        fork = m.Fork(
            instance=name,
            function=name,
            directory=directory,
            uid=uid,
            folder=str(self.source.parent),
            entry=self.source.name,
            arena=LAYOUT,
            device=DEVICE,
            gpus=1,
            limits={"NOFILE": 256, "NPROC": 64},
        )
        begun_s = time.perf_counter()
        self.zygote.send(fork, [self.log, arena.fd])
        start_ms = (await asyncio.wait_for(importing, 30) - begun_s) * 1e3
        await asyncio.wait_for(loaded, 30)
        return start_ms


async def measure(rig: Rig, count: int) -> dict[str, Any]:
    rig.zygote.serve(rig.told, lambda: None)
    starts_ms = [await rig.start(number) for number in range(count)]
    await asyncio.sleep(SETTLE_S)
    instances = [private_nbytes(pid) for pid in rig.pids.values()]
    return {
        "confinement": rig.confinement,
        "warm_s": rig.warm_s,
        "starts_ms": starts_ms,
        "instance_private_nbytes": instances,
        "init_private_nbytes": [private_nbytes(pid) for pid in inits_of(list(rig.pids.values()))],
    }


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="dmb-") as folder:
        os.chmod(folder, 0o755)  # the sandbox's uid must be able to enter it
        rig = Rig(Path(folder))
        try:
            result = asyncio.run(measure(rig, 5 if args.quick else 40))
        finally:
            rig.process.terminate()
            rig.process.wait()
            shutil.rmtree(rig.paths.run, ignore_errors=True)
    start_ms = statistics.median(result["starts_ms"])
    memory_mb = statistics.median(result["instance_private_nbytes"]) / 1e6
    memory_mb += statistics.median(result["init_private_nbytes"] or [0]) / 1e6
    print(f"confinement {result['confinement']}; the zygote was warm after {result['warm_s']:.1f} s")
    goals = [
        Goal(
            name="start of an instance until import, median ms",
            goal=f"<= {START_GOAL_MS:g}",
            measured=start_ms,
            met=start_ms <= START_GOAL_MS,
        ),
        Goal(
            name="private memory of an idle instance, MB",
            goal=f"<= {MEMORY_GOAL_MB:g}",
            measured=memory_mb,
            met=memory_mb <= MEMORY_GOAL_MB,
        ),
    ]
    report(goals, args, result)


if __name__ == "__main__":
    main(arguments(__doc__ or "").parse_args())
