"""The policy's order in each tenant, and the choice among the tenants' first requests: pure."""

from typing import Final

from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.orders import Heaped
from dormouse.core.decisions.scheduling.shares import LEAD_S, Shares
from dormouse.core.decisions.scheduling.state import Waiting
from dormouse.core.decisions.scheduling.topology import Bandwidths

ONE: Final = ""
"""The tenant of all requests where no tenant has a share."""


class TenantOrders:
    """An order (orders.py) for each tenant that has requests; those of one that is over its share come last."""

    def __init__(self, kind: type[Heaped], topology: Bandwidths, shares: Shares) -> None:
        self._kind, self._topology, self._shares = kind, topology, shares
        self._orders: dict[str, Heaped] = {}
        self.gives_up = kind.gives_up

    def _of(self, tenant: str) -> Heaped:
        order = self._orders.get(tenant)
        if order is None:
            order = self._orders[tenant] = self._kind(self._topology)
        return order

    def add(self, waiting: Waiting, now_s: float) -> None:
        self._of(self._shares.tenant(waiting)).add(waiting, now_s)

    def add_late(self, waiting: Waiting) -> None:
        self._of(self._shares.tenant(waiting)).add_late(waiting)

    def pop(self, now_s: float) -> tuple[Waiting | None, bool]:
        orders, shares = self._orders, self._shares
        if not shares.on:
            return self._of(ONE).pop(now_s)
        first: tuple[tuple[float, ...], Waiting, bool] | None = None
        least_s = 0.0
        for virtual_s, tenant in shares.ascending():
            if (order := orders.get(tenant)) is None:
                continue
            if first is not None and virtual_s >= least_s + LEAD_S:
                break
            waiting, late = order.pop(now_s)
            if waiting is None:
                continue
            least_s = virtual_s if first is None else least_s
            found = later = order.standing(waiting, now_s), waiting, late
            if first is None or found[0] < first[0]:
                first, later = found, first
            if later is not None:
                self.add(later[1], now_s)
        return (None, False) if first is None else first[1:]

    def update(self, now_s: float, functions: list[Function]) -> None:
        """Each tenant's among themselves."""
        if not self._shares.on:
            self._of(ONE).update(now_s, functions)
            return
        known = {function.tenant for function in functions}
        for tenant in [tenant for tenant in self._orders if tenant not in known and not self._shares.wants(tenant)]:
            del self._orders[tenant]
        for tenant, order in self._orders.items():
            order.update(now_s, [function for function in functions if function.tenant == tenant])

    def standing(self, waiting: Waiting, now_s: float) -> tuple[float, ...]:
        return self._of(self._shares.tenant(waiting)).standing(waiting, now_s)
