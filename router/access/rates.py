"""Requests and tokens a minute, and requests at a time, of each tenant at this router.

A token bucket holds one minute's worth, so that a tenant which was silent may use a minute at once. Tokens that were
not known beforehand (the output) are taken when they have come: a bucket may go below zero, and the tenant waits until
it is above again. Knows tenants and a clock given to it; knows no request and no protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.access.key_file import TenantLimits
from router.errors import Exhausted

MINUTE_S = 60.0

_BUSY_RETRY_S = 1.0

# Tenants with nothing going on are forgotten once there are more than this.
_MOST_IDLE_TENANTS = 10_000


class Bucket:
    """So much a minute, and one minute's worth at once."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is left; below zero after more was taken than there was."""
        self._level = min(self.per_minute, self._level + max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much is there; 0 when it is. More than a minute's worth needs a full bucket."""
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take it, whether it is there or not."""
        self._level = self.level(now_s) - amount


@dataclass
class _Tenant:
    limits: TenantLimits
    requests: Bucket | None
    tokens: Bucket | None
    num_running: int = 0


class RateLimiter:
    """The tenants of one router. `limits_of` is asked at each request: changed limits hold from the next one on."""

    def __init__(self, limits_of: Callable[[str], TenantLimits], clock: Callable[[], float]) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def admit(self, name: str) -> None:
        """Count one request. Raises Exhausted, and counts nothing, where one limit is reached."""
        tenant, now_s = self._tenant(name), self._clock()
        if tenant.limits.max_concurrent_requests is not None:
            _refuse_busy(tenant.num_running, tenant.limits.max_concurrent_requests)
        if tenant.requests is not None:
            _refuse("requests", tenant.requests, tenant.requests.wait_s(1, now_s))
        if tenant.tokens is not None:
            _refuse("tokens", tenant.tokens, tenant.tokens.wait_s(1, now_s))
        if tenant.requests is not None:
            tenant.requests.take(1, now_s)

    def charge_prompt(self, name: str, num_tokens: int) -> None:
        """Count a prompt's tokens. Raises Exhausted, and counts nothing, where they are not there yet."""
        tenant, now_s = self._tenant(name), self._clock()
        if tenant.tokens is not None:
            _refuse("tokens", tenant.tokens, tenant.tokens.wait_s(num_tokens, now_s), num_tokens)
            tenant.tokens.take(num_tokens, now_s)

    def charge_output(self, name: str, num_tokens: int) -> None:
        """Count tokens that were generated, however many are left."""
        tenant = self._tenant(name)
        if tenant.tokens is not None:
            tenant.tokens.take(num_tokens, self._clock())

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """One request runs in this block. Raises Exhausted where as many run as may."""
        tenant = self._tenant(name)
        if tenant.limits.max_concurrent_requests is not None:
            _refuse_busy(tenant.num_running, tenant.limits.max_concurrent_requests)
        tenant.num_running += 1
        try:
            yield
        finally:
            tenant.num_running -= 1

    def counts_tokens(self, name: str) -> bool:
        """Whether the tenant's output has to be counted."""
        return self._limits_of(name).tokens_per_minute is not None

    def _tenant(self, name: str) -> _Tenant:
        limits = self._limits_of(name)
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = _Tenant(limits, self._bucket(limits.requests_per_minute), None)
            tenant.tokens = self._bucket(limits.tokens_per_minute)
        elif tenant.limits != limits:
            tenant.limits = limits
            tenant.requests = self._changed(tenant.requests, limits.requests_per_minute)
            tenant.tokens = self._changed(tenant.tokens, limits.tokens_per_minute)
        return tenant

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._clock())

    def _changed(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        """A bucket of the new size, which keeps what was missing from the old one."""
        if bucket is not None and bucket.per_minute == per_minute:
            return bucket
        made = self._bucket(per_minute)
        if made is not None and bucket is not None:
            now_s = self._clock()
            made.take(bucket.per_minute - bucket.level(now_s), now_s)
        return made

    def _forget_idle(self) -> None:
        """Forgets those whom a new start would not favour: nothing runs and the buckets are full."""
        if len(self._tenants) < _MOST_IDLE_TENANTS:
            return
        now_s = self._clock()
        for name, tenant in list(self._tenants.items()):
            buckets = [bucket for bucket in (tenant.requests, tenant.tokens) if bucket is not None]
            if not tenant.num_running and all(bucket.level(now_s) >= bucket.per_minute for bucket in buckets):
                del self._tenants[name]


def _refuse(what: str, bucket: Bucket, wait_s: float, asked: int = 1) -> None:
    if wait_s > 0:
        raise Exhausted(
            f"rate limit: this tenant may use {bucket.per_minute} {what} a minute at this router, and {asked} more "
            f"{'is' if asked == 1 else 'are'} over it; try again in {wait_s:.1f} s",
            wait_s,
        )


def _refuse_busy(num_running: int, limit: int) -> None:
    if num_running >= limit:
        raise Exhausted(
            f"concurrency limit: {num_running} requests of this tenant run at this router, {limit} may; try again "
            "when one has ended",
            _BUSY_RETRY_S,
        )
