"""Visibility of functions to callers: pure. For a caller, functions of other tenants do not exist.

Only one thing cannot be hidden: that a name is taken, because all functions of a node share one space of names.
"""

from collections.abc import Container
from typing import Any

from dormouse.core.decisions.requests.state import OpenDeploy, RouterState
from dormouse.router.access.access import Caller
from dormouse.schemas.messages import Failure, FunctionSpec


def sees(caller: Caller, p: RouterState, name: str) -> bool:
    """Whether there is a function of this name, deployed or on its way, that the caller may know of."""
    tenants = _tenants(p, name)
    return bool(tenants) and all(caller.sees(name, tenant) for tenant in tenants)


def serves(caller: Caller, p: RouterState, name: str) -> bool:
    """Whether the caller may invoke the function deployed under this name."""
    function = p.functions.get(name)
    return function is not None and caller.sees(name, function.spec.tenant)


def sees_all(caller: Caller) -> bool:
    return caller.tenant is None and caller.functions == ("*",)


def pin_refusal(caller: Caller, p: RouterState, name: str, bounded: Container[str]) -> Failure | None:
    """Why this caller, who sees it, may not pin that. ``bounded``: tenants that may keep only so much on a GPU."""
    if p.one_tenant or "admin" in caller.rights or all(tenant in bounded for tenant in _tenants(p, name)):
        return None
    text = (
        f"{caller.name} may not pin here: its tenant's memory on GPUs is not limited, so models of others would leave "
        "before all that it pins; ask whoever runs this node to pin it, or for [tenants.NAME] gpu_memory"
    )
    return Failure(code="scope_missing", status=403, text=text)


def _tenants(p: RouterState, name: str) -> set[str]:
    return {owner.spec.tenant for owner in (p.functions.get(name), p.deploy(name)) if owner is not None}


def deploy_refusal(caller: Caller, p: RouterState, spec: FunctionSpec, most: int = 1 << 30) -> Failure | None:
    """Why this caller may not deploy that, in words that name no other tenant. ``most`` functions are a tenant's, where
    there are several.
    """
    if caller.tenant not in (None, spec.tenant):
        text = f"this key deploys for tenant {caller.tenant!r} only; leave the tenant out"
        return Failure(code="forbidden", status=403, text=text)
    if not caller.names(spec.name):
        text = f"this key is for functions called {' or '.join(caller.functions)}; use such a name, or another key"
        return Failure(code="forbidden", status=403, text=text)
    if caller.tenant is None:
        return None
    if _tenants(p, spec.name) - {spec.tenant}:
        return Failure(code="name_taken", status=409, text=f"{spec.name!r} is not to be had on this node; use another")
    if p.one_tenant and set(p.tenants()) - {spec.tenant}:
        text = "this node serves another tenant; deploy on another node, or ask whoever runs this one"
        return Failure(code="tenant_refused", status=403, text=text)
    if not p.one_tenant and len(_names(p, spec.tenant) - {spec.name}) >= most:
        text = (
            f"tenant {spec.tenant!r} has {most:,} functions, which is the most that this node grants "
            "(limits.tenant_functions); remove some"
        )
        return Failure(code="functions_full", status=507, text=text)
    return None


def _names(p: RouterState, tenant: str) -> set[str]:
    """Of all that it has, deployed or on its way."""
    deploys = [change.spec for change in p.changes.values() if isinstance(change, OpenDeploy)]
    specs = [*deploys, *(function.spec for function in p.functions.values())]
    return {spec.name for spec in specs if spec.tenant == tenant}


def part_of(caller: Caller, status: dict[str, Any]) -> dict[str, Any]:
    """The part of ``status`` that a caller may see: all of it, or the caller's own functions and nothing that tells of
    others.
    """
    if sees_all(caller):
        return status
    functions = {name: row for name, row in status["functions"].items() if caller.sees(name, row["tenant"])}
    return {
        "node": {key: status["node"][key] for key in ("name", "missing")},
        "functions": {name: _alone(row, set(functions)) for name, row in functions.items()},
        "loads": [row for row in status.get("loads", []) if caller.sees(row["function"], row["tenant"])],
        "sessions": [],  # programs of whoever may attach to the node, who administers it
        "gpus": {},
        "store": {},
        "waiting": sum(row.get("queued", 0) for row in functions.values()),
        "waits": {"oldest": [], "others": {}},  # a reason names whoever has the GPU
        "tenants": {name: row for name, row in status.get("tenants", {}).items() if name == caller.tenant},
    }


def _alone(row: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Without the names of others' functions."""
    row = row | {"shared_with": [name for name in row.get("shared_with", []) if name in own]}
    eviction = row.get("last_eviction")
    if eviction is not None and eviction.get("for") not in own:
        row["last_eviction"] = eviction | {"for": None}
    return row
