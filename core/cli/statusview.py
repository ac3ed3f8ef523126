"""Output of `dormouse status` for people, made from its JSON for programs: a screen, problems first; one function; or
all tables. Decides nothing.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import click

from dormouse.core.cli.loadsview import LOADS, SESSIONS, load_row, session_row
from dormouse.core.output import table
from dormouse.core.problems import intended, problems, standing, strangers, troubles
from dormouse.core.quantities import duration, size

GPU: Final = [
    "gpu", "name", "pool", "turn", "seats", "busy", "weights", "KV", "lost", "activations", "free", "largest free",
    "fragmentation", "moved", "segments", "contexts",
]  # fmt: skip
FUNCTION: Final = [
    "name", "state", "instances", "queued", "requests", "p50_ms", "p99_ms", "wakes", "evictions", "outcomes",
]  # fmt: skip
MODEL: Final = ["function", "model", "on GPUs", "host", "file", "shared", "last wake"]
SERVICE: Final = ["function", "in time", "wanted", "requests/s", "run", "with wake", "last evicted"]
TOKENS: Final = [
    "model", "first token (p50, p99)", "queue, runtime, wake, prefill (p50)", "next tokens (p50, p99)", "in time",
    "wanted", "tokens in", "out", "reused",
]  # fmt: skip
SAMPLING: Final = ["model", "sampling, unless a request says otherwise"]
INSTANCE: Final = ["function", "instance", "state", "pid", "memory", "processor time", "processes"]
RUNTIME: Final = [
    "model", "GPU", "runtime", "running", "waiting", "preempted", "KV blocks", "used", "idle", "KV", "of the pool",
    "reused",
]  # fmt: skip
LIMITS: Final = ("share", "gpu_memory", "requests_s", "tokens_s")
TENANT: Final = ["tenant", "functions", "share", "over it", "gpu_memory", "requests_s", "tokens_s"]
JOBS: Final = ("queued", "begun", "succeeded", "failed", "cancelled")
WAIT: Final = ["waiting", "for", "until its deadline", "why"]


OVERVIEW: Final = ["function", "state", "running", "queued", "requests", "errors", "in time", "p50", "p99", "on GPUs"]
SCREEN_GPU: Final = ["gpu", "used", "turn", "seats", "busy"]
BUSIEST: Final = 3
"""Functions that are named beside a GPU: so many fit on a line."""

MAX_PROBLEMS: Final = 8
LONGEST: Final = 300
"""Characters of a problem."""

NOTED_S: Final = 3600.0
"""So long after a process has ended that is said, though it runs again."""

FEWEST: Final = 5
"""Functions that are shown on the smallest screen."""


def screen(value: dict[str, Any], height: int) -> None:
    """``value`` as `dormouse status --json` prints it, in ``height`` lines or little more: what is wrong, GPUs, and
    the functions that are broken, late, busy, or asked most.
    """
    found = [*problems(value), *strangers(value)]
    head(value, found[:MAX_PROBLEMS])
    if len(found) > MAX_PROBLEMS:
        click.echo(f"and {len(found) - MAX_PROBLEMS} more such lines: dormouse status --all")
    if value.get("store"):
        click.echo(store_line(value["store"]))
    table([screen_gpu_row(number, gpu) for number, gpu in value["gpus"].items()], SCREEN_GPU)
    if said := jobs_line(value["functions"]):
        click.echo(said)
    loads = value.get("loads", [])
    table([load_row(row) for row in loads], LOADS)
    table([session_row(row) for row in value.get("sessions", [])], SESSIONS)
    functions = sorted(value["functions"].items(), key=lambda item: standing(item[1]))
    left = max(
        FEWEST,
        height
        - len(found[:MAX_PROBLEMS])
        - len(value["gpus"])
        - 6
        - bool(said)
        - len(loads)
        - len(value.get("sessions", [])),
    )
    table([overview_row(name, row) for name, row in functions[:left]], OVERVIEW)
    if len(functions) > left:
        click.echo(f"and {len(functions) - left} functions more: dormouse status --all")


def head(value: dict[str, Any], found: list[str]) -> None:
    from dormouse.core.exposure import WHO

    node = value["node"]
    click.echo(f"node {node['name']!r} at {node['address']}; sandbox: {node['confinement'] or 'not ready'}")
    if who := WHO.get(node.get("without_key", "")):
        click.echo(who)
    for text in found:
        problem_line(text)
    for text in intended(value):
        click.echo(text)
    for role, left in node.get("left", {}).items():
        if role in node["peers"] and left["ago_s"] < NOTED_S:
            click.echo(f"{role} was replaced on purpose {duration(1000 * round(left['ago_s']))} ago")
    for role, ended in node.get("ended", {}).items():
        if role in node["peers"] and ended["ago_s"] < NOTED_S:
            often = f", and {ended['times'] - 1} times before" if ended["times"] > 1 else ""
            said = f"{role} ended {duration(1000 * round(ended['ago_s']))} ago{often}, and was started again"
            click.echo(f"{said}: {node['state']}/logs/supervisor.log")


def problem_line(text: str) -> None:
    click.echo("! " + (text if len(text) <= LONGEST else text[:LONGEST] + " ..."))


def overview_row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    recent, share = row.get("recent") or {}, row.get("traffic")
    return row | {
        "function": name,
        "state": f"{row['state']} ({share} %)" if share not in (None, 100) else row.get("state"),
        "in time": f"{recent['in_time']:.1%}" if recent.get("counted") else None,
        "p50": told(row.get("p50_ms")),
        "p99": told(row.get("p99_ms")),
        "on GPUs": _places(map(str, row.get("gpu_nbytes", {})), row),
    }


def _places(gpus: Iterable[str], row: dict[str, Any]) -> str | None:
    """GPUs that have some of its model, and whether it is kept there."""
    return ", ".join([*gpus, *(["pinned"] if row.get("pinned") else [])]) or None


def screen_gpu_row(number: str, gpu: dict[str, Any]) -> dict[str, Any]:
    if gpu.get("state") == "drained":
        return {"gpu": number, "used": "drained"}
    free, capacity = gpu.get("free_nbytes"), gpu.get("capacity_nbytes")
    seated = gpu.get("seats")
    return {
        "gpu": number,
        "used": None if free is None or capacity is None else f"{size(capacity - free)} of {size(capacity)}",
        "turn": turns(gpu),
        "seats": len(seated) if seated else None,
        "busy": busy(gpu),
    }


def busy(gpu: dict[str, Any]) -> str | None:
    """The share of the GPU's time that was used lately, and its users."""
    told = gpu.get("busy")
    if told is None or not told["functions"]:
        return None
    first = [f"{name} {share:.0%}" for name, share in list(told["functions"].items())[:BUSIEST]]
    more = len(told["functions"]) + told["others"] - len(first)
    whose = ", ".join([*first, *([f"{more} more"] if more else [])])
    return f"{told['share']:.0%} of {told['seconds']} s: {whose}"


