"""Rate limits of tenants, whoever calls their functions: requests and tokens per second. Pure.

A request takes one from its tenant's bucket of requests. The tokens that a language model computes for it are known
only afterwards: they are charged as its runtime counts them, and while more were used than allowed, requests wait.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Final

from dormouse.core.config import TenantSection
from dormouse.core.rate import Bucket
from dormouse.router.access.access import Refusal

TOKENS_S: Final = 10.0
"""Tokens are counted some seconds late, and an answer's come together: so many seconds' worth may be used at once."""


class TenantLimits:
    def __init__(self, tenants: Mapping[str, TenantSection]) -> None:
        self._tenants = tenants
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def enter(self, tenant: str, now_s: float) -> Refusal | None:
        """A request for one of its functions; why it may not be."""
        section = self._tenants.get(tenant)
        if section is None:
            return None
        if section.tokens_s is not None:
            bucket = self._tokens_of(tenant, section.tokens_s, now_s)
            if wait_s := bucket.wait_s(now_s, 0.0):
                text = (
                    f"tenant {tenant!r} has used {ceil(-bucket.tokens):,} tokens more than its {section.tokens_s:g} a "
                    f"second ([tenants.{tenant}] tokens_s); send it again in {ceil(wait_s)} s"
                )
                return _refusal(text, wait_s)
        if section.requests_s is not None:
            bucket = self._requests.get(tenant) or Bucket.full(section.requests_s, max(1.0, section.requests_s), now_s)
            self._requests[tenant] = bucket
            if wait_s := bucket.take(now_s):
                text = (
                    f"tenant {tenant!r} may send {section.requests_s:g} requests a second "
                    f"([tenants.{tenant}] requests_s); send it again in {ceil(wait_s)} s"
                )
                return _refusal(text, wait_s)
        return None

    def used(self, tokens: Iterable[tuple[str, int]], now_s: float) -> None:
        """So many by tenant, of prompts and answers together."""
        for tenant, count in tokens:
            section = self._tenants.get(tenant)
            if section is not None and section.tokens_s is not None:
                self._tokens_of(tenant, section.tokens_s, now_s).charge(now_s, count)

    def _tokens_of(self, tenant: str, rate_s: float, now_s: float) -> Bucket:
        bucket = self._tokens.get(tenant)
        if bucket is None:
            bucket = self._tokens[tenant] = Bucket.full(rate_s, TOKENS_S * rate_s, now_s)
        return bucket


def _refusal(text: str, wait_s: float) -> Refusal:
    return Refusal(429, "rate_limited", text, ((b"retry-after", b"%d" % ceil(wait_s)),))
