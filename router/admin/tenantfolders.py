"""Bytes of tenants' snapshots on the disk, with those of versions that are kept: pure. A large file that several of a
tenant's snapshots have counts once; every other entry as a block at least, since it takes one.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

BLOCK_NBYTES: Final = 4096


class TenantFolders:
    """``most``: bytes that a tenant may have; None: there is no bound, and nothing is counted."""

    def __init__(self, most: Callable[[str], int] | None) -> None:
        self.most = most
        self.held: Counter[str] = Counter()  # bytes by tenant
        self._trees: dict[Hashable, tuple[str, Counter[Hashable]]] = {}  # large files, and bytes of all others as None
        self._uses: Counter[tuple[str, Hashable]] = Counter()  # entries by tenant and large file

    def put(self, tree: Hashable, tenant: str, nbytes: int, large: Hashable = None) -> int:
        """One more entry; how many bytes the tenant has too many by now. ``large``: which file it is."""
        if self.most is None:
            return 0
        owner, files = self._trees.setdefault(tree, (tenant, Counter()))
        if large is None:
            files[None] += nbytes
            self.held[owner] += nbytes
        elif large not in files:
            files[large] = nbytes
            self.held[owner] += 0 if self._uses[owner, large] else nbytes
            self._uses[owner, large] += 1
        return max(0, self.held[owner] - self.most(owner))

    def drop(self, tree: Hashable) -> None:
        """It is removed, or never came to be."""
        owner, files = self._trees.pop(tree, ("", Counter[Hashable]()))
        for large, nbytes in files.items():
            if large is not None:
                self._uses[owner, large] -= 1
                if self._uses[owner, large]:
                    continue
                del self._uses[owner, large]
            self.held[owner] -= nbytes

    def check(self) -> None:
        """Assert that the sums are exact."""
        held = Counter[str]()
        for tenant in {owner for owner, _ in self._trees.values()}:
            files = [files for owner, files in self._trees.values() if owner == tenant]
            held[tenant] = sum(each[None] for each in files)
            held[tenant] += sum({key: n for each in files for key, n in each.items() if key is not None}.values())
        assert +held == +self.held
