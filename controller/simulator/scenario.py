"""What is simulated: TOML in, one checked structure out. Owns the names, defaults and units of a scenario's keys, which
docs/simulator.md describes; reads no other file than the scenario.
"""

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.topology import Topology
from dormouse.core.config import parse_nbytes
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy, checked

MAX_GPUS: Final = 1024
MAX_FUNCTIONS: Final = 100_000
"""Beyond these a scenario is taken for a slip of the pen: it would need days, or all memory."""

TORPOR: Final = Policy(order="rrc-latency", placement="torpor", eviction="torpor", passed_over_ms=0)

POLICIES: Final = {
    "default": Policy(),
    "torpor": TORPOR,
    "torpor-fifo": msgspec.structs.replace(TORPOR, order="fifo"),
    "torpor-random": msgspec.structs.replace(TORPOR, placement="random"),
    "torpor-lru": msgspec.structs.replace(TORPOR, eviction="lru"),
    "fifo": Policy(order="fifo"),
    "edf": Policy(order="edf"),
    "feasible": Policy(order="feasible"),
}
"""What ``--policy`` may name. Torpor's differ from ``torpor`` in one setting each, the last ones from ``default``."""

Size = str | int
Time = str | int | float

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Gpus(_Section, frozen=True, kw_only=True):
    """``[gpus]``"""

    count: int
    memory: Size
    link: Size = "10GB"
    switch: Size = ""
    switches: list[int] | None = None
    peer: Size | list[list[Size]] = ""


class _Model(_Section, frozen=True, kw_only=True):
    """``[[models]]``"""

    name: str
    size: Size
    run: Time
    wake: Time = ""
    peer_wake: Time = ""
    deadline: Time = "1s"
    percentile: float = 98.0
    functions: int = 1


class Arrivals(_Section, frozen=True, kw_only=True):
    """``[arrivals]``: ``rate`` in requests per minute and function."""

    process: str = "poisson"  # "poisson" | "regular" | "trace"
    rate: float | None = None
    minutes: float | None = None
    trace: str = ""
    warm: bool = True


class _Tree(_Section, frozen=True, kw_only=True):
    gpus: _Gpus
    models: list[_Model]
    arrivals: Arrivals
    policy: Policy = Policy()
    seed: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """``models[f]`` is function f's, and so are ``deadlines_s`` and ``percentiles`` (in (0, 1)). ``wakes_s`` is how
    long a request takes alone whose model is copied whole from the host.
    """

    path: Path
    gpus: int
    gpu_nbytes: int
    topology: Topology
    models: list[ModelSpec]
    wakes_s: list[float]
    deadlines_s: list[float]
    percentiles: list[float]
    arrivals: Arrivals
    policy: Policy
    seed: int


def load_scenario(path: str) -> Scenario:
    """Read a file. Raises ConfigError naming the file, the key and what to write."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a scenario file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; write the scenario as TOML") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}; see docs/simulator.md") from error
    return parse_scenario(tree, path)


def parse_scenario(tree: dict[str, Any], origin: str) -> Scenario:
    """Check a decoded tree; traces are found beside ``origin``. Raises ConfigError."""
    try:
        read = msgspec.convert(tree, _Tree)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_worded(str(error))}") from error
    keys = _Keys(origin)
    topology = _topology(keys, read.gpus)
    gpu_nbytes = keys.nbytes("gpus.memory", read.gpus.memory)
    keys.need(bool(read.models), "models", "an empty list", "write at least one [[models]]")
    specs = [_spec(keys, f"models[{i}]", model, topology, gpu_nbytes) for i, model in enumerate(read.models)]
    deadlines = [keys.seconds(f"models[{i}].deadline", model.deadline) for i, model in enumerate(read.models)]
    who = _in_turn([model.functions for model in read.models])
    keys.need(len(who) <= MAX_FUNCTIONS, "models.functions", len(who), f"write at most {MAX_FUNCTIONS:,} in all")
    keys.need(read.seed >= 0, "seed", read.seed, "write a whole number of at least 0")
    return Scenario(
        path=Path(origin),
        gpus=read.gpus.count,
        gpu_nbytes=gpu_nbytes,
        topology=topology,
        models=[specs[i] for i in who],
        wakes_s=[max(specs[i].run_s, specs[i].nbytes / topology.host_bps) + specs[i].extra_s for i in who],
        deadlines_s=[deadlines[i] for i in who],
        percentiles=[read.models[i].percentile / 100 for i in who],
        arrivals=_arrivals(keys, read.arrivals),
        policy=checked(read.policy, f"{origin}: [policy]"),
        seed=read.seed,
    )


class _Keys:
    """Checks of single values that know how to name them."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def need(self, right: bool, key: str, found: object, cure: str) -> None:
        if not right:
            raise ConfigError(f"{self.origin}: {key} is {found}; {cure}")

    def nbytes(self, key: str, value: Size) -> int:
        try:
            nbytes = parse_nbytes(value)
        except ConfigError as error:
            raise ConfigError(f"{self.origin}: {key}: {error}") from None
        self.need(nbytes > 0, key, value, "write more than 0 bytes")
        return nbytes

    def seconds(self, key: str, value: Time) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|)\s*", str(value))
        cure = "write a number above 0 and one of us, ms, s, m, h"
        if match is None:
            raise ConfigError(f"{self.origin}: {key} is {value!r}; {cure}")
        seconds = float(match[1]) * _UNITS_S[match[2]]
        self.need(seconds > 0.0, key, repr(value), cure)
        return seconds


