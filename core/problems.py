"""Problems of a node, in words for whoever is called at night, from the output of `dormouse status --json`. Pure.

Worst first: parts that do not run, losses, late functions, places that will be full.
"""

from collections.abc import Iterator
from typing import Any, Final

from dormouse.core.errortext import gist
from dormouse.core.quantities import duration, size

NEARLY_FULL: Final = 0.95
BROKEN: Final = ("failed", "quarantined")
ENOUGH: Final = 20
"""Answers within the window, before it is said that a function is late."""

FEW: Final = 5
"""Failures, before it is said that a function fails: in a row, or half of the window's answers and more."""

MIN_DISK_NBYTES: Final = 64 << 20
"""Of the state directory's disk: a function's files, jobs and logs soon find none."""

LONG_MS: Final = 1000.0
"""For a request to have waited for a GPU."""


def problems(value: dict[str, Any]) -> list[str]:
    return [*_node(value), *_store(value.get("store", {})), *troubles(value["functions"]), *_waits(value)]


def broken(row: dict[str, Any]) -> bool:
    return row.get("state") in BROKEN


def failing(row: dict[str, Any]) -> str:
    """The number of its requests that failed lately, in words, if nearly all did; else ""."""
    recent = row.get("recent")
    if recent is None:
        return ""
    window, in_a_row = recent["window"], recent["failed_in_a_row"]
    if in_a_row >= FEW:
        return f"its last {in_a_row} requests failed"
    if window["failed"] >= FEW and 2 * window["failed"] >= window["counted"]:
        return f"{window['failed']} of {window['counted']} requests failed within {window['seconds']:g} s"
    return ""


def late(row: dict[str, Any]) -> dict[str, Any] | None:
    """Its recent window, if that had enough answers and too few were in time."""
    window = (row.get("recent") or {}).get("window")
    if window is None or window["counted"] < ENOUGH or 100 * window["in_time"] >= row["percentile"]:
        return None
    return dict(window)


def standing(row: dict[str, Any]) -> tuple[bool, bool, bool, int, int]:
    """The order in which a person wants to see functions."""
    return (
        not broken(row),
        not failing(row),
        late(row) is None,
        -row.get("running", 0) - row.get("queued", 0),
        -row.get("requests", 0),
    )


def strangers(value: dict[str, Any]) -> list[str]:
    """Tenants that the node file names and nobody else: maybe slips of the pen."""
    tenants = value.get("tenants", {})
    if not any(row["functions"] for row in tenants.values()):
        return []  # nothing is deployed yet
    known = ", ".join(name for name, row in tenants.items() if row["functions"])
    return [
        f"[tenants.{name}] of the node file: no function is of this tenant (there are: {known})"
        for name, row in tenants.items()
        if not row["functions"]
    ]


def intended(value: dict[str, Any]) -> list[str]:
    """Intended states that keep the node from its work: no problems."""
    node, said = value["node"], []
    if node.get("draining"):
        left = f"; {count} run still" if (count := node.get("requests_open")) else ""
        said.append(f"drained: no new requests are taken until `dormouse drain --undo`{left}")
    for number, gpu in value["gpus"].items():
        if gpu.get("state") == "drains":
            said.append(f"GPU {number} drains: leases that are to end: {len(gpu['seats'])}")
        elif gpu.get("state") == "drained":
            said.append(f"GPU {number} is drained until `dormouse gpu undrain {number}`")
    return said


def _node(value: dict[str, Any]) -> Iterator[str]:
    node = value["node"]
    for role, text in node.get("down", {}).items():
        yield f"{role} does not start, and is tried again: {text}"
    for role in node.get("gone", ()):
        yield f"{role} has ended, and is started again"
    if (left := node.get("disk_free_nbytes")) is not None and left < MIN_DISK_NBYTES:
        yield f"the disk of {node['state']} has {size(left)} left: deploys, jobs and logs need it; make room"
    if why := node.get("tracing", {}).get("trouble"):
        yield f"traces are not taken by {node['tracing']['endpoint']}: {why}"
    if node["missing"]:
        yield f"not ready: waits for {', '.join(node['missing'])}"
    for number, gpu in value["gpus"].items():
        for text in gpu.get("trouble", ()):
            yield f"GPU {number}: trouble: {text}"


def _store(store: dict[str, Any] | None) -> Iterator[str]:
    """None: it is not the caller's to see."""
    if store is None:
        return
    if not store:
        yield "store: nothing is known of it; the controller did not answer in time"
        return
    if not store["answered"]:
        yield "store: did not say in time which model lies where; host, file and shared are missing below"
    if store["trouble"]:
        yield f"store: trouble: {store['trouble']}"
    for tier in ("host", "file"):
        nbytes, most = store[f"{tier}_nbytes"], store[f"{tier}_budget_nbytes"]
        if most and nbytes >= NEARLY_FULL * most:
            yield f"store: {nbytes / most:.0%} of what models may take ({tier}); remove functions, or raise the limit"


def troubles(functions: dict[str, Any]) -> Iterator[str]:
    """Of functions: those that are broken, that fail, that are late."""
    for name, row in functions.items():
        if broken(row):
            why = gist(row.get("error") or "") or "its log says why"
            yield f"{name} is {row['state']}: {why} (dormouse logs {name})"
    for name, row in functions.items():
        if text := failing(row):
            yield f"{name} fails: {text} (dormouse requests {name} --failed)"
        elif (counted := late(row)) is not None:
            what, kind = ("is late or fails", "failed") if counted["failed"] else ("is late", "slow")
            yield (
                f"{name} {what}: {counted['in_time']:.1%} of {counted['counted']} in time within "
                f"{counted['seconds']:g} s, {row['percentile']:g} % wanted (dormouse requests {name} --{kind})"
            )


def _waits(value: dict[str, Any]) -> Iterator[str]:
    waits = value.get("waits", {"oldest": [], "others": {}})
    long = [row for row in waits["oldest"] if row["waited_ms"] >= LONG_MS]
    if long:
        count = len(waits["oldest"]) + sum(waits["others"].values())
        first = max(long, key=lambda row: float(row["waited_ms"]))
        yield f"{count} wait for a GPU, {first['function']} for {duration(first['waited_ms'])}: {first['reason']}"
    for name, row in value.get("tenants", {}).items():
        if row["over_share"]:
            yield f"tenant {name} is over its share of the GPUs' time: its requests come last"
