"""One attached instance: owns its link, its offers and its model; its messages go to loading.py."""

import os
from collections.abc import Callable
from typing import Final

from dormouse.core.links.link import Link
from dormouse.core.paths import FILES_SOCKET, STORE_SOCKET
from dormouse.core.rate import Bucket
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.ingest.loading import Loading, StoreServices
from dormouse.gpuserver.store.ingest.models import StoredModel
from dormouse.gpuserver.store.ingest.offers import Offer, Offers
from dormouse.gpuserver.store.ingest.steps import Broke, Gone, WrittenBack
from dormouse.gpuserver.store.memory.functions import Key
from dormouse.gpuserver.store.memory.segments import Segment
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

INSTANCE_HWM: Final = 64
"""Messages that the socket of one instance may hold."""

InstanceLink = Link[m.InstanceToStore, m.StoreToInstance]


class StoreInstance:
    """An instance.

    Args:
        scope: within which its segments are shared.
        on_version: called when its model has a new version.
    """

    def __init__(
        self,
        attach: m.AttachInstance,
        arena: SharedMemory,
        scope: str,
        node: StoreServices,
        pace: Bucket,
        on_version: Callable[["StoreInstance"], None],
    ) -> None:
        self.attach = attach
        self.scope = scope
        self.key: Key | None = (attach.function, attach.function_version) if attach.function else None
        ranks = {} if self.key is None else node.functions.ranks(self.key)
        self.model = StoredModel(attach.instance, node.segments, attach.quota_nbytes, ranks)
        self.gone = False
        self._arena = arena
        self._pace = pace
        self._on_version = on_version
        self._loading = Loading(self.model, arena, attach.arena, scope, node, self)
        self._link: InstanceLink | None = None
        self._offers: Offers | None = None

    def open(self) -> None:
        """Bind its endpoints. Raises PeerLost: its directory is gone, it died while this was on its way."""
        path = os.path.join(self.attach.directory, STORE_SOCKET)
        try:
            self._link = Link(
                path,
                bind=True,
                incoming=m.InstanceToStore,
                on_message=self._loading.hear,
                on_garbage=lambda error: self._loading.hear(Broke(str(error))),
                max_nbytes=1 << 20,
                hwm=INSTANCE_HWM,
                owner=self.attach.uid,
                pace=self._pace,
            )
            self._offers = Offers(os.path.join(self.attach.directory, FILES_SOCKET), self.attach.uid)
        except PeerLost:
            self.close()
            self._arena.close()
            raise

    def leave(self) -> None:
        """The instance is gone: its endpoints go now, its memory when nothing is under way in it."""
        self.gone = True
        self.close()
        self._loading.hear(Gone())

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._offers is not None:
            self._offers.close()

    def written(self, segments: dict[int, Segment], freed: list[int]) -> None:
        """An executor has written these back, by storage."""
        self._loading.hear(WrittenBack(segments, freed))

    # --- for loading.py

    def find_offer(self, file: int) -> Offer | None:
        return None if self._offers is None else self._offers.find(file)

    def answer(self, message: m.StoreToInstance) -> None:
        try:
            if self._link is not None:
                self._link.send(message)
        except PeerLost as error:
            self._loading.hear(Broke(str(error)))

    def publish(self) -> None:
        self._on_version(self)
