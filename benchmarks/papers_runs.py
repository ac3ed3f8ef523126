"""The part of ``benchmarks.papers`` that simulates: one run in, what the figures need of it out."""

import ast
import hashlib
import json
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.decisions import clocked, microseconds
from benchmarks.pool_models import language_models
from benchmarks.pool_trace import requests
from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.main import Requests, simulation_of
from dormouse.controller.simulator.report import report
from dormouse.controller.simulator.scenario import Scenario, parse_scenario
from dormouse.schemas.policy import Policy

ORIGIN: Final = "benchmarks.papers"

ROOT: Final = Path(__file__).parents[1]

RELEVANT: Final = ("core/decisions/scheduling", "controller/simulator", "core/decisions/memory")

IRRELEVANT: Final = (
    "core/decisions/scheduling/reasons.py",
    "controller/simulator/output.py",
    "controller/simulator/plots.py",
    "controller/simulator/progress.py",
    "controller/simulator/capacity.py",
)
"""Sources there that no result depends on: a change of these leaves what is remembered valid."""

BOX: Final = tuple(1 / 2**n for n in range(7, 0, -1)) + tuple(1 - 1 / 2**n for n in range(2, 8))
"""Quantiles of Torpor's Fig. 14b: 1/128, 1/64, ..., 1/2, ..., 63/64, 127/128."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """``tree`` is a scenario as a TOML file would give it. ``locality``, where a scenario's arrivals cannot say it:
    the variation (CV) of the gaps, and the share of requests that are for the same model as the one before.
    ``decodes_s``: what of a lease lies after the first token, by model. ``timed``: also what decisions cost.
    ``pools``: how memory is kept, of the simulator's `POOLS`.
    """

    tree: dict[str, Any]
    policy: Policy
    seed: int
    locality: tuple[float, float] | None = None
    decodes_s: dict[str, float] = field(default_factory=dict)
    timed: bool = False
    pools: str = "ideal"

    @property
    def key(self) -> str:
        tree = dict(self.tree)
        if trace := tree["arrivals"].get("trace"):
            tree["arrivals"] = {**tree["arrivals"], "trace": digest(trace)}
        policy = {"": type(self.policy).__name__, **msgspec.to_builtins(self.policy)}
        parts = [version(), tree, policy, self.seed, self.locality, self.decodes_s, self.timed, self.pools]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def digest(path: str) -> str:
    """What is in a file, rather than where it is."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def version() -> str:
    """Of all code that results come from."""
    sources = sorted(path for folder in RELEVANT for path in (ROOT / folder).rglob("*.py"))
    here = ROOT / "benchmarks"
    sources += [ROOT / "schemas" / "policy.py", Path(__file__), here / "pool_models.py", here / "pool_trace.py"]
    found = hashlib.sha256()
    for path in sources:
        if str(path.relative_to(ROOT)) not in IRRELEVANT:
            found.update(fingerprint(path.read_text(encoding="utf-8")).encode())
    return found.hexdigest()


