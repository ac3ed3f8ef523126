"""Folders of language models for tests: judged as an instance does, without a node."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dormouse.client_shim.llm import checkpoint, loading, weights
from dormouse.client_shim.llm.folder import BadFolder, read_json, spec_of
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import DecoderSpec

Names = dict[str, str]


def examine(folder: Path, convert: bool = False, dtype: str = "auto", context: int = 0) -> tuple[DecoderSpec, Names]:
    """Everything that is judged before weights are read."""
    spec = spec_of(read_json(str(folder), "config.json"), dtype, context)
    found = checkpoint.find_weights(str(folder), convert)
    loading.check_layers(spec.layers, found)
    wanted = weights.wanted_by(weights.skeleton(spec))
    return spec, weights.matched(spec.family, wanted, found.tensors)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises((BadFolder, ConfigError)) as raised:
        examine(folder, **settings)
    return str(raised.value)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@contextmanager
def little_memory() -> Iterator[None]:
    """No more than there is, and 1 GiB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
