"""Rows for people: loads in progress, and programs of `dormouse run`, as `dormouse status` and `dormouse ls` show them.
Decides nothing.
"""

from typing import Any, Final

from dormouse.core.quantities import duration, size

LOADS: Final = ["loading", "version", "for", "tenant", "since", "silent for", "load_timeout", "ends within"]
_FOR: Final = {"served": "what is served", "extra": "an extra instance", "deploy": "a deploy"}
SESSIONS: Final = ["program", "session", "pid", "tenant", "since", "memory", "processor time"]


def load_row(row: dict[str, Any]) -> dict[str, Any]:
    """Of the router's list. A load that waits for a place has no instance."""
    loads = row["instance"] is not None
    return {
        "loading": row["function"],
        "version": row["version"],
        "for": _FOR[row["for"]],
        "tenant": row["tenant"],
        "since": duration(row["since_ms"]) if loads else "waits for a place (limits.loads)",
        "silent for": duration(row["silent_ms"]) if loads else None,
        "load_timeout": duration(row["load_timeout_ms"]),
        "ends within": duration(row["ends_within_ms"]) if loads else None,
    }


def session_row(row: dict[str, Any]) -> dict[str, Any]:
    """A program of `dormouse run`. Its use of the machine is not known once it has ended."""
    known = row["memory_nbytes"] is not None
    return row | {
        "since": duration(1000 * (row["since_ms"] // 1000)),
        "memory": size(row["memory_nbytes"]) if known else None,
        "processor time": duration(1000 * row["cpu_s"]) if known else None,
    }
