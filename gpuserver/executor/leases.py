"""The leases of one GPU at work, on the executor's thread: carries out the machine's decisions or passes them on.

Events are handled one after the other, each with its effects, also those that arise meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dormouse.core import tenants
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import read_header
from dormouse.core.decisions.leases.machine import Machine
from dormouse.core.decisions.memory.transfer import Kind
from dormouse.gpuserver.device.protocol import Device
from dormouse.gpuserver.executor.lending import Lending
from dormouse.gpuserver.executor.orders import Attach, Orders, Posted, Repaid, Serve
from dormouse.gpuserver.executor.wakes import BeginWake, Recipients, StopWake, WakeOver, Wakes
from dormouse.schemas import messages as m


class Leases:
    """See the module.

    Args:
        post: have something done on this thread; from any thread, in order.
        batch_nbytes: bytes that a wake keeps in the store's memory at a time.
    """

    def __init__(
        self,
        device: Device,
        orders: Orders,
        outside: Recipients,
        post: Callable[..., object],
        batch_nbytes: int,
        turns: int = 1,
        turn_s: float = 0.02,
        seat_idle_s: float = 600.0,
        offload: str = "ahead",
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        share = device.activations_share_pool
        self.machine = Machine(
            device.make_pool(),
            share=share,
            turns=turns,
            turn_s=turn_s,
            seat_idle_s=seat_idle_s,
            offload=offload,
            quotas=quotas,
        )
        self.orders = orders
        self.wakes = Wakes(device, batch_nbytes, outside, self.dispatch, post)
        self.lending = Lending(self.machine.residency)
        self._device, self._outside = device, outside
        self._events: deque[Posted] = deque()
        self._handling = False

    @classmethod
    def of_config(
        cls, config: NodeConfig, device: Device, orders: Orders, outside: Recipients, post: Callable[..., object]
    ) -> "Leases":
        # So that all GPUs together leave half of the store's memory alone.
        batch_nbytes = config.host_nbytes // (4 * config.gpu_count)
        policy = config.schedule
        turn_s, seat_idle_s = policy.turn_ms / 1000, config.gpu.seat_idle_ms / 1000
        quotas = tenants.gpu_nbytes(config.tenants)
        return cls(
            device, orders, outside, post, batch_nbytes, policy.turns, turn_s, seat_idle_s, policy.offload, quotas
        )

    def attach(self, attach: m.AttachInstance, arena: Any) -> None:
        """An instance has an endpoint here. ``arena`` is the compute thread's from now on."""
        self.orders.give(Attach(attach, arena))
        told = e.InstanceAttached(attach.instance, attach.tenant, attach.llm, attach.group, attach.adapter)
        self.dispatch(told)

    def wake(self, wake: m.Wake) -> None:
        rates = e.WakeRates(self._device.bandwidth(Kind.SLAB), self._device.bandwidth(Kind.PEER))
        self.dispatch(e.WakeAsked(wake, rates))

    def preload(self, preload: m.Preload) -> None:
        rates = e.WakeRates(self._device.bandwidth(Kind.SLAB), self._device.bandwidth(Kind.PEER))
        self.dispatch(e.PreloadAsked(preload, rates))

    def dispatch(self, event: Posted) -> None:
        """Let the machine decide and carry out its decision; events that arise meanwhile wait for their turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                first = self._events.popleft()
                if isinstance(first, BeginWake | StopWake | WakeOver):
                    self.wakes.handle(first)
                    if not isinstance(first, BeginWake):
                        continue
                    first = e.Begun(first.serial)
                if isinstance(first, Repaid):
                    self._outside.take_back(first.loan)
                    continue
                self.orders.heard(first)
                for effect in self.machine.handle(first, time.monotonic()):
                    self._perform(effect)
        finally:
            self._handling = False

    def _perform(self, effect: o.Effect) -> None:
        match effect:
            case o.Reply(instance=instance, message=message):
                self._outside.reply(instance, message)
            case o.Expel(instance=instance, text=text, story=story):
                self._outside.expel(instance, text, story)
            case o.ToRuntimeOf(serial=serial, instance=instance, runtime=runtime):
                self._outside.to_runtime(serial, instance, runtime, effect.message)
            case o.Skip(serial=serial):
                self.orders.skipped.add(serial)
                self.wakes.interrupt(serial)
                self._outside.lease_over(serial)
            case m.Done(serial=serial):
                self._outside.to_controller(effect)
                self._outside.lease_over(serial)
            case o.StopBringing(serial=serial):
                self.wakes.stop_ahead(serial)
            case o.OpenRuntime(instance=instance, runtime=runtime):
                self._outside.open_runtime(instance, runtime)
            case m.Pressed() | m.Idle() | m.Busy() | m.WantsTurn() | m.Preloaded() | m.Metered() | m.Unloaded():
                self._outside.to_controller(effect)
            case m.AskPlace() | m.Written() | m.LetGo() | m.FirstUse():
                self._outside.to_store(effect)
            case o.Execute(alone=True, instance=instance) if (loan := self._outside.lend(instance)) is not None:
                self.orders.give(Serve(effect.serial, read_header(effect.data), loan, effect.data))
            case o.Listen(begin=begin) if (loan := self._outside.lend(begin.instance)) is not None:
                self.orders.listen(begin, loan, effect.until_s)
            case o.Listen(begin=begin):
                self._events.append(e.NotLent(begin.serial))
            case _:
                self.orders.give(effect)
