"""Resources of one instance outside its own process: directory, arena, endpoint, log pipe, uid; and the announcement of
these to other processes.

Makes, announces and removes. core/decisions/requests/policy.py decides when an instance starts or ends.
"""

import asyncio
import contextlib
import errno
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from dormouse.core import answerhead
from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.decisions.requests.failures import REFUSED
from dormouse.core.decisions.requests.runtimes import runtime_group
from dormouse.core.decisions.requests.state import SESSION_TENANT, most_open
from dormouse.core.directories import remove_tree
from dormouse.core.links.ends import STRANGER_RATE_S
from dormouse.core.links.link import Link
from dormouse.core.masking import NO_MASK, SecretMask
from dormouse.core.paths import RunPaths
from dormouse.core.poster import Poster
from dormouse.core.rate import Bucket, SharedBuckets
from dormouse.core.shm import SharedMemory
from dormouse.core.times import utc
from dormouse.router.instances.logpipe import LogPipe
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

MESSAGE_NBYTES: Final = 1 << 20
"""Largest message from an instance: a traceback; bodies go through the arena beyond INLINE_BODY_NBYTES."""

HIGH_WATER_MARK: Final = 64
"""An instance and the router exchange a handful of messages per request; one that lets more pile up is broken."""

LLM_HIGH_WATER_MARK: Final = 4096
"""Of an instance that has many requests at once."""

FORGET_S: Final = 1.0
"""Pages that a large body has used are kept for the next one so long: new ones take ten times as long to write."""

ASKED: Final = 4
"""Messages that an instance may send more for each request, and whenever a client took more of an answer: about its
lease, and the answer.
"""

CALL: Final = 8
"""And each of its calls, which is a request. An answer that is no error gives it back: many such calls are honest."""

PARTS: Final = 8
"""Parts of answers that come together and cost the router what a message does."""

_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{1,500}")
"""Values that can stand in a header without ending it."""

SESSION: Final = m.FunctionSpec(name="", version=0, entry="", snapshot="", tenant=SESSION_TENANT, quota_nbytes=1 << 40)
"""As what sessions are attached."""


TOLD: Final = 16
"""Requests that a log names of those that an instance ended with."""

SOCKETS: Final = 32
"""Of an instance, all those who attach it, and what the processes of a node may want meanwhile."""


def expect_room(run: Path) -> None:
    """Raises OSError if the run directory is nearly full. The store or an executor that finds no room for an instance's
    socket there could only end.
    """
    disk = os.statvfs(run)
    if disk.f_files and disk.f_favail < SOCKETS:  # 0: as many as there are
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run))


