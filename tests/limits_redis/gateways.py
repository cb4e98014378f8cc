"""Several gateways' limiters in one event loop, on one Redis; and what they let through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import GatewayError, RateLimited, StoreUnavailable
from gateway.limits import Lease, Limiter
from gateway.limits_redis import RedisCounters
from gateway.types import Limit, Limits
from gateway.windows import WallClock
from tests.servers.redis import Cluster, Redis

PATIENCE = 20.0  # seconds
WINDOW = "sekisho:window:"


def requests(count: int, seconds: int = 60, name: str = "key:t/k:requests") -> Limits:
    return Limits(requests=((f"{name}/{seconds}", Limit(count, seconds, "requests", "key")),))


def tokens(count: int, seconds: int = 60, name: str = "key:t/k:tokens") -> Limits:
    return Limits(tokens=((f"{name}/{seconds}", Limit(count, seconds, "tokens", "key")),))


def budget(count: int, period: str = "day", name: str = "tenant:t:budget") -> Limits:
    return Limits(tokens=((f"{name}/{period}", Limit(count, 86400, "tokens", "tenant", period)),))


def parallel(most: int, name: str = "key:t/k") -> Limits:
    return Limits(concurrency=((name, most),))


@dataclass
class Gateway:
    """One process as far as limits go."""

    counters: RedisCounters
    limiter: Limiter
    longest: float = 0.0  # seconds that a `cover` took
    refusals: list[GatewayError] = field(default_factory=list)

    async def admit(self, limits: Limits, cost: int = 0) -> Lease | None:
        """A lease, with `cost` tokens set aside where that is not 0; None when it was refused."""
        lease: Lease | None = None
        now = begun = time.monotonic()
        try:
            await self.limiter.cover_request(limits, now)
            self.longest = max(self.longest, time.monotonic() - begun)
            lease = self.limiter.admit(limits, now)
            if cost:
                begun = time.monotonic()
                await self.limiter.cover_tokens(limits, cost, now)
                self.longest = max(self.longest, time.monotonic() - begun)
                lease.reserve(cost, now)
            return lease
        except (RateLimited, StoreUnavailable) as error:
            self.longest = max(self.longest, time.monotonic() - begun)
            self.refusals.append(error)
        except asyncio.CancelledError:
            if lease is not None:
                lease.close(time.monotonic())
            raise
        if lease is not None:
            lease.close(time.monotonic())
        return None

    async def spend(self, limits: Limits, cost: int = 0, used: int | None = None) -> bool:
        """One request that ends at once and used what it had set aside, or `used`."""
        lease = await self.admit(limits, cost)
        if lease is None:
            return False
        finish(lease, cost if used is None else used)
        return True

    async def spend_until_refused(self, limits: Limits, cost: int = 0) -> int:
        spent = 0
        while spent < 10_000 and await self.spend(limits, cost):
            spent += 1
        return spent


def finish(lease: Lease, used: int = 0) -> None:
    now = time.monotonic()
    lease.settle(used, now)
    lease.close(now)


@asynccontextmanager
async def gateways(
    url: str, number: int, on_failure: str = "refuse", *, clock: WallClock | None = None, acquainted: bool = False
) -> AsyncIterator[list[Gateway]]:
    """With `refuse` nothing is let through that Redis has not granted, however slow the machine is.

    `acquainted`: all know how many they are, which takes a heartbeat.
    """
    found = []
    for _ in range(number):
        counters = RedisCounters(url, on_failure, clock or WallClock(time.time() - time.monotonic()))
        found.append(Gateway(counters, Limiter(counters)))
    try:
        for gateway in found:
            await gateway.counters.start()
        if acquainted:
            assert await eventually(lambda: all(gateway.counters.live == number for gateway in found))
        yield found
    finally:
        for gateway in found:
            await gateway.counters.close()


async def eventually(check: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def until_up(nodes: Sequence[Gateway]) -> None:
    assert await eventually(lambda: all(node.counters.up for node in nodes))


def used(server: Redis | Cluster, limits: Limits) -> int:
    """What Redis has booked of the one counter of `limits`."""
    ((name, limit),) = (*limits.requests, *limits.tokens)
    if not limit.period:
        return int(server.ask("HGET", WINDOW + name, "used") or 0)
    keys = server.ask("KEYS", f"sekisho:budget:{name}:*")
    return sum(int(server.ask("HGET", key, "used")) for key in keys)


def slots(server: Redis | Cluster, limits: Limits) -> int:
    """Slots that are taken of the one place of `limits`, dead ones among them."""
    ((name, _),) = limits.concurrency
    held = server.ask("HGETALL", f"sekisho:place:{name}")
    values = held[1::2] if isinstance(held, list) else held.values()
    return sum(int(value.partition(":")[0]) for value in values)
