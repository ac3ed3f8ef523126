"""The stream's connection to one executor: definitions sent, frames and credit, replies.

Owns the definition tables of a connection, which outlive leases, and the frame numbers of the current lease. It does
not know tensors or storages. Used under the stream's lock only.
"""

import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.plans import Plan
from dormouse.client_shim.stream.backend import Backend, Channel
from dormouse.client_shim.stream.call_sites import Site
from dormouse.client_shim.stream.failures import ExecutorLost, LeaseLost, SeatLost
from dormouse.client_shim.stream.numerics import InstanceNumerics
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.client_shim.stream.tape import Tape
from dormouse.schemas import stream as wire
from dormouse.schemas.messages import Lease

KEPT_FRAMES: Final = 256
"""Frames whose call sites are remembered: an error is at most a few windows old when it is reported."""

DEFINITIONS_NBYTES: Final = wire.MAX_FRAME_NBYTES // 4
"""Definitions after which a frame is sent, well below the limit on frames."""

FREE_NUMBERS: Final = 1 << 14
"""Storages that one command may free: a list of a hundred thousand tensors dies at once, and a frame has a limit."""

QUIET_COMMANDS: Final = 1 << 14
"""Numbers in a frame that no operation has filled (seeds, empty storages) after which it is sent."""

EAGER_COMMANDS: Final = 4
"""The first frame of a lease, and the next after an answer, has so many: the executor has nothing to do."""

MAX_EAGER_COMMANDS: Final = 32
"""An executor that has nothing to do again is quicker than the program: each frame costs both, so the next one is twice
as large, up to this."""

INLINE_FRAME_NBYTES: Final = 1 << 17
"""A frame with more small uploads than this is sent, well below the limit on frames."""

AWAKE_S: Final = 0.0002
"""Time for which a waiter for an answer stays awake: to be woken takes longer than most answers."""

REPLY_TIMEOUT_S: Final = 3600.0
"""A waiting operation gives up after this; requests have deadlines of their own that the router keeps, so this only
bounds a fault of ours."""


_next_epoch = count(1).__next__


