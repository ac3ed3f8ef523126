"""An instance's storages on one GPU: the meaning of ids, views by geometry, and their fate at the end of a lease.

Owns every reference to device memory that the interpreter holds. Views are made once per (storage, geometry), after
checking that the geometry lies inside the storage; the check is here and nowhere else.
"""

from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from msgspec import Struct

from dormouse.gpuserver.commands.definitions import CheckedMeta, ProtocolViolation, brief

Materialise = Callable[[], torch.UntypedStorage]
MayWrite = Callable[[bool], bool]
"""Whether a storage may be written where it is; asked with True, whether it may grow there, which nothing in a pool
can."""

Direct = Callable[[int], torch.UntypedStorage | None]


STORAGE_BITS: Final = 63
"""Storage ids are non-negative and below two to this: they are kept in a database of signed numbers."""

MAX_STORAGES: Final = 1 << 20
MAX_STORAGE_NBYTES: Final = 1 << 40
"""Of one instance: far beyond what models have."""

EMBEDDING: Final = "aten::embedding"
"""Its table may be read where it comes from."""

DIRECT_SHARE: Final = 4
"""A command that reads more than one part in so many of a storage waits until it has come: reads of single rows are
slower than copies."""


class StorageFailure(Struct, frozen=True, eq=False):
    """Why a storage has no value: the first error's kind, text and place, and the storage that was not there if that is
    why: its instance may know more of it.
    """

    kind: str
    text: str
    where: list[Any] | None = None
    storage: int | None = None

    def at(self, where: list[Any]) -> "StorageFailure":
        """The same, of a command that was the first to meet it."""
        return self if self.where is not None else StorageFailure(self.kind, self.text, where, self.storage)

    def told(self) -> list[Any]:
        """The failure as it travels."""
        return [self.kind, self.text, self.where, *(() if self.storage is None else (self.storage,))]


