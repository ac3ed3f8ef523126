"""`dormouse doctor`: finds the parts of this machine that a node would use, and the missing ones. Changes nothing.

Each finding is a row: name, "ok" | "warn" | "fail", what was found, and what to do about it.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dormouse.core import exposure, torchbuild
from dormouse.core import gpus as gpus_
from dormouse.core.config import NodeConfig, machine_nbytes, parse_nbytes
from dormouse.core.directories import RunDirectory, expect_apart, open_directory
from dormouse.core.keys import KeyFile
from dormouse.core.node.adminclient import AdminClient
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.quantities import size
from dormouse.core.sandbox.warming import Warming
from dormouse.core.torchbuild import Build, covers
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import GpuPlace

PROBE_S: Final = 60.0
STATUS_S: Final = 10.0
IMPORTS_S: Final = 180.0
"""As long as `dormouse up` waits for a node, most of which is the same."""


MIN_FREE: Final = {"run": (1 << 20, 16 << 20), "state": (64 << 20, 2 << 30)}
"""Bytes below which a directory's disk is full, and below which it soon is: a run directory has a few files of
settings, a state directory logs, functions' folders and models.
"""

MIN_INODES: Final = 1000
"""A node makes a few hundred files at its start."""


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # "ok" | "warn" | "fail"
    found: str
    advice: str = ""


def of_running(run: Path) -> NodeConfig | None:
    """The configuration of the node there; None if this user may not read it."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(RunPaths(run).node_json.read_bytes(), type=NodeConfig)
    return None


def examine(config: NodeConfig, running: bool) -> list[Finding]:
    """All findings, in the order in which a person wants them. ``running``: this node runs now."""
    found = gpus_.find(config, opening=not running)
    gpu, gpus = _cuda(config, found)
    builds = torchbuild.builds(config)
    return [
        _python(),
        *_torch(builds),
        gpu,
        *_gpus(found, torchbuild.kernels() if gpus and builds["node"].cuda else []),
        *_links(config, found.places),
        _compiler(config, gpus),
        _memory(config, gpus),
        _shared_memory(config),
        *_libraries(config),
        *_confinement(config),
        _pool(config),
        _models(config),
        _directory(config, "run"),
        _directory(config, "state"),
        *(_disk(config, what) for what in ("run", "state")),
        _port(config, running),
        _exposure(config),
        Finding("node", "ok", f"{config.node.name!r} {'runs' if running else 'does not run'}"),
        *(_troubles(config) if running else []),
    ]


def _troubles(config: NodeConfig) -> list[Finding]:
    """Processes that do not start, and what the running node's GPUs say that they have to do without."""
    try:
        status = AdminClient(config.run_directory, STATUS_S).status()
    except (CallRefused, Unreachable, LookupError) as error:
        return [Finding("gpus", "warn", f"the node does not say how they are: {error}")]
    return [
        *(
            Finding(role, "warn", text, "it does not start, and is tried again about once a minute")
            for role, text in status["node"]["down"].items()
        ),
        *(
            Finding(f"gpu {number}", "warn", text, "what this GPU goes on without; docs/gpu.md")
            for number, gpu in status["gpus"].items()
            for text in gpu.get("trouble", ())
        ),
    ]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch(builds: dict[str, Build]) -> list[Finding]:
    """The builds of both interpreters; a node needs the same version in both."""
    findings = []
    for name, build in builds.items():
        if build.version:
            findings.append(Finding(f"torch ({name})", "ok", str(build)))
        else:
            advice = "install torch 2.11 to 2.13 there; set [sandbox] python if it is another interpreter"
            findings.append(Finding(f"torch ({name})", "fail", "not installed", advice))
    if len({build.version.split("+")[0] for build in builds.values()}) > 1:
        findings.append(Finding("torch", "fail", "the versions differ", "install the same version of torch in both"))
    return findings


