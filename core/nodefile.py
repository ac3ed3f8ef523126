"""A node file: TOML, checked, with errors that name the file, the line and the key."""

import os
import re
import tomllib
from pathlib import Path

import msgspec

from dormouse.core import exposure
from dormouse.core.config import LEAST_NBYTES, NodeConfig, StartSection, parse_nbytes
from dormouse.schemas import policy
from dormouse.schemas.errors import ConfigError


def load_config(path: str | Path) -> NodeConfig:
    """Read a TOML file. Raises ConfigError naming the file, the line and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; write the node file as TOML") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give the path of a node file, or none for the defaults"
        ) from error
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # also of a number with thousands of digits
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return parse_config(tree, str(path), text)


def parse_config(tree: object, origin: str = "configuration", text: str = "") -> NodeConfig:
    """Check a decoded tree. Raises ConfigError."""
    try:
        config = msgspec.convert(tree, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}{_line(text, str(error))}: {error}{_cure(str(error))}") from error
    if config.start != StartSection():
        raise ConfigError(f"{origin}{_line(text, '`start`')}: [start] is for the options of `dormouse up` alone")
    for label, value in (
        ("gpu.memory", config.gpu.memory),
        ("gpu.link", config.gpu.link),
        ("gpu.switch", config.gpu.switch),
        ("gpu.peer", config.gpu.peer),
        ("gpu.activations", config.gpu.activations),
        ("limits.host", config.limits.host),
        ("limits.disk", config.limits.disk),
    ):
        if value:
            _checked(origin, text, label, value)
    for label in ("memory", "scratch"):
        _checked(origin, text, f"sandbox.{label}", getattr(config.sandbox, label))
    for label in ("body", "bodies", "response", "stream", "log"):
        _checked(origin, text, f"limits.{label}", getattr(config.limits, label))
    if parse_nbytes(config.limits.bodies) < parse_nbytes(config.limits.body):
        raise ConfigError(
            f"{origin}{_line(text, '`bodies`')}: limits.bodies is {config.limits.bodies}, less than one body may have "
            f"(limits.body is {config.limits.body}); write more, at least a few of them"
        )
    _checked(origin, text, "record.limit", config.record.limit)
    _checked(origin, text, "limits.folder", config.limits.folder)
    for path in config.sandbox.read:
        if not path.startswith("/") or not os.path.normpath(path).strip("/"):
            line = _line(text, "`read`")
            raise ConfigError(f"{origin}{line}: sandbox.read has {path!r}; write absolute paths of directories, not /")
    for label, value, choices in (
        ("gpu.device", config.gpu.device, ("auto", "cuda", "host")),
        ("gpu.pool", config.gpu.pool, ("auto", "regions", "pages", "buddy")),
        ("sandbox.cgroups", config.sandbox.cgroups, ("auto", "off")),
        ("node.tenants", config.node.tenants, ("one", "many")),
        ("node.sharing", config.node.sharing, ("none", "tenant", "node")),
    ):
        if value not in choices:
            line = _line(text, f"`{label.split('.')[1]}`")
            raise ConfigError(f"{origin}{line}: {label} is {value!r}; write {' or '.join(choices)}")
    for label, trouble in exposure.slips(config.node):
        raise ConfigError(f"{origin}{_line(text, f'`{label}`')}: node.{label} {trouble}")
    least = LEAST_NBYTES.get(config.gpu.pool, 0)
    if config.gpu.memory and parse_nbytes(config.gpu.memory) < least:
        raise ConfigError(
            f"{origin}{_line(text, '`memory`')}: gpu.memory is {config.gpu.memory}, in which a pool of the kind "
            f"{config.gpu.pool} can keep nothing; write at least {least >> 20}MiB, or another gpu.pool"
        )
    try:
        policy.checked(config.schedule, "schedule")
    except ConfigError as error:
        said = str(error).removeprefix("schedule: ")
        raise ConfigError(f"{origin}{_line(text, f'`{said.split()[0]}`')}: schedule.{said}") from None
    if not 0 <= config.gpu.count <= 64:
        raise ConfigError(
            f"{origin}{_line(text, '`count`')}: gpu.count is {config.gpu.count}; write a number from 0 to 64"
        )
    for label, number in (("processes", 8), ("open_files", 32)):
        if getattr(config.sandbox, label) < number:
            raise ConfigError(
                f"{origin}{_line(text, f'`{label}`')}: sandbox.{label} is {getattr(config.sandbox, label)}; write at "
                f"least {number}"
            )
    if not 0 <= config.sandbox.cpus <= 4096:
        raise ConfigError(
            f"{origin}{_line(text, '`cpus`')}: sandbox.cpus is {config.sandbox.cpus}; write a number from 0 (no limit)"
        )
    for entry in config.gpu.operators:
        if not re.fullmatch(r"[A-Za-z_]\w*(:[A-Za-z_][\w.]*)?", entry):
            raise ConfigError(
                f"{origin}{_line(text, '`operators`')}: gpu.operators has {entry!r}; write a library's "
                'namespace, such as "mylib", or with the module that defines its operators, "mylib:package.module"'
            )
    for label, count, least in (
        ("folder_files", config.limits.folder_files, 1),
        ("extra_instances", config.limits.extra_instances, 0),
        ("extra_idle_ms", config.limits.extra_idle_ms, 1),
        ("connections", config.limits.connections, 1),
        ("header_ms", config.limits.header_ms, 1),
        ("body_ms", config.limits.body_ms, 1),
    ):
        if count < least:
            line = _line(text, f"`{label}`")
            raise ConfigError(f"{origin}{line}: limits.{label} is {count}; write at least {least}")
    if not 0 <= config.node.port <= 65535:
        raise ConfigError(
            f"{origin}{_line(text, '`port`')}: node.port is {config.node.port}; write a number from 0 to 65535"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", config.node.name):
        raise ConfigError(f"{origin}{_line(text, '`name`')}: node.name may have 1 to 32 letters, digits, '-' and '_'")
    return config


def _checked(origin: str, text: str, label: str, value: str) -> None:
    try:
        parse_nbytes(value)
    except ConfigError as error:
        raise ConfigError(f"{origin}{_line(text, '`' + label.split('.')[1] + '`')}: {label}: {error}") from None


def _cure(message: str) -> str:
    """What there is instead of an unknown key."""
    if "unknown field" not in message:
        return ""
    section = re.search(r"`\$\.(\w+)`$", message)
    fields = {field.name: field.type for field in msgspec.structs.fields(NodeConfig)}
    known = msgspec.structs.fields(fields[section[1]]) if section else msgspec.structs.fields(NodeConfig)
    return f"; write some of {', '.join(field.encode_name for field in known if field.type is not StartSection)}"


def _line(text: str, message: str) -> str:
    """``:LINE`` of the key that a message names, if it can be found."""
    names = re.findall(r"`\$?\.?([A-Za-z0-9_.]+)`", message)
    for name in names:
        key = name.split(".")[-1]
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(rf"\s*(\[\s*{re.escape(key)}\s*\]|{re.escape(key)}\s*=)", line):
                return f":{number}"
    return ""