class CommandFailed(Exception):
    """A command cannot run; it poisons the storages that it would have written."""

    def __init__(self, failure: StorageFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class HeldStorage(Struct, eq=False):
    """One storage. `address` and `nbytes` are valid once `storage` is there.

    `may_write` is there as long as the bytes are the pool's, and is asked before the first write, which others who
    share them must not see (`in_place` from then on), and before any growth of the storage. `direct` is there as long
    as the bytes are on their way: gives them where they come from, to a command that needs no more than so many of
    them.
    """

    nbytes: int
    materialise: Materialise | None = None
    may_write: MayWrite | None = None
    direct: Direct | None = None
    persistent: bool = False
    in_place: bool = False
    dirty: bool = False
    error: StorageFailure | None = None
    storage: torch.UntypedStorage | None = None
    tensor: torch.Tensor | None = None  # the result that made it, until somebody needs the storage itself
    address: int = 0
    views: dict[int, torch.Tensor] = {}  # by geometry number

    @classmethod
    def of_result(cls, tensor: torch.Tensor, meta: CheckedMeta) -> "HeldStorage":
        address = tensor.data_ptr() - meta.offset * meta.itemsize
        return cls(meta.extent, tensor=tensor, address=address, views={meta.number: tensor})

    @classmethod
    def of_bytes(cls, storage: torch.UntypedStorage) -> "HeldStorage":
        return cls(storage.nbytes(), storage=storage, address=storage.data_ptr())

    def bytes(self) -> torch.UntypedStorage:
        """The storage itself, brought into being if it is not there."""
        if self.storage is None:
            if self.tensor is not None:
                self.storage = self.tensor.untyped_storage()
                self.tensor = None
            elif self.materialise is not None:
                self.storage = self.materialise()
                self.direct = None
            else:
                raise RuntimeError("a storage without content")
            self.nbytes = self.storage.nbytes()
            self.address = self.storage.data_ptr()
        return self.storage

    def resized(self) -> None:
        """The storage was given another size by an operation: views may be stale."""
        self.views.clear()
        if self.storage is not None:
            self.nbytes = self.storage.nbytes()
            self.address = self.storage.data_ptr()


class EndReport(Struct):
    """The effects of a lease on the model. `spoiled` are the persistent ones of the `poisoned`: an operation failed
    while it wrote them, and they must be forgotten on this GPU.
    """

    dirty: list[int] = []
    created: list[tuple[int, int]] = []
    freed: list[int] = []
    spoiled: list[int] = []
    poisoned: dict[int, StorageFailure] = {}


class StorageTable:
    """Storages by id. Persistent ones are bound by the executor; the others are made by commands and end with the
    lease."""

    def __init__(self, device: torch.device, contains: Callable[[int, int], bool] | None) -> None:
        self.device = device
        self.by_id: dict[int, HeldStorage] = {}
        self.freed_persistent: dict[int, None] = {}  # by this lease, in its order
        self.ahead: dict[int, HeldStorage] = {}  # made by commands not asked for yet, see templates.py
        self.owed: dict[int, HeldStorage] = {}  # the same, once all of it has been asked for
        self.written: Callable[[], object] = lambda: None  # called before something is written
        self.settled: Callable[[], object] = lambda: None  # nothing is ahead after that
        self.contains = contains

    def check_fresh(self, numbers: list[Any]) -> None:
        """Check the ids of new storages. Raises ProtocolViolation for a value that cannot be one."""
        by_id, freed = self.by_id, self.freed_persistent
        for number in numbers:
            # The shift is 0 for numbers that the store can keep, and for no others.
            if type(number) is not int or number >> STORAGE_BITS or number in by_id or number in freed:
                raise ProtocolViolation(f"storage {brief(number)} is not a new number")
        if len(by_id) + len(numbers) > MAX_STORAGES:
            raise ProtocolViolation("too many storages")

    def bind(
        self,
        number: int,
        nbytes: int,
        materialise: Materialise,
        may_write: MayWrite | None = None,
        direct: Direct | None = None,
    ) -> None:
        """A persistent storage. `may_write` is asked before its first write: False if it must be copied first; `direct`
        before a use that needs a few rows, until it was materialised.
        """
        self.by_id[number] = HeldStorage(nbytes, materialise, may_write, direct, persistent=True)

    def will_write(self, stored: HeldStorage, grows: bool = False) -> None:
        """Before a command that writes: a storage whose bytes others share, or that does not stay as large as it is,
        becomes a copy of its own.
        """
        if stored.may_write is None or (stored.in_place and not grows):
            return
        if stored.may_write(grows):
            stored.in_place = True
            return
        source = stored.bytes()
        copy = torch.empty(source.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()
        copy.copy_(source)
        stored.storage, stored.may_write = copy, None
        stored.resized()

    def unbind(self, numbers: list[int]) -> None:
        for number in numbers:
            self.by_id.pop(number, None)

    def free(self, numbers: list[int]) -> None:
        for number in numbers:
            stored = self.by_id.pop(number, None)
            if stored is not None and stored.persistent:
                self.freed_persistent[number] = None

    def get(self, number: Any) -> HeldStorage:
        stored = self.by_id.get(number) or self.owed.get(number)
        if stored is None:
            text = f"storage {brief(number)} is not on this GPU: it was lost with a lease, or freed"
            known = number if type(number) is int else None
            raise CommandFailed(StorageFailure("RuntimeError", text, storage=known))
        if stored.error is not None:
            raise CommandFailed(stored.error)
        return stored

    def view(self, stored: HeldStorage, meta: CheckedMeta) -> torch.Tensor:
        """The tensor that a geometry names on a storage. The extent is checked once for each pair."""
        view = stored.views.get(meta.number)
        if view is None:
            storage = stored.bytes()
            if meta.extent > stored.nbytes:
                text = f"a tensor that ends at byte {meta.extent} of a storage of {stored.nbytes}"
                raise CommandFailed(StorageFailure("RuntimeError", text))
            if self.contains is not None and stored.nbytes and not self.contains(stored.address, stored.nbytes):
                text = f"{stored.nbytes} bytes at {stored.address:#x} are no memory of this GPU that the executor knows"
                raise CommandFailed(StorageFailure("RuntimeError", text))
            view = stored.views[meta.number] = tensor_on(storage, meta, self.device)
        return view

    def direct(self, stored: HeldStorage, meta: CheckedMeta, touched_nbytes: int) -> torch.Tensor | None:
        """The same for a storage that is on its way, on the bytes where they come from; None if that cannot be."""
        assert stored.direct is not None
        if meta.extent > stored.nbytes or touched_nbytes > stored.nbytes // DIRECT_SHARE:
            return None
        storage = stored.direct(touched_nbytes)
        return None if storage is None else tensor_on(storage, meta, self.device)

    def own(self) -> list[tuple[int, HeldStorage]]:
        """Storages that the lease has made or changed, with their bytes."""
        self.settled()
        own = [(n, s) for n, s in self.by_id.items() if s.error is None and (s.dirty or not s.persistent)]
        for _, stored in own:
            stored.bytes()
        return own

    def spill(self, numbers: Collection[int]) -> list[int]:
        """These have been copied elsewhere: let go of their bytes. Returns those persistent ones that are the lease's
        own: among these, or lost.
        """
        for number in numbers:
            stored = self.by_id[number]
            stored.storage = stored.tensor = stored.materialise = stored.may_write = stored.direct = None
            stored.views.clear()
        kept = set(numbers)
        return [n for n, s in self.by_id.items() if s.persistent and (n in kept or s.error is not None)]

    def restore(self, number: int, storage: torch.UntypedStorage) -> None:
        """The bytes of one that was spilled."""
        stored = self.by_id[number]
        stored.storage = storage
        stored.resized()

    def forget_views(self) -> None:
        """Geometry numbers are void: views stay reachable only through their storages."""
        for stored in self.by_id.values():
            if stored.storage is None and (stored.tensor is not None):
                stored.bytes()
            stored.views.clear()

    def create(self, number: int, nbytes: int) -> HeldStorage:
        storage = torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        stored = self.by_id[number] = HeldStorage.of_bytes(storage)
        return stored

    def end(self, keep: bool) -> EndReport:
        """The lease is over; storages that are not persistent are dropped unless they are kept."""
        report = EndReport(freed=list(self.freed_persistent))
        self.freed_persistent.clear()
        for number, stored in list(self.by_id.items()):
            if stored.error is not None:
                report.poisoned[number] = stored.error
            if stored.persistent:
                if stored.error is not None:
                    report.spoiled.append(number)
                elif stored.dirty:
                    report.dirty.append(number)
            elif keep and stored.error is None:
                report.created.append((number, stored.bytes().nbytes()))
            else:
                del self.by_id[number]
        self.unbind(report.spoiled)
        return report


def tensor_on(storage: torch.UntypedStorage, meta: CheckedMeta, device: torch.device) -> torch.Tensor:
    """The tensor that a checked geometry names on a storage."""
    tensor = torch.empty(0, dtype=meta.dtype, device=device)
    tensor.set_(storage, meta.offset, meta.size, meta.stride)
    if meta.bits & 1:
        torch._C._set_conj(tensor, True)
    if meta.bits & 2:
        torch._C._set_neg(tensor, True)
    return tensor


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Its bytes."""
    bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return bytes
