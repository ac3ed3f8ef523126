"""Fingerprints: blake3 of a segment's bytes under a key that only this node knows and that differs by sharing scope.

The store hashes its own copy, so a fingerprint is never a claim. The key keeps a tenant from learning another's
contents by guessing them; equal bytes of different scopes have different fingerprints and are kept apart.
"""

import os
import secrets
from pathlib import Path
from typing import Final

from blake3 import blake3

from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import AttachInstance

KEY_NBYTES: Final = 32
FINGERPRINT_NBYTES: Final = 32


def scope_of(sharing: str, attach: AttachInstance) -> str:
    """Within which equal tensors of this instance are kept once. ``sharing`` is ``none``, ``tenant`` or ``node``."""
    if sharing == "node":
        return "node"
    if sharing == "tenant":
        return f"tenant {attach.tenant}"
    return f"function {attach.function}" if attach.function else f"instance {attach.instance}"


class HashKeys:
    """The node's secret and the keys made from it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._keys: dict[str, bytes] = {}  # by scope

    def of(self, scope: str) -> bytes:
        key = self._keys.get(scope)
        if key is None:
            key = self._keys[scope] = blake3(scope.encode(), key=self._secret).digest()
        return key


def load_keys(path: Path) -> HashKeys:
    """The secret in ``path``, made at the first start. Raises ConfigError if it cannot be read or written."""
    try:
        if not path.exists():
            _make(path)
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; set [node] state to a directory that can be written") from error
    if len(secret) != KEY_NBYTES:
        raise ConfigError(
            f"{path} has {len(secret)} bytes, not {KEY_NBYTES}: it is damaged; restore it from a copy, or move "
            f"{path.parent} away: functions then load their models afresh"
        )
    return HashKeys(secret)


def _make(path: Path) -> None:
    """All of it or nothing, whenever the process is killed."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_bytes(KEY_NBYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)


def fingerprint(key: bytes, data: memoryview) -> bytes:
    """The fingerprint of all of ``data``. About 5 GB/s and without the interpreter lock, so it belongs in a thread."""
    return blake3(data, key=key).digest()