def one(value: dict[str, Any], name: str) -> None:
    """All that is known of one function."""
    only = value | {"functions": {name: value["functions"][name]}, "tenants": {}}
    for text in found(value, name):
        problem_line(text)
    if said := jobs_line(only["functions"]):
        click.echo(said)
    if calls := only["functions"][name].get("calls"):
        click.echo(f"may call {', '.join(calls)}")
    function_tables(only)
    table([load_row(row) for row in value.get("loads", []) if row["function"] == name], LOADS)
    table([wait_row(row) for row in value.get("waits", NO_WAITS)["oldest"] if row["function"] == name], WAIT)


def found(value: dict[str, Any], name: str | None) -> list[str]:
    """Problems of the node, or of one function."""
    return problems(value) if name is None else list(troubles({name: value["functions"][name]}))


NO_WAITS: Final[dict[str, Any]] = {"oldest": [], "others": {}}


def show(value: dict[str, Any]) -> None:
    """All tables; what a node that is starting cannot say yet may be missing."""
    head(value, [*problems(value), *strangers(value)])
    if value.get("store"):
        click.echo(store_line(value["store"]))
    table([gpu_row(number, gpu) for number, gpu in value["gpus"].items()], GPU)
    if said := jobs_line(value["functions"]):
        click.echo(said)
    function_tables(value)
    table([load_row(row) for row in value.get("loads", [])], LOADS)
    table([session_row(row) for row in value.get("sessions", [])], SESSIONS)
    limited = {name: row for name, row in value.get("tenants", {}).items() if any(row[key] for key in LIMITS)}
    table([tenant_row(name, row) for name, row in limited.items()], TENANT)
    waits = value.get("waits", NO_WAITS)
    table([wait_row(row) for row in waits["oldest"]], WAIT)
    if waits["others"]:
        click.echo("and more: " + ", ".join(f"{count} ({kind})" for kind, count in waits["others"].items()))


