"""Connections that a router gives to its successor: all of them, before there is one."""

import os
import socket

from dormouse.core.listening import MAX_FDS, HandedSockets

CONNECTIONS = 600
"""A packet for each does not fit: the kernel takes some hundred."""


def test_all_are_there_when_the_successor_comes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pairs = [socket.socketpair() for _ in range(CONNECTIONS // 2)]
    given = [end for pair in pairs for end in pair]
    inodes = [os.fstat(end.fileno()).st_ino for end in given]
    with theirs:
        heir = HandedSockets(ours)
        assert all(heir.give(end.fileno()) for end in given)
        heir.close()
        for end in given:
            end.close()
        taken = HandedSockets(theirs).take()
        assert [os.fstat(fd).st_ino for fd in taken] == inodes
        for fd in taken:
            os.close(fd)


def test_what_finds_no_room_is_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    heir = HandedSockets(ours)
    one, other = socket.socketpair()
    with one, other:
        assert [heir.give(one.fileno()) for _ in range(MAX_FDS + 1)] == [True] * MAX_FDS + [False]
        one.close()
        other.settimeout(60.0)
        assert other.recv(1) == b"", "no descriptor of it is left"
    heir.close()
