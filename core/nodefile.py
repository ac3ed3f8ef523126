"""Reads and checks a node file: TOML, with errors that name file, line and key."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.core import exposure, nottoml, tenants
from dormouse.core.config import MIN_NBYTES, YEAR_MS, NodeConfig, StartSection, TenantSection, parse_nbytes
from dormouse.schemas import policy
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import ISOLATIONS

_MAYBE_SIZES: Final = (
    "gpu.memory", "gpu.link", "gpu.switch", "gpu.peer", "gpu.activations", "limits.host", "limits.disk", "limits.quota",
    "limits.tenant_folders",
    "environments.tenant_store",
)  # fmt: skip
_SIZES: Final = (
    "sandbox.memory", "sandbox.scratch", "limits.body", "limits.bodies", "limits.response", "limits.stream",
    "limits.log", "record.limit", "limits.folder", "jobs.store", "jobs.tenant_store",
    "environments.size", "environments.store",
)  # fmt: skip
_CHOICES: Final = {
    "gpu.device": ("auto", "cuda", "host"),
    "gpu.templates": ("on", "off", "check"),
    "gpu.graphs": ("auto", "on", "off"),
    "gpu.pool": ("auto", "regions", "pages", "buddy"),
    "sandbox.cgroups": ("auto", "off"),
    "node.tenants": ("one", "many"),
    "node.sharing": ("none", "tenant", "node"),
    "node.isolation": ISOLATIONS,
}
_NUMBERS: Final = {
    "gpu.count": (0, 64, "a number from 0 to 64"),
    "gpu.seat_idle_ms": (1, inf, "at least 1"),
    "sandbox.processes": (8, inf, "at least 8"),
    "sandbox.open_files": (32, inf, "at least 32"),
    "sandbox.cpus": (0, 4096, "a number from 0 (no limit)"),
    "limits.folder_files": (1, inf, "at least 1"),
    "limits.tenant_functions": (1, inf, "at least 1"),
    "limits.versions": (0, 1000, "a number from 0 to 1000"),
    "limits.loads": (1, inf, "at least 1"),
    "limits.timeout_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "limits.load_timeout_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "limits.compute_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "limits.extra_instances": (0, inf, "at least 0"),
    "limits.extra_idle_ms": (1, inf, "at least 1"),
    "limits.sessions": (0, inf, "at least 0"),
    "limits.yield_ms": (1, inf, "at least 1"),
    "limits.heartbeat_ms": (1, inf, "at least 1"),
    "limits.connections": (1, inf, "at least 1"),
    "limits.header_ms": (1, inf, "at least 1"),
    "limits.body_ms": (1, inf, "at least 1"),
    "jobs.keep_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "jobs.wait_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "jobs.tenant_jobs": (1, 1_000_000, "a number from 1 to 1000000"),
    "tracing.share": (0, 1, "a number from 0 to 1"),
    "environments.time_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "environments.idle_ms": (1, YEAR_MS, f"a number from 1 to {YEAR_MS}, a year"),
    "node.port": (0, 65535, "a number from 0 to 65535"),
}


def load_config(path: str | Path) -> NodeConfig:
    """Read a TOML file. Raises ConfigError naming the file, the line and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; write the node file as TOML") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give the path of a node file, or none for the defaults"
        ) from error
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise ConfigError(f"{path}: not TOML: {nottoml.cause(text, error)}") from error
    return parse_config(tree, str(path), text)


def named_config(name: str) -> NodeConfig:
    """That of a node of this name which has no file. Raises ConfigError."""
    return parse_config({"node": {"name": name}}, f"--node {name}")


def parse_config(tree: object, origin: str = "configuration", text: str = "") -> NodeConfig:
    """Check a decoded tree. Raises ConfigError."""
    try:
        config = msgspec.convert(tree, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}{_line(text, str(error))}: {error}{_cure(str(error))}") from error
    for slip in _slips(config):
        key = slip.split()[0].strip("[]:")
        raise ConfigError(f"{origin}{_line(text, f'`{key}`')}: {slip}")
    return config


