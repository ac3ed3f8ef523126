"""What the zygote imports, so that a function's own imports find it done.

Chosen by measurement: what the first lines of functions import, and of `transformers` the modules that every model
needs. A model's own module (``transformers.models.bert``) takes 5 to 50 ms and is left to the instance that wants it.
"""

import importlib
import os
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
IF_INSTALLED: Final = (
    "safetensors.torch",
    "tokenizers",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def import_everything() -> None:
    """Import, and prepare the shim; runs no operation. Raises ImportError only for what Dormouse itself needs."""
    linux.limit_malloc_arenas(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ALWAYS:
        importlib.import_module(name)
    for name in IF_INSTALLED:
        with suppress(ImportError):
            importlib.import_module(name)
    install.prepare()
