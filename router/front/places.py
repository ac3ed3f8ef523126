"""Places of HTTP connections: who may be connected, and who gives way to one more. Pure: connections are named, and
never looked at.

    heads --a whole head--> busy --answered, and all of it read--> idle --the next head begins--> heads or busy

* There are ``most`` places, never more. A newcomer takes that of a connection that owes the rest of a head, or
  of a body that nobody waits for, and has for HEAD_S; else of one that is idle; else the oldest that owes something.
  One that has shown a key gives way last. One that is being answered never does; then the newcomer is refused.
* A peer that owes something in a quarter of all places takes that of its own oldest, so that its many heads push out
  nobody else's. While there are free places none is closed: a busy client may open hundreds before it sends a byte.
* Those without a key may be answered in seven of eight places: one is kept. Where there are several tenants, an owner
  (a tenant, a key of none, or all without a key together) is answered in no more places than it leaves free, and beyond
  that its key lets it owe nothing.
* Answered connections that are still read so that their client receives the answer have ENDING places of their own.
"""

import ipaddress
from collections import Counter
from typing import Final, Generic, TypeVar

HEAD_S: Final = 1.0
"""A head takes a packet or two: a client that has not sent one for so long is slow, or waits for something."""

ENDING: Final = 64
"""Input of such clients is discarded, so nobody misses the oldest of too many."""

C = TypeVar("C")


class ConnectionPlaces(Generic[C]):
    """See the module. A connection is in one of the dictionaries, each in the order in which they came there.
    ``shared``: by several tenants.
    """

    def __init__(self, most: int, shared: bool = False) -> None:
        self.most = most
        self._shared = shared
        self._heads: dict[C, float] = {}
        self._idle: dict[C, float] = {}
        self._busy: dict[C, float] = {}
        self._idle_keyed: dict[C, float] = {}
        self._ending: dict[C, float] = {}
        self._where: dict[C, dict[C, float]] = {}  # of which _ending is none
        self._peers: dict[C, str] = {}
        self._heads_of: dict[str, dict[C, None]] = {}  # by peer
        self._owners: dict[C, str] = {}  # the last owner of a request, with a key
        self._busy_of: Counter[str] = Counter()  # by owner; "": of those without a key

    def __len__(self) -> int:
        return len(self._where)

    def come(self, newcomer: C, peer: str, now_s: float) -> C | None:
        """The connection to be closed: none, another, or the newcomer."""
        self._peers[newcomer] = peer
        if len(self._where) < self.most:
            leaves = None
        elif (leaves := self._gives_way(peer, now_s)) is not None:
            self.gone(leaves)
        else:
            self.gone(newcomer)
            return newcomer
        self._move(newcomer, self._heads, now_s)
        return leaves

    def _gives_way(self, peer: str, now_s: float) -> C | None:
        own = self._heads_of.get(peer, {})
        if len(own) >= max(1, self.most // 4) and now_s - self._heads[first := next(iter(own))] >= HEAD_S:
            return first
        oldest = next(iter(self._heads), None)
        slow = oldest is not None and now_s - self._heads[oldest] >= HEAD_S
        for among in (self._heads if slow else {}, self._idle, self._idle_keyed, self._heads):
            if among:
                return next(iter(among))
        return None

    def owes(self, connection: C, now_s: float) -> None:
        """It has begun a head, or been answered before its body was whole."""
        self._move(connection, None, 0.0)
        owner = self._owners.get(connection, "")
        self._move(connection, self._busy if owner and self._has_part(owner) else self._heads, now_s)

    def asks(self, connection: C, now_s: float) -> None:
        """Its head is whole."""
        self._move(connection, self._busy, now_s)

    def asks_for(self, connection: C, owner: str, now_s: float) -> bool:
        """The caller is known; "": somebody without a key. Whether there is a place for the answer."""
        if connection not in self._where:
            return True  # nobody receives it
        self._move(connection, None, 0.0)
        self._owners[connection] = owner
        has_part = self._has_part(owner)
        self._move(connection, self._busy, now_s)
        return has_part

    def _has_part(self, owner: str) -> bool:
        """Whether one more may be answered."""
        own = self._busy_of[owner]
        if self._shared:
            return own < self.most - len(self._busy)
        return bool(owner) or own < self.most - self.most // 8

    def rests(self, connection: C, now_s: float) -> None:
        """Nothing is sent or expected."""
        self._move(connection, self._idle_keyed if self._owners.get(connection) else self._idle, now_s)

    def is_busy(self, connection: C) -> bool:
        return self._where.get(connection) is self._busy

    def ends(self, connection: C, now_s: float) -> C | None:
        """Nothing more is sent to it. Returns the connection to be closed instead, if any."""
        self.gone(connection)
        self._ending[connection] = now_s
        if len(self._ending) <= ENDING:
            return None
        oldest = next(iter(self._ending))
        del self._ending[oldest]
        return oldest

    def gone(self, connection: C) -> None:
        """Any number of times."""
        self._move(connection, None, 0.0)
        self._peers.pop(connection, None)
        self._owners.pop(connection, None)
        self._ending.pop(connection, None)

    def _move(self, connection: C, to: dict[C, float] | None, now_s: float) -> None:
        before = self._where.pop(connection, None)
        if before is not None:
            del before[connection]
        peer = self._peers.get(connection)
        if before is self._heads and peer is not None:
            own = self._heads_of[peer]
            del own[connection]
            if not own:
                del self._heads_of[peer]
        owner = self._owners.get(connection, "")
        if before is self._busy:
            self._busy_of[owner] -= 1
            if not self._busy_of[owner]:
                del self._busy_of[owner]
        if to is None or peer is None:
            return
        to[connection], self._where[connection] = now_s, to
        if to is self._heads:
            self._heads_of.setdefault(peer, {})[connection] = None
        elif to is self._busy:
            self._busy_of[owner] += 1


def peer_of(address: object) -> str:
    """Of a socket's address, what one host has to itself: of IPv6, its network of 64 bits; "" of a Unix socket."""
    if not isinstance(address, tuple):
        return ""
    host = str(address[0]).partition("%")[0]
    if ":" not in host:
        return host
    mapped = ipaddress.IPv6Address(host).ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.IPv6Network((host, 64), strict=False))
