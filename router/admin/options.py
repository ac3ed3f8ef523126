"""Resolution of a deploy's options: those of the command, then of ``dormouse.toml``, then those that the function had.
Pure.

Options are passed flat, in the words of schemas/options.py: one entry for each, and one for each variable and secret.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, get_type_hints

import msgspec

from dormouse.core import nottoml
from dormouse.core.config import parse_duration_ms, parse_nbytes
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec
from dormouse.schemas.options import ALL, FILE, FILE_NBYTES, KEPT, OPTIONS, PREFIX, Settings, Value, written

Flat = dict[str, Value]

_TYPES: Final = get_type_hints(Settings)
_WANTED: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
_SHOWN_CHARS: Final = 80

OF_ONE_DEPLOY: Final = ("note", "check", "traffic")
"""Settings of one deploy that are no options of the function."""


@dataclass(frozen=True)
class SettledOptions:
    """``options``: what the version keeps for later ones, of which ``of_file`` are ``dormouse.toml``'s; ``kept``: those
    that neither the command nor the file has set.
    """

    settings: Settings
    options: Flat
    of_file: tuple[str, ...]
    kept: tuple[str, ...]


def flat(said: Mapping[str, Any], strict: bool = False) -> Flat:
    """As somebody has given them. Raises ConfigError."""
    found: Flat = {}
    for word, value in said.items():
        name = _named(word)
        try:
            typed = msgspec.convert(value, _TYPES[name], strict=strict)
        except msgspec.ValidationError:
            raise ConfigError(f"{word} is {_short(value)}; write {_wanted(name)}") from None
        if name == "env":
            found |= {f"{PREFIX[name]}{each}": text for each, text in typed.items()}
        elif name in PREFIX:
            found |= {f"{PREFIX[name]}{each}": True for each in typed}
        else:
            found[name] = _canonical(name, typed)
    return found


def of_file(text: str) -> Flat:
    """The options in a ``dormouse.toml``. Raises ConfigError naming the line."""
    if len(text.encode()) > FILE_NBYTES:
        raise ConfigError(f"{FILE} has more than {FILE_NBYTES:,} bytes; put what is larger into a file of its own")
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FILE}: not TOML: {nottoml.cause(text, error)}") from None
    found: Flat = {}
    for word, value in tree.items():
        try:
            found |= flat({word: value}, strict=True)
            if OPTIONS[_named(word)].metadata["of"] == "command":
                raise ConfigError(f"{word} says what is deployed, so it belongs to the command")
        except ConfigError as error:
            raise ConfigError(f"{FILE}{_line(text, word)}: {error}") from None
    return found


def settle(said: Flat, file: Flat, before: FunctionSpec | None, reset: Iterable[str] = ()) -> SettledOptions:
    """``before`` is served, and what is deployed now takes its place. Raises ConfigError."""
    words = [*reset]
    for word in words:
        if word != ALL and not word.startswith(tuple(PREFIX.values())):
            _named(word)
    if stays := [key for key in file if key not in said and _is_reset(key, [each for each in words if each != ALL])]:
        raise ConfigError(f"{stays[0]} is what {FILE} says; change it there")
    of_before = () if before is None else before.of_file
    left = {} if before is None else had(before)
    left = {key: value for key, value in left.items() if key not in of_before and not _is_reset(key, words)}
    new = {key: value for key, value in file.items() if _rival(key) not in said} | said
    kept = {key: value for key, value in left.items() if key not in new and _rival(key) not in new}
    options = {key: value for key, value in (kept | new).items() if "." in key or key in KEPT}
    return SettledOptions(_settings(kept | new), options, tuple(sorted(file.keys() - said.keys())), tuple(sorted(kept)))


def had(spec: FunctionSpec) -> Flat:
    """The options of a deployed version; for one of an older Dormouse, those that can be seen of it."""
    if spec.options is not None:
        return dict(spec.options)
    of_model = spec.llm if spec.llm is not None and not spec.llm.base else spec.embedding
    found: Flat = {
        **{f"{PREFIX['env']}{name}": value for name, value in spec.env},
        **{f"{PREFIX['secrets']}{name}": True for name in spec.secrets},
        **{name: getattr(spec, f"{name}_ms") for name in ("deadline", "timeout", "load_timeout", "batch_wait")},
        **{name: getattr(spec, name) for name in ("percentile", "tenant", "idempotent", "max_queue", "max_instances")},
        **{name: getattr(spec, name) for name in ("concurrency", "batch", "network")},
        "quota": spec.quota_nbytes,
        "stateless": spec.stateless and spec.llm is None and spec.embedding is None,
        "embedding": spec.embedding is not None,
    }
    if of_model is not None:
        found |= {name: getattr(of_model, name) for name in ("context", "dtype", "convert")}
    if spec.llm is not None:
        found |= {"ttft": spec.llm.ttft_ms, "tpot": spec.llm.tpot_ms}
    return {key: value for key, value in found.items() if value != _default(key)}


def changes(before: Flat, after: Flat) -> list[dict[str, str | None]]:
    """For people: the options that have changed. Variables have no values here."""
    rows = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _default(key)), after.get(key, _default(key))
        if old != new:
            rows.append({"option": key.replace("_", "-") if "." not in key else key, **_told(key, old, new)})
    return rows


def told(spec: FunctionSpec) -> dict[str, str]:
    """All that is not the default, as it is written; variables and secrets by their names alone."""
    return {key: "set" if "." in key else _short(written(key, value)) for key, value in had(spec).items()}


def told_in_audit(spec: FunctionSpec) -> dict[str, Any]:
    """A deployed version for the audit log: variables and secrets by their names alone."""
    more = {"version": spec.version, "content": spec.content, "note": spec.note, "options": told(spec)}
    return {key: value for key, value in more.items() if value not in ("", {})}


def kind_of(spec: FunctionSpec) -> str:
    """Those of another kind have other options."""
    return _kind(spec.llm is not None or spec.embedding is not None, "" if spec.llm is None else spec.llm.base)


def kind_said(said: Flat) -> str:
    return _kind(bool(said.get("llm")), str(said.get("base", "")))


def _kind(model: bool, base: str) -> str:
    return "adapter" if base else "model" if model else "function"


def _told(key: str, old: Value | None, new: Value | None) -> dict[str, str | None]:
    if "." in key:
        words = {PREFIX["secrets"]: "bound", PREFIX["call"]: "allowed"}
        word = words.get(f"{key.partition('.')[0]}.", "set")
        again = "another value" if old is not None and new is not None else word
        return {"old": None if old is None else word, "new": None if new is None else again}
    return {"old": _short(written(key, old)), "new": _short(written(key, new))}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _named(word: str) -> str:
    """The option that a word means. Raises ConfigError."""
    name = {"secret": "secrets"}.get(word, word.replace("-", "_"))
    if name not in OPTIONS:
        if name in OF_ONE_DEPLOY:
            text = f"{word} belongs to one deploy and is not kept; there is nothing to reset or to write into {FILE}"
            raise ConfigError(f"{text}: give --{word} to the deploy that it is for")
        near = get_close_matches(name, OPTIONS)
        known = f"did you mean {near[0].replace('_', '-')}?" if near else f"there are {', '.join(KEPT)}"
        extra = "; write variables into [env]" if name == "env_file" else ""
        raise ConfigError(f"{word[:_SHOWN_CHARS]} is no option of a deploy{extra}; {known}".replace("_", "-"))
    return name


def _wanted(name: str) -> str:
    match OPTIONS[name].metadata["kind"]:
        case "duration":
            return 'a duration such as "80ms"'
        case "size":
            return 'a size such as "1GiB"'
        case "variables":
            return "a table of names and texts"
        case "secrets":
            return 'a list of names, such as ["TOKEN"]'
        case "names":
            return 'a list of names, such as ["tokenizer"]'
    return _WANTED[_TYPES[name]]


def _canonical(name: str, value: Any) -> Value:
    """Equal for what means the same. Raises ConfigError."""
    kind = OPTIONS[name].metadata["kind"]
    try:
        if kind == "duration":
            none = OPTIONS[name].default == 0 and re.fullmatch(r"0+(ms|s|m|h)?", str(value).strip())
            return 0 if none else parse_duration_ms(value)
        found: Value = parse_nbytes(value) if kind == "size" else value
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return found


def _default(key: str) -> Value | None:
    found: Value | None = None if "." in key else OPTIONS[key].default  # type: ignore[assignment]
    return found


def _is_reset(key: str, words: Collection[str]) -> bool:
    plain = {_named(word) for word in words if word != ALL and "." not in word}
    several = next((name for name, prefix in PREFIX.items() if key.startswith(prefix)), "")
    return ALL in words or key in words or key in plain or several in plain


def _rival(key: str) -> str:
    """A variable's name may be a secret's, but not at once."""
    env, secret = PREFIX["env"], PREFIX["secrets"]
    if key.startswith(env):
        return secret + key.removeprefix(env)
    return env + key.removeprefix(secret) if key.startswith(secret) else ""


def _settings(options: Flat) -> Settings:
    env, secret = PREFIX["env"], PREFIX["secrets"]
    plain: dict[str, Any] = {key: value for key, value in options.items() if "." not in key}
    return Settings(
        **plain,
        env={key.removeprefix(env): str(value) for key, value in options.items() if key.startswith(env)},
        secrets=tuple(key.removeprefix(secret) for key in options if key.startswith(secret)),
        call=tuple(key.removeprefix(PREFIX["call"]) for key in options if key.startswith(PREFIX["call"])),
    )


def _line(text: str, word: str) -> str:
    """``:LINE`` of a key."""
    wanted = re.compile(rf"\s*\[?\s*[\"']?{re.escape(word)}[\"']?\s*[\]=.]")
    return next((f":{number}" for number, line in enumerate(text.splitlines(), 1) if wanted.match(line)), "")
