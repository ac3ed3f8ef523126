"""The roles of a node's processes, by kind. Pure."""

from typing import Final

MODULES: Final = {
    "controller": "dormouse.controller.main",
    "store": "dormouse.gpuserver.store",
    "router": "dormouse.router.main",
    "metrics": "dormouse.router.metrics.main",
    "traces": "dormouse.router.traces.main",
    "zygote": "dormouse.core.sandbox.zygote",
    "gpu": "dormouse.gpuserver.executor.main",
}

ALONE: Final = ("gpu", "zygote", "metrics", "traces")
"""Replaced alone when they die: no other process refers to what they hold."""

ON_DEMAND: Final = ("metrics", "traces")
"""Started when they are first wanted."""


def kind(role: str) -> str:
    """The kind of a role: "gpu" of "gpu1", "zygote" of "zygote.NAME"."""
    return role.partition(".")[0].rstrip("0123456789")
