"""The scenario of a simulation: TOML in, one checked structure out. Reads no other file than the scenario; the keys
that there are are tree.py's, the objects made of them building.py's.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.controller.simulator.baselines import SimulatedPolicy, checked_baseline
from dormouse.controller.simulator.building import (
    read_arrivals,
    read_faults,
    read_model,
    read_quotas,
    read_rates,
    read_shares,
    read_topology,
)
from dormouse.controller.simulator.checks import Checks
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.streams.adapters import check_groups, read_bases
from dormouse.controller.simulator.tree import MAX_FUNCTIONS, MAX_NODES, MAX_SEED, Arrivals, Tree, worded
from dormouse.core import nottoml
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import MAX, Policy

TORPOR: Final = SimulatedPolicy(
    order="rrc-latency", placement="torpor", eviction="torpor", passed_over_ms=0, whole=True
)

NATIVE: Final = SimulatedPolicy(order="fifo", placement="bound", passed_over_ms=0, native=True)

POLICIES: Final[dict[str, Policy]] = {
    "default": Policy(),
    "torpor": TORPOR,
    "torpor-edf": msgspec.structs.replace(TORPOR, order="rrc-deadline"),
    "torpor-drop": msgspec.structs.replace(TORPOR, drop_ms=5000),
    "torpor-fifo": msgspec.structs.replace(TORPOR, order="fifo"),
    "torpor-random": msgspec.structs.replace(TORPOR, placement="random"),
    "torpor-lru": msgspec.structs.replace(TORPOR, eviction="lru"),
    "torpor-block": msgspec.structs.replace(TORPOR, allocate=True),
    "simple-swap": SimulatedPolicy(order="fifo", placement="random", eviction="lru", passed_over_ms=0, whole=True),
    "nonswap": Policy(order="fifo", placement="bound", passed_over_ms=0),
    "native": NATIVE,
    "infless-ka": msgspec.structs.replace(NATIVE, keep_alive="history"),
    "infless-oracle": msgspec.structs.replace(NATIVE, keep_alive="trace"),
    "sllm": SimulatedPolicy(
        order="fifo", placement="random", eviction="lru", passed_over_ms=0, reuse=False, whole=True
    ),
    "fifo": Policy(order="fifo"),
    "edf": Policy(order="edf"),
    "feasible": Policy(order="feasible"),
    "turn-kept": Policy(turn_ms=MAX),
    "preload": Policy(preload=True),
}
"""Names for ``--policy``: ``torpor-``'s differ from ``torpor`` in one setting each, the last ones from ``default``;
the others are the baselines of Torpor §7.3 and §7.4, and Tangram §5.1.
"""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """``models[f]`` is function f's, and so are ``deadlines_s``, ``percentiles`` (in (0, 1)) and ``rates`` (requests
    per minute; empty with a trace). ``wakes_s`` is how long a request takes alone whose model is copied whole from
    the host. A language model's deadline is that of its first token. ``node_of[f]`` is the node that serves function f;
    ``gpus`` are of each of ``nodes``. ``faults`` count GPUs through all nodes, and time from the first request of all.
    ``tree`` is the input. ``shares`` and ``quotas`` (bytes of each
    GPU) are of tenants.
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
    shares: tuple[tuple[str, float], ...] = ()
    quotas: Mapping[str, int] = {}


def load_scenario(path: str) -> Scenario:
    """Read a file. Raises ConfigError naming the file, the key and what to write."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a scenario file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; write the scenario as TOML") from error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits, and of as many brackets
        raise ConfigError(f"{path}: not TOML: {nottoml.cause(text, error)}; see docs/simulator.md") from error
    return parse_scenario(tree, path)


def parse_scenario(tree: dict[str, Any], origin: str) -> Scenario:
    """Check a decoded tree; traces are found beside ``origin``. Raises ConfigError."""
    try:
        read = msgspec.convert(tree, Tree)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {worded(str(error))}") from error
    return built(read, origin)


def built(read: Tree, origin: str) -> Scenario:
    """Check a scenario that was read or resized (resize.py). Raises ConfigError."""
    check = Checks(origin)
    topology = read_topology(check, read.gpus)
    gpu_nbytes = check.nbytes("gpus.memory", read.gpus.memory)
    check.need(bool(read.models), "models", "an empty list", "write at least one [[models]]")
    bases = read_bases(check, read.models)
    specs = [
        read_model(check, f"models[{i}]", model, topology, gpu_nbytes, bases[i]) for i, model in enumerate(read.models)
    ]
    deadlines = [
        check.seconds(f"models[{i}].deadline", model.deadline) if (llm := specs[i].llm) is None else llm.ttft_s
        for i, model in enumerate(read.models)
    ]
    who = _in_turn([model.functions for model in read.models])
    check.need(len(who) <= MAX_FUNCTIONS, "models.functions", len(who), f"write at most {MAX_FUNCTIONS:,} in all")
    check.need(0 <= read.seed < MAX_SEED, "seed", read.seed, f"write a whole number from 0 to {MAX_SEED - 1}")
    arrivals = read_arrivals(check, read.arrivals)
    rates = read_rates(check, read)
    nodes = read.gpus.nodes
    check.need(1 <= nodes <= MAX_NODES, "gpus.nodes", nodes, f"write a number from 1 to {MAX_NODES}")
    most = f"write at least gpus.nodes, {nodes}, functions in all"
    check.need(nodes == 1 or len(who) >= nodes, "models.functions", len(who), most)
    wakes_s = [_alone_s(specs[i], topology) for i in who]
    check_groups(check, [specs[i] for i in who], gpu_nbytes)
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
        faults=read_faults(check, read.faults, nodes * read.gpus.count, sum(wakes_s) if arrivals.warm else 0.0),
        arrivals=arrivals,
        policy=checked_baseline(read.policy, f"{origin}: [policy]"),
        seed=read.seed,
        tree=read,
        shares=read_shares(check, read),
        quotas=read_quotas(check, read),
    )


def _alone_s(spec: ModelSpec, topology: Topology) -> float:
    """A request's time whose model is copied whole from the host: its first half needs all of it, if there are two."""
    copy_s = spec.nbytes / topology.host_bps
    if spec.llm is not None:
        return copy_s + spec.llm.start_s + spec.llm.seat_s + spec.run_s + spec.llm.idle_s
    if not spec.host_s:
        return max(spec.run_s, copy_s) + spec.extra_s
    half_s = spec.run_s / 2
    return max(half_s, copy_s) + spec.extra_s + spec.host_s + half_s


def _in_turn(functions: Sequence[int]) -> list[int]:
    """The model of each function: one of each, and again, until all have had their number."""
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
    """The node of each function: those of the first model in turn, those of the next from there on."""
    node_of = [0] * len(models)
    for turn, function in enumerate(sorted(range(len(models)), key=lambda f: (models[f], f))):
        node_of[function] = turn % nodes
    return node_of
