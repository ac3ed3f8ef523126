"""Costs of use: prices from a file, and sums by function and tenant. Pure but for reading the file.

Missing prices are 0. A node's measurements are in schemas/messages/ (Metered, HostMetered); docs/tenants.md explains
them.
"""

import json
import math
import time
import tomllib
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.core import nottoml
from dormouse.core.config import parse_duration_ms
from dormouse.schemas.errors import ConfigError

GIB: Final = 1 << 30
MILLION: Final = 1_000_000

AHEAD_S: Final = 60.0
"""Callers' clocks may be so far ahead."""

ON_GPU: Final = ("weights_nbyte_s", "kv_nbyte_s", "activations_nbyte_s", "adapter_nbyte_s")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a second of a GPU; of a GiB of GPU memory, or host memory, for a second; of a million tokens."""

    currency: str = ""
    gpu_s: float = 0.0
    gpu_gib_s: float = 0.0
    host_gib_s: float = 0.0
    prompt_tokens_1m: float = 0.0
    completion_tokens_1m: float = 0.0


NUMBERS: Final = tuple(name for name in Prices.__struct_fields__ if name != "currency")


def load_prices(path: str | Path) -> Prices:
    """From a JSON file if it is called so, else from TOML. Raises ConfigError naming the file and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = json.loads(text) if str(path).endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a file of prices") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; write prices as TOML or JSON") from error
    except (ValueError, RecursionError) as error:
        why = f"JSON: {error}" if str(path).endswith(".json") else f"TOML: {nottoml.cause(text, error)}"
        raise ConfigError(f"{path}: not {why}; write lines such as gpu_s = 0.001") from error
    return parse_prices(tree, str(path))


def parse_prices(tree: object, origin: str) -> Prices:
    """Raises ConfigError."""
    known = ", ".join(Prices.__struct_fields__)
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: not a table of prices; write some of {known}")
    if unknown := sorted(tree.keys() - set(Prices.__struct_fields__)):
        raise ConfigError(f"{origin}: {unknown[0]} is no price; write some of {known}")
    for name in NUMBERS:
        price = tree.get(name, 0)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise ConfigError(f"{origin}: {name} is {price!r}; write a number of at least 0")
    if not isinstance(tree.get("currency", ""), str):
        raise ConfigError(f"{origin}: currency is {tree['currency']!r}; write its name in quotes")
    return msgspec.convert(tree, Prices)


def parse_since(text: str, now_s: float | None = None) -> float:
    """``"2h"`` ago, ``"7d"``, or a time: ``"2026-11-25T10:00"``, of this machine if it has no zone. Seconds of the Unix
    clock. Raises ConfigError.
    """
    now_s = time.time() if now_s is None else now_s
    try:
        if text.endswith("d") and text[:-1].isdigit() and len(text) < 6:
            return now_s - int(text[:-1]) * 86_400
        return now_s - parse_duration_ms(text) / 1000
    except ConfigError as error:
        if "too long" in str(error):
            raise ConfigError(f"--since: {error}") from None
    try:
        since_s = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"--since is {text!r}; write how long ago, such as 30m, 2h or 7d, or a time such as 2026-11-25T10:00"
        ) from None
    if since_s > now_s + AHEAD_S:
        raise ConfigError(f"--since is {text!r}, which is in the future; write a time that has been")
    return max(0.0, since_s)


def cost(row: Mapping[str, Any], prices: Prices) -> dict[str, float]:
    """Of what one function has used, by what it is for."""
    return {
        "gpu": row["gpu_s"] * prices.gpu_s,
        "gpu_memory": sum(row[name] for name in ON_GPU) / GIB * prices.gpu_gib_s,
        "host_memory": row["host_nbyte_s"] / GIB * prices.host_gib_s,
        "tokens": row["prompt_tokens"] / MILLION * prices.prompt_tokens_1m
        + row["made_tokens"] / MILLION * prices.completion_tokens_1m,
    }


def bill(rows: Iterable[Mapping[str, Any]], prices: Prices) -> dict[str, Any]:
    """Each function's use with its cost, sums by tenant, and the sum of all."""
    functions = [{**row, "cost": cost(row, prices)} for row in rows]
    for function in functions:
        function["cost"]["total"] = math.fsum(function["cost"].values())
    tenants = sorted({function["tenant"] for function in functions})
    by_tenant = {name: [each for each in functions if each["tenant"] == name] for name in tenants}
    return {
        "functions": functions,
        "tenants": [{"tenant": name, **_sum(own)} for name, own in by_tenant.items()],
        "total": _sum(functions),
    }


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = ("requests", "prompt_tokens", "made_tokens")
    counts: dict[str, Any] = {name: sum(row[name] for row in rows) for name in kinds}
    held = {name: math.fsum(row[name] for row in rows) for name in ("gpu_s", *ON_GPU, "host_nbyte_s")}
    parts = ("gpu", "gpu_memory", "host_memory", "tokens", "total")
    return counts | held | {"cost": {part: math.fsum(row["cost"][part] for row in rows) for part in parts}}
