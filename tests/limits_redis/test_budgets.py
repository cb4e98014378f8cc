"""Token budgets of a day or a month: shared, and new with the next period."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest

from gateway.errors import QuotaExceeded
from gateway.windows import WallClock
from tests.limits_redis.gateways import budget, eventually, finish, gateways, until_up, used
from tests.servers.redis import Redis

NEVER_YET = datetime(2031, 3, 31, 23, 59, 50, tzinfo=UTC)  # the last seconds of a day and of a month


def clock_at(moment: datetime) -> WallClock:
    return WallClock(moment.timestamp() - time.monotonic())


def booked(server: Redis, period: str, first: datetime) -> int:
    value = server.ask("HGET", f"sekisho:budget:tenant:t:budget/{period}:{int(first.timestamp())}", "used")
    return int(value or 0)


@pytest.mark.parametrize(("period", "old"), [("day", datetime(2031, 3, 31, tzinfo=UTC)),
                                             ("month", datetime(2031, 3, 1, tzinfo=UTC))])  # fmt: skip
def test_a_budget_is_shared_and_starts_again_with_the_period(server: Redis, period: str, old: datetime) -> None:
    async def scenario() -> None:
        clock, limits = clock_at(NEVER_YET), budget(1000, period)
        async with gateways(server.url, 2, clock=clock) as (first, second):
            spent = [await node.spend(limits, 50) for _ in range(8) for node in (first, second)]
            assert all(spent)
            over_midnight = await first.admit(limits, 150)
            assert over_midnight is not None
            assert await eventually(lambda: booked(server, period, old) == 950)  # nothing is held in store for long
            assert await second.admit(limits, 100) is None
            error = second.refusals[-1]
            assert isinstance(error, QuotaExceeded)
            assert error.retry_after is not None and 0 < error.retry_after <= 10
            clock.offset += 20
            assert await first.spend(limits, 900)
            assert await second.spend(limits, 100)
            assert await first.admit(limits, 100) is None
            finish(over_midnight, 5)
        assert booked(server, period, datetime(2031, 4, 1, tzinfo=UTC)) == 1000
        assert booked(server, period, old) == 950  # nobody looks at it any more

    asyncio.run(scenario())
    for key in server.ask("KEYS", "sekisho:budget:*"):
        assert server.ask("TTL", key) > 86000


def test_what_is_drawn_of_a_budget_is_held_for_seconds_only(server: Redis) -> None:
    async def scenario() -> None:
        limits = budget(100_000)
        async with gateways(server.url, 1, clock=clock_at(NEVER_YET)) as (node,):
            for _ in range(300):
                assert await node.spend(limits, 10)
            assert used(server, limits) > 3000  # drawn in store
            assert await eventually(lambda: used(server, limits) == 3000)

    asyncio.run(scenario())


def test_a_budget_that_changes_while_redis_is_away(fragile: Redis) -> None:
    async def scenario() -> None:
        clock, limits = clock_at(NEVER_YET), budget(1000)
        async with gateways(fragile.url, 1, "local", clock=clock) as (node,):
            assert await node.spend(limits, 300)
            fragile.stop()
            assert await node.spend(limits, 400)
            assert await node.admit(limits, 400) is None
            clock.offset += 20
            assert await node.spend(limits, 600)
            fragile.start()
            await until_up([node])
            assert await eventually(lambda: used(fragile, limits) == 600)
            assert await node.admit(limits, 500) is None
            assert await node.spend(limits, 400)

    asyncio.run(scenario())
    assert used(fragile, budget(1000)) == 1000
