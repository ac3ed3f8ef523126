"""Worlds: what a zygote is warm with, and what runs in its children. Values only; nothing is started or imported here.

A node has one zygote for each world. The router asks the zygote of the world of functions for instances.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import structs

if TYPE_CHECKING:
    from dormouse.core.config import NodeConfig

FUNCTIONS: Final = "functions"
ZYGOTE: Final = "zygote"
"""Role of the zygote of functions; that of another world has the world's name behind a dot."""

PLAIN: Final = "plain"
PLAIN_ZYGOTE: Final = f"{ZYGOTE}.{PLAIN}"
"""Of functions with libraries of their own, where these are not those that the zygote of functions has imported."""


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``python`` is the interpreter. ``modules`` are imported once, or the zygote does not start; ``libraries`` where
    they are installed, and are left out where that fails. ``prepare`` is called when all is imported, ``entry`` in each
    confined child (forkserver.py says with what): functions, as "module:name".
    """

    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9]{0,11}$")]  # it is part of a socket's path
    python: str
    modules: tuple[str, ...]
    entry: str
    libraries: tuple[str, ...] = ()
    prepare: str = ""

    @property
    def role(self) -> str:
        return ZYGOTE if self.name == FUNCTIONS else f"{ZYGOTE}.{self.name}"

    @property
    def needed(self) -> tuple[str, ...]:
        """Every module without which the world is none."""
        functions = [name.partition(":")[0] for name in (self.entry, self.prepare) if name]
        return tuple(dict.fromkeys([*self.modules, *functions]))


_PREPARE: Final = {"on": "prepare", "off": "prepare_unfollowed", "check": "prepare_checked"}
"""By ``[gpu] templates``."""


def worlds(config: "NodeConfig") -> dict[str, World]:
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


def dormant_worlds(config: "NodeConfig") -> dict[str, World]:
    """The same of those whose zygotes are started when they are wanted, and end when they are not."""
    functions = worlds(config)[ZYGOTE]
    plain = structs.replace(functions, name=PLAIN, libraries=())
    return {plain.role: plain}
