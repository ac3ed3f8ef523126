"""Metering: turns statements of executors, the store and the router into the usage of each function. Pure.

Bytes that several hold together are split among them by how much each has used them; of host memory, by the time that
they had seats on GPUs. The parts of each statement add up to it, to the byte-millisecond.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dormouse.controller.ledger import Account, Ledger, Used
from dormouse.core.decisions.memory.holdings import split
from dormouse.schemas import messages as m

NOBODY: Final = Account("", "")
"""Usage that nobody has asked for, or whose owner is no longer known."""

SESSIONS: Final = "(dormouse run)"
"""The name of an account of programs without a function."""

MAX_GONE: Final = 1024
"""Instances that are gone and may still be named, at most: of the last seconds."""

KINDS: Final = frozenset({"weights", "kv", "activations", "host"})


class Metering:
    """``adapted`` returns whether a function is an adapter over a base."""

    def __init__(self, ledger: Ledger, adapted: Callable[[str], bool]) -> None:
        self.ledger = ledger
        self._adapted = adapted
        self._accounts: dict[str, Account] = {}  # by instance
        self._gone: OrderedDict[str, Account] = OrderedDict()
        self._tenants: dict[str, str] = {}  # by function that has had an instance or is deployed
        self._seats_ms: dict[Account, int] = {}  # since the last statement of host memory
        self._parts: dict[tuple[str, ...], list[int]] = {}  # how much each of these has used, when one last has

    # --- whose is what

    def instance_up(self, instance: str, function: str, tenant: str) -> None:
        self._accounts[instance] = Account(tenant, function or SESSIONS)
        if function:
            self._tenants[function] = tenant

    def instance_gone(self, instance: str) -> None:
        account = self._accounts.pop(instance, None)
        if account is not None:
            self._gone[instance] = account
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)

    def deployed(self, functions: Iterable[tuple[str, str]]) -> None:
        """``(function, tenant)`` of all that are; usage of others is forgotten when their instances are."""
        living = {account.function: account.tenant for account in self._accounts.values()}
        self._tenants = living | dict(functions)

    def account_of(self, owner: str) -> Account:
        """An instance's, or a function's."""
        account = self._accounts.get(owner) or self._gone.get(owner)
        if account is not None:
            return account
        tenant = self._tenants.get(owner)
        return NOBODY if tenant is None else Account(tenant, owner)

    # --- usage

    def gpu(self, stated: m.Metered, now_s: float) -> Mapping[str, int]:
        """Returns the tokens that were computed, by tenant."""
        tokens: Counter[str] = Counter()
        for use in stated.uses:
            account = self.account_of(use.instance)
            tokens[account.tenant] += use.prompt + use.made
            self._seats_ms[account] = self._seats_ms.get(account, 0) + use.seat_ms
            used = Used(gpu_us=use.gpu_us, prompt_tokens=use.prompt, made_tokens=use.made)
            self.ledger.add(account, used, now_s)
        for held in stated.held:
            self._held(held, held.parts, now_s)
        return tokens

    def host(self, stated: m.HostMetered, now_s: float) -> None:
        known: dict[tuple[str, ...], list[int]] = {}
        for held in stated.held:
            owners = tuple(held.owners)
            parts = [self._seats_ms.get(self.account_of(owner), 0) for owner in owners]
            known[owners] = parts if any(parts) else self._parts.get(owners, [])
            self._held(held, known[owners], now_s)
        self._parts = known
        self._seats_ms.clear()

    def _held(self, held: m.HeldBytes, parts: list[int], now_s: float) -> None:
        if held.kind not in KINDS:
            return
        owners = held.owners or [""]
        if len(parts) != len(owners):
            parts = [0] * len(owners)
        kind = held.kind
        if (
            kind == "weights"
            and held.owners
            and all(self._adapted(self.account_of(owner).function) for owner in owners)
        ):
            kind = "adapter"
        for owner, part in zip(owners, split(held.nbyte_ms, parts), strict=True):
            self.ledger.add(self.account_of(owner), Used(**{kind: part}), now_s)

    def served(self, stated: m.Served, now_s: float) -> None:
        for function, tenant, requests in stated.functions:
            self.ledger.add(Account(tenant, function), Used(requests=requests), now_s)
