"""Secrets of tenants: ``STATE/secrets.json``, each value sealed with the node's key. Owns the file's format.

::

    [{"tenant", "name", "sealed": base64 of (nonce of 12 bytes | AES-256-GCM of the value), "set_s", "set_by"}, ...]

The tenant and the name are authenticated with the value, so that nobody who can write the file can give a line another
one's value. The key is 32 random bytes in a file of its own, which a copy of the state directory may leave out. One
process writes: the router. Permissions, and the choice of secrets for a function, are not decided here.
"""

import base64
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.core.times import utc
from dormouse.core.wholefile import write_whole
from dormouse.schemas.errors import ConfigError

MIN_NBYTES: Final = 4
"""A shorter secret stands in any text by chance: it could not be masked."""

MAX_NBYTES: Final = 32 << 10
"""Of a secret, and of a function's variables together: they travel in one packet."""

MAX_SECRETS: Final = 1000
"""Of a tenant."""

MAX_TENANT_NBYTES: Final = 1 << 20
"""Of all values of a tenant, as they are sealed: the whole file is written with each change, and is in memory."""

KEY_NBYTES: Final = 32
NONCE_NBYTES: Final = 12
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""A secret's name: it is that of an environment variable, too."""

_Stamp = tuple[int, int, int]


class SealedSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    tenant: str
    name: str
    sealed: str
    set_s: float  # Unix time
    set_by: str

    def shown(self) -> dict[str, Any]:
        """The secret as people may see it: all but the value."""
        return {"name": self.name, "tenant": self.tenant, "set": utc(self.set_s), "set_by": self.set_by}


def checked_variable(name: str, what: str) -> str:
    """Raises ConfigError for what is no name of a variable."""
    if not VARIABLE.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} cannot be {what}: use up to 64 letters, digits and '_', not a digit first")
    return name


class SecretFile:
    """All of them, as the file has them: a change is durable when it returns. A fault of the file or its key is a
    ConfigError for the caller who wants a secret, and no reason for a node not to start. It may be changed by one
    thread while another asks.
    """

    def __init__(self, path: Path, key: Path) -> None:
        self._path, self._key = path, key
        self._known: tuple[_Stamp, Sequence[SealedSecret]] | None = None  # what the file had then

    def all(self) -> Sequence[SealedSecret]:
        """Read only if somebody else has changed the file: the router's loop asks. Raises ConfigError."""
        known = self._known
        try:
            if known is not None and known[0] == _stamp(self._path):
                return known[1]
            with self._path.open("rb") as file:
                stamp = _stamp(file.fileno())
                found = msgspec.json.decode(file.read(), type=tuple[SealedSecret, ...])
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; see that the node's user can read it") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: {error}; restore it, or move it away and set the secrets anew") from error
        self._known = stamp, found
        return found

    def names(self, tenant: str) -> set[str]:
        """Raises ConfigError."""
        return {each.name for each in self.all() if each.tenant == tenant}

    def values(self, tenant: str, names: Iterable[str]) -> dict[str, str]:
        """Raises ConfigError, which names a secret that is not there."""
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        found = {each.name: each for each in self.all() if each.tenant == tenant}
        if missing := [name for name in wanted if name not in found]:
            raise ConfigError(unknown(missing[0], tenant))
        key = self._read_key()
        return {name: _opened(key, found[name], self._key) for name in wanted}

    def set(self, tenant: str, name: str, value: str, by: str, now_s: float) -> None:
        """Raises ConfigError, OSError."""
        checked_variable(name, "a secret's name, which is that of an environment variable")
        if "\0" in value or not MIN_NBYTES <= len(value.encode()) <= MAX_NBYTES:
            raise ConfigError(
                f"a secret is text of {MIN_NBYTES} to {MAX_NBYTES:,} bytes without NUL; this has "
                f"{len(value.encode()):,}"
            )
        kept = [each for each in self.all() if (each.tenant, each.name) != (tenant, name)]
        if sum(each.tenant == tenant for each in kept) >= MAX_SECRETS:
            raise ConfigError(f"tenant {tenant!r} has {MAX_SECRETS:,} secrets; remove some (`dormouse secret rm`)")
        sealed = _sealed(self._own_key(), tenant, name, value)
        nbytes = len(sealed) + sum(len(each.sealed) for each in kept if each.tenant == tenant)
        if nbytes > MAX_TENANT_NBYTES:
            raise ConfigError(
                f"the secrets of tenant {tenant!r} would have {nbytes:,} bytes, and may have {MAX_TENANT_NBYTES:,}; "
                "remove some (`dormouse secret rm`)"
            )
        self._write([*kept, SealedSecret(tenant=tenant, name=name, sealed=sealed, set_s=now_s, set_by=by)])

    def remove(self, tenant: str, name: str) -> bool:
        """False if there is none. Raises ConfigError, OSError."""
        found = self.all()
        kept = [each for each in found if (each.tenant, each.name) != (tenant, name)]
        if len(kept) < len(found):
            self._write(kept)
        return len(kept) < len(found)

    def _read_key(self) -> bytes:
        """Raises ConfigError."""
        try:
            key = self._key.read_bytes()
        except OSError as error:
            raise ConfigError(f"the key of the node's secrets, {self._key}: {error.strerror}; restore it") from error
        if len(key) != KEY_NBYTES:
            raise ConfigError(f"{self._key} has {len(key)} bytes and is no key of secrets; restore it")
        return key

    def _own_key(self) -> bytes:
        """Made with the first secret. Raises ConfigError, OSError."""
        if not self._key.exists() and not self._path.exists():
            write_whole(self._key, secrets.token_bytes(KEY_NBYTES))
        return self._read_key()

    def _write(self, found: list[SealedSecret]) -> None:
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(found)))
        self._known = _stamp(self._path), found


def _stamp(file: Path | int) -> _Stamp:
    """Another one for a file that has changed, or who may read it. Raises OSError."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_ctime_ns


def unknown(name: str, tenant: str) -> str:
    """The error text for a missing secret."""
    return f"tenant {tenant!r} has no secret {name!r}; set it with `dormouse secret set {name} --tenant {tenant}`"


def _sealed(key: bytes, tenant: str, name: str, value: str) -> str:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # few nodes need it: 30 ms

    nonce = secrets.token_bytes(NONCE_NBYTES)
    data = AESGCM(key).encrypt(nonce, value.encode(), _bound(tenant, name))
    return base64.b64encode(nonce + data).decode()


def _opened(key: bytes, secret: SealedSecret, path: Path) -> str:
    """Raises ConfigError."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        data = base64.b64decode(secret.sealed, validate=True)
        nonce, data = data[:NONCE_NBYTES], data[NONCE_NBYTES:]
        return AESGCM(key).decrypt(nonce, data, _bound(secret.tenant, secret.name)).decode()
    except (InvalidTag, ValueError) as error:
        text = f"the secret {secret.name!r} was not sealed with the key in {path}; restore the key, or set it anew"
        raise ConfigError(text) from error


def _bound(tenant: str, name: str) -> bytes:
    return f"{tenant}\0{name}".encode()
