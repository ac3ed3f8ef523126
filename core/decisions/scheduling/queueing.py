"""Queue of requests that wait for a lease: pure. One of an instance that has a lease is *parked* until that is over.
One that is sooner done on a busy GPU than on a free one is *held* until that GPU's lease is over, and so are the others
of its instance. All the rest are in the policy's order.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from math import inf
from operator import attrgetter
from typing import Final

from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.orders import ORDER_CLASSES, UPDATE_S
from dormouse.core.decisions.scheduling.seniority import Seniority
from dormouse.core.decisions.scheduling.shares import Shares
from dormouse.core.decisions.scheduling.state import Gpu, Model, Waiting
from dormouse.core.decisions.scheduling.tenant_orders import TenantOrders
from dormouse.core.decisions.scheduling.topology import Bandwidths
from dormouse.schemas.policy import Policy

_number: Final = attrgetter("request")
_arrived: Final = attrgetter("arrived_s", "request")

LOOK: Final = 32
"""Requests of a GPU, or of an instance, that are considered again when their GPU or instance is free: the others would
only wait again. Of an instance the oldest and the newest: under overload the old are late and the new may not be.
"""


class Queue:
    """``gpus`` and ``functions`` are the scheduler's. ``held_until_s``: when some of those that are held are to be
    considered again, whatever happens: the lease that they wait for is overdue then.
    """

    def __init__(
        self, policy: Policy, topology: Bandwidths, gpus: dict[int, Gpu], functions: dict[str, Function]
    ) -> None:
        self._topology = topology
        self._gpus = gpus
        self._functions = functions
        self._updated_s = 0.0
        self._holding: set[int] = set()  # GPUs that requests are held for
        self._postponed: dict[int, float] = {}  # of these, where one waits though a turn is to be had, and until when
        self.held_until_s = inf
        self.waiting: OrderedDict[int, Waiting] = OrderedDict()  # by request, in order of arrival
        self._contending: dict[str, OrderedDict[int, Waiting]] = {}  # by tenant, without those that are rationed
        self._rationed: list[Waiting] = []
        self.rations_s = inf  # when some of those are to be considered again, if one may be woken then
        self.shares = Shares(gpus)
        self.order = TenantOrders(ORDER_CLASSES[policy.order], topology, self.shares)
        self.seniority = Seniority(policy)

    def add(self, waiting: Waiting, now_s: float) -> None:
        if self.shares.on:
            self.shares.waits(waiting, now_s)
        self.waiting[waiting.request] = waiting
        self._contend(waiting)
        self._file(waiting, now_s)

    def came_again(self, waiting: Waiting, now_s: float) -> None:
        """As if it came now."""
        self.waiting.move_to_end(waiting.request)
        self._contending[self.shares.tenant(waiting)].move_to_end(waiting.request)
        if waiting.held_for is None:
            self.order.add(waiting, now_s)

    def _contend(self, waiting: Waiting) -> None:
        tenant = self.shares.tenant(waiting)
        self._contending.setdefault(tenant, OrderedDict())[waiting.request] = waiting

    def contends_no_more(self, waiting: Waiting) -> None:
        """It is not among those that may be overdue."""
        tenant = self.shares.tenant(waiting)
        own = self._contending.get(tenant)
        if own is not None and own.pop(waiting.request, None) is not None and not own:
            del self._contending[tenant]

    def overdue(self, now_s: float) -> Waiting | None:
        """The oldest that is (seniority.py), of tenants that are not over their share."""
        oldest: Waiting | None = None
        for waiting in self._contending.values():
            late = self.seniority.overdue(waiting.values(), now_s)
            if late is not None and not self.shares.is_over(late.tenant):
                oldest = late if oldest is None else min(oldest, late, key=_arrived)
        return oldest

    def _file(self, waiting: Waiting, now_s: float) -> None:
        if waiting.model.leased and waiting.resumes is None:
            self._park(waiting)
        else:
            self.order.add(waiting, now_s)

    def follow(self, policy: Policy, now_s: float) -> None:
        """Another order from now on, also of those that wait."""
        for number in sorted(self._holding):
            self.let_go(self._gpus[number], now_s, len(self._gpus[number].held))
        self.order = TenantOrders(ORDER_CLASSES[policy.order], self._topology, self.shares)
        self.let_rationed(now_s, len(self._rationed))
        self.order.update(now_s, list(self._functions.values()))
        self.seniority = Seniority(policy)
        for waiting in self.waiting.values():
            waiting.model.parked.clear()
        self._contending.clear()
        self.shares.recount(self.waiting.values())
        for waiting in self.waiting.values():
            self._contend(waiting)
            self._file(waiting, now_s)

    def taken(self, waiting: Waiting) -> None:
        """It gets a lease."""
        waiting.live = False
        del self.waiting[waiting.request]
        self.contends_no_more(waiting)
        if self.shares.on:
            self.shares.waits_no_more(waiting)
        parked = waiting.model.parked
        if parked:
            at = bisect_left(parked, waiting.request, key=_number)
            if at < len(parked) and parked[at] is waiting:
                del parked[at]

    def left(self, waiting: Waiting, now_s: float) -> None:
        """It waits no more, without a lease: others of its instance may have waited behind it."""
        self.taken(waiting)
        model = waiting.model
        if not model.leased and model.held_for is None:
            self.unpark(model, now_s)

    def forget(self, model: Model) -> None:
        """None of its requests waits any more."""
        model.parked.clear()
        for waiting in [waiting for waiting in self.waiting.values() if waiting.model is model]:
            self.taken(waiting)

    def update(self, now_s: float) -> bool:
        """Rank functions anew, now and then; whether it was time to."""
        if now_s >= self._updated_s + UPDATE_S:
            self._updated_s = now_s
            self.order.update(now_s, list(self._functions.values()))
            return True
        return False

    def next(self, free: set[int], now_s: float) -> tuple[Waiting | None, bool]:
        """The next that one of the free GPUs may be given to, and whether it is known to be late; None if there is
        none.
        """
        while True:
            waiting, late = self.order.pop(now_s)
            if waiting is None:
                released = sorted((free & self._holding) - self._postponed.keys())
                if not released:
                    return None, False
                for number in released:
                    self.let_go(self._gpus[number], now_s)
                continue
            if not waiting.blocked:
                return waiting, late
            self._park(waiting)

    def _park(self, waiting: Waiting) -> None:
        parked = waiting.model.parked
        if parked and waiting.request < parked[-1].request:
            insort(parked, waiting, key=_number)
        else:
            parked.append(waiting)

    def unpark(self, model: Model, now_s: float) -> None:
        """Its lease is over."""
        parked = model.parked
        if len(parked) <= LOOK:
            model.parked = []
        else:
            model.parked = parked[LOOK // 2 : -LOOK // 2]
            parked = parked[: LOOK // 2] + parked[-LOOK // 2 :]
        for waiting in parked:
            self.order.add(waiting, now_s)

    def hold(self, waiting: Waiting, number: int, now_s: float) -> None:
        """Let it wait for this GPU."""
        gpu = self._gpus[number]
        insort(gpu.held, waiting, key=_number)
        if waiting.resumes is None:
            waiting.model.held_for = number
        self._holding.add(number)
        self.begun(gpu, now_s)

    def ration(self, waiting: Waiting) -> None:
        """Let it wait until one of those that are given up may be woken."""
        waiting.rationed = True
        self.contends_no_more(waiting)
        self._rationed.append(waiting)
        if self.rations_s == inf:
            self.rations_s = 0.0

    def let_rationed(self, now_s: float, count: int = LOOK) -> None:
        """One of them may be: the oldest and the newest are to be considered again."""
        rationed = [waiting for waiting in self._rationed if waiting.live]
        middle = slice(count // 2, max(count // 2, len(rationed) - count // 2))
        self._rationed = rationed[middle]
        del rationed[middle]
        self.rations_s = now_s + UPDATE_S if self._rationed else inf
        for waiting in rationed:
            waiting.rationed = False
            self._contend(waiting)
            self.order.add(waiting, now_s)

    def begun(self, gpu: Gpu, now_s: float) -> None:
        """A GPU that requests are held for has a lease."""
        if gpu.running is not None and gpu.running.overdue_s > now_s:
            self.held_until_s = min(self.held_until_s, gpu.running.overdue_s)

    def postpone(self, number: int, until_s: float) -> None:
        """Requests held for this GPU are to be considered again then, or when something happens there."""
        self._postponed[number] = until_s
        self.held_until_s = min(self.held_until_s, until_s)

    def let_go(self, gpu: Gpu, now_s: float, count: int = LOOK) -> None:
        """So many of those that wait for this GPU are to be considered again."""
        self._postponed.pop(gpu.number, None)
        if not gpu.held:
            return
        held, gpu.held = gpu.held[:count], gpu.held[count:]
        for waiting in held:
            model = waiting.model
            if waiting.live:
                waiting.held_for = None
                self.order.add(waiting, now_s)
            if model.held_for == gpu.number:
                model.held_for = None
                if not model.leased:
                    self.unpark(model, now_s)
        if not gpu.held:
            self._holding.discard(gpu.number)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """A lease that is overdue already is waited for until it ends."""
        self.held_until_s = min(self._postponed.values(), default=inf)
        for number in self._holding:
            self.begun(self._gpus[number], now_s)

    def let_go_overdue(self, now_s: float) -> None:
        """The ends of the leases that these wait for are no longer predictable."""
        if self.held_until_s <= now_s:
            for number in sorted(self._holding | self._postponed.keys()):  # one that jumps the order is held nowhere
                gpu = self._gpus[number]
                late = gpu.running is not None and gpu.running.overdue_s <= now_s
                if late or self._postponed.get(number, inf) <= now_s:
                    self.let_go(gpu, now_s, len(gpu.held))
            self._settle(now_s)
