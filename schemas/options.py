"""Options of a deploy, declared once for the command line, the keys of ``dormouse.toml`` and of a query over HTTP, and
a node's checks. Imports nothing: `dormouse --help` pays for it.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

Value = str | int | float | bool

Kind = Literal["", "duration", "size", "variables", "secrets", "names"]
Of = Literal["functions", "models", "command"]
"""``command``: what is deployed. It is said each time, and no option that a function keeps."""


def _set(
    default: Any, help: str, *, kind: Kind = "", of: Of = "functions", unset: str = "", metavar: str | None = None
) -> Any:
    """``unset``: the meaning of the default, where that is no value."""
    told = {"help": help, "kind": kind, "of": of, "unset": unset, "metavar": metavar}
    return field(default_factory=dict, metadata=told) if default == {} else field(default=default, metadata=told)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a function's owner; durations as ``"80ms"`` or a number of milliseconds, sizes as ``"1GiB"``."""

    deadline: str | int = _set(1000, "Wanted latency, e.g. 80ms.", kind="duration")
    percentile: float = _set(98.0, "Per cent of requests that shall meet it.")
    timeout: str | int = _set(60_000, "After which a request fails and is stopped.", kind="duration")
    load_timeout: str | int = _set(300_000, "After which load() fails without progress.", kind="duration")
    tenant: str = _set("default", "Whose function it is.")
    max_queue: int = _set(256, "Requests that may wait.")
    quota: str | int = _set(1 << 30, "How much the model may grow after load().", kind="size")
    idempotent: bool = _set(False, "A request may be run again when a GPU's process dies under it.")
    stateless: bool = _set(False, "No request changes what later ones see: several may run at once.")
    max_instances: int = _set(0, "How many of a stateless function at once.", unset="one per GPU")
    concurrency: int = _set(1, "Requests in one instance, of an async handle().")
    batch: int = _set(0, "Requests of one handle_batch(), at most.", unset="one by one")
    batch_wait: str | int = _set(0, "How long a batch may wait for more.", kind="duration")
    eager: bool = _set(False, "GPUs are given its operations one by one, and not as CUDA graphs.")
    env: dict[str, str] = _set(
        {}, "A variable that it sees. Several may be given.", kind="variables", metavar="NAME=VALUE"
    )
    requirements: str = _set("", "Libraries of its own.", unset="requirements.txt beside it")
    allow_build: bool = _set(False, "Build those that have no wheel, where the node allows it.")
    network: bool = _set(False, "It has the machine's network, where the node allows it.")
    secrets: tuple[str, ...] = _set((), "A secret that it sees as a variable.", kind="secrets", metavar="NAME")
    call: tuple[str, ...] = _set(
        (), "A function that its code may call. Several may be given.", kind="names", metavar="NAME"
    )
    embedding: bool = _set(False, "It makes embeddings of texts (/v1/embeddings), not text.", of="models")
    convert: bool = _set(False, "Also take weights that are pickled: a sandbox reads them.", of="models")
    context: int = _set(0, "Its longest sequence, in tokens.", of="models", unset="the model's own")
    dtype: str = _set("auto", "Its numbers: auto, bfloat16 or float32.", of="models")
    generation_config: str = _set(
        "auto", "What its files say of sampling holds where requests say nothing (auto), or not (none).", of="models"
    )
    ttft: str | int = _set(500, "Wanted time to its first token.", kind="duration", of="models")
    tpot: str | int = _set(60, "Wanted time of each further token.", kind="duration", of="models")
    isolation: str = _set(
        "",
        "Equal models of a tenant share a process on a GPU (tenant), or not (function).",
        of="models",
        unset="the node's",
    )
    llm: bool = _set(False, "The folder is a language model's.", of="command")
    base: str = _set("", "The folder is a LoRA adapter of this language model, which is deployed.", of="command")


OPTIONS: Final = {each.name: each for each in fields(Settings)}
KEPT: Final = tuple(name for name, each in OPTIONS.items() if each.metadata["of"] != "command")
PREFIX: Final = {"env": "env.", "secrets": "secret.", "call": "call."}
"""Of what there may be several of: each variable, secret and name is kept, changed and reset for itself."""

ALL: Final = "all"
"""To reset: whatever the function has had."""

FILE: Final = "dormouse.toml"
FILE_NBYTES: Final = 16 << 10

_UNITS: Final[dict[str, tuple[tuple[int, str], ...]]] = {
    "duration": ((3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")),
    "size": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}


def written(name: str, value: object) -> str:
    """A value of an option as somebody would write it."""
    kind = OPTIONS[name].metadata["kind"]
    if kind in _UNITS and isinstance(value, int):
        unit, word = next(((unit, word) for unit, word in _UNITS[kind] if value and value % unit == 0), (1, ""))
        return f"{value // unit}{word}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def standing(name: str) -> str:
    """The default, for people."""
    each = OPTIONS[name]
    return str(each.metadata["unset"]) or written(name, each.default)
