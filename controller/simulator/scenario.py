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

from dormouse.controller.simulator.baselines import SimulatedPolicy, checked_baseline
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.topology import Topology
from dormouse.core.config import parse_nbytes
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

MAX_GPUS: Final = 1024
MAX_NODES: Final = 1024
MAX_FUNCTIONS: Final = 100_000
"""Beyond these a scenario is taken for a slip of the pen: it would need days, or all memory."""

MAX_INSTANCES: Final = 64
"""Of one function, each on a GPU of its own: a node has no more GPUs."""

TORPOR: Final = Policy(order="rrc-latency", placement="torpor", eviction="torpor", passed_over_ms=0)

NATIVE: Final = SimulatedPolicy(order="fifo", placement="bound", passed_over_ms=0, native=True)

POLICIES: Final[dict[str, Policy]] = {
    "default": Policy(),
    "torpor": TORPOR,
    "torpor-fifo": msgspec.structs.replace(TORPOR, order="fifo"),
    "torpor-random": msgspec.structs.replace(TORPOR, placement="random"),
    "torpor-lru": msgspec.structs.replace(TORPOR, eviction="lru"),
    "torpor-block": SimulatedPolicy(**msgspec.structs.asdict(TORPOR), allocate=True),
    "simple-swap": Policy(order="fifo", placement="random", eviction="lru", passed_over_ms=0),
    "nonswap": Policy(order="fifo", placement="bound", passed_over_ms=0),
    "native": NATIVE,
    "infless-ka": msgspec.structs.replace(NATIVE, keep_alive="history"),
    "infless-oracle": msgspec.structs.replace(NATIVE, keep_alive="trace"),
    "sllm": SimulatedPolicy(order="fifo", placement="random", eviction="lru", passed_over_ms=0, reuse=False),
    "fifo": Policy(order="fifo"),
    "edf": Policy(order="edf"),
    "feasible": Policy(order="feasible"),
}
"""What ``--policy`` may name: ``torpor-``'s differ from ``torpor`` in one setting each, the last ones from ``default``;
the others are what Torpor §7.3 and §7.4, and Tangram §5.1, are compared with.
"""

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
    nodes: int = 1


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
    rate: float | None = None
    activation: Size = 0
    shared: float = 0.0
    idempotent: bool = False
    native: Size = ""
    native_run: Time = ""
    cold_start: Time = ""
    allocate: Time = ""
    instances: int = 1


class _Fault(_Section, frozen=True, kw_only=True):
    """``[[faults]]``"""

    gpu: int
    at: Time
    back: Time = ""


class Arrivals(_Section, frozen=True, kw_only=True):
    """``[arrivals]``: ``rate`` in requests per minute and function; ``scale`` is what a trace's counts are multiplied
    with.
    """

    process: str = "poisson"  # "poisson" | "regular" | "trace"
    rate: float | None = None
    minutes: float | None = None
    trace: str = ""
    within: str = "random"  # "random" | "poisson" | "gaps": when, within a trace's minutes
    scale: float = 1.0
    warm: bool = True


class Tree(_Section, frozen=True, kw_only=True):
    gpus: _Gpus
    models: list[_Model]
    arrivals: Arrivals
    policy: SimulatedPolicy = SimulatedPolicy()
    faults: list[_Fault] = []
    seed: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """``models[f]`` is function f's, and so are ``deadlines_s``, ``percentiles`` (in (0, 1)) and ``rates`` (requests
    per minute; empty with a trace). ``wakes_s`` is how long a request takes alone whose model is copied whole from
    the host. ``node_of[f]`` is the node that serves function f; ``gpus`` are of each of ``nodes``. ``faults`` count
    GPUs through all nodes, and time from the first request of all. ``tree`` is what was read.
    """

    path: Path
    nodes: int
    gpus: int
    gpu_nbytes: int
    topology: Topology
    models: list[ModelSpec]
    wakes_s: list[float]
    deadlines_s: list[float]
    percentiles: list[float]
    rates: list[float]
    node_of: list[int]
    faults: list[Fault]
    arrivals: Arrivals
    policy: SimulatedPolicy
    seed: int
    tree: Tree


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
        read = msgspec.convert(tree, Tree)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_worded(str(error))}") from error
    return built(read, origin)


