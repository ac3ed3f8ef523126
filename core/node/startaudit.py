"""The audit log's line of a node's start: the user, the kind of start, and the settings that have changed since the
start before. Owns the file that keeps those.
"""

import os
import re
from contextlib import suppress
from typing import Any, Final

import msgspec

from dormouse.core.audit import Audit
from dormouse.core.config import NodeConfig
from dormouse.core.paths import StatePaths
from dormouse.core.users import user_name
from dormouse.core.version import this_version
from dormouse.core.wholefile import write_whole

_PASSWORD: Final = re.compile(r"//[^/@\s]*@")
"""Of an address: an index may be named with one."""


def started(state: StatePaths, config: NodeConfig, act: str) -> None:
    """Raises OSError, ConfigError."""
    now = settings(config)
    before: dict[str, Any] = {}
    with suppress(FileNotFoundError, msgspec.MsgspecError):  # the first start, or a file that was damaged
        before = msgspec.json.decode(state.settings.read_bytes(), type=dict[str, Any])
    known = [key for key in now if before and before.get(key) != now[key]]
    changes = {key: [before.get(key), now[key]] for key in known}
    more = {"uid": os.getuid(), "version": this_version(), "settings": changes}
    Audit(state.audit).write(user_name(), "this machine", act, config.node.name, "ok", **more)
    with suppress(OSError):  # on a full disk a node serves what it has; the next start tells these changes again
        write_whole(state.settings, msgspec.json.format(msgspec.json.encode(now)))


def settings(config: NodeConfig) -> dict[str, Any]:
    """Flat, by the names that a node file has for them; no password is told."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    del tree["start"]
    flat = {f"{part}.{key}": value for part, section in tree.items() for key, value in section.items()}
    hidden: dict[str, Any] = msgspec.json.decode(_PASSWORD.sub("//...@", msgspec.json.encode(flat).decode()))
    return hidden