def _cuda(config: NodeConfig, found: gpus_.GpuSurvey) -> tuple[Finding, int]:
    """The device that executors would drive, and the number of GPUs."""
    count = len(found.gpus)
    trouble, advice = gpus_.trouble(config, found)
    if trouble:
        return Finding("gpu", "fail", trouble, advice), count
    if not count:
        return Finding("gpu", "ok", f"emulated in host memory: {found.reason}"), 0
    used = f"; [gpu] count takes {config.gpu.count} of them" if 0 < config.gpu.count < count else ""
    text = f"{count} x {found.gpus[0]}, CUDA {found.driver}, cuda-bindings {found.bindings}{used}"
    return Finding("gpu", "ok", text, "what has run on a GPU so far: docs/gpu.md"), count


def _gpus(found: gpus_.GpuSurvey, kernels: Sequence[str]) -> list[Finding]:
    """Reasons why single GPUs cannot be used, or not wholly."""
    findings = []
    for number, (name, state) in enumerate(zip(found.gpus, found.states, strict=False)):
        taken = state.total_nbytes - state.free_nbytes
        if " MIG " in name:
            text = f"{name} is a part of a GPU (MIG), of which CUDA shows a process one alone"
            advice = "for each other part, start a node with CUDA_VISIBLE_DEVICES naming it (see `nvidia-smi -L`)"
            findings.append(Finding(f"gpu {number}", "ok", text, advice))
        if state.error:
            working = any(not each.error for each in found.states)
            advice = "the node goes on without it" if working else "no GPU can be used"
            findings.append(Finding(f"gpu {number}", "warn" if working else "fail", state.error, advice))
        elif taken > state.total_nbytes // 8:  # a context takes less itself
            text = f"{size(taken)} of {size(state.total_nbytes)} are held by other processes"
            advice = "end them; the node takes what is left when it starts"
            findings.append(Finding(f"gpu {number}", "warn", text, advice))
        if not state.error and kernels and not covers(kernels, state.capability):
            text = "torch has no kernels for {} ({}.{}), only {}".format(name, *state.capability, " ".join(kernels))
            findings.append(Finding(f"gpu {number}", "fail", text, "install a torch that is built for it"))
    return findings


def _links(config: NodeConfig, places: Sequence[GpuPlace]) -> list[Finding]:
    """GPUs that share a switch, and those that have NVLink: of real ones, by NVML or by the configuration."""
    if not places:
        return []
    numbers = {place.uuid: number for number, place in enumerate(places)}
    reason = next((place.reason for place in places if place.reason), "")
    parts, unknown = [], False
    for what, label, configured, lists in (
        ("on one PCIe switch", "switch", config.gpu.switch, [place.switch_with for place in places]),
        ("with NVLink", "peer", config.gpu.peer, [place.nvlink_with for place in places]),
    ):
        pairs = sorted(
            (number, numbers[uuid]) for number, uuids in enumerate(lists) for uuid in uuids if uuid in numbers
        )
        named = ", ".join(f"{one}-{other}" for one, other in pairs if one < other)
        if configured:
            parts.append(f"{what}: as [gpu] {label} says")
        elif reason:
            unknown = True
        elif len(pairs) == len(places) * (len(places) - 1) > 0:
            parts.append(f"{what}: all {len(places)}")
        else:
            parts.append(f"{what}: {named or 'none'}")
    if unknown:
        advice = "install NVIDIA's NVML, which comes with the driver, or set [gpu] switch and peer"
        return [Finding("gpu links", "warn", "; ".join([*parts, f"not known: {reason}"]), advice)]
    return [Finding("gpu links", "ok", "; ".join(parts))]


def too_large(config: NodeConfig) -> list[str]:
    """Warnings for the caller who starts a node: resources in its configuration that its machine lacks."""
    _, gpus = _cuda(config, gpus_.find(config, opening=False))
    memory = _memory(config, gpus)
    absent = [path for path in config.sandbox.read if not os.path.exists(path)]
    found = [f"memory: {memory.found}: {memory.advice}"] if memory.state == "fail" else []
    return found + [f"[sandbox] read has {path}, which is not there" for path in absent]


