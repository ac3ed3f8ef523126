"""The router's part of `dormouse ls` and `dormouse status`. No I/O. Visibility to callers is tenancy.py's."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

from msgspec.structs import asdict

from dormouse.core import procfs
from dormouse.core.config import NodeConfig, TenantSection
from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.lives import longest_load_s, without_instance
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.replicas import limit
from dormouse.core.decisions.requests.state import Instance, InstanceState, RouterState, ServedFunction, most_open
from dormouse.core.errortext import gist
from dormouse.core.names import base_of
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.sandbox.world import PLAIN_ZYGOTE
from dormouse.router.front import openapi
from dormouse.router.front.requests import Requests
from dormouse.router.front.stats import FunctionStats
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.sessions import Sessions
from dormouse.router.traces.outbox import Outbox
from dormouse.schemas.messages import FunctionSpec

NAMES: Final = 20
"""Of functions that share bytes with one: hundreds may, each with all others."""

OPTIONAL: Final = {"metrics", PLAIN_ZYGOTE}
"""Roles that a node may have or not."""


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    paths: RunPaths
    state: StatePaths
    peers: dict[str, int]
    down: dict[str, str]
    ended: dict[str, tuple[int, float]]
    left: dict[str, tuple[int, float]]
    loop: asyncio.AbstractEventLoop
    policy: RequestPolicy
    requests: Requests

    instances: Instances
    sessions: Sessions

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def confinement(self) -> str: ...
    @property
    def seen(self) -> set[str]: ...
    @property
    def watchers(self) -> int: ...
    @property
    def disk_free_nbytes(self) -> int | None: ...
    @property
    def traces(self) -> Outbox: ...


NOTHING: Final = FunctionStats()
"""Of a function that nobody has asked."""


def running(instance: Instance) -> int:
    """Requests that it has. A language model's has many."""
    return len(instance.open) if most_open(instance.spec) else int(instance.state is InstanceState.BUSY)


def _running(picture: RouterState, function: ServedFunction) -> int:
    return sum(running(picture.instances[each]) for each in function.instances)


def own(stats: dict[str, FunctionStats], spec: FunctionSpec) -> FunctionStats | None:
    """Its counts; None if there are none yet, or they are of another tenant's function of that name."""
    found = stats.get(spec.name)
    return found if found is not None and found.tenant == spec.tenant else None


def state(picture: RouterState, function: ServedFunction) -> str:
    """That of its first instance, or why there is none; busy as long as anything runs: another may be, and that of a
    language model is idle to the policy while it has room for more.
    """
    if (instance := picture.instances.get(function.instance or "")) is not None:
        at_work = instance.state is InstanceState.IDLE and _running(picture, function)
        return (InstanceState.BUSY if at_work else instance.state).value
    return "quarantined" if function.quarantine else "failed" if function.failure is not None else "waiting"


def functions(
    picture: RouterState, stats: dict[str, FunctionStats], jobs: Callable[[str, str], dict[str, int]], now_s: float
) -> list[dict[str, Any]]:
    """A row of each, as `dormouse ls` has it. ``jobs(function, tenant)``: how many it has, by state."""
    rows = []
    for name, function in sorted(picture.functions.items()):
        spec = function.spec
        rows.append(
            {
                "name": name,
                "version": spec.version,
                "traffic": splits.shares(picture, base_of(name)).get(spec.version),
                "tenant": spec.tenant,
                "deadline_ms": spec.deadline_ms,
                "percentile": spec.percentile,
                "timeout_ms": spec.timeout_ms,
                "idempotent": spec.idempotent,
                "file": spec.entry,
                "state": state(picture, function),
                "error": (why := function.failure.text if function.failure is not None else function.not_deployed)
                or None,
                "why": gist(why) or None,
                "deploying": picture.deploy(name) is not None,
                "instance": function.instance,
                "instances": {each: picture.instances[each].state.value for each in function.instances},
                "stateless": spec.stateless,
                "calls": list(spec.calls),
                "embedding": spec.embedding is not None,
                "max_instances": limit(picture, function),
                "writes": function.writes,
                "queued": len(function.queue),
                "running": _running(picture, function),
                "jobs": jobs(name, spec.tenant),
                **(stat := own(stats, spec) or NOTHING).summary(),
                "recent": stat.lately.told(spec, now_s),
                "llm": None
                if spec.llm is None
                else stat.tokens_summary(spec.llm, spec.percentile)
                | {"isolation": spec.llm.isolation, "base": spec.llm.base or None}
                | {"sampling": openapi.said_of(function).get("sampling", {})},
            }
        )
    return rows