class StreamConnection:
    """`tape` is that of the connection that has begun last."""

    def __init__(self, channel: Channel, tape: Tape, settle: Callable[[int], None], lose: Callable[[], None]) -> None:
        self.channel = channel
        self.tape = tape
        self.commands = tape.commands
        self._epoch = _next_epoch()
        self.told_keys: set[int] = set()
        self._definitions_nbytes = 0  # about, of the keys in the frame being filled
        self._told_metas: set[int] = set()
        self._told_templates: dict[int, int] = {}  # lengths, by number
        self._new_templates: list[int] = []  # in the frame being filled
        self._told_changes = 0  # of settings of numerics
        self._told_graphs: set[str] = set()  # by digest
        self.graphs: dict[str, str] = {}  # their states: "" is built, else why it never will be
        self._metas: list[Any] = []
        self._keys: list[Any] = []
        self._settle = settle  # called for each acknowledged frame
        self._lose = lose  # called when the executor is gone: it will not say so a second time
        self._values: dict[int, list[Any]] = {}  # by token: VALUE and FAILED replies
        self._sites: dict[int, Sequence[Site | None]] = {}  # by frame number
        self.suspect = False
        """Whether the executor may know less than it was sent."""
        self.open = False
        self.sent_nbytes = 0
        self.acknowledged, self.number = 0, 1
        self.lease = Lease(gpu=0, epoch=0, serial=0, secret=0)

    def begin(self, lease: Lease) -> None:
        """Frames are numbered anew. Definitions live on, unless frames of an earlier lease may not have been read."""
        self._look_back()
        self.lease = lease
        self.open = True
        self.number = 1  # of the frame being filled
        self.acknowledged = 0
        self.commands.clear()
        self.tape.take_sites()
        self.tape.epoch, self.tape.idle = self._epoch, True
        self.tape.worth = EAGER_COMMANDS
        self.tape.begin_lease()
        self._inline_nbytes = 0  # in the frame being filled
        self._values.clear()
        self._sites.clear()
        if self.suspect:
            self.suspect = False
            self._metas, self._keys = [], []
            self._forget()

    def _look_back(self) -> None:
        """Late replies to the lease before: a refusal means that definitions were thrown away with their frame."""
        while self.acknowledged < self.number - 1 and self.pump(0):
            pass

    @property
    def untouched(self) -> bool:
        """Whether nothing was sent to the executor in this lease, and need not be."""
        return self.number == 1 and not self.commands

    @property
    def in_flight(self) -> int:
        return self.number - 1 - self.acknowledged

    def tell(self, plan: Plan) -> None:
        """Define a plan's key, and the geometries that it names, ahead of its first command."""
        if len(self.told_keys) >= wire.MAX_DEFS - 1 or len(self._told_metas) + len(plan.metas) >= wire.MAX_DEFS - 1:
            self._forget()
        self._definitions_nbytes += plan.nbytes
        if self._definitions_nbytes > DEFINITIONS_NBYTES:
            self.flush()
            self._definitions_nbytes = plan.nbytes
        for meta in plan.metas:
            self.tell_meta(meta)
        self.told_keys.add(plan.id)
        self._keys += (plan.id, plan.definition)

    def tell_template(self, number: int, words: list[Any], plans: list[Plan]) -> bool:
        """Define a sequence of commands that have these keys; False if it is not to be followed now."""
        if number in self._told_templates:
            return True
        if not words:
            return False
        words_told = sum(self._told_templates.values()) + len(words)
        if len(self._told_templates) >= wire.MAX_TEMPLATES or words_told > wire.MAX_TEMPLATES_WORDS:
            self._forget()
            return False
        epoch = self._epoch
        for plan in plans:
            if plan.id not in self.told_keys:
                self.tell(plan)
        self.flush()  # with its keys: a template is large
        if self._epoch != epoch:
            return False
        self._told_templates[number] = len(words)
        self._new_templates.append(number)
        self.commands += (wire.TEMPLATE, number, words)
        return True

    def tell_graph(self, digest: str, definition: bytes) -> str | None:
        """Its state: "" is built, None is not known yet, else why it never will be."""
        if digest not in self._told_graphs:
            if len(self._told_graphs) >= wire.MAX_GRAPHS:
                return f"at most {wire.MAX_GRAPHS} graphs of one instance are compiled"
            self._told_graphs.add(digest)
            self.flush()
            self.commands += (wire.GRAPH, digest, definition)
            self.flush()
        return self.graphs.get(digest)

    def tell_numerics(self, numerics: InstanceNumerics) -> None:
        for command in numerics.since(self._told_changes):
            self.say(command)
        self._told_changes = numerics.changes

    def say(self, command: Sequence[Any]) -> None:
        """Append a command that is no operation, and that nobody waits for."""
        self.commands += command
        if len(self.commands) > QUIET_COMMANDS:
            self.flush()

    def free(self, numbers: list[int]) -> None:
        """Storages that have died."""
        for start in range(0, len(numbers), FREE_NUMBERS):
            part = numbers[start : start + FREE_NUMBERS]
            self.commands += (wire.FREE, len(part), *part)
            if len(part) == FREE_NUMBERS:
                self.flush()

    def upload_inline(self, storage: RemoteStorage, offset: int, content: bytes) -> None:
        """A few bytes, in the command itself."""
        self.commands += (wire.UPLOAD_INLINE, storage.id, storage.nbytes, offset, content)
        self._inline_nbytes += len(content)
        if self._inline_nbytes > INLINE_FRAME_NBYTES:
            self.flush()

    def tell_meta(self, meta: metas.Meta) -> None:
        if meta.id not in self._told_metas:
            if len(self._told_metas) >= wire.MAX_DEFS - 1:
                self._forget()
            self._told_metas.add(meta.id)
            self._metas += (meta.id, meta.definition())

    def _forget(self) -> None:
        # Definitions come first in a frame, so the void must be in a frame before the one that defines again.
        self.say((wire.FORGET_DEFS,))
        self.flush()
        self.told_keys.clear()
        self._told_metas.clear()
        self._told_templates.clear()
        self._told_graphs &= self.graphs.keys()
        self._told_changes = 0
        self._knows_less()

    def _knows_less(self) -> None:
        self._epoch = self.tape.epoch = _next_epoch()

    def flush(self) -> None:
        """Send the recorded commands."""
        if not self.commands:
            return
        try:
            frame = self.commands.framed([self.lease.serial, self.lease.secret, self.number, [self._metas, self._keys]])
        except (OverflowError, ValueError, TypeError) as error:
            self._abandon()
            raise RuntimeError(f"an operation's arguments cannot be sent: {error}") from error
        if len(frame) > wire.MAX_FRAME_NBYTES:
            self._abandon()
            raise RuntimeError(
                f"an operation needs a frame of {len(frame)} bytes, over the limit of {wire.MAX_FRAME_NBYTES}"
            )
        while self.in_flight >= wire.WINDOW_FRAMES:
            self.pump(REPLY_TIMEOUT_S)
        self.sent_nbytes += len(frame)
        self._sites[self.number] = self.tape.take_sites()
        self._sites.pop(self.number - KEPT_FRAMES, None)
        self.number += 1
        self.tape.idle = False
        self._clear()
        try:
            self.channel.send(frame)
        except ConnectionError as error:
            self._lose()
            raise ExecutorLost(str(error)) from error

    def _abandon(self) -> None:
        """The frame cannot be sent: its definitions are still unsent."""
        self.told_keys.difference_update(self._keys[::2])
        self._told_metas.difference_update(self._metas[::2])
        for number in self._new_templates:
            del self._told_templates[number]
        self._told_changes = 0
        self._knows_less()
        self.tape.lose()
        self._clear()

    def _clear(self) -> None:
        self._metas, self._keys, self._new_templates, self._inline_nbytes = [], [], [], 0
        self.commands.clear()
        self.tape.take_sites()
        self._definitions_nbytes = 0

    def poll(self) -> None:
        """Look for acknowledgements; send waiting commands if the executor is idle."""
        while self.in_flight and self.pump(0):
            pass
        if not self.in_flight:
            self.send_early()

    def send_early(self) -> None:
        """To an executor that has nothing to do."""
        self.tape.worth = min(2 * self.tape.worth, MAX_EAGER_COMMANDS)
        self.flush()

    def pump(self, timeout_s: float) -> bool:
        """Handle the replies to one frame; whether there were any."""
        try:
            reply = self.channel.recv(timeout_s)
        except ConnectionError as error:
            self._lose()
            raise ExecutorLost(str(error)) from error
        if reply is None:
            return False
        refused: LeaseLost | None = None
        for kind, *fields in wire.replies(reply):
            if kind == wire.ACK:
                serial, number = fields
                if serial == self.lease.serial:
                    self.acknowledged = max(self.acknowledged, number)
                    self.tape.idle = not self.in_flight
                    self._settle(number)
            elif kind == wire.REFUSED:
                serial, reason, why = fields
                self.suspect = True
                if serial == self.lease.serial and self.open:
                    lost = SeatLost if why == wire.SEAT_LOST else LeaseLost
                    refused = lost(f"the GPU's executor refused this request's operations: {reason}")
            elif kind == wire.STALLED:
                self.tape.stalls(*fields)
            elif kind == wire.BUILT:
                self.graphs[fields[0]] = fields[1]
            else:
                self._values[fields[0]] = [kind, *fields[1:]]
        if refused is not None:
            raise refused
        return True

    def wait(self, token: int) -> list[Any]:
        """The reply to a waiting command: [VALUE, payload] or [FAILED, kind, text, where]."""
        self.tape.wait()
        self.flush()
        self.tape.worth = EAGER_COMMANDS
        deadline_s = time.perf_counter() + AWAKE_S
        while token not in self._values and time.perf_counter() < deadline_s:
            if not self.pump(0):
                os.sched_yield()
        while token not in self._values:
            if not self.pump(REPLY_TIMEOUT_S):
                raise ExecutorLost("the executor has not answered")
        return self._values.pop(token)

    def site(self, number: int, index: int) -> Site | None:
        sites = self._sites.get(number, ())
        return sites[index] if 0 <= index < len(sites) else None


class Connections:
    """To each executor that has lent its GPU, by GPU and epoch: the definitions sent to each outlive leases."""

    def __init__(self, backend: Backend, tape: Tape, settle: Callable[[int], None], lose: Callable[[], None]) -> None:
        self._backend = backend
        self._tape = tape
        self._settle = settle
        self._lose = lose
        self._known: dict[tuple[int, int], StreamConnection] = {}

    @property
    def sent_nbytes(self) -> int:
        """Bytes of frames sent so far; bulk bytes, which go through the arena, not among them."""
        return sum(connection.sent_nbytes for connection in self._known.values())

    def of(self, lease: Lease) -> StreamConnection:
        key = (lease.gpu, lease.epoch)
        if key not in self._known:
            # Older epochs of this GPU are dead processes.
            self._known = {place: known for place, known in self._known.items() if place[0] != lease.gpu}
            self._known[key] = StreamConnection(self._backend.executor(lease), self._tape, self._settle, self._lose)
        return self._known[key]
