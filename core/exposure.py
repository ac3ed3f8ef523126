"""Decides where a node may listen: on loopback always, elsewhere only with a key and a channel that nobody reads along.

Tries the certificate, too. The permissions of callers are decided in router/access/access.py.
"""

import ipaddress
import os
import re
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from dormouse.core.keys import KeyFile
from dormouse.core.paths import StatePaths
from dormouse.schemas.errors import Unsafe

if TYPE_CHECKING:
    from dormouse.core.config import NodeConfig, NodeSection

HOST: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}|[0-9a-f:.]*:[0-9a-f:.]*")
ORIGIN: Final = re.compile(r"https?://([a-z0-9][a-z0-9._-]*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name is never looked up: the answer could change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def slips(node: "NodeSection") -> Iterator[tuple[str, str]]:
    """Mistakes: a key of ``[node]``, and the fault of its value."""
    for host in node.hosts:
        if not HOST.fullmatch(host):
            yield "hosts", f"has {host!r}; write names or addresses in small letters, without scheme and port"
    for origin in node.cors:
        if not ORIGIN.fullmatch(origin):
            yield "cors", f'has {origin!r}; write origins in small letters, such as "https://app.example"'
    for label, path in (("tls_cert", node.tls_cert), ("tls_key", node.tls_key)):
        if path and not os.path.isabs(path):
            yield label, f"is {path!r}; write an absolute path, because a node runs in no particular directory"
    if bool(node.tls_cert) != bool(node.tls_key):
        yield ("tls_key" if node.tls_cert else "tls_cert"), "is missing; TLS needs both tls_cert and tls_key"
    if node.open_loopback and (node.behind_proxy or not is_loopback(node.host)):
        yield "open_loopback", "is for a node that only this machine reaches; leave it out, and give clients keys"


WithoutKey = Literal["anybody", "until the first key", "nobody"]
UNTIL_FIRST: Final = "until the first key"

WHO: Final[dict[str, str]] = {
    "anybody": "who calls from this machine needs no key",
    UNTIL_FIRST: "who calls from this machine needs no key, until the first one is made",
    "nobody": "every request needs a key",
}
"""For people."""


def without_key(node: "NodeSection", keys_wanted: bool) -> WithoutKey:
    """The callers on this machine that invoke without a key; on others, nobody ever does. ``keys_wanted``: there was a
    key once.
    """
    if node.behind_proxy or not is_loopback(node.host):
        return "nobody"
    if node.open_loopback:
        return "anybody"
    return "nobody" if keys_wanted else UNTIL_FIRST


def check(config: "NodeConfig") -> None:
    """Raises Unsafe, and ConfigError if the file of keys cannot be read."""
    has_key = is_loopback(config.node.host) or KeyFile(StatePaths(config.state_directory).keys).usable
    if (text := refusal(config.node, has_key)) is not None:
        raise Unsafe(text)


def refusal(node: "NodeSection", has_key: bool) -> str | None:
    """Why a node must not be started so, and what to do; None if it may. ``has_key``: one that is not revoked."""
    if (trouble := tls_trouble(node)) is not None:
        return trouble
    if is_loopback(node.host):
        return None
    missing = []
    if not has_key:
        missing.append("make an API key first (`dormouse keys create --config NODE.toml`)")
    if not node.tls_cert and not node.behind_proxy:
        missing.append(
            "set [node] tls_cert and tls_key, or behind_proxy = true if a proxy in front of the node speaks TLS"
        )
    if not missing:
        return None
    return (
        f"others than this machine reach node.host {node.host!r}, and could invoke and read along: "
        f"{'; '.join(missing)}; or listen on 127.0.0.1"
    )


def tls_trouble(node: "NodeSection") -> str | None:
    """The fault of the certificate and its key, read with this process's rights; None if they can be used."""
    try:
        if node.tls_cert:
            tls_context(node)
    except Unsafe as error:
        return str(error)
    return None


def tls_context(node: "NodeSection") -> ssl.SSLContext:
    """The certificate and its key as their files are now; raises Unsafe."""
    for label, path in (("tls_cert", node.tls_cert), ("tls_key", node.tls_key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise Unsafe(
                f"node.{label} {path}: {error.strerror}; name a PEM file that the node's user may read"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password: else OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(node.tls_cert, node.tls_key, password="")
    except (ssl.SSLError, OSError) as error:
        raise Unsafe(
            f"node.tls_cert {node.tls_cert} and node.tls_key {node.tls_key} cannot be used together "
            f"({getattr(error, 'reason', None) or error}); name a PEM chain and the PEM key that belongs to its first "
            "certificate, without a password"
        ) from error
    return context