def loads(picture: RouterState, now_s: float) -> list[dict[str, Any]]:
    """A row of each instance that loads, with its times, and of each that waits for a place to load and may."""
    rows = []
    for each in picture.instances.values():
        if not each.state.loads:
            continue
        serving, limit_s = picture.serving(each), each.spec.load_timeout_ms / 1000
        due_s = min(each.progress_s + limit_s, each.started_s + longest_load_s(picture, each.spec))
        why = "deploy" if serving is None else "served" if serving.instance == each.name else "extra"
        times = (now_s - each.started_s, now_s - each.progress_s, max(0.0, due_s - now_s))
        rows.append(_load(each.spec, why, each.name, times))
    for owner in (owner for name in picture.wanted for owner in without_instance(picture, name)):
        if not isinstance(owner, ServedFunction):
            rows.append(_load(owner.spec, "deploy"))
        elif owner.retry_s <= now_s:
            rows.append(_load(owner.spec, "served"))
    return rows


def _load(
    spec: FunctionSpec, why: str, instance: str | None = None, times: tuple[float, float, float] | None = None
) -> dict[str, Any]:
    since_ms, silent_ms, ends_within_ms = (None,) * 3 if times is None else (round(1000 * each) for each in times)
    return {
        "function": spec.name,
        "version": spec.version,
        "tenant": spec.tenant,
        "for": why,
        "instance": instance,
        "since_ms": since_ms,
        "silent_ms": silent_ms,
        "load_timeout_ms": spec.load_timeout_ms,
        "ends_within_ms": ends_within_ms,
    }


async def processes(node: Node) -> dict[str, dict[str, Any]]:
    """Resources of each instance, by its name. Looked up in a thread: there may be hundreds."""
    pids = {name: host.pid for name, host in node.instances.hosts.items()}
    found = await asyncio.to_thread(procfs.footprints, [*pids.values()])
    return {name: {"pid": pid, **found[pid]._asdict()} for name, pid in pids.items() if pid in found}


def status(
    node: Node, rows: list[dict[str, Any]], controller: dict[str, Any], used: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The router's state and the controller's in one: functions by name, GPUs, the store; ``used``: by instances."""
    picture, (host, port) = node.policy.picture, node.address
    counted = controller.get("functions", {})
    return {
        "node": {
            "name": node.config.node.name,
            "address": url(node),
            "host": host,
            "port": port,
            "run": str(node.paths.run),
            "state": str(node.state.state),
            "confinement": node.confinement,
            "peers": node.peers,
            "down": node.down,
            "gone": gone(node),
            "ended": _ago(node.ended, node.loop.time()),
            "left": _ago(node.left, node.loop.time()),
            "instances": len(picture.instances) + len(picture.sessions),
            "requests_open": len(picture.requests),
            "missing": node.policy.missing(),
            "draining": node.requests.drain.on,
            "watchers": node.watchers,
            "disk_free_nbytes": node.disk_free_nbytes,
            "tracing": node.traces.told(),
        },
        "functions": {
            row["name"]: counted.get(row["name"], {})
            | row
            | {"processes": {each: used[each] for each in row["instances"] if each in used}}
            for row in rows
        },
        "loads": loads(picture, node.loop.time()),
        "sessions": [
            row | {key: used.get(row["session"], {}).get(key) for key in ("memory_nbytes", "cpu_s", "processes")}
            for row in node.sessions.rows(node.loop.time())
        ],
        "gpus": controller.get("gpus", {}),
        "store": controller.get("store", {}),
        "waiting": controller.get("waiting", 0),
        "waits": controller.get("waits", {"oldest": [], "others": {}}),
        "tenants": tenants(node.config, picture),
    }


def _ago(ends: dict[str, tuple[int, float]], now_s: float) -> dict[str, dict[str, float]]:
    return {role: {"times": times, "ago_s": now_s - last_s} for role, (times, last_s) in ends.items()}


def url(node: Node) -> str:
    host, port = node.address
    return f"{'https' if node.config.node.tls_cert else 'http'}://{host}:{port}"


def bounded(status: dict[str, Any]) -> dict[str, Any]:
    """The part of it that a caller receives: of long lists, their first names and how many there are."""
    functions = {}
    for name, row in status["functions"].items():
        shared = row.get("shared_with", [])
        functions[name] = row | {"shared_with": shared[:NAMES], "shared_count": len(shared)}
    return status | {
        "functions": functions,
        "loads": status.get("loads", [])[:NAMES],
        "sessions": status.get("sessions", [])[:NAMES],
    }


def gone(node: Node) -> list[str]:
    """Processes that were up, are not, and will be again."""
    drained = {f"gpu{number}" for number in node.policy.picture.drained}
    return sorted(node.seen - {*node.peers} - {*node.down} - OPTIONAL - drained)


def tenants(config: NodeConfig, picture: RouterState) -> dict[str, dict[str, Any]]:
    """Those that the node file names, and those that have functions."""
    counts = Counter(picture.tenants())
    return {
        name: {
            "functions": counts[name],
            "over_share": name in picture.over_share,
            **asdict(config.tenants.get(name, TenantSection())),
        }
        for name in sorted({*config.tenants, *counts})
    }
