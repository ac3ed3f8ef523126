"""Every exception of Dormouse, ordered by how much of the system it takes with it.

::

    DormouseError
    ├─ PeerLost             another process is gone; the calls it held fail, the system goes on
    ├─ ProcessFailed        this process must exit: an invariant is broken or a device can no longer be trusted
    ├─ ProtocolError        a message that must not be
    │  ├─ LocalProtocolError  we were about to send it: our bug
    │  └─ RemoteProtocolError they sent it: the peer is dropped
    └─ ConfigError          at start-up only
       └─ Unsafe            it could be used, by others than it is meant for

A failed call is not an exception but a value, ``messages.Failure``: it crosses processes with a stable code, and a
user's exception with it as its type's name and text, never as an object. core/decisions/requests/failures.py
words those of the node.
"""


class DormouseError(Exception):
    """Base of all errors below. Safe to retry: see the subclass."""


class PeerLost(DormouseError):
    """Another process of the node is gone. A retry is safe once it is back."""


class ProcessFailed(DormouseError):
    """This process must exit and be replaced; carries the story of its last events. Never retried in place."""


class ProtocolError(DormouseError):
    """A message that must not be. Never retried."""


class LocalProtocolError(ProtocolError):
    """We were about to send it."""


class RemoteProtocolError(ProtocolError):
    """A peer sent it; the peer is dropped."""


class ConfigError(DormouseError):
    """The configuration cannot be used; the message names the key and its line. Never retried."""


class Unsafe(ConfigError):
    """The configuration would let others in or read along; refused until it says how they are kept out."""
