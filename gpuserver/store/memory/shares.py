"""Decides which tenant has how much of the host memory that nobody can take back: pure.

Bytes that are in a file too are anybody's: they go when others need the room. Only bytes that are in host memory alone
count: drafts, by the bytes that have come and not by those that were announced, and segments without a file, for each
tenant that holds them.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from dormouse.gpuserver.store.memory.segments import Holder, Segments
from dormouse.gpuserver.store.memory.slabs import SlabSpan


class HostShares:
    """``tenant`` returns that of a holder; None if it is of none. ``most``: bytes that a tenant may have."""

    def __init__(self, segments: Segments, tenant: Callable[[Holder], str | None], most: Callable[[str], int]) -> None:
        self._segments, self._tenant, self._most = segments, tenant, most
        self._drafts: dict[SlabSpan, tuple[str, str, int]] = {}  # tenant, instance, bytes
        self._alone: dict[SlabSpan, tuple[frozenset[str], int]] = {}  # tenants and bytes of segments in no file
        self._held: Counter[str] = Counter()  # bytes of both, by tenant
        self._announced: Counter[str] = Counter()  # bytes of drafts, come or not, by instance

    def came(self, span: SlabSpan, instance: str, nbytes: int) -> None:
        """So many bytes more of a draft."""
        if span not in self._drafts:
            self._announced[instance] += span.nbytes
        tenant, _, before = self._drafts.get(span, (self._tenant(instance) or "", instance, 0))
        self._drafts[span] = tenant, instance, before + nbytes
        self._held[tenant] += nbytes

    def freed(self, spans: Iterable[SlabSpan]) -> None:
        for span in spans:
            if span in self._drafts:
                tenant, instance, nbytes = self._drafts.pop(span)
                self._held[tenant] -= nbytes
                self._announced[instance] -= span.nbytes
                if not self._announced[instance]:
                    del self._announced[instance]

    def announced(self, instance: str) -> int:
        """Bytes of its drafts, come or not."""
        self._sync()
        return self._announced[instance]

    def lacking(self, instance: str, nbytes: int) -> int:
        """How many bytes its tenant would have too many with these."""
        self._sync()
        tenant = self._tenant(instance) or ""
        return max(0, self._held[tenant] + nbytes - self._most(tenant))

    def held(self, instance: str) -> tuple[str, int, int]:
        """The instance's tenant, its bytes, and its most."""
        tenant = self._tenant(instance) or ""
        return tenant, self._held[tenant], self._most(tenant)

    def largest_draft(self) -> str:
        """The instance with most bytes in drafts, of the tenant with most; "" if there is none."""
        by_tenant, by_instance = Counter[str](), Counter[tuple[str, str]]()
        for tenant, instance, nbytes in self._drafts.values():
            by_tenant[tenant] += nbytes
            by_instance[tenant, instance] += nbytes
        some = [key for key, nbytes in by_instance.items() if nbytes]
        return max(some, key=lambda key: (by_tenant[key[0]], by_instance[key]), default=("", ""))[1]

    def _sync(self) -> None:
        """Take over changes of holders and files."""
        moved, self._segments.moved = self._segments.moved, {}
        for span, known in moved.items():
            holders = self._segments.holders_at(span, known)
            if holders is not None:
                self.freed([span])  # a segment now
            alone = holders is not None and not self._segments.is_filed(known)
            tenants = frozenset(each for each in map(self._tenant, holders or ()) if each is not None)
            before, nbytes = self._alone.pop(span, (frozenset[str](), 0))
            for tenant in before:
                self._held[tenant] -= nbytes
            if alone and tenants:
                self._alone[span] = tenants, known.nbytes
                for tenant in tenants:
                    self._held[tenant] += known.nbytes

    def check(self) -> None:
        """Assert that the sums are exact."""
        held = Counter[str]()
        for tenant, _, nbytes in self._drafts.values():
            held[tenant] += nbytes
        for tenants, nbytes in self._alone.values():
            held.update(dict.fromkeys(tenants, nbytes))
        assert +held == +self._held