def built(read: Tree, origin: str) -> Scenario:
    """Check what was read or made from it (resize.py). Raises ConfigError."""
    keys = _Keys(origin)
    topology = _topology(keys, read.gpus)
    gpu_nbytes = keys.nbytes("gpus.memory", read.gpus.memory)
    keys.need(bool(read.models), "models", "an empty list", "write at least one [[models]]")
    specs = [_spec(keys, f"models[{i}]", model, topology, gpu_nbytes) for i, model in enumerate(read.models)]
    deadlines = [keys.seconds(f"models[{i}].deadline", model.deadline) for i, model in enumerate(read.models)]
    who = _in_turn([model.functions for model in read.models])
    keys.need(len(who) <= MAX_FUNCTIONS, "models.functions", len(who), f"write at most {MAX_FUNCTIONS:,} in all")
    keys.need(read.seed >= 0, "seed", read.seed, "write a whole number of at least 0")
    arrivals = _arrivals(keys, read.arrivals)
    rates = _rates(keys, read)
    nodes = read.gpus.nodes
    keys.need(1 <= nodes <= MAX_NODES, "gpus.nodes", nodes, f"write a number from 1 to {MAX_NODES}")
    most = f"write at least gpus.nodes, {nodes}, functions in all"
    keys.need(nodes == 1 or len(who) >= nodes, "models.functions", len(who), most)
    wakes_s = [max(specs[i].run_s, specs[i].nbytes / topology.host_bps) + specs[i].extra_s for i in who]
    return Scenario(
        path=Path(origin),
        nodes=nodes,
        gpus=read.gpus.count,
        gpu_nbytes=gpu_nbytes,
        topology=topology,
        models=[specs[i] for i in who],
        wakes_s=wakes_s,
        deadlines_s=[deadlines[i] for i in who],
        percentiles=[read.models[i].percentile / 100 for i in who],
        rates=[rates[i] for i in who] if rates else [],
        node_of=_dealt(who, nodes),
        faults=_faults(keys, read.faults, nodes * read.gpus.count, sum(wakes_s) if arrivals.warm else 0.0),
        arrivals=arrivals,
        policy=checked_baseline(read.policy, f"{origin}: [policy]"),
        seed=read.seed,
        tree=read,
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
    keys.need(
        1 <= model.instances <= MAX_INSTANCES,
        f"{at}.instances",
        model.instances,
        f"write how many of a function may run at once, 1 to {MAX_INSTANCES}",
    )
    run_s = keys.seconds(f"{at}.run", model.run)
    peer_bps = max((bps for row in topology.peer_bps for bps in row), default=0.0)
    activation_nbytes = 0
    if model.activation not in (0, ""):
        activation_nbytes = keys.nbytes(f"{at}.activation", model.activation)
        keys.need(
            nbytes + activation_nbytes <= gpu_nbytes,
            f"{at}.activation",
            f"{activation_nbytes:,} bytes ({model.name})",
            f"with its size that is more than gpus.memory, {gpu_nbytes:,}: write less, or use larger GPUs",
        )
    keys.need(0.0 <= model.shared <= 1.0, f"{at}.shared", model.shared, "write a share of the size from 0 to 1")
    native_nbytes = keys.nbytes(f"{at}.native", model.native) if model.native != "" else 0
    keys.need(
        native_nbytes <= gpu_nbytes,
        f"{at}.native",
        f"{native_nbytes:,} bytes ({model.name})",
        f"no GPU has more than gpus.memory, {gpu_nbytes:,}: write less, or use larger GPUs",
    )

    def seconds(key: str, value: Time) -> float:
        return keys.seconds(f"{at}.{key}", value) if value != "" else 0.0

    return ModelSpec(
        name=model.name,
        nbytes=nbytes,
        activation_nbytes=activation_nbytes,
        base=at,
        base_nbytes=int(model.shared * nbytes),
        instances=model.instances,
        idempotent=model.idempotent,
        native_nbytes=native_nbytes,
        native_run_s=seconds("native_run", model.native_run),
        cold_start_s=seconds("cold_start", model.cold_start),
        allocate_s=seconds("allocate", model.allocate),
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


def _dealt(models: Sequence[int], nodes: int) -> list[int]:
    """Which node serves each function: those of the first model in turn, those of the next where they left off."""
    node_of = [0] * len(models)
    for turn, function in enumerate(sorted(range(len(models)), key=lambda f: (models[f], f))):
        node_of[function] = turn % nodes
    return node_of


def _faults(keys: _Keys, faults: Sequence[_Fault], gpus: int, begins_s: float) -> list[Fault]:
    """In the order of their times, which the scenario counts from the end of the warming up, at ``begins_s``."""
    found: list[Fault] = []
    up_s: dict[int, float] = {}  # since when, by GPU that was lost before
    for i, fault in enumerate(faults):
        at = f"faults[{i}]"
        keys.need(0 <= fault.gpu < gpus, f"{at}.gpu", fault.gpu, f"write a number from 0 to {gpus - 1}")
        at_s = keys.seconds(f"{at}.at", fault.at)
        up = up_s.get(fault.gpu, 0.0)
        keys.need(at_s > up, f"{at}.at", repr(fault.at), f"GPU {fault.gpu} is lost then: write a time after it is back")
        back_s = math.inf
        if fault.back != "":
            back_s = keys.seconds(f"{at}.back", fault.back)
            keys.need(back_s > at_s, f"{at}.back", repr(fault.back), "write a time after it was lost, or leave it out")
        up_s[fault.gpu] = back_s
        back = None if back_s == math.inf else begins_s + back_s
        found.append(Fault(gpu=fault.gpu, at_s=begins_s + at_s, back_s=back))
    return sorted(found, key=lambda fault: (fault.at_s, fault.gpu))


def _arrivals(keys: _Keys, arrivals: Arrivals) -> Arrivals:
    choices, withins = ("poisson", "regular", "trace"), ("random", "poisson", "gaps")
    process, minutes, trace, within = arrivals.process, arrivals.minutes, arrivals.trace, arrivals.within
    keys.need(process in choices, "arrivals.process", repr(process), f"write one of {', '.join(choices)}")
    if minutes is not None:
        right = math.isfinite(minutes) and minutes > 0.0
        keys.need(right, "arrivals.minutes", minutes, "write a number above 0")
    keys.need(within in withins, "arrivals.within", repr(within), f"write one of {', '.join(withins)}")
    right = math.isfinite(arrivals.scale) and arrivals.scale > 0.0
    keys.need(right, "arrivals.scale", arrivals.scale, "write a number above 0")
    if process == "trace":
        keys.need(trace != "", "arrivals.trace", "missing", "write the path of a CSV file of counts")
        return arrivals
    for key, found, unset in (
        ("trace", trace, ""),
        ("within", within, "random"),
        ("scale", arrivals.scale, 1),
    ):
        keys.need(found == unset, f"arrivals.{key}", repr(found), 'write process = "trace", or remove it')
    return arrivals


def _rates(keys: _Keys, read: Tree) -> list[float]:
    """Requests per minute of a function of each model; none with a trace."""
    traced = read.arrivals.process == "trace"
    common = read.arrivals.rate
    given = [("arrivals.rate", common), *((f"models[{i}].rate", model.rate) for i, model in enumerate(read.models))]
    for key, rate in given:
        keys.need(rate is None or not traced, key, rate, "remove it: a trace has its own rates")
        right = rate is None or (math.isfinite(rate) and rate > 0.0)
        keys.need(right, key, rate, "write requests per minute and function, above 0")
    if traced:
        return []
    rates = [common if model.rate is None else model.rate for model in read.models]
    keys.need(None not in rates, "arrivals.rate", "missing", "write requests per minute and function")
    return [rate for rate in rates if rate is not None]


def _worded(message: str) -> str:
    """msgspec's message, its key first and with what to write."""
    text, _, where = message.partition(" - at `$")
    at = where.rstrip("`").removeprefix(".")
    if (match := re.match(r"Object (contains unknown|missing required) field `(.+)`", text)) is None:
        return f"{at or 'scenario'}: {text[0].lower()}{text[1:]}; see docs/simulator.md"
    key = f"{at}.{match[2]}" if at else match[2]
    if match[1].startswith("missing"):
        return f"{key} is missing; write it"
    table = {
        "": Tree,
        "gpus": _Gpus,
        "models": _Model,
        "arrivals": Arrivals,
        "policy": SimulatedPolicy,
        "faults": _Fault,
    }
    known = table[at.split("[")[0]].__struct_fields__
    return f"{key} is not a key; write one of {', '.join(known)}"
