"""Tenants of a node file: their sections, checked, and their limits. Pure."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Final

from dormouse.core.config import NodeConfig, TenantSection, parse_nbytes
from dormouse.core.names import NAME
from dormouse.schemas.errors import ConfigError

MAX_TENANTS: Final = 1024
"""More are taken for a slip."""


def slips(tenants: Mapping[str, TenantSection], several: bool) -> Iterator[str]:
    """Mistakes, each beginning with its key. ``several``: the node serves more than one."""
    if len(tenants) > MAX_TENANTS:
        yield f"tenants has {len(tenants)} entries; write at most {MAX_TENANTS}"
    if len(tenants) > 1 and not several:
        names = ", ".join(sorted(tenants))
        yield f'tenants has {names}, but the node serves one tenant; write [node] tenants = "many", or one of them'
    for name, tenant in tenants.items():
        at = f"tenants.{name}"
        if NAME.fullmatch(name) is None:
            yield f"tenants.{name!r} cannot be a tenant's name; use 1 to 63 letters, digits, '.', '_' and '-'"
        if tenant.share is not None and not (math.isfinite(tenant.share) and tenant.share > 0.0):
            yield f"{at}.share is {tenant.share:g}; write a number above 0, which counts beside the shares of others"
        for key, text in (("gpu_memory", tenant.gpu_memory), ("host", tenant.host)):
            try:
                if text:
                    parse_nbytes(text)
            except ConfigError as error:
                yield f"{at}.{key}: {error}"
        for key, rate in (("requests_s", tenant.requests_s), ("tokens_s", tenant.tokens_s)):
            if rate is not None and not (math.isfinite(rate) and rate > 0.0):
                yield f"{at}.{key} is {rate:g}; write how many per second, a number above 0, or leave it out"


def gpu_nbytes(tenants: Mapping[str, TenantSection]) -> dict[str, int]:
    """Of each GPU, by tenant."""
    return {name: parse_nbytes(each.gpu_memory) for name, each in tenants.items() if each.gpu_memory}


def host_nbytes(config: NodeConfig, tenant: str) -> int:
    """Of host memory, for data that is in no file. If there are several tenants, none can take all of it."""
    section = config.tenants.get(tenant)
    if section is not None and section.host:
        return parse_nbytes(section.host)
    return config.host_nbytes // (2 if config.node.tenants == "many" else 1)


def quota_nbytes(config: NodeConfig, tenant: str) -> int:
    """The most that one of its models may grow by."""
    return parse_nbytes(config.limits.quota) if config.limits.quota else host_nbytes(config, tenant)


def folder_nbytes(config: NodeConfig, _tenant: str) -> int:
    """Of the folders of all of a tenant's functions, with versions that are kept."""
    if config.limits.tenant_folders:
        return parse_nbytes(config.limits.tenant_folders)
    disk = os.statvfs(config.state_directory)
    return disk.f_blocks * disk.f_frsize // 2


def limited(tenants: Mapping[str, TenantSection]) -> frozenset[str]:
    """Those whose tokens are."""
    return frozenset(name for name, each in tenants.items() if each.tokens_s is not None)


def shares(tenants: Mapping[str, TenantSection]) -> tuple[tuple[str, float], ...]:
    """Those that are said, by tenant."""
    return tuple(sorted((name, each.share) for name, each in tenants.items() if each.share is not None))
