"""Parts of Dormouse that a command runs in its own process. Named, as the supervisor names roles (node/roles.py), and
imported when they are wanted: the command line knows the parts above it by name alone.
"""

import importlib
from typing import Any, Final

MODULES: Final = {
    "offline": "dormouse.controller.offline",
    "replay": "dormouse.controller.replay",
    "session": "dormouse.client_shim.instance.session",
    "simulator": "dormouse.controller.simulator.main",
}


def part(name: str) -> Any:
    return importlib.import_module(MODULES[name])
