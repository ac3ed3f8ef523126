"""Choice of the executors' kind of pool where the node file says "auto": ``pages`` from the first language model on.

Runtimes of language models can be kept apart in ``pages`` only, and on CUDA devices there is no other way for them to
reach a pool at all. Before that it is ``regions``: mapping granules and their rounding have a price, and nobody
needs them yet. Executors read the configuration when they start, so one that has another pool is to be replaced.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dormouse.core.config import NodeConfig
from dormouse.core.startup import keep_node_config
from dormouse.schemas import messages as m


def chosen(config: NodeConfig, functions: Iterable[m.FunctionSpec], marker: Path, log: Any) -> NodeConfig:
    """The configuration from now on; it is kept for processes that start. ``marker`` tells the node's next start, so
    that its executors need not be replaced; where it cannot be written, they are.
    """
    models = any(spec.llm is not None for spec in functions)
    try:
        if models:
            marker.touch(mode=0o600)
        else:
            marker.unlink(missing_ok=True)
    except OSError as error:
        log.warning("pool_not_noted", path=str(marker), error=str(error))
    if not models or config.start.pages:
        return config  # a pool of pages stays one until the node starts anew: each change costs a pause
    config = msgspec.structs.replace(config, start=msgspec.structs.replace(config.start, pages=True))
    keep_node_config(config)
    return config


def outdated(config: NodeConfig, hellos: Mapping[int, m.Hello]) -> list[int]:
    """GPUs whose executors started by an older configuration."""
    return [gpu for gpu, hello in hellos.items() if hello.pool != config.pool]