def fingerprint(source: str) -> str:
    """Of what a module does: not of its comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def simulated(run: Run) -> dict[str, Any]:
    """What came of a run: the simulator's report, and more. Latencies in milliseconds, None where the request at that
    rank was never answered.
    """
    scenario = parse_scenario(run.tree, ORIGIN)
    times_s, functions, warm = _local(scenario, run) if run.locality else arrivals(scenario, run.seed)
    simulation = simulation_of(scenario, run.policy, run.seed, run.pools)
    ends: list[tuple[float, int]] = []
    simulation.on_busy = lambda gpu, _, ended_s: ends.append((ended_s, gpu))
    costs: list[int] = []
    if run.timed:
        assert isinstance(simulation, Simulation)
        costs = clocked(simulation.core)
    began = time.thread_time()
    latency_s = simulation.run(times_s, functions, warm)
    cpu_s = time.thread_time() - began
    times_s, functions, latency_s = times_s[warm:], functions[warm:], latency_s[warm:]
    busy_s = simulation.busy_s
    fields = report(
        "", times_s, functions, latency_s, scenario.deadlines_s, scenario.percentiles, busy_s,
        simulation.wakes, simulation.host_nbytes, 0.0,
    ).as_json()  # fmt: skip
    answered = ~np.isnan(latency_s)
    all_s = np.where(answered, latency_s, np.inf)
    span_s = float((times_s + np.where(answered, latency_s, 0.0)).max() - times_s[0])
    first_s = all_s - np.array([run.decodes_s.get(model.name, 0.0) for model in scenario.models])[functions]
    asked_nbytes = np.array([model.nbytes for model in scenario.models])[functions].sum()
    return {
        **fields,
        "executed": len(np.unique(functions[answered])),
        "per_s": float(answered.sum()) / span_s,
        "p99_ms": rank_ms(all_s, 0.99),
        "max_ms": rank_ms(all_s, 1.0),
        "first_p99_ms": rank_ms(first_s, 0.99),
        "first_p50_ms": rank_ms(first_s, 0.50),
        "loaded": float(simulation.host_nbytes / asked_nbytes),
        "models": _by_model(scenario, functions, all_s, first_s),
        "busy": [busy / span_s for busy in busy_s],
        "gpu_p98_ms": _by_gpu(times_s, latency_s, ends, len(busy_s)),
        "box": [rank_ms(all_s / np.asarray(scenario.deadlines_s)[functions] / 1000, share) for share in BOX],
        "cpu_s": cpu_s,
        **(microseconds(costs) if costs else {}),
    }


def rank_ms(seconds: npt.NDArray[np.float64], share: float) -> float | None:
    """The least latency that such a share of requests do not exceed."""
    if not len(seconds):
        return None
    rank = max(0, int(np.ceil(share * len(seconds) - 1e-9)) - 1)
    found = float(np.partition(seconds, rank)[rank])
    return found * 1000 if np.isfinite(found) else None


Seconds = npt.NDArray[np.float64]


def _by_model(
    scenario: Scenario, functions: npt.NDArray[np.int64], all_s: Seconds, first_s: Seconds
) -> dict[str, dict[str, float | None]]:
    names = np.array([model.name for model in scenario.models])
    found = {}
    for name in dict.fromkeys(names.tolist()):
        mine = (names == name)[functions]
        first = float(first_s[mine].mean()) * 1000 if mine.any() else None
        found[name] = {
            "p90_ms": rank_ms(all_s[mine], 0.90),
            "p98_ms": rank_ms(all_s[mine], 0.98),
            "first_mean_ms": first if first is not None and np.isfinite(first) else None,
        }
    return found


def _by_gpu(
    times_s: npt.NDArray[np.float64], latency_s: npt.NDArray[np.float64], ends: list[tuple[float, int]], gpus: int
) -> list[float | None]:
    """98th percentile of the requests that each GPU ran. A lease's end is its request's answer, so both in order of
    time are the same requests.
    """
    answers = np.argsort(times_s + latency_s, kind="stable")[: len(ends)]
    ran_on = np.array([gpu for _, gpu in sorted(ends)], np.int64)
    return [rank_ms(latency_s[answers[ran_on == gpu]], 0.98) for gpu in range(gpus)]


def _local(scenario: Scenario, run: Run) -> Requests:
    """Tangram's requests: gaps of a Gamma distribution, models by ``benchmarks.pool_trace``; each model once before."""
    assert run.locality is not None
    variation, repeat = run.locality
    rng = np.random.default_rng(run.seed)
    minutes = scenario.arrivals.minutes or 1.0
    per_s = sum(scenario.rates) / 60.0
    count = round(per_s * minutes * 60.0)
    by_name = {model.name: model for model in language_models()}
    models = [by_name[model.name.split()[0]] for model in scenario.models]  # a second "llama8B 2" is like the first
    functions = [model for model, _ in requests(models, count, repeat, run.seed)]
    gaps_s = rng.gamma(1 / variation**2, variation**2 / per_s, count)
    ends_s = np.cumsum(scenario.wakes_s)
    return (
        np.concatenate([[0.0], ends_s[:-1], ends_s[-1] + np.cumsum(gaps_s)]),
        np.concatenate([np.arange(len(models)), np.array(functions, np.int64)]),
        len(models),
    )