def _topology(keys: _Keys, gpus: _Gpus) -> Topology:
    count = gpus.count
    keys.need(1 <= count <= MAX_GPUS, "gpus.count", count, f"write a number from 1 to {MAX_GPUS}")
    host = keys.nbytes("gpus.link", gpus.link)
    switch = keys.nbytes("gpus.switch", gpus.switch) if gpus.switch != "" else 0
    switches = [gpu // 2 for gpu in range(count)] if gpus.switches is None else gpus.switches
    keys.need(
        len(switches) == count, "gpus.switches", f"of {len(switches)}", f"write one number for each of {count} GPUs"
    )
    return Topology(
        host_bps=float(min(host, switch) if switch else host),
        switch_bps=float(switch),
        switches=tuple(switches) if switch else (),
        peer_bps=_peers(keys, gpus.peer, count),
    )


def _peers(keys: _Keys, peer: Size | list[list[Size]], count: int) -> tuple[tuple[float, ...], ...]:
    """The matrix; one bandwidth stands for all pairs."""
    if peer == "":
        return ()
    if not isinstance(peer, list):
        bps = float(keys.nbytes("gpus.peer", peer))
        return tuple(tuple(bps if a != b else 0.0 for b in range(count)) for a in range(count))
    square = len(peer) == count and all(len(row) == count for row in peer)
    keys.need(square, "gpus.peer", "not square", f"write one bandwidth, or {count} lists of {count}, 0 for no link")
    return tuple(
        tuple(
            float(keys.nbytes(f"gpus.peer[{a}][{b}]", to)) if a != b and to not in (0, "0", "") else 0.0
            for b, to in enumerate(row)
        )
        for a, row in enumerate(peer)
    )


def _spec(keys: _Keys, at: str, model: _Model, topology: Topology, gpu_nbytes: int) -> ModelSpec:
    nbytes = keys.nbytes(f"{at}.size", model.size)
    keys.need(
        nbytes <= gpu_nbytes,
        f"{at}.size",
        f"{nbytes:,} bytes ({model.name})",
        f"no GPU holds more than gpus.memory, {gpu_nbytes:,}: use a smaller model or larger GPUs",
    )
    keys.need(0.0 < model.percentile < 100.0, f"{at}.percentile", model.percentile, "write a number between 0 and 100")
    keys.need(model.functions >= 1, f"{at}.functions", model.functions, "write at least 1, or remove the model")
    run_s = keys.seconds(f"{at}.run", model.run)
    peer_bps = max((bps for row in topology.peer_bps for bps in row), default=0.0)
    return ModelSpec(
        name=model.name,
        nbytes=nbytes,
        run_s=run_s,
        extra_s=_extra_s(keys, f"{at}.wake", model.wake, run_s, nbytes, topology.host_bps),
        peer_extra_s=_extra_s(keys, f"{at}.peer_wake", model.peer_wake, run_s, nbytes, peer_bps),
    )


def _extra_s(keys: _Keys, key: str, wake: Time, run_s: float, nbytes: int, bps: float) -> float:
    """What a wake adds beyond the longer of run and copy, from how long it takes; 0 where nothing is said."""
    if wake == "":
        return 0.0
    wake_s = keys.seconds(key, wake)
    if bps <= 0.0:
        return 0.0
    least_s = max(run_s, nbytes / bps)
    keys.need(
        wake_s >= least_s - 1e-12,
        key,
        repr(wake),
        f"run and copy alone take {math.ceil(least_s * 1e4) / 10:g}ms: write at least that, or leave it out",
    )
    return max(0.0, wake_s - least_s)


def _in_turn(functions: Sequence[int]) -> list[int]:
    """Which model each function has: one of each, and again, until all have had their number."""
    left, turns = list(functions), []
    while any(left):
        for index, more in enumerate(left):
            if more:
                turns.append(index)
                left[index] -= 1
            if len(turns) > MAX_FUNCTIONS:
                return turns
    return turns


def _arrivals(keys: _Keys, arrivals: Arrivals) -> Arrivals:
    choices = ("poisson", "regular", "trace")
    process, rate, minutes = arrivals.process, arrivals.rate, arrivals.minutes
    keys.need(process in choices, "arrivals.process", repr(process), f"write one of {', '.join(choices)}")
    if minutes is not None:
        right = math.isfinite(minutes) and minutes > 0.0
        keys.need(right, "arrivals.minutes", minutes, "write a number above 0")
    if process == "trace":
        keys.need(arrivals.trace != "", "arrivals.trace", "missing", "write the path of a CSV file of counts")
        keys.need(rate is None, "arrivals.rate", rate, "remove it: a trace has its own rates")
        return arrivals
    keys.need(rate is not None, "arrivals.rate", "missing", "write requests per minute and function")
    assert rate is not None
    right = math.isfinite(rate) and rate > 0.0
    keys.need(right, "arrivals.rate", rate, "write requests per minute and function, above 0")
    keys.need(not arrivals.trace, "arrivals.trace", repr(arrivals.trace), 'write process = "trace", or remove it')
    return arrivals


def _worded(message: str) -> str:
    """msgspec's message, its key first and with what to write."""
    text, _, where = message.partition(" - at `$")
    at = where.rstrip("`").removeprefix(".")
    if (match := re.match(r"Object (contains unknown|missing required) field `(.+)`", text)) is None:
        return f"{at or 'scenario'}: {text[0].lower()}{text[1:]}; see docs/simulator.md"
    key = f"{at}.{match[2]}" if at else match[2]
    if match[1].startswith("missing"):
        return f"{key} is missing; write it"
    table = {"": _Tree, "gpus": _Gpus, "models": _Model, "arrivals": Arrivals, "policy": Policy}
    known = table[at.split("[")[0]].__struct_fields__
    return f"{key} is not a key; write one of {', '.join(known)}"