def _slips(config: NodeConfig) -> Iterator[str]:
    """Mistakes, each beginning with its key. The first is reported, and later checks count on it."""
    if config.start != StartSection():
        yield "[start] is for the options of `dormouse up` alone"
    for label in (*_MAYBE_SIZES, *_SIZES):
        value = attrgetter(label)(config)
        try:
            if value or label in _SIZES:
                parse_nbytes(value)
        except ConfigError as error:
            yield f"{label}: {error}"
    gpu, limits = config.gpu, config.limits
    if parse_nbytes(limits.bodies) < parse_nbytes(limits.body):
        yield (
            f"limits.bodies is {limits.bodies}, less than one body may have (limits.body is {limits.body}); write "
            "more, at least a few of them"
        )
    for path in config.sandbox.read:
        if not path.startswith("/") or not os.path.normpath(path).strip("/"):
            yield f"sandbox.read has {path!r}; write absolute paths of directories, not /"
    for key in ("run", "state"):
        if (path := getattr(config.node, key)) and not path.startswith("/"):
            yield f"node.{key} is {path!r}; write an absolute path, because a node runs in no particular directory"
    if (adapters := config.node.adapters) and (not adapters.startswith("/") or not os.path.isdir(adapters)):
        yield f"node.adapters is {adapters!r}; write the absolute path of a folder that is there"
    if (key := config.node.secrets_key) and (not key.startswith("/") or not os.path.isdir(os.path.dirname(key))):
        yield f"node.secrets_key is {key!r}; write the absolute path of a file, in a folder that is there"
    for label, choices in _CHOICES.items():
        if (value := attrgetter(label)(config)) not in choices:
            yield f"{label} is {value!r}; write {' or '.join(choices)}"
    for key, trouble in exposure.slips(config.node):
        yield f"node.{key} {trouble}"
    least = MIN_NBYTES.get(gpu.pool, 0)
    if gpu.memory and parse_nbytes(gpu.memory) < least:
        yield (
            f"gpu.memory is {gpu.memory}, in which a pool of the kind {gpu.pool} can keep nothing; write at least "
            f"{least >> 20}MiB, or another gpu.pool"
        )
    yield from tenants.slips(config.tenants, config.node.tenants == "many")
    try:
        policy.checked(config.schedule, "schedule")
    except ConfigError as error:
        yield f"schedule.{str(error).removeprefix('schedule: ')}"
    for label, (low, high, wanted) in _NUMBERS.items():
        if not low <= (value := attrgetter(label)(config)) <= high:
            yield f"{label} is {value}; write {wanted}"
    if (endpoint := config.tracing.endpoint) and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", endpoint):
        yield f"tracing.endpoint is {endpoint!r}; write http:// or https://, a host and a port"
    try:
        _ = config.environments.reached
    except ValueError as error:
        yield (
            'environments.index, find_links and hosts name hosts, like "files.example.org" or '
            f'"files.example.org:8443"; one of them does not ({error})'
        )
    for entry in gpu.operators:
        if not re.fullmatch(r"[A-Za-z_]\w*(:[A-Za-z_][\w.]*)?", entry):
            yield (
                f'gpu.operators has {entry!r}; write a library\'s namespace, such as "mylib", or with the module that '
                'defines its operators, "mylib:package.module"'
            )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", config.node.name):
        yield "node.name may have 1 to 32 letters, digits, '-' and '_'"


def _cure(message: str) -> str:
    """A suggestion in place of an unknown key, or of a value of another type."""
    if "unknown field" not in message:
        return _typed(message)
    section = re.search(r"`\$\.(\w+)(\[\.\.\.\])?`$", message)
    fields = {field.name: field.type for field in msgspec.structs.fields(NodeConfig)}
    kind = NodeConfig if section is None else TenantSection if section[2] else fields[section[1]]
    known = _keys(kind)
    found = re.search(r"unknown field `([^`]+)`", message)
    name = "" if found is None else found[1]
    if near := get_close_matches(name, known, 1):
        return f"; did you mean {near[0]}? There are {', '.join(known)}"
    if places := [f"[{each}]" for each, type_ in fields.items() if type_ is not StartSection and name in _keys(type_)]:
        return f"; it belongs into {' or '.join(places)}"
    return f"; write some of {', '.join(known)}"


def _typed(message: str) -> str:
    """The form of a value, by its key and its default."""
    found = re.search(r"at `\$\.([a-z_]+)\.([a-z_]+)(\[\w+\])?`$", message)
    if found is None or not hasattr(section := getattr(NodeConfig(), found[1], None), found[2]):
        return ""
    label, default = f"{found[1]}.{found[2]}", getattr(section, found[2])
    if isinstance(default, bool):
        return "; write true or false"
    if label in (*_MAYBE_SIZES, *_SIZES):
        return '; write a size in quotes, such as "4GiB"'
    if isinstance(default, tuple | list):
        return '; write a list of texts, such as ["one", "two"]'
    if isinstance(default, str):
        return f"; write a text in quotes{f', such as {json.dumps(default)}' if default else ''}"
    return f"; write a number{' of milliseconds' if label.endswith('_ms') else ''}, such as {default}"


def _keys(kind: Any) -> list[str]:
    """None of what is no section."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return []
    return [field.encode_name for field in msgspec.structs.fields(kind) if field.type is not StartSection]


def _line(text: str, message: str) -> str:
    """``:LINE`` of the key that a message names, if it can be found."""
    names = re.findall(r"`\$?\.?([A-Za-z0-9_.]+)(?:\[\w+\])?`", message)
    for name in names:
        *within, key = name.split(".")
        section = re.compile(rf"\s*\[\s*{re.escape('.'.join(within))}\s*\]") if len(within) > 1 else None
        for number, line in enumerate(text.splitlines(), 1):
            if section is not None:
                section = None if section.match(line) else section
                continue
            if re.match(rf"\s*(\[\s*{re.escape(key)}\s*\]|{re.escape(key)}\s*=)", line):
                return f":{number}"
    return ""
