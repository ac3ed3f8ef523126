"""`dormouse simulate`: runs a scenario under one or several policies and prints what came out. Owns the clock on the
wall and the terminal; what happens in a run is engine.py's.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

import click

from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.report import Report, report
from dormouse.controller.simulator.scenario import POLICIES, Scenario, load_scenario
from dormouse.core.output import show_json, table
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

OWN: Final = "scenario"
"""What the settings of the scenario's own [policy] are called."""

QUIET_S: Final = 1.0
"""A run shorter than this shows no progress."""

CLEAR: Final = "\r\x1b[K"
"""Empties the line that the cursor is on."""


def main(path: str, policies: str | None = None, seed: int | None = None, json_: bool = False) -> None:
    """Simulate and print. ``policies`` are names separated by commas; None: the scenario's own. Raises ConfigError."""
    scenario = load_scenario(path)
    chosen = choose(scenario, policies)
    seed = scenario.seed if seed is None else seed
    reports = [simulate(scenario, name, policy, seed) for name, policy in chosen.items()]
    if json_:
        show_json({"seed": seed, "policies": [one.as_json() for one in reports]})
    else:
        rows = [one.as_row() for one in reports]
        columns = list(rows[0])
        if sys.stdout.isatty():  # 80 columns do not hold what is the same in all rows
            click.echo(f"{reports[0].functions:,} functions, {reports[0].requests:,} requests, seed {seed}")
            columns = [column for column in columns if column not in ("functions", "requests")]
        table(rows, columns)


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


def simulate(scenario: Scenario, name: str, policy: Policy, seed: int) -> Report:
    """One run."""
    times_s, functions, warm = arrivals(scenario, seed)
    began = time.perf_counter()
    simulation = simulation_of(scenario, policy, seed)
    show = _progress(name, len(times_s))
    latency_s = simulation.run(times_s, functions, warm, show)
    wall_s = time.perf_counter() - began
    if show is not None:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
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
    )


def simulation_of(scenario: Scenario, policy: Policy, seed: int) -> Simulation:
    return Simulation(
        policy,
        scenario.topology,
        scenario.gpus,
        scenario.gpu_nbytes,
        scenario.models,
        scenario.deadlines_s,
        scenario.percentiles,
        seed,
    )


def _progress(name: str, count: int) -> Callable[[int], None] | None:
    """Shows on a terminal how far a long run is; the line is gone when it ends."""
    if not sys.stderr.isatty():
        return None
    began = time.monotonic()

    def show(done: int) -> None:
        if time.monotonic() - began < QUIET_S:
            return
        sys.stderr.write(f"{CLEAR}{name}: {done / count:.0%} of {count:,} requests")
        sys.stderr.flush()

    return show
