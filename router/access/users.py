"""Users of this machine: the names of uids, and the uids that may administrate. Reads the passwd database; decides no
more.
"""

import pwd
from collections.abc import Iterable

from dormouse.router.access.access import Caller, at_the_node
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import Failure


def admin_uids(own: int, names: Iterable[str]) -> frozenset[int]:
    """Administrators' uids: the node's own, root's, and ``[node] admins``. Raises ConfigError for unknown names."""
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
    """The caller at the other end of a connection to the admin socket."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # a uid needs no entry
        name = str(uid)
    return at_the_node(uid, name)


def stranger(caller: Caller) -> Failure:
    """The answer to a user who can reach the admin socket and may not administrate."""
    text = f"user {caller.name!r} may not administrate this node; its owner can name them in [node] admins"
    return Failure(code="forbidden", status=403, text=text)
