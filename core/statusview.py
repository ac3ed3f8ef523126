"""What `dormouse status` prints for people, from the JSON that it prints for programs. Decides nothing."""

from typing import Any, Final

import click

from dormouse.core.output import size, table

GPU: Final = [
    "gpu", "name", "pool", "running", "weights", "lost", "activations", "free", "largest free", "fragmentation",
    "moved", "segments",
]  # fmt: skip
FUNCTION: Final = ["name", "state", "queued", "requests", "p50_ms", "p99_ms", "wakes", "evictions", "outcomes"]
MODEL: Final = ["function", "model", "on GPUs", "host", "file", "shared", "last wake"]


def show(value: dict[str, Any]) -> None:
    """``value`` as GET /admin/status answers it; what a node that is starting cannot say yet may be missing."""
    node = value["node"]
    click.echo(f"node {node['name']!r} at {node['address']}; sandbox: {node['confinement'] or 'not ready'}")
    if node["missing"]:
        click.echo(f"not ready: waits for {', '.join(node['missing'])}")
    store_lines(value.get("store", {}))
    table([gpu_row(number, gpu) for number, gpu in value["gpus"].items()], GPU)
    table(list(value["functions"].values()), FUNCTION)
    table([model_row(name, row) for name, row in value["functions"].items() if row.get("nbytes")], MODEL)


def store_lines(store: dict[str, Any]) -> None:
    if not store:
        click.echo("store: nothing is known of it; the controller did not answer in time")
        return
    host, files = (used(store, tier) for tier in ("host", "file"))
    click.echo(f"store: host {host}, files {files}; {store['segments']} segments in {store['slabs']} slabs")
    if not store["answered"]:
        click.echo("store: did not say in time which model lies where; host, file and shared are missing below")
    if store["trouble"]:
        click.echo(f"store: trouble: {store['trouble']}")


def used(store: dict[str, Any], tier: str) -> str:
    budget = store[f"{tier}_budget_nbytes"]
    return size(store[f"{tier}_nbytes"]) + ("" if budget is None else f" of {size(budget)}")


def gpu_row(number: str, gpu: dict[str, Any]) -> dict[str, Any]:
    share = gpu.get("fragmentation")
    return {
        "gpu": number,
        "name": gpu.get("name"),
        "pool": gpu.get("pool"),
        "running": gpu.get("busy_with"),
        "weights": size(gpu.get("weights_nbytes")),
        "lost": size(gpu.get("lost_nbytes")),
        "activations": size(gpu.get("activation_nbytes")),
        "free": size(gpu.get("free_nbytes")),
        "largest free": size(gpu.get("largest_free_nbytes")),
        "fragmentation": None if share is None else f"{share:.0%}",
        "moved": size(gpu.get("moved_nbytes")),
        "segments": gpu.get("segments"),
    }


def model_row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    shared = size(row["shared_nbytes"]) if row.get("shared_nbytes") else None
    return {
        "function": name,
        "model": size(row["nbytes"]),
        "on GPUs": ", ".join(f"{gpu}: {size(nbytes)}" for gpu, nbytes in row.get("gpu_nbytes", {}).items()) or None,
        "host": size(row.get("host_nbytes")),
        "file": size(row.get("file_nbytes")),
        "shared": shared if shared is None else f"{shared} with {', '.join(row['shared_with']) or 'nobody now'}",
        "last wake": wake(row.get("last_wake")),
    }


def wake(last: dict[str, Any] | None) -> str | None:
    if last is None:
        return None
    sources = (("host", "host_nbytes"), ("GPUs", "peer_nbytes"), ("files", "file_nbytes"))
    parts = ", ".join(f"{size(last[key])} from {source}" for source, key in sources if last[key])
    took = "" if last["wake_us"] is None else f" in {last['wake_us'] / 1000:.1f} ms"
    return f"GPU {last['gpu']}{took}: {parts}"