class InstanceHost:
    """One instance's belongings. ``uid`` owns its directory and endpoint."""

    def __init__(
        self,
        name: str,
        spec: m.FunctionSpec,
        uid: int,
        paths: RunPaths,
        layout: m.Arena,
        on_message: Callable[[str, m.InstanceToRouter], None],
        on_garbage: Callable[[str, str], None],
        pace: Bucket,
        log: Any,
    ) -> None:
        """Whatever a message of the instance raises, also in ``on_message``, is reported as garbage and ends no other.
        Raises OSError, PeerLost, and nothing is left then.
        """
        self.name = name
        self.snapshot = spec.snapshot
        self._at_once = most_open(spec) > 0
        self.mask: SecretMask = NO_MASK
        self.uid = uid
        self.layout = layout
        self.pid = 0
        self._request_nbytes = self._response_nbytes = 0  # of what has gone through the arena, at most
        self._forgetting: asyncio.TimerHandle | None = None
        self.log_pipe: LogPipe | None = None
        self.running: dict[int, str] = {}  # ids of requests, by ticket
        self.directory = paths.instance(name)

        def heard(message: m.InstanceToRouter) -> None:
            try:
                if isinstance(message, m.Returned | m.Raised):
                    self._forget_soon()
                    self._ran(message.request)
                elif isinstance(message, m.Loaded | m.LoadFailed):
                    self._drain_log()  # the deployer is shown its output, then its outcome
                if wrong := _wrong_head(message):
                    return on_garbage(name, wrong)
                if isinstance(message, m.AnswerParts):
                    self.link.spend(len(message.parts) // PARTS)
                if isinstance(message, m.CallFunction):
                    self.link.spend(CALL)
                on_message(name, self.masked(message))
            except Exception as error:  # the outermost frame of this instance's session
                log.error("instance_raised", instance=name, story=traceback.format_exc())
                on_garbage(name, f"what it sent raised {type(error).__name__} in the router")

        with contextlib.ExitStack() as undo:
            expect_room(paths.run)
            os.mkdir(self.directory, 0o700)
            undo.callback(remove_tree, self.directory)
            self.arena = SharedMemory.create(f"dormouse-arena-{name}", layout.nbytes)
            undo.callback(self.arena.close)
            self.link: Link[m.InstanceToRouter, m.RouterToInstance] = Link(
                f"{self.directory}/router",
                bind=True,
                incoming=m.InstanceToRouter,
                on_message=heard,
                on_garbage=lambda error: on_garbage(name, str(error)),
                max_nbytes=MESSAGE_NBYTES,
                hwm=LLM_HIGH_WATER_MARK if self._at_once else HIGH_WATER_MARK,
                owner=uid,
                pace=pace,
            )
            undo.callback(self.link.close)
            os.chown(self.directory, uid, -1)
            undo.pop_all()
        self.attachment = m.AttachInstance(
            instance=name,
            tenant=spec.tenant,
            function=spec.name,
            function_version=spec.version,
            directory=self.directory,
            uid=uid,
            arena=layout,
            quota_nbytes=spec.quota_nbytes,
            llm=spec.llm is not None,
            group=runtime_group(spec),
            eager=spec.eager,
            adapter=spec.llm is not None and spec.llm.base != "",
        )

    def runs(self, ticket: int, request: str) -> None:
        """It is given a request of this id."""
        self._drain_log()
        self.running[ticket] = request

    def _ran(self, ticket: int) -> None:
        if ticket in self.running:
            self._drain_log()
            del self.running[ticket]

    def _drain_log(self) -> None:
        if self.log_pipe is not None:
            self.log_pipe.drain()

    def put_request(self, body: bytes | memoryview) -> tuple[bytes | None, int]:
        """``body`` and ``nbytes`` of Run for this request body."""
        self._keep()
        if len(body) <= m.INLINE_BODY_NBYTES or self._at_once:  # the arena has room for one
            return bytes(body), 0  # no copy: small ones came as bytes
        self._request_nbytes, done = max(self._request_nbytes, len(body)), 0
        while done < len(body):  # pages that are written whole are neither zeroed before nor mapped here
            done += os.pwrite(self.arena.fd, body[done:], done)
        return None, len(body)

    def _keep(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None

    def _forget_soon(self) -> None:
        """Give the pages of a large request or answer back, because hundreds of idle instances would keep theirs."""
        self._keep()
        if self._request_nbytes or self._response_nbytes:
            self._forgetting = asyncio.get_running_loop().call_later(FORGET_S, self._forget)

    def _forget(self) -> None:
        self.arena.punch(0, self._request_nbytes)
        self.arena.punch(self.layout.request_nbytes, self._response_nbytes)
        self._request_nbytes = self._response_nbytes = 0

    def masked(self, message: m.InstanceToRouter) -> m.InstanceToRouter:
        """Without the instance's secrets in its texts for people."""
        match message:
            case _ if not self.mask:
                return message
            case m.Raised(text=text, head=head) if head is not None:
                return structs.replace(message, text=self.mask.text(text), head=self._masked_head(head))
            case m.Returned(head=head) | m.AnswerPart(head=head) if head is not None:
                return structs.replace(message, head=self._masked_head(head))
            case m.Raised(text=text) | m.LoadFailed(text=text) | m.Spoiled(text=text):
                return structs.replace(message, text=self.mask.text(text))
            case m.Loaded(warning=warning, schema=schema):
                schema = self.mask.data(schema[: m.SCHEMA_NBYTES])  # bytes: nobody has looked whether it is text
                return structs.replace(message, warning=self.mask.text(warning), schema=schema)
            case _:
                return message

    def _masked_head(self, head: m.AnswerHead) -> m.AnswerHead:
        return structs.replace(head, headers={name: self.mask.text(value) for name, value in head.headers.items()})

    def give_up(self, request: int) -> None:
        """Say which request the coming signal is for."""
        start = self.layout.control_offset
        self.arena.view[start : start + m.CONTROL_NBYTES] = request.to_bytes(m.CONTROL_NBYTES, "little")

    def take_response(self, body: bytes | None, nbytes: int, kind: str) -> bytes:
        """A copy of the returned bytes: the instance can still write its arena. Raises RemoteProtocolError."""
        if kind and not _HEADER_VALUE.fullmatch(kind):
            raise RemoteProtocolError(f"an answer of type {kind[:80]!r}")
        if body is not None:
            return body
        if not 0 <= nbytes <= self.layout.response_nbytes:
            raise RemoteProtocolError(f"a response of {nbytes} bytes in an area of {self.layout.response_nbytes}")
        self._response_nbytes = max(self._response_nbytes, nbytes)
        self._forget_soon()
        return os.pread(self.arena.fd, nbytes, self.layout.request_nbytes)

    def close(self, how: str = "") -> None:
        """``how`` completes "it ...": for its log."""
        self._keep()
        self.link.close()
        if self.log_pipe is not None:
            self.log_pipe.close()
            said = [f"instance {self.name} ended: {f'it {how}' if how else 'the node stops'}"]
            said += [f"request {request}" for request in list(self.running.values())[:TOLD]]
            said += [f"and {len(self.running) - TOLD} more"] if len(self.running) > TOLD else []
            self.log_pipe.note(", ".join([*said, utc(time.time())]))
        self.arena.close()
        with contextlib.suppress(OSError):  # else with the run directory
            remove_tree(self.directory)


def _wrong_head(message: m.InstanceToRouter) -> str:
    """The fault in its answer's head: nobody has checked that an honest shim has sent it."""
    head = message.head if isinstance(message, m.Returned | m.Raised | m.AnswerPart) else None
    if head is None:
        return "a refusal without a status" if isinstance(message, m.Raised) and message.code == REFUSED else ""
    if head.code and not answerhead.CODE.fullmatch(head.code):
        return f"an error called {head.code[:80]!r}"
    return answerhead.wrong(head.status, head.headers, 400 if isinstance(message, m.Raised) else 200)


class Instances:
    """All instances' belongings, and the inboxes of the processes that attach them."""

    def __init__(
        self,
        config: NodeConfig,
        paths: RunPaths,
        on_message: Callable[[str, m.InstanceToRouter], None],
        on_garbage: Callable[[str, str], None],
        log: Any,
    ) -> None:
        self._log = log
        self.hosts: dict[str, InstanceHost] = {}
        self.own_uids = False  # whether the zygote gives each instance a uid of its own
        self._config = config
        self._paths = paths
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._paces = SharedBuckets(STRANGER_RATE_S, STRANGER_RATE_S)
        self._inboxes: dict[str, tuple[int, Poster[m.InboxPacket, m.InboxPacket]]] = {}  # by role: epoch, connection
        self._layout = m.Arena(
            request_nbytes=parse_nbytes(config.limits.body),
            response_nbytes=parse_nbytes(config.limits.response),
            stream_nbytes=parse_nbytes(config.limits.stream),
        )

    def open(self, name: str, spec: m.FunctionSpec) -> InstanceHost:
        """Make an instance's belongings and announce them to all that attach. Raises OSError, PeerLost."""
        return self._open(name, spec, self._free_uid())

    def open_session(self, name: str) -> InstanceHost:
        """The same for a session, which runs as the node's own user."""
        return self._open(name, SESSION, os.getuid())

    def _open(self, name: str, spec: m.FunctionSpec, uid: int) -> InstanceHost:
        pace = self._paces.of(spec.tenant, asyncio.get_running_loop().time())
        host = InstanceHost(
            name, spec, uid, self._paths, self._layout, self._on_message, self._on_garbage, pace, self._log
        )
        self.hosts[name] = host
        for _, inbox in self._inboxes.values():
            inbox.post(host.attachment, (host.arena.fd,))
        return host

    def fork_message(
        self,
        host: InstanceHost,
        spec: m.FunctionSpec,
        folder: str,
        device: m.DeviceInfo,
        variables: bool,
        environment: str,
    ) -> m.Fork:
        return m.Fork(
            instance=host.name,
            function=spec.name,
            directory=host.directory,
            uid=host.uid,
            folder=folder,
            entry=spec.entry,
            arena=host.layout,
            device=device,
            gpus=1,
            llm=spec.llm,
            embedding=spec.embedding,
            concurrency=spec.concurrency,
            batch=spec.batch,
            variables=variables,
            environment=environment,
            network=spec.network and self._config.sandbox.network,  # which may have been taken back
            limits=self.limits,
        )

    @property
    def limits(self) -> dict[str, int]:
        """Of each, as Fork has them."""
        sandbox = self._config.sandbox
        return {"NOFILE": sandbox.open_files, "NPROC": sandbox.processes, "DATA": parse_nbytes(sandbox.memory)}

    @property
    def builder_uid(self) -> int:
        """The uid that builds environments, one at a time: no instance has it."""
        return self._config.sandbox.uid_base - 1 if self.apart else os.getuid()

    @property
    def apart(self) -> bool:
        """Whether each has a uid of its own."""
        return os.getuid() == 0 and self._config.sandbox.uid == "auto" and self.own_uids

    def _free_uid(self) -> int:
        """A uid that no living instance has; the node's own where instances cannot have one."""
        if not self.apart:
            return os.getuid()
        taken = {host.uid for host in self.hosts.values()}
        uid = self._config.sandbox.uid_base
        while uid in taken:
            uid += 1
        return uid

    def send(self, name: str, message: m.RouterToInstance) -> None:
        """Raises PeerLost when the instance does not read."""
        if (host := self.hosts.get(name)) is not None:
            if isinstance(message, m.Run | m.PartsTaken):
                host.link.spend(-ASKED)
            if isinstance(message, m.CallAnswered) and message.status < 400:
                host.link.spend(-CALL)
            host.link.send(message)

    def close(self, name: str, how: str) -> None:
        """The process is gone: detach everywhere and remove its belongings."""
        if (host := self.hosts.pop(name, None)) is None:
            return
        for _, inbox in self._inboxes.values():
            inbox.post(m.DetachInstance(instance=name))
        host.close(how)

    def peers_changed(self, peers: dict[str, int]) -> None:
        """Connect to the inboxes of new epochs and announce to them all instances that there are."""
        for role, (epoch, old) in list(self._inboxes.items()):
            if peers.get(role) != epoch:
                old.close()
                del self._inboxes[role]
        for role, epoch in peers.items():
            if role in self._inboxes or not (role == "store" or role.startswith("gpu")):
                continue
            try:
                inbox: Poster[m.InboxPacket, m.InboxPacket] = Poster(
                    self._paths.inbox(role, epoch), m.InboxPacket, lambda _: None, lambda: None
                )
            except PeerLost:
                continue  # it died meanwhile; the supervisor will report it
            self._inboxes[role] = epoch, inbox
            for host in self.hosts.values():
                inbox.post(host.attachment, (host.arena.fd,))

    def snapshots(self) -> set[str]:
        """The snapshots of living instances."""
        return {host.snapshot for host in self.hosts.values()}

    @property
    def store_attached(self) -> bool:
        return "store" in self._inboxes

    def close_all(self) -> None:
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()
        for _, inbox in self._inboxes.values():
            inbox.close()
        self._inboxes.clear()
