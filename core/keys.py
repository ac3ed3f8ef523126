"""API keys: their rights, their making, and the file that keeps them, ``STATE/keys.json``.

Owns the file's format. Of a key's secret only a hash is kept: it has 160 random bits, so a fast hash cannot be guessed
backwards. One process writes at a time: the router of a running node, else a command that holds the state directory's
lock. The permissions of a request with a key are decided in router/access/access.py.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from dormouse.core.names import NAME
from dormouse.core.times import utc
from dormouse.core.wholefile import write_whole
from dormouse.schemas.admin import Scope, Wish
from dormouse.schemas.errors import ConfigError

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

MAX_KEYS: Final = 10_000
MAX_REVOKED: Final = 1000
"""Revoked keys that are remembered, the latest: one at least must be, because it tells that keys were wanted."""

MAX_PATTERNS: Final = 64
MAX_RATE: Final = 1_000_000.0
SECRET_NBYTES: Final = 20
_PATTERN: Final = re.compile(r"[A-Za-z0-9*?._-]{1,63}")
_TOKEN: Final = re.compile(rb"dm_([0-9a-f]{12})_([0-9a-f]{%d})" % (2 * SECRET_NBYTES))


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tenant`` is None for all tenants, which only ``admin`` may have; ``rate_s`` is 0 for no limit."""

    id: str
    digest: str  # sha256 of the whole token, hexadecimal
    scopes: tuple[Scope, ...]
    functions: tuple[str, ...]  # patterns as a shell's
    tenant: str | None
    rate_s: float
    burst: int
    note: str
    made_s: float  # Unix time
    made_by: str
    revoked_s: float | None = None


def mint(wish: Wish, made_by: str, now_s: float) -> tuple[Key, str]:
    """A new key, and its token, which is kept nowhere. Raises ConfigError naming what is wrong."""
    if not wish.scopes:
        raise ConfigError(f"a key needs a scope; write some of {', '.join(SCOPES)}")
    if not 1 <= len(wish.functions) <= MAX_PATTERNS:
        raise ConfigError(f"a key names 1 to {MAX_PATTERNS} functions or patterns; '*' is all")
    for pattern in wish.functions:
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(f"{pattern!r} is no function's name and no pattern; write such as chat or chat-*")
    if wish.tenant is not None and not NAME.fullmatch(wish.tenant):
        raise ConfigError(f"{wish.tenant!r} cannot be a tenant's name; use 1 to 63 letters, digits, '.', '_' and '-'")
    if not 0 <= wish.rate_s <= MAX_RATE or not 0 <= wish.burst <= MAX_RATE:
        raise ConfigError(f"rate and burst are numbers from 0, which is no limit, to {MAX_RATE:,.0f}")
    if wish.burst and not wish.rate_s:
        raise ConfigError("a burst needs a rate; give --rate, in requests per second")
    if len(wish.note) > 200 or not wish.note.isprintable():
        raise ConfigError("a key's note is one line of at most 200 characters")
    token = f"dm_{secrets.token_hex(6)}_{secrets.token_hex(SECRET_NBYTES)}"
    key = Key(
        id=token.split("_")[1],
        digest=_digest(token.encode()),
        scopes=tuple(scope for scope in SCOPES if scope in wish.scopes),
        functions=wish.functions,
        tenant=wish.tenant or (None if "admin" in wish.scopes or {*wish.scopes} == {"metrics"} else "default"),
        rate_s=wish.rate_s,
        burst=wish.burst or max(1, round(wish.rate_s)) if wish.rate_s else 0,
        note=wish.note,
        made_s=now_s,
        made_by=made_by,
    )
    return key, token


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def shown(key: Key) -> dict[str, Any]:
    """A key as people may see it: all but its hash."""
    return {
        "id": key.id,
        "scopes": list(key.scopes),
        "functions": list(key.functions),
        "tenant": key.tenant,
        "rate_s": key.rate_s or None,
        "burst": key.burst or None,
        "note": key.note,
        "made": utc(key.made_s),
        "made_by": key.made_by,
        "revoked": None if key.revoked_s is None else utc(key.revoked_s),
    }


class KeyFile:
    """All keys by id, oldest first, as the file has them: every change is durable when it returns."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read: without it nobody can say who may do what."""
        self._path = path
        self._by_id: dict[str, Key] = {}
        try:
            found = msgspec.json.decode(path.read_bytes(), type=list[Key])
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; see that the node's user can read it") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}; restore it from a copy, or move it away and make new keys") from error
        self._by_id = {key.id: key for key in found}

    def all(self) -> list[Key]:
        return list(self._by_id.values())

    @property
    def wanted(self) -> bool:
        """There was a key once: who made one does not want requests without any, also when it is revoked."""
        return bool(self._by_id)

    @property
    def usable(self) -> bool:
        return any(key.revoked_s is None for key in self._by_id.values())

    def find(self, token: bytes) -> Key | None:
        """The key of this token, unless it is revoked. Takes the same time whichever part of the secret is wrong."""
        match = _TOKEN.fullmatch(token)
        key = self._by_id.get(match[1].decode()) if match is not None else None
        if key is None or not hmac.compare_digest(key.digest, _digest(token)) or key.revoked_s is not None:
            return None
        return key

    def holds(self, name: str) -> bool:
        """Whether there is a key with this id that is not revoked."""
        key = self._by_id.get(name)
        return key is not None and key.revoked_s is None

    def create(self, wish: Wish, made_by: str, now_s: float) -> tuple[Key, str]:
        """A new key and its token, which can be read nowhere afterwards. Raises ConfigError, OSError."""
        if sum(key.revoked_s is None for key in self._by_id.values()) >= MAX_KEYS:
            raise ConfigError(f"there are {MAX_KEYS:,} keys; revoke some (`dormouse keys revoke ID`)")
        key, token = mint(wish, made_by, now_s)
        self._write([*self._by_id.values(), key])
        return key, token

    def revoke(self, name: str, now_s: float) -> Key | None:
        """The key as it now is; None if there is none with this id. Raises OSError."""
        key = self._by_id.get(name)
        if key is not None and key.revoked_s is None:
            key = msgspec.structs.replace(key, revoked_s=now_s)
            self._write([key if each.id == name else each for each in self._by_id.values()])
        return key

    def _write(self, keys: Sequence[Key]) -> None:
        revoked = sorted((key for key in keys if key.revoked_s is not None), key=lambda key: key.revoked_s or 0.0)
        forgotten = {key.id for key in revoked[:-MAX_REVOKED]}
        kept = [key for key in keys if key.id not in forgotten]
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(kept)))
        self._by_id = {key.id: key for key in kept}
