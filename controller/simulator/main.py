"""`dormouse simulate`: runs a scenario under one or several policies, with one or several numbers of functions, or
searches for the number of GPUs or functions that is enough. Owns the wall clock; a run is
engine.py's, its output output.py's.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from dormouse.controller.simulator.arrivals import Functions, Times, arrivals
from dormouse.controller.simulator.baselines import as_baseline
from dormouse.controller.simulator.capacity import LIMITS, TARGET, CapacitySearch, check_deadlines
from dormouse.controller.simulator.cluster import Cluster
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.output import PolicyResults, SimulationPlan, Tried, conclude, draw, printed
from dormouse.controller.simulator.plots import Figures
from dormouse.controller.simulator.progress import Progress
from dormouse.controller.simulator.report import Report, mean, report
from dormouse.controller.simulator.resize import least_gpus, with_functions, with_gpus
from dormouse.controller.simulator.scenario import POLICIES, Scenario, load_scenario
from dormouse.controller.simulator.tree import MAX_FUNCTIONS, MAX_GPUS
from dormouse.controller.simulator.watch import Watch
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

OWN: Final = "scenario"
"""The name of the settings of the scenario's own [policy]."""

MAX_POINTS: Final = 100
"""Numbers of functions in one command."""

Requests = tuple[Times, Functions, int]


def main(
    path: str,
    policy: str | None = None,
    seed: int | None = None,
    json_: bool = False,
    functions: str | None = None,
    find: str | None = None,
    target: float | None = None,
    limit: int | None = None,
    plot: str | None = None,
    seeds: int = 1,
    pools: str = "ideal",
    by_model: bool = False,
) -> None:
    """Simulate and print. ``policy`` and ``functions`` are names and numbers separated by commas; None: the
    scenario's own. ``find``: "gpus" or "functions", of which the number that is enough is searched up to ``limit``.
    ``plot``: a folder for figures. ``seeds``: how many runs of each, with one seed after the other. ``pools``: how
    memory is kept, one of `POOLS`. ``by_model``: print a table for each model too. Raises ConfigError, after printing,
    if no number up to ``limit`` is enough.
    """
    scenario = load_scenario(path)
    chosen = choose(scenario, policy)
    sweep = None if functions is None else numbers(path, functions)
    points = [scenario] if sweep is None else [with_functions(scenario, count) for count in sweep]
    plan = planned(scenario, scenario.seed if seed is None else seed, sweep, find, target, limit)
    plan = msgspec.structs.replace(plan, seeds=seeds, pools=pools, by_model=by_model)
    if plan.find is not None:
        for point in points:
            check_deadlines(point, plan.target)
            _sized(point, plan, plan.limit)  # raises ConfigError if it cannot grow so far
    for settings in chosen.values():
        as_baseline(scenario.models, settings, path)  # raises ConfigError, rather now than after the first policies
    figures = None if plot is None else Figures(plot)
    progress = Progress()
    steps = len(points) * len(chosen)
    found: list[list[PolicyResults]] = []
    for point in points:
        found.append([])
        requests = [arrivals(point, seed) for seed in plan.all_seeds]
        for name, settings in chosen.items():
            step = (len(found) - 1) * len(chosen) + len(found[-1]) + 1
            where = f"{'search' if plan.find else 'run'} {step} of {steps}, " if steps > 1 else ""
            where += name if sweep is None else f"{name}, {len(point.models):,} functions"
            found[-1].append(_try(point, name, settings, plan, requests, figures is not None, where, progress))
    progress.clear()
    printed(found, plan, json_)
    if figures is not None:
        draw(figures, points, found, plan)
    for one in [one for results in found for one in results if one.answer is None]:
        raise ConfigError(f"{path}: --find-capacity: {conclude(one, plan)}; raise --limit or lower --target")


def choose(scenario: Scenario, names: str | None) -> dict[str, Policy]:
    """Policies by name, in the order they were asked for."""
    if names is None:
        return {OWN: scenario.policy}
    known = {OWN: scenario.policy, **POLICIES}
    chosen: dict[str, Policy] = {}
    for name in names.split(","):
        if name.strip() not in known:
            raise ConfigError(
                f"{scenario.path}: --policy: {name.strip()!r} is unknown; write one of {', '.join(known)}"
            )
        chosen[name.strip()] = known[name.strip()]
    return chosen


