"""Who may do what: every administrative act passes :func:`permit`, with its caller, before anything is done.

Owns nothing and does no I/O. Over the admin socket the kernel says who calls; over TCP nobody may administrate.
"""

import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from dormouse.router.http import Exchange, refuse
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import Failure


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks for an act. ``tenant``: whose functions it may see and change; None: everybody's."""

    name: str  # a user's, for people
    uid: int | None  # None: not of this machine
    origin: str  # where it calls from: "unix", or an address
    tenant: str | None = None


def permit(caller: Caller, act: a.Act) -> None:
    """Raises router.http.HttpError if this caller may not do that."""


def admin_uids(own: int, names: Iterable[str]) -> frozenset[int]:
    """Who may administrate: the node's own user, root, and ``[node] admins``. Raises ConfigError for unknown names."""
    uids = {own, 0}
    for name in names:
        try:
            uids.add(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise ConfigError(
                f"node.admins: there is no user {name!r} on this machine; write names or numeric uids"
            ) from None
    return frozenset(uids)


def caller_of(uid: int) -> Caller:
    """Of a connection to the admin socket."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # a uid needs no entry
        name = str(uid)
    return Caller(name=name, uid=uid, origin="unix")


def stranger(caller: Caller) -> Failure:
    """What someone is told who may reach the admin socket and nothing more."""
    text = f"user {caller.name!r} may not administrate this node; its owner can name them in [node] admins"
    return Failure(code="forbidden", status=403, text=text)


def caller_over_tcp(_: Exchange) -> Caller:
    """Raises HttpError: nobody yet."""
    raise refuse(
        403,
        "forbidden",
        "nobody may administrate over TCP; use the `dormouse` command on the node, as its user or one of [node] admins",
        close=True,
    )
