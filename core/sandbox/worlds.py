"""The worlds of a node, by its configuration."""

import sys
from typing import Final

from msgspec import structs

from dormouse.core.config import NodeConfig
from dormouse.core.sandbox.world import FUNCTIONS, PLAIN, ZYGOTE, World

_PREPARE: Final = {"on": "prepare", "off": "prepare_unfollowed", "check": "prepare_checked"}
"""By ``[gpu] templates``."""


def worlds(config: NodeConfig) -> dict[str, World]:
    """The worlds of a node, by the roles of their zygotes; the world of functions first."""
    prepare = _PREPARE[config.gpu.templates] if config.gpu.fast_path else "prepare_python"
    functions = World(
        name=FUNCTIONS,
        python=config.sandbox.python or sys.executable,
        modules=("dormouse.client_shim.instance.warm",),
        libraries=config.sandbox.warm,
        prepare=f"dormouse.client_shim.torch_face.install:{prepare}",
        entry="dormouse.client_shim.instance.runner:run_instance",
    )
    return {world.role: world for world in (functions, *config.start.worlds)}


def dormant_worlds(config: NodeConfig) -> dict[str, World]:
    """The same of those whose zygotes are started when they are wanted, and end when they are not."""
    functions = worlds(config)[ZYGOTE]
    plain = structs.replace(functions, name=PLAIN, libraries=())
    return {plain.role: plain}