def numbers(path: str, text: str) -> list[int]:
    """Numbers of functions, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", part) or not 1 <= int(part) <= MAX_FUNCTIONS:
            raise ConfigError(
                f"{path}: --functions: {part.strip()!r} is not a number from 1 to {MAX_FUNCTIONS:,}; write for example "
                "--functions 160,240,320"
            )
        found.add(int(part))
    if len(found) > MAX_POINTS:
        raise ConfigError(f"{path}: --functions: {len(found)} numbers; write at most {MAX_POINTS}")
    return sorted(found)


def planned(
    scenario: Scenario, seed: int, sweep: list[int] | None, find: str | None, target: float | None, limit: int | None
) -> SimulationPlan:
    """Options with their defaults. Raises ConfigError where they contradict one another."""
    path = scenario.path
    if find is None:
        for option, value in (("--target", target), ("--limit", limit)):
            if value is not None:
                raise ConfigError(f"{path}: {option} is of --find-capacity; add that, or remove it")
        return SimulationPlan(seed=seed, sweep=sweep)
    if find == "functions" and sweep is not None:
        raise ConfigError(f"{path}: --find-capacity functions tries numbers of functions itself; remove --functions")
    target = TARGET if target is None else target
    if not 0.0 < target <= 1.0:
        raise ConfigError(f"{path}: --target: {target:g} is not a share of functions; write one as 0.98, at most 1")
    most = MAX_GPUS if find == "gpus" else MAX_FUNCTIONS
    limit = LIMITS[find] if limit is None else limit
    if not 1 <= limit <= most:
        raise ConfigError(f"{path}: --limit: {limit} {find}; write a number from 1 to {most:,}")
    least = least_gpus(scenario) if find == "gpus" else scenario.nodes
    if find == "gpus" and limit < least:
        raise ConfigError(
            f"{path}: --limit: {limit} gpus, and [[faults]] name GPU {least - 1}; write at least {least}, or remove "
            "that fault"
        )
    return SimulationPlan(
        seed=seed, sweep=sweep, find=find, target=target, limit=limit, nodes=scenario.nodes, least=least
    )


def _try(
    point: Scenario,
    name: str,
    policy: Policy,
    plan: SimulationPlan,
    requests: Sequence[Requests],
    watched: bool,
    where: str,
    progress: Progress,
) -> PolicyResults:
    """One run of a scenario as it is, or those of a search."""
    tried: dict[int, Tried] = {}

    def run(number: int, sized: Scenario, asked: Sequence[Requests], at: str) -> float:
        watch = Watch() if watched else None
        reports = []
        for index, (seed, each) in enumerate(zip(plan.all_seeds, asked, strict=True)):
            where = f"{at}, seed {seed}" if plan.seeds > 1 else at
            watched_one = None if index else watch
            reports.append(simulate(sized, name, policy, seed, each, watched_one, progress, where, plan.pools))
        tried[number] = Tried(mean(reports), watch, reports)
        return tried[number].report.compliant

    if plan.find is None:
        run(len(point.models), point, requests, where)
        return PolicyResults(policy=name, tried=tried, answer=len(point.models))
    gpus = plan.find == "gpus"
    search = CapacitySearch(point.gpus if gpus else len(point.models), plan.limit, plan.least)
    while (number := search.at) is not None:
        sized = _sized(point, plan, number)
        asked = requests if gpus else [arrivals(sized, seed) for seed in plan.all_seeds]
        at = f"{where}, try {search.tried + 1} of at most {search.at_most}: {number:,} {'GPUs' if gpus else plan.find}"
        search.tell((run(number, sized, asked, at) >= plan.target) != gpus)
    answer = search.high if gpus else search.low
    return PolicyResults(policy=name, tried=tried, answer=answer if answer in tried else None)


def _sized(point: Scenario, plan: SimulationPlan, number: int) -> Scenario:
    return with_gpus(point, number) if plan.find == "gpus" else with_functions(point, number)


def simulate(
    scenario: Scenario,
    name: str,
    policy: Policy,
    seed: int,
    requests: Requests | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
    where: str = "",
    pools: str = "ideal",
) -> Report:
    """One run. ``requests`` are what `arrivals` gives, where the caller has them; ``where`` is shown with the
    progress.
    """
    times_s, functions, warm = requests or arrivals(scenario, seed)
    progress = progress or Progress()
    began = time.perf_counter()
    simulation = simulation_of(scenario, policy, seed, pools)
    if watch is not None:
        watch.begin(scenario.nodes * scenario.gpus, float(times_s[warm]), float(times_s[-1]))
        simulation.on_busy = watch.on_busy
    label = where or name
    progress.show(label, 0, len(times_s))
    latency_s = simulation.run(times_s, functions, warm, lambda done: progress.show(label, done, len(times_s)))
    wall_s = time.perf_counter() - began
    progress.clear()
    if watch is not None:
        watch.end(latency_s[warm:])
    return report(
        name,
        times_s[warm:],
        functions[warm:],
        latency_s[warm:],
        scenario.deadlines_s,
        scenario.percentiles,
        simulation.busy_s,
        simulation.wakes,
        simulation.host_nbytes,
        wall_s,
        simulation.links_busy_s,
        [model.name for model in scenario.models],
        None if simulation.streams is None else simulation.streams.part(slice(warm, None)),
        [math.inf if model.llm is None else model.llm.tpot_s for model in scenario.models],
    )


def simulation_of(scenario: Scenario, policy: Policy, seed: int, pools: str = "ideal") -> Simulation | Cluster:
    """Raises ConfigError if models lack what the policy needs."""
    models = as_baseline(scenario.models, policy, str(scenario.path))
    node_of = scenario.node_of
    nodes: list[Simulation] = []
    for node in range(scenario.nodes):
        mine = [function for function in range(len(models)) if node_of[function] == node]
        first = node * scenario.gpus
        faults = [
            msgspec.structs.replace(fault, gpu=fault.gpu - first)
            for fault in scenario.faults
            if first <= fault.gpu < first + scenario.gpus
        ]
        nodes.append(
            Simulation(
                policy,
                scenario.topology,
                scenario.gpus,
                scenario.gpu_nbytes,
                [models[function] for function in mine],
                [scenario.deadlines_s[function] for function in mine],
                [scenario.percentiles[function] for function in mine],
                seed,
                faults,
                pools=pools,
                shares=scenario.shares,
                quotas=scenario.quotas,
            )
        )
    return nodes[0] if len(nodes) == 1 else Cluster(nodes, node_of)
