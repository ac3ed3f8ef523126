"""Usage of this node's functions: receives the statements, keeps the ledger and its file, answers queries."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from dormouse.controller.busyshares import BusyShares
from dormouse.controller.ledger import NOTHING, Account, Ledger, Used, numbers
from dormouse.controller.metering import Metering
from dormouse.controller.usagefile import UsageFile
from dormouse.core.prices import AHEAD_S
from dormouse.schemas import messages as m

WRITE_S: Final = 2.0
"""Between two batches of accounts that are written. A controller that is killed loses what has changed since."""

NOBODYS: Final = "(nobody's)"


class NodeUsage:
    """``log`` is the process's. ``limited`` tenants may use so many tokens a second; the router is notified
    (``tell``) of those that they have. Until `open`, all is in memory alone.
    """

    def __init__(self, log: Any, limited: frozenset[str], tell: Callable[[m.TokensUsed], None]) -> None:
        self._log, self._limited, self._tell = log, limited, tell
        self.busy = BusyShares()
        self._ledger = Ledger()
        self._adapters: frozenset[str] = frozenset()
        self._tenants: dict[str, str] = {}  # by function that is deployed
        self._metering = Metering(self._ledger, lambda function: function in self._adapters)
        self._file: UsageFile | None = None
        self._restored: dict[Account, Used] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, path: Path) -> None:
        self._file = UsageFile(path, self._ledger, self._log)
        self._restored = self._file.restored

    def deployed(self, specs: Sequence[m.FunctionSpec]) -> None:
        """All that are."""
        self._adapters = frozenset(spec.name for spec in specs if spec.llm is not None and spec.llm.base)
        self._tenants = {spec.name: spec.tenant for spec in specs}
        self._metering.deployed(self._tenants.items())

    def metered(self, gpu: int, message: m.Metered, now_s: float) -> None:
        """``now_s`` is of a monotonic clock."""
        for use in message.uses:
            self.busy.add(gpu, self._metering.account_of(use.instance).function or NOBODYS, use.gpu_us, now_s)
        tokens = self._metering.gpu(message, time.time())
        if limited := [(name, count) for name, count in tokens.items() if count and name in self._limited]:
            self._tell(m.TokensUsed(tenants=limited))
        self._set_timer()

    def heard(self, message: m.RouterToController | m.HostMetered) -> None:
        """Of the router, its statements of instances and requests count."""
        now_s = time.time()
        match message:
            case m.HostMetered():
                self._metering.host(message, now_s)
            case m.Served():
                self._metering.served(message, now_s)
            case m.InstanceUp(instance=instance, function=function, tenant=tenant):
                self._metering.instance_up(instance, function, tenant)
            case m.InstanceGone(instance=instance):
                self._metering.instance_gone(instance)
        self._set_timer()

    def totals(self) -> dict[str, Used]:
        """Usage since the start of this process, by function that is deployed. Restored usage does not count: some of
        what the process before has reported may be lost with it, and such a total could be less than before.
        """
        return {name: self._since_start(Account(tenant, name)) for name, tenant in self._tenants.items()}

    def _since_start(self, account: Account) -> Used:
        known = self._ledger.books.get(account)
        if known is None:
            return NOTHING
        used = known.total.minus(self._restored.get(account, NOTHING))
        if min(numbers(used)) < 0:  # the ledger had forgotten it, and began anew
            del self._restored[account]
            return known.total
        return used

    def answer(self, asked: m.AskUsage) -> m.Status:
        now_s, text = time.time(), ""
        if not math.isfinite(asked.since_s):
            text = f"since is {asked.since_s}; write seconds of the Unix clock"
        elif asked.since_s > now_s + AHEAD_S:
            text = "since is in the future; name a time that has been"
        if text:
            return m.Status(query=asked.query, json=b"", failure=m.Failure(code="bad_request", status=400, text=text))
        since_s, used = self._ledger.since(asked.since_s, now_s)
        rows = [account._asdict() | _told(usage) for account, usage in sorted(used.items())]
        value = {"since_s": since_s, "until_s": round(now_s, 3), "functions": rows}
        return m.Status(query=asked.query, json=orjson.dumps(value))

    def _set_timer(self) -> None:
        if self._timer is None and self._file is not None and self._ledger.changed:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write)

    def _write(self) -> None:
        self._timer = None
        if self._file is not None:
            self._file.write()
        self._set_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._file is not None:
            self._file.close()


def _told(usage: Any) -> dict[str, int | float]:
    """In the units of prices: seconds, and bytes times seconds."""
    fields: dict[str, int] = msgspec.structs.asdict(usage)
    counts = {name: fields[name] for name in ("requests", "prompt_tokens", "made_tokens")}
    held = {f"{name}_nbyte_s": fields[name] / 1000 for name in ("weights", "kv", "activations", "adapter", "host")}
    return counts | {"gpu_s": fields["gpu_us"] / 1e6} | held
