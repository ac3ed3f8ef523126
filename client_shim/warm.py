"""What the zygote imports, so that a function's own imports find it done.

Chosen by measurement: what the first lines of functions import; what else is a setting, by default the modules of
`transformers` that every model needs. A model's own module (``transformers.models.bert``) takes 5 to 50 ms and is left
to the instance that wants it.
"""

import importlib
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from dormouse.client_shim import install, linux

ALWAYS: Final = (
    "copy",
    "dataclasses",
    "functools",
    "json",
    "math",
    "numpy",
    "orjson",
    "torch",
    "torch.nn.functional",
    "torch.nn.utils.parametrize",
    "dormouse.client_shim.runner",
)


def import_everything(if_installed: Iterable[str]) -> None:
    """Import, and prepare the shim; runs no operation. Raises ImportError only for what Dormouse itself needs.

    ``if_installed`` is ``[sandbox] warm`` of the node's configuration.
    """
    linux.limit_malloc_arenas(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ALWAYS:
        importlib.import_module(name)
    for name in if_installed:
        with suppress(ImportError):
            importlib.import_module(name)
    install.prepare()