def function_tables(value: dict[str, Any]) -> None:
    table([function_row(row) for row in value["functions"].values()], FUNCTION)
    table([model_row(name, row) for name, row in value["functions"].items() if row.get("nbytes")], MODEL)
    services = [(name, row) for name, row in value["functions"].items() if (row.get("service") or {}).get("counted")]
    table([service_row(name, row) for name, row in services], SERVICE)
    models = [(name, row) for name, row in value["functions"].items() if row.get("llm")]
    table([tokens_row(name, row["llm"], row["percentile"]) for name, row in models], TOKENS)
    sampled = [(name, row["llm"]["sampling"]) for name, row in models if row["llm"].get("sampling")]
    table([sampling_row(name, sampling) for name, sampling in sampled], SAMPLING)
    table([runtime_row(name, each) for name, row in models for each in row.get("runtimes", ())], RUNTIME)
    table(
        [
            instance_row(name, row, each)
            for name, row in value["functions"].items()
            for each in row.get("processes", ())
        ],
        INSTANCE,
    )


def jobs_line(functions: dict[str, Any]) -> str:
    """Of all functions together; "" if there are none."""
    counts = Counter[str]()
    for row in functions.values():
        counts.update(row.get("jobs", {}))
    said = ", ".join(f"{counts[state]} {state}" for state in JOBS if counts[state])
    return f"jobs: {said}" if said else ""


def tenant_row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tenant": name,
        "functions": row["functions"],
        "share": row["share"],
        "over it": "yes" if row["over_share"] else None,
        **{key: row[key] or None for key in ("gpu_memory", "requests_s", "tokens_s")},
    }


def store_line(store: dict[str, Any]) -> str:
    host, files = (used(store, tier) for tier in ("host", "file"))
    return f"store: host {host}, files {files}; {store['segments']} segments in {store['slabs']} slabs"


def used(store: dict[str, Any], tier: str) -> str:
    budget = store[f"{tier}_budget_nbytes"]
    return size(store[f"{tier}_nbytes"]) + ("" if budget is None else f" of {size(budget)}")


def gpu_row(number: str, gpu: dict[str, Any]) -> dict[str, Any]:
    if gpu.get("state") == "drained":
        return {"gpu": number, "name": "(drained)"}
    share = gpu.get("fragmentation")
    return {
        "gpu": number,
        "name": gpu.get("name"),
        "pool": gpu.get("pool"),
        "turn": turns(gpu),
        "seats": seats(gpu),
        "busy": busy(gpu),
        "weights": size(gpu.get("weights_nbytes")),
        "KV": size(gpu.get("kv_nbytes")),
        "lost": size(gpu.get("lost_nbytes")),
        "activations": size(gpu.get("activation_nbytes")),
        "free": size(gpu.get("free_nbytes")),
        "largest free": size(gpu.get("largest_free_nbytes")),
        "fragmentation": None if share is None else f"{share:.0%}",
        "moved": size(gpu.get("moved_nbytes")),
        "segments": gpu.get("segments"),
        "contexts": contexts(gpu),
    }


def contexts(gpu: dict[str, Any]) -> str | None:
    """Of runtimes, and what they have room for beside the pool; None: emulated."""
    if not gpu.get("context_nbytes"):
        return None
    return f"{size(gpu.get('contexts_nbytes'))} of {size(gpu.get('beside_nbytes'))}"


def turns(gpu: dict[str, Any]) -> str | None:
    """Functions that compute, or may."""
    return ", ".join(turn["function"] + (" (idle)" if turn["idle"] else "") for turn in gpu.get("turns", ())) or None


def seats(gpu: dict[str, Any]) -> str | None:
    """Leases that have their memory there, and functions whose leases do so without a turn."""
    names = list(gpu.get("seats", ()))
    for turn in gpu.get("turns", ()):
        if turn["function"] in names:
            names.remove(turn["function"])
    count = len(gpu.get("seats", ()))
    return f"{count}, without a turn: {', '.join(names)}" if names else str(count) if count else None


def function_row(row: dict[str, Any]) -> dict[str, Any]:
    living, most = len(row.get("instances", ())), row.get("max_instances", 1)
    return row | {
        "instances": f"{living} of {most}" if most > 1 or living > 1 else living,
        "outcomes": ", ".join(f"{count} {code}" for code, count in row.get("outcomes", {}).items()) or None,
    }


def model_row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    shared = size(row["shared_nbytes"]) if row.get("shared_nbytes") else None
    if shared is not None:
        more = row.get("shared_count", 0) - len(row["shared_with"])
        shared += f" with {', '.join(row['shared_with']) or 'nobody now'}" + (f" and {more} more" if more > 0 else "")
    return {
        "function": name,
        "model": size(row["nbytes"]),
        "on GPUs": _places((f"{gpu}: {size(nbytes)}" for gpu, nbytes in row.get("gpu_nbytes", {}).items()), row),
        "host": size(row.get("host_nbytes")),
        "file": size(row.get("file_nbytes")),
        "shared": shared,
        "last wake": wake(row.get("last_wake")),
    }


