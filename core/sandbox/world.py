"""Worlds: the imports that a zygote is warm with, and the code that runs in its children. Values only; nothing is
started or imported here.

A node has one zygote for each world. The router asks the zygote of the world of functions for instances.
"""

from typing import Annotated, Final

import msgspec

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
