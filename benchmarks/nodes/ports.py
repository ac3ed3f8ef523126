"""TCP ports for tests and benchmarks: one that is ours, or one that is likely to be free."""

import socket


def reserved_port() -> socket.socket:
    """A socket bound to a free TCP port, which is the caller's while the socket is open.

    It does not listen, so a server that sets SO_REUSEADDR, as the router does, can bind the port again and again; the
    system gives it to nobody else, neither to another test's node nor to a client, while no server has it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def free_port() -> int:
    """A TCP port that was free a moment ago: for one who can try again, or takes the blame."""
    with reserved_port() as probe:
        return int(probe.getsockname()[1])
