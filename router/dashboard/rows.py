"""The dashboard's view of `dormouse status`: pure. Nothing that grows by the clock alone is in it, so that a quiet node
sends nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from dormouse.core.problems import broken, failing, intended, late, problems, strangers

TEXT: Final = 1000
"""Characters of a function's error; the whole is in its log."""

UNREAD: Final = "see its log"
"""Instead of an error, for those who may not read logs."""

MAX_PROBLEMS: Final = 50
NAMES: Final = 20
"""Of functions that share bytes with one: hundreds may, each with all others."""

NODE: Final = ("name", "address", "confinement", "peers", "gone", "instances", "missing")
GPU: Final = (
    "epoch", "name", "pool", "capacity_nbytes", "weights_nbytes", "kv_nbytes", "lost_nbytes", "activation_nbytes",
    "free_nbytes", "largest_free_nbytes", "fragmentation", "turns", "seats", "trouble", "state",
)  # fmt: skip
FUNCTION: Final = (
    "version", "tenant", "deadline_ms", "percentile", "state", "deploying", "stateless", "embedding", "max_instances",
    "queued", "running", "requests", "errors", "outcomes", "p50_ms", "p99_ms", "nbytes", "gpu_nbytes", "host_nbytes",
    "file_nbytes", "shared_nbytes", "wakes", "evictions", "last_wake", "traffic",
)  # fmt: skip
STORE: Final = ("host_nbytes", "host_budget_nbytes", "file_nbytes", "file_budget_nbytes")
LLM: Final = (
    "ttft_ms", "tpot_ms", "wanted_ttft_ms", "wanted_tpot_ms", "prompt_tokens", "made_tokens", "reused_tokens", "base",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeView:
    """The state that one kind of caller sees. ``functions`` and ``gpus`` are by name, ``minutes`` by number; the rest
    is sent as a whole.
    """

    node: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)
    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    minutes: dict[str, list[int]] = field(default_factory=dict)


def view(status: dict[str, Any], whole: bool, reads: bool = True) -> NodeView:
    """Of what `dormouse status` says to this caller; ``whole``: to one who sees the node; ``reads``: who may read the
    logs, too. Without minutes, which are not the status's.
    """
    if not reads:  # a traceback has what the function has
        rows = {
            name: row | {key: row.get(key) and UNREAD for key in ("error", "why")}
            for name, row in status["functions"].items()
        }
        status = status | {"functions": rows}
    said = status if whole else status | {"store": None}
    found = [*problems(said), *(strangers(status) if whole else ())]
    more = [f"and {len(found) - MAX_PROBLEMS} more"] if len(found) > MAX_PROBLEMS else []
    return NodeView(
        node=_picked(status["node"], NODE) | {"waiting": status["waiting"], "intended": intended(status)},
        problems=found[:MAX_PROBLEMS] + more,
        store=_picked(status["store"] or {}, STORE),
        gpus={str(number): _picked(gpu, GPU) for number, gpu in status["gpus"].items()},
        functions={name: function(row) for name, row in status["functions"].items()},
    )


def function(row: dict[str, Any]) -> dict[str, Any]:
    recent = row.get("recent") or {}
    in_time = recent.get("in_time")
    error, eviction = row.get("error"), row.get("last_eviction")
    return _picked(row, FUNCTION) | {
        "instances": len(row.get("instances", ())),
        "error": error[-TEXT:] if error else None,
        "why": row.get("why"),
        "broken": broken(row),
        "failing": bool(failing(row)),
        "late": late(row) is not None,
        "shared_with": (shared := row.get("shared_with", ()))[:NAMES],
        "shared_count": len(shared),
        "in_time": in_time,
        "counted": recent.get("counted", 0),
        "complies": None if in_time is None else 100 * in_time >= row["percentile"],
        "last_eviction": None if eviction is None else {key: eviction[key] for key in ("gpu", "nbytes", "for", "rule")},
        "llm": None if row.get("llm") is None else _picked(row["llm"], LLM),
        "runtimes": row.get("runtimes", []),
    }


def _picked(row: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: row[key] for key in keys if key in row}


def difference(before: NodeView, after: NodeView) -> dict[str, Any]:
    """The changes: whole rows, None for those that are gone; empty if there are none."""
    changed: dict[str, Any] = {}
    for part in ("node", "problems", "store"):
        if getattr(before, part) != (now := getattr(after, part)):
            changed[part] = now
    for part in ("gpus", "functions", "minutes"):
        old, new = getattr(before, part), getattr(after, part)
        rows = {name: row for name, row in new.items() if old.get(name) != row}
        rows |= {name: None for name in old if name not in new}
        if rows:
            changed[part] = rows
    return changed
