"""One attached instance: owns its arena, its link, its offers and its model, and hears what it says, in order.

A message may wait for room, a copy, a hash or a file; those behind it wait in a queue, so one task serves the instance
from its first message to its end, and only that task gives its memory back.
"""

import asyncio
import os
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

from dormouse.core.link import Link
from dormouse.core.paths import FILES_SOCKET, STORE_SOCKET
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.functions import Key
from dormouse.gpuserver.store.lifts import LiftFailed
from dormouse.gpuserver.store.loading import Loading, Node
from dormouse.gpuserver.store.models import MAX_STORAGES, Model, ModelError
from dormouse.gpuserver.store.offers import Offers
from dormouse.gpuserver.store.slabs import HostFull
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

INSTANCE_HWM: Final = 64
"""Messages that the socket of one instance may hold."""

MAX_WAITING: Final = 2 * MAX_STORAGES
"""Messages and freed storages that may wait behind a slow one: an honest instance has no more storages to free, and has
one upload unanswered."""

InstanceLink = Link[m.InstanceToStore, m.StoreToInstance]


class Tenant:
    """An instance.

    Args:
        scope: within which its segments are shared.
        on_version: called when its model has a new version.
        on_change: called when host memory may be used otherwise than before.
    """

    def __init__(
        self,
        attach: m.AttachInstance,
        arena: SharedMemory,
        scope: str,
        node: Node,
        on_version: Callable[["Tenant"], None],
        on_change: Callable[[], None],
    ) -> None:
        self.attach = attach
        self.scope = scope
        self.key: Key | None = (attach.function, attach.function_version) if attach.function else None
        ranks = {} if self.key is None else node.functions.ranks(self.key)
        self.model = Model(attach.instance, node.segments, attach.quota_nbytes, ranks)
        self.gone = False
        self._arena = arena
        self._node = node
        self._on_version = on_version
        self._on_change = on_change
        self._broken = False  # it broke the protocol: nothing it says counts any more
        self._waiting: deque[m.InstanceToStore] = deque()
        self._weight = 0  # of what waits
        self._heard = asyncio.Event()
        self._loading = Loading(self.model, arena, attach.arena, scope, node, on_change)
        self._link: InstanceLink | None = None
        self._offers: Offers | None = None

    def open(self) -> None:
        """Bind its endpoints. Raises PeerLost, OSError: its directory is gone, it died while this was on its way."""
        path = os.path.join(self.attach.directory, STORE_SOCKET)
        try:
            self._link = Link(
                path,
                bind=True,
                incoming=m.InstanceToStore,
                on_message=self._hear,
                on_garbage=lambda error: self._break(str(error)),
                max_nbytes=1 << 20,
                hwm=INSTANCE_HWM,
            )
            os.chown(path, self.attach.uid, -1, follow_symlinks=False)  # the directory is the instance's
            self._offers = Offers(os.path.join(self.attach.directory, FILES_SOCKET), self.attach.uid)
        except (PeerLost, OSError):
            self._close_sockets()
            self._arena.close()
            raise

    def leave(self) -> None:
        """The instance is gone: its endpoints go now, its memory when nothing is under way in it."""
        self.gone = True
        self._close_sockets()
        self._heard.set()

    def _close_sockets(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._offers is not None:
            self._offers.close()

    # --- the queue

    def _hear(self, message: m.InstanceToStore) -> None:
        if self._broken or self.gone:
            return
        self._weight += _weight(message)
        if self._weight > MAX_WAITING:
            self._break(f"more than {MAX_WAITING:,} messages and freed storages wait for the store")
            return
        self._waiting.append(message)
        self._heard.set()

    async def serve(self) -> None:
        """Carry out its messages until it is gone."""
        while not self.gone:
            if not self._waiting:
                self._heard.clear()
                await self._heard.wait()
                continue
            message = self._waiting.popleft()
            self._weight -= _weight(message)
            await self._handle(message)
        self._arena.close()
        await self._loading.close()

    async def _handle(self, message: m.InstanceToStore) -> None:
        try:
            match message:
                case m.StoreUpload():
                    await self._loading.upload(message)
                    self._answer(m.Uploaded())
                case m.StoreFile():
                    assert self._offers is not None
                    await self._loading.read_file(message, self._offers.find(message.file))
                    self._answer(m.Uploaded())
                case m.StoreFree(storages=storages):
                    self.model.free(storages)
                    self._node.memory.collect()
                case m.Commit():
                    if await self._loading.commit() and not self.gone:
                        self._on_version(self)
                    self._answer(m.Committed(version=self.model.version, nbytes=self.model.nbytes))
        except RemoteProtocolError as error:
            self._break(str(error))
        except (HostFull, ModelError, LiftFailed) as error:
            self._answer(m.StoreFailed(text=str(error)))
        except Exception as error:  # the outermost frame of this instance's session
            self._node.log.error("instance_raised", instance=self.attach.instance, story=traceback.format_exc())
            self._break(f"what it sent raised {type(error).__name__} in the store")
        self._on_change()

    # ---

    def _answer(self, message: m.StoreToInstance) -> None:
        try:
            if self._link is not None and not self.gone:
                self._link.send(message)
        except PeerLost as error:
            self._break(str(error))

    def _break(self, text: str) -> None:
        """It broke the protocol: tell it once, then hear nothing more from it. Its own ``load()`` will time out."""
        if not self._broken:
            self._broken = True
            self._waiting.clear()
            self._node.log.warning("instance_violation", instance=self.attach.instance, text=text)
            self._answer(m.StoreFailed(text=text))


def _weight(message: m.InstanceToStore) -> int:
    return 1 + (len(message.storages) if isinstance(message, m.StoreFree) else 0)
