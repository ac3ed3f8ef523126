"""Inputs of every process of a node at its start: its command line, its configuration, its parent."""

import argparse
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from dormouse.core.config import NodeConfig
from dormouse.core.paths import RunPaths
from dormouse.core.standby import stands_by

END_INSTANCES: Final = signal.SIGHUP
"""Tells a zygote, which has no link, to end all instances and to be ready for another router."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


def die_with_parent(number: int, dumpable: bool = False) -> None:
    """Be sent signal ``number`` when the parent dies; if it is dead already, leave now."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if not dumpable:
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # same-uid sandboxes must not read us through /proc
    if os.environ.get("DORMOUSE_PARENT", str(os.getppid())) != str(os.getppid()):
        os._exit(1)


def parse_arguments() -> argparse.Namespace:
    """``--run DIR --role NAME --epoch N``, as the supervisor gives them to every child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    return parser.parse_args()


def keep_node_config(config: NodeConfig, *, next_: bool = False) -> None:
    """Keep the configuration for every process that starts from now on; ``next_``: of a node that takes over from one
    that still runs, for processes that stand by.
    """
    paths = RunPaths(config.run_directory)
    path = paths.next_json if next_ else paths.node_json
    early = path.with_suffix(".new")
    early.write_bytes(msgspec.json.encode(config))
    early.rename(path)


def read_node_config(run: str) -> NodeConfig:
    """Returns the configuration that :func:`keep_node_config` kept last."""
    paths = RunPaths(run)
    path = paths.next_json if stands_by() else paths.node_json
    return msgspec.json.decode(path.read_bytes(), type=NodeConfig)


def keep_drained_gpus(run: str | Path, gpus: Iterable[int]) -> None:
    """Keep which GPUs are drained, for processes that start from now on, those of a node that takes over among them.
    Raises OSError.
    """
    path = RunPaths(run).drained_gpus
    early = path.with_suffix(".new")
    early.write_bytes(msgspec.json.encode(sorted(gpus)))
    early.rename(path)


def read_drained_gpus(run: str | Path) -> list[int]:
    """Returns the GPUs that :func:`keep_drained_gpus` kept last."""
    try:
        return msgspec.json.decode(RunPaths(run).drained_gpus.read_bytes(), type=list[int])
    except FileNotFoundError:
        return []
