"""Where the bytes of wakes come from, and what other GPUs read of ours: questions that are open, and pins.

Passes what peers and the store answer to the wake that asked. Answers come on the I/O thread, so that neither they nor
another GPU wait for a kernel.
"""

import sys
import threading
from collections.abc import Callable

from dormouse.gpuserver.effects import AskPeer, Effect, LeavePeer
from dormouse.gpuserver.residency import Residency
from dormouse.gpuserver.waking import Waking
from dormouse.schemas import messages as m


class Sources:
    """The questions and pins of one GPU. Pins are made and undone on the I/O thread only."""

    def __init__(self, residency: Residency, emit: Callable[[Effect], None]) -> None:
        self._residency = residency
        self._emit = emit
        self._waking: dict[int, Waking] = {}  # by ticket of a question that is open
        self._lock = threading.Lock()
        self._pinned: dict[tuple[int, int, int], list[int]] = {}  # segments by (gpu, epoch, ticket)

    # --- what a wake asks; any thread

    def ask(self, waking: Waking, gpu: int | None, ticket: int, segments: list[int]) -> None:
        """Ask another GPU, or the store (None)."""
        with self._lock:
            self._waking[ticket] = waking
        self._emit(m.Fetch(ticket=ticket, segments=segments) if gpu is None else AskPeer(gpu, ticket, segments))

    def let_go(self, gpu: int | None, ticket: int) -> None:
        """Nothing of the answer is read any more."""
        with self._lock:
            self._waking.pop(ticket, None)
        self._emit(m.LetGo(ticket=ticket) if gpu is None else LeavePeer(gpu, ticket))

    # --- what is answered; I/O thread

    def _find(self, ticket: int) -> Waking | None:
        with self._lock:
            return self._waking.get(ticket)

    def fetched(self, fetched: m.Fetched) -> None:
        """The store's answer. Its slabs are mapped."""
        if (waking := self._find(fetched.ticket)) is not None:
            waking.from_store(fetched)

    def fetch_failed(self, failed: m.FetchFailed) -> None:
        if (waking := self._find(failed.ticket)) is not None:
            waking.from_store_failed(failed.ticket, failed.text, failed.damaged)

    def peer_pinned(self, pinned: m.PeerPinned) -> None:
        """Another GPU's answer."""
        if (waking := self._find(pinned.ticket)) is not None:
            waking.from_peer(pinned.ticket, pinned.extents)

    def peer_silent(self, ticket: int) -> None:
        """A peer has nothing, or does not answer."""
        if (waking := self._find(ticket)) is not None:
            waking.from_nobody(ticket)

    def peer_lost(self, gpu: int) -> None:
        """Another executor is gone. Its own wakes need nothing of ours any more."""
        with self._lock:
            wakings = list(dict.fromkeys(self._waking.values()))
        for waking in wakings:
            waking.peer_lost(gpu)

    # --- what other GPUs read; I/O thread

    def unpin_all(self, gpu: int) -> list[int]:
        """What a peer that is gone had pinned. Returns segments to be forgotten on the device thread."""
        gone = [key for key in self._pinned if key[0] == gpu]
        return [segment for key in gone for segment in self._residency.let_go(self._pinned.pop(key))]

    def pin(self, pin: m.PeerPin, max_extents: int = sys.maxsize) -> list[tuple[int, list[tuple[int, int]]]]:
        """Keep for another GPU what of these is here."""
        found = self._residency.pin(pin.segments, max_extents)
        if found:
            self._pinned.setdefault((pin.gpu, pin.epoch, pin.ticket), []).extend(segment for segment, _ in found)
        return found

    def unpin(self, unpin: m.PeerUnpin) -> list[int]:
        """Returns segments to be forgotten on the device thread."""
        return self._residency.let_go(self._pinned.pop((unpin.gpu, unpin.epoch, unpin.ticket), []))