def wake(last: dict[str, Any] | None) -> str | None:
    if last is None:
        return None
    sources = (("host", "host_nbytes"), ("GPUs", "peer_nbytes"), ("files", "file_nbytes"))
    parts = ", ".join(f"{size(last[key])} from {source}" for source, key in sources if last[key])
    took = "" if last["wake_us"] is None else f" in {duration(last['wake_us'] / 1000)}"
    return f"GPU {last['gpu']}{took}: {parts}"


def service_row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    service, weight = row["service"], {True: ", heavy", False: ", light", None: ""}
    last = row.get("last_eviction")
    return {
        "function": name,
        "in time": f"{service['in_time']:.1%} of {service['counted']}{'' if service['complies'] else ': missed'}",
        "wanted": f"{service['percentile']:g}% in {duration(service['deadline_ms'])}",
        "requests/s": service["rate_s"],
        "run": told(service["run_ms"]),
        "with wake": f"{told(service['wake_ms']) or 'unknown'}{weight[service['heavy']]}",
        "last evicted": None if last is None else eviction(last),
    }


def tokens_row(name: str, llm: dict[str, Any], percentile: float) -> dict[str, Any]:
    """``llm`` as the router counts it (router/front/stats.py)."""
    parts = [llm[f"{part}_ms"]["p50"] for part in ("queue", "runtime", "wake", "prefill")]
    in_time = None
    if llm["counted"]:
        in_time = f"{llm['in_time']:.1%} of {llm['counted']}{'' if llm['complies'] else ': missed'}"
    return {
        "model": name,
        "first token (p50, p99)": durations(llm["ttft_ms"]),
        "queue, runtime, wake, prefill (p50)": ", ".join(duration(part) for part in parts if part is not None) or None,
        "next tokens (p50, p99)": durations(llm["tpot_ms"]),
        "in time": in_time,
        "wanted": f"{percentile:g}% in {duration(llm['wanted_ttft_ms'])}, then {duration(llm['wanted_tpot_ms'])}",
        "tokens in": llm["prompt_tokens"],
        "out": llm["made_tokens"],
        "reused": llm["reused_tokens"],
    }


def sampling_row(name: str, sampling: dict[str, Any]) -> dict[str, Any]:
    return {"model": name, "sampling, unless a request says otherwise": sampling_text(sampling)}


def sampling_text(sampling: dict[str, Any]) -> str:
    """The sampling of the model's files, by the names that requests have for it."""
    said = [f"{field} {json.dumps(value)}" for field, value in sampling.items() if field != "unfollowed"]
    ignored = sampling.get("unfollowed")
    return ", ".join(said or ["OpenAI's"]) + (f"; not followed: {', '.join(ignored)}" if ignored else "")


def runtime_row(name: str, runtime: dict[str, Any]) -> dict[str, Any]:
    """A process that computes a language model."""
    return {
        "model": name,
        "GPU": runtime["gpu"],
        "runtime": f"pid {runtime['pid']}",
        "running": runtime["running"],
        "waiting": runtime["waiting"],
        "preempted": runtime["preempted"],
        "KV blocks": runtime["kv_blocks"],
        "used": runtime["kv_blocks_used"],
        "idle": runtime["kv_blocks_idle"],
        "KV": size(runtime["kv_nbytes"]),
        "of the pool": f"{runtime['kv_share']:.1%}",
        "reused": size(runtime["reused_nbytes"]),
    }


def instance_row(name: str, row: dict[str, Any], instance: str) -> dict[str, Any]:
    taken = row["processes"][instance]
    return {
        "function": name,
        "instance": instance,
        "state": row["instances"].get(instance),
        "pid": taken["pid"],
        "memory": size(taken["memory_nbytes"]),
        "processor time": duration(1000 * taken["cpu_s"]),
        "processes": taken["processes"],
    }


def eviction(last: dict[str, Any]) -> str:
    whom = f" for {last['for']}" if last["for"] else ""
    ago = duration(1000 * round(last["ago_s"]))
    return f"{size(last['nbytes'])} from GPU {last['gpu']}{whom} {ago} ago: {last['rule']}"


def wait_row(row: dict[str, Any]) -> dict[str, Any]:
    left_ms = row["left_ms"]
    return {
        "waiting": row["function"],
        "for": duration(row["waited_ms"]),
        "until its deadline": duration(left_ms) if left_ms >= 0 else f"{duration(-left_ms)} late",
        "why": row["reason"],
    }


def told(ms: float | None) -> str | None:
    return None if ms is None else duration(ms)


def durations(ms: dict[str, float | None]) -> str | None:
    """A p50 and a p99."""
    p50, p99 = told(ms["p50"]), told(ms["p99"])
    return None if p50 is None else f"{p50}, {p99}"