def _compiler(config: NodeConfig, gpus: int) -> Finding:
    """The C++ compiler, which decides how activations of emulated GPUs are counted, and whether C++ or Python records
    and runs operations.
    """
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    counted = "" if gpus else f"activations are counted {'exactly' if path else 'approximately'}, and "
    by_python = f"{path or 'none'}: {counted}Python records and runs each operation"
    if path is None:
        advice = "install a C++ compiler (g++), and Python's headers (python3-dev)"
        return Finding("compiler", "warn", by_python, advice)
    if not config.gpu.fast_path:
        return Finding("compiler", "ok", f"{by_python}, because [gpu] fast_path is false")
    if not headers:
        return Finding("compiler", "warn", f"{by_python}, because its headers are missing", "install python3-dev")
    return Finding("compiler", "ok", f"{path}: {counted}operations are recorded and run by C++")


def _memory(config: NodeConfig, gpus: int) -> Finding:
    """``gpus`` of CUDA; without them, emulated ones take of the machine's memory."""
    total = machine_nbytes()
    pools = 0 if gpus else config.gpu_count * config.gpu_nbytes
    emulated = "" if gpus else f" {config.gpu_count} emulated GPUs of {size(config.gpu_nbytes)},"
    found = f"{size(total)} in all;{emulated} {size(config.host_nbytes)} for models"
    if pools + config.host_nbytes > total:
        advice = "that is more than the machine has; set [gpu] memory, count or [limits] host lower"
        return Finding("memory", "fail", found, advice)
    return Finding("memory", "ok", found)


def _shared_memory(config: NodeConfig) -> Finding:
    """memfds live in the kernel's own tmpfs, so /dev/shm's size does not bind; memory and its control group do."""
    try:
        os.close(os.memfd_create("dormouse-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding(
            "shared memory",
            "fail",
            f"memfd_create: {error.strerror}",
            "run on Linux 3.17 or newer, outside such a filter",
        )
    arena = sum(parse_nbytes(each) for each in (config.limits.body, config.limits.response, config.limits.stream))
    try:
        shm = os.statvfs("/dev/shm")
        room = f"; /dev/shm has {size(shm.f_bsize * shm.f_blocks)}"
    except OSError:
        room = ""
    return Finding("shared memory", "ok", f"memfd with seals; at most {size(arena)} per instance{room}")


def _libraries(config: NodeConfig) -> list[Finding]:
    """Imports the libraries of `[sandbox] warm` as a zygote would, anew after each that fails."""
    python = config.sandbox.python or sys.executable
    with tempfile.TemporaryDirectory(prefix="dormouse-doctor-") as directory:
        file = Path(directory) / "warming"
        command = [python, "-P", "-m", "dormouse.core.sandbox.preload", msgspec.json.encode(config).decode(), str(file)]
        for _ in range(len(config.sandbox.warm) + 1):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORTS_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                return [Finding("libraries", "fail", f"the import of torch was not done: {error}")]
            left_out = Warming.read(file).left_out
            if done.returncode == 0:
                break
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [Finding("libraries", "fail", f"what Dormouse needs cannot be imported: {words}")]
    advice = "mend or remove it; functions that do not import it work"
    found = [Finding("library", "warn", f"{name} is left out: {reason}", advice) for name, reason in left_out.items()]
    found += [Finding("library", "warn", text) for text in done.stdout.splitlines() if " is built for " in text]
    return found or [Finding("libraries", "ok", "all of [sandbox] warm that is installed was imported")]


def _confinement(config: NodeConfig) -> list[Finding]:
    """Attempts of an instance in this machine's sandbox, and how each has ended."""
    python = config.sandbox.python or sys.executable
    arguments = [python, "-P", "-m", "dormouse.core.sandbox.trial", msgspec.json.encode(config).decode()]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PROBE_S)
        rows = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return [Finding("confinement", "warn", f"unknown: the trial did not answer ({type(error).__name__})")]
    advice = (
        "to serve untrusted functions, run the node as root or allow user namespaces, and give it control groups "
        "(`systemd-run --user --scope`, or a service with Delegate=yes)"
    )
    return [
        Finding(row["name"], "ok" if row["held"] else "warn", row["found"], "" if row["held"] else advice)
        for row in rows
    ]


def _pool(config: NodeConfig) -> Finding:
    """The way executors manage the memory of GPUs, as the next start would choose it."""
    if config.gpu.pool != "auto":
        return Finding("pool", "ok", config.pool)
    with suppress(ConfigError):  # the state directory is another finding
        if StatePaths(config.state_directory).language_models.exists():
            return Finding("pool", "ok", 'pages, because language models are deployed ([gpu] pool is "auto")')
    return Finding("pool", "ok", f'{config.pool}, and pages once a language model is deployed ([gpu] pool is "auto")')


