"""Removes functions without a node, for `dormouse rm`: in the state directory, under the lock that a node would have.

The files of their models are removed when the next node starts, which keeps those of deployed functions only.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dormouse.controller.catalogue import CatalogueFile
from dormouse.core.directories import lock, open_directory, remove_tree
from dormouse.core.migrations import migrate
from dormouse.core.paths import StatePaths
from dormouse.schemas.errors import ConfigError


def remove(directory: Path, names: Sequence[str]) -> list[str]:
    """Remove those of ``names`` that are deployed in this state directory; returns them, removed for good.

    Raises ConfigError (a node runs on it, or it cannot be read), NotWritten, OSError.
    """
    fd = open_directory(directory, "state directory", None, links=True)
    if fd is None:
        return []
    try:
        lock(fd, directory, "state directory")
        state = StatePaths(directory)
        if not state.catalogue.exists():
            return []
        migrate(state)
        catalogue = CatalogueFile(state.catalogue)
        try:
            deployed = {name for name, _ in catalogue.versions()}
            removed = [name for name in dict.fromkeys(names) if name in deployed]
            left = [spec for spec in catalogue.functions() if spec.name not in removed]
            if adapters := [spec.name for spec in left if spec.llm is not None and spec.llm.base in removed]:
                raise ConfigError(
                    f"{', '.join(adapters[:10])} have adapters over what is to be removed: remove these too"
                )
            for name in removed:
                catalogue.remove(name)
                remove_tree(str(state.functions / name))
                for end in (".log", ".log.1", ".log.times", ".log.1.times"):
                    state.function_log(name).with_suffix(end).unlink(missing_ok=True)
            return removed
        finally:
            catalogue.close()
    finally:
        os.close(fd)