def _models(config: NodeConfig) -> Finding:
    """Whether language models of several tenants can be on this node."""
    exposed = config.models_exposed(os.getuid() == 0 and config.sandbox.uid == "auto")
    if not exposed:
        return Finding("language models", "ok", "those of several tenants are kept apart")
    state = "warn" if config.node.tenants == "many" else "ok"
    return Finding("language models", state, "those of one tenant only", exposed)


def _directory(config: NodeConfig, what: str) -> Finding:
    """As a start would see it, but nothing is made."""
    name, advice = f"{what} directory", f"set [node] {what}"
    try:
        path = config.run_directory if what == "run" else config.state_directory
        if what == "run":
            RunDirectory.examine(path)
            expect_apart(path, config.state_directory)
        elif (fd := open_directory(path, name, None, links=True)) is not None:
            os.close(fd)
    except ConfigError as error:
        return Finding(name, "fail", str(error), advice)
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{path} cannot be written", advice)
    return Finding(name, "ok", str(path))


def _disk(config: NodeConfig, what: str) -> Finding:
    """Room where that directory is, or will be: sockets and settings in one, models and deploys in the other."""
    try:
        path = config.run_directory if what == "run" else config.state_directory
        while not path.exists() and path != path.parent:
            path = path.parent
        disk = os.statvfs(path)
    except OSError as error:
        return Finding(f"{what} disk", "fail", f"{path}: {error.strerror}", f"set [node] {what}")
    except ConfigError as error:
        return Finding(f"{what} disk", "fail", str(error), f"set [node] {what}")
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    said = f"{size(free)} free of {size(disk.f_blocks * disk.f_frsize)}"
    said += f", {inodes:,} inodes free" if disk.f_files else ""
    least, low = MIN_FREE[what]
    advice = f"free space there, or set [node] {what} to another disk"
    if free < least or (disk.f_files and inodes < MIN_INODES):
        return Finding(f"{what} disk", "fail", f"{said}: a node cannot start, or cannot keep what is deployed", advice)
    if free < low:
        return Finding(f"{what} disk", "warn", said, advice)
    return Finding(f"{what} disk", "ok", said)


def _port(config: NodeConfig, running: bool) -> Finding:
    host, port = config.node.host, config.node.port
    if running:  # maybe with a node file that this command was not given
        with contextlib.suppress(OSError, ValueError, LookupError):
            ready = json.loads((RunPaths(config.run_directory).trusted / "ready").read_bytes())
            host, port = ready["host"], ready["port"]
        return Finding("port", "ok", f"{host}:{port} (the node has it)")
    if port == 0:
        return Finding("port", "ok", f"{host}:{port} (any free one)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return Finding(
            "port", "fail", f"{host}:{port}: {error.strerror}", "stop what uses it, or set another [node] port"
        )
    return Finding("port", "ok", f"{host}:{port} is free")


def _exposure(config: NodeConfig) -> Finding:
    """Exposure of the node, as `up` judges it."""
    node = config.node
    try:
        exposure.check(config)
    except ConfigError as error:
        return Finding("exposure", "fail", str(error), "docs/remote-access.md says how others may reach a node")
    reach = "this machine alone" if exposure.is_loopback(node.host) else "others than this machine"
    how = "TLS" if node.tls_cert else "a proxy" if node.behind_proxy else "plain HTTP"
    try:
        keys_wanted = KeyFile(StatePaths(config.state_directory).keys).wanted
    except ConfigError as error:
        return Finding("exposure", "warn", f"{reach}, by {how}; {error}", "say this to whoever runs the node")
    who = exposure.WHO[exposure.without_key(node, keys_wanted)]
    return Finding("exposure", "ok", f"{reach}, by {how}; {who}")


def as_json(findings: list[Finding]) -> str:
    return json.dumps(
        {"ok": all(f.state != "fail" for f in findings), "findings": [vars(f) for f in findings]}, indent=2
    )
