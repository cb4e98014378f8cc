"""Gateways that share a limit: exact totals for every order, nothing hoarded, nothing lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.errors import RateLimited
from gateway.limits import Lease
from gateway.limits_redis import RedisCounters, store
from gateway.limits_redis.link import Link
from gateway.limits_redis.terms import Call, Reply
from gateway.types import Limit, Limits
from tests.limits_redis.gateways import (
    WINDOW,
    Gateway,
    budget,
    eventually,
    finish,
    gateways,
    parallel,
    requests,
    slots,
    tokens,
    until_up,
    used,
)
from tests.servers.redis import Redis


class Step(NamedTuple):
    """One request: which gateway it comes to, when, what it sets aside and uses, how long it runs, when it is cut."""

    gateway: int
    at: float
    cost: int
    used: int
    runs: float
    cut: float | None


class Admission(NamedTuple):
    before: float
    after: float
    cost: int
    ended: float
    used: int


MOMENTS = st.floats(0, 0.06)
STEPS = st.builds(
    lambda gateway, at, cost, share, runs, cut: Step(gateway, at, cost, int(cost * share), runs, cut),
    st.integers(0, 2), MOMENTS, st.integers(1, 30), st.floats(0, 1), MOMENTS, st.none() | st.floats(0, 0.005),
)  # fmt: skip


def all_limits(count: int, most: int) -> Limits:
    return requests(count) + requests(count, 1) + tokens(count * 10) + tokens(count * 10, 1) + parallel(most)


async def run(url: str, steps: Sequence[Step], limits: Limits, most: int) -> list[Admission]:
    admitted: list[Admission] = []
    running = 0

    async def request(node: Gateway, step: Step) -> None:
        nonlocal running
        await asyncio.sleep(step.at)
        before = time.monotonic()
        lease = await node.admit(limits, step.cost)
        if lease is None:
            return
        running += 1
        assert running <= most
        after = time.monotonic()
        try:
            await asyncio.sleep(step.runs)
        finally:
            running -= 1
            ended = time.monotonic()
            finish(lease, step.used)
            admitted.append(Admission(before, after, step.cost, ended, step.used))

    async with gateways(url, 3) as nodes:
        tasks = [asyncio.create_task(request(nodes[step.gateway], step)) for step in steps]
        for task, step in zip(tasks, steps, strict=True):
            if step.cut is not None:
                asyncio.get_running_loop().call_later(step.at + step.cut, task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    return admitted


@given(st.lists(STEPS, min_size=5, max_size=40), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_order_keeps_every_limit_and_balances_to_the_token(
    server: Redis, steps: list[Step], count: int, most: int
) -> None:
    server.ask("FLUSHALL")
    limits = all_limits(count, most)
    admitted = asyncio.run(run(server.url, steps, limits, most))
    for last in admitted:  # those surely within one second of each other, and surely running still
        within = [one for one in admitted if one.before <= last.after and last.after - one.before < 1]
        spent = [one.used if one.ended <= last.after else one.cost for one in within if one.after <= last.before]
        assert sum(spent) + last.cost <= count * 10
        assert len([one for one in within if one.after <= last.before]) + 1 <= count
    total = sum(one.used for one in admitted)
    assert used(server, tokens(count * 10)) == total <= count * 10
    assert slots(server, parallel(most)) == 0


def test_two_gateways_admit_a_limit_exactly(server: Redis) -> None:
    async def scenario() -> int:
        async with gateways(server.url, 2) as nodes:
            done = 0
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                done += sum(await asyncio.gather(*(node.spend(requests(60)) for node in nodes for _ in range(10))))
                await asyncio.sleep(0.01)
            return done

    assert asyncio.run(scenario()) == 60
    assert used(server, requests(60)) == 60


def test_what_one_gateway_does_not_use_others_get(server: Redis) -> None:
    """The first draws in store while it is busy, and stops. Nothing of what was drawn may be lost to the second."""

    async def scenario() -> tuple[int, int]:
        async with gateways(server.url, 2) as (first, second):
            limits = requests(2000, 3600)
            early = sum([await first.spend(limits) for _ in range(500)])
            late = 0
            for _ in range(400):
                late += await second.spend_until_refused(limits)
                if early + late == 2000:
                    break
                await asyncio.sleep(0.05)
            return early, late

    early, late = asyncio.run(scenario())
    assert early == 500
    assert early + late == 2000


def test_slots_that_nobody_uses_go_to_others(server: Redis) -> None:
    async def scenario() -> int:
        limits = parallel(100)
        async with gateways(server.url, 2) as (first, second):
            busy = [await first.admit(limits) for _ in range(20)]
            for lease in busy[:10]:
                assert lease is not None
                finish(lease)
            held = [lease for lease in busy[10:] if lease is not None]
            assert len(held) == 10
            others: list[Lease] = []
            deadline = time.monotonic() + 20
            while len(others) < 90 and time.monotonic() < deadline:
                lease = await second.admit(limits)
                if lease is None:
                    await asyncio.sleep(0.05)
                else:
                    others.append(lease)
            assert await second.admit(limits) is None
            for lease in (*held, *others):
                finish(lease)
            return len(others)

    assert asyncio.run(scenario()) == 90
    assert slots(server, parallel(100)) == 0


def test_slots_that_nobody_uses_are_given_back_without_being_asked_for(server: Redis) -> None:
    async def scenario() -> None:
        limits = parallel(1000)
        async with gateways(server.url, 1) as (node,):
            leases = [lease for _ in range(30) if (lease := await node.admit(limits)) is not None]
            assert slots(server, limits) > len(leases) == 30  # some are held in store
            assert await eventually(lambda: slots(server, limits) == 30)
            for lease in leases:
                finish(lease)
            assert await eventually(lambda: slots(server, limits) == 0)

    asyncio.run(scenario())


def test_what_is_drawn_is_booked_where_it_is_spent(server: Redis) -> None:
    """Room drawn in one slice does not pay for requests of a later one: it would be free again too soon."""

    async def scenario() -> int:
        limits = requests(100_000)
        async with gateways(server.url, 1) as (node,):
            for _ in range(300):
                assert await node.spend(limits)
            assert used(server, limits) > 300  # some is held in store
            await asyncio.sleep(1.2)
            late = int(server.ask("TIME")[0])  # the slices of a minute are seconds
            for _ in range(5):
                assert await node.spend(limits)
        return late

    late = asyncio.run(scenario())
    key = f"{WINDOW}key:t/k:requests/60"
    last = int(server.ask("HGET", key, "last"))
    ring = [int(server.ask("HGET", key, number % 61) or 0) for number in range(late, last + 1)]
    assert sum(ring) == 5
    assert used(server, requests(100_000)) == 305


def test_requests_that_need_several_limits_get_all_of_them_under_load(server: Redis) -> None:
    """Far below every limit nobody is refused, however many come at once while room is drawn for them."""

    async def scenario() -> None:
        limits = requests(10**6) + tokens(10**9) + budget(10**9) + tokens(10**9, 3600, "tenant:t") + parallel(10**5)
        async with gateways(server.url, 2) as nodes:
            for _ in range(15):
                outcomes = await asyncio.gather(*(node.spend(limits, 700, 100) for node in nodes for _ in range(300)))
                assert all(outcomes), (nodes[0].refusals or nodes[1].refusals)[0]

    asyncio.run(scenario())


def test_a_process_that_is_busy_refuses_nobody_while_there_is_room(
    server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of a limit per second is over within 17 ms, and here every answer of Redis is read later than that."""
    run = Link.run

    async def run_late(link: Link, calls: Sequence[Call]) -> Sequence[Reply | Exception]:
        replies = await run(link, calls)
        time.sleep(0.03)  # noqa: ASYNC251 (the event loop is meant to be held up)
        return replies

    async def scenario() -> tuple[int, list[RateLimited]]:
        async with gateways(server.url, 1) as (node,):
            monkeypatch.setattr(Link, "run", run_late)
            admitted = 0
            for _ in range(20):  # where other processes keep Redis from answering, it counts as gone for a while
                admitted += sum(await asyncio.gather(*(node.spend(requests(100, 1)) for _ in range(30))))
                if admitted:
                    break
                await asyncio.sleep(0.5)
            return admitted, [error for error in node.refusals if isinstance(error, RateLimited)]

    admitted, refused = asyncio.run(scenario())
    assert admitted and not refused


def test_a_refund_makes_room_for_other_gateways(server: Redis) -> None:
    async def scenario() -> None:
        limits = tokens(100)
        async with gateways(server.url, 2) as (first, second):
            for node, other in [(first, second), (second, first)] * 3:
                lease = await when_there_is_room(node, limits, 80)  # the refund of the other one is on its way
                assert await other.admit(limits, 80) is None
                finish(lease, 1)

    async def when_there_is_room(node: Gateway, limits: Limits, cost: int) -> Lease:
        for _ in range(400):
            lease = await node.admit(limits, cost)
            if lease is not None:
                return lease
            await asyncio.sleep(0.05)
        raise AssertionError("the refund never came")

    asyncio.run(scenario())
    assert used(server, tokens(100)) == 6


def test_own_refunds_are_room_at_once(server: Redis) -> None:
    """A key whose requests set 80 of 100 tokens aside and use none is never refused, whichever slice they fall in."""

    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            deadline, sent = time.monotonic() + 2.5, 0
            while time.monotonic() < deadline:
                assert await node.spend(tokens(100), 80, used=0), node.refusals
                sent += 1
                await asyncio.sleep(0.007)
            assert sent > 20

    asyncio.run(scenario())
    assert used(server, tokens(100)) == 0


def test_a_late_settlement_corrects_what_it_had_reserved(server: Redis) -> None:
    """Slices after the reservation, with more and with less than was set aside."""

    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            leases = [await node.admit(tokens(1000), 100) for _ in range(4)]
            await asyncio.sleep(2.2)
            for lease, spent in zip(leases, (0, 50, 100, 250), strict=True):
                assert lease is not None
                finish(lease, spent)
            assert await eventually(lambda: used(server, tokens(1000)) == 400)

    asyncio.run(scenario())
    assert used(server, tokens(1000)) == 400


def test_after_the_time_a_refusal_names_it_fits(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 2) as (first, second):
            limits = requests(5, 1)
            for _ in range(3):
                while await first.spend(limits):
                    pass
                assert not await second.spend(limits)
                error = second.refusals[-1]
                assert isinstance(error, RateLimited)
                assert error.retry_after is not None and 0 < error.retry_after < 1.1
                await asyncio.sleep(error.retry_after + 0.01)
                assert await second.spend(limits)

    asyncio.run(scenario())


def test_a_refusal_and_the_headers_tell_what_all_gateways_have_used(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 2) as (first, second):
            limits = requests(10)
            for node in (first, first, second):
                assert await node.spend(limits)
                await asyncio.sleep(0.3)  # so that nothing is drawn in store
            lease = await second.admit(limits)
            assert lease is not None
            lines = lease.headers(time.monotonic()).split(b"\r\n")
            assert b"x-ratelimit-limit-requests: 10" in lines
            assert b"x-ratelimit-remaining-requests: 6" in lines
            assert any(line.startswith(b"x-ratelimit-reset-requests: 1m") for line in lines)
            finish(lease)
            assert await first.spend_until_refused(limits) == 6
            error = first.refusals[-1]
            assert "10 requests per minute, 10 used" in error.message
            assert error.retry_after is not None and 55 < error.retry_after <= 61

    asyncio.run(scenario())


def test_a_request_larger_than_its_limit_is_told_so_without_asking(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            assert await node.admit(tokens(100), 101) is None
            assert node.refusals[0].code == "request_too_large_for_limit"
            assert node.counters.draws == 0

    asyncio.run(scenario())


def test_a_hot_key_seldom_asks_and_then_waits_for_nothing(server: Redis) -> None:
    async def scenario() -> None:
        limits = requests(10**6, 3600) + tokens(10**9, 3600) + budget(10**9) + parallel(10**4)
        async with gateways(server.url, 1) as (node,):
            for _ in range(3000):
                assert await node.spend(limits, 10)
            draws, scripts = node.counters.draws, server.commands()
            assert draws < 150
            account = node.limiter._accounts[limits]
            for _ in range(500):
                covering = node.counters.cover(account.tokens, account.places, 1, time.monotonic())
                try:
                    covering.send(None)
                except StopIteration:
                    pass
                else:  # it has suspended
                    covering.close()
                    raise AssertionError("a cover with room for everything has waited")
            await asyncio.sleep(0.1)
            assert node.counters.draws == draws
            assert server.commands() - scripts <= 2  # somebody's heartbeat, a renewal of slots

    asyncio.run(scenario())


def test_a_lower_limit_holds_from_the_next_request_on(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            (name, _), *_ = requests(0).requests
            for _ in range(300):
                assert await node.spend(requests(5000))
            counter = node.counters.counter(name, Limit(300, 60, "requests", "key"))
            assert node.counters.counter(name, Limit(300, 60, "requests", "key")) is counter
            node.limiter.forget_accounts()
            assert not await node.spend(requests(300))

    asyncio.run(scenario())
    assert used(server, requests(300)) == 300


def test_names_that_nobody_uses_are_forgotten(server: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SWEEP", 0.0)

    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            for number in range(50):
                assert await node.spend(requests(10, 1, f"key:t/{number}"))
            node.limiter.forget_accounts()
            assert kept(node.counters) >= 50
            deadline = time.monotonic() + 20
            while kept(node.counters) > 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
                await node.spend(requests(10, 1, "key:t/other"))
            assert kept(node.counters) <= 2

    def kept(counters: RedisCounters) -> int:
        return len(counters._counters) + len(counters._places)

    asyncio.run(scenario())


def test_redis_forgets_windows_that_nobody_uses(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            assert await node.spend(requests(10, 1) + parallel(3) + budget(100), 5)

    asyncio.run(scenario())
    for key in server.ask("KEYS", "sekisho:*"):
        assert server.ask("PTTL", key) > 0, key


def test_a_clock_of_redis_that_was_set_back_forgets_nothing_and_blocks_nothing(server: Redis) -> None:
    async def scenario() -> None:
        limits, key = requests(10), f"{WINDOW}key:t/k:requests/60"
        async with gateways(server.url, 1) as (node,):
            for _ in range(4):
                assert await node.spend(limits)
            assert await eventually(lambda: used(server, limits) == 4)
            ahead = int(server.ask("HGET", key, "last")) + 1000
            server.ask("HSET", key, "last", ahead)
            assert await node.spend_until_refused(limits) == 6
            assert int(server.ask("HGET", key, "last")) < ahead

    asyncio.run(scenario())


def test_processes_that_have_gone_leave_nothing_in_a_window(server: Redis) -> None:
    async def scenario() -> None:
        server.ask("HSET", f"{WINDOW}key:t/k:requests/60", "of:gone", "7:1:12345", "last", 12400, "used", 0)
        async with gateways(server.url, 1) as (node,):
            assert await node.spend(requests(10))
            assert server.ask("HGET", f"{WINDOW}key:t/k:requests/60", "of:gone") is None

    asyncio.run(scenario())


def test_slices_in_redis_stay_below_the_limit_while_time_passes(server: Redis) -> None:
    """A limit per second under steady pressure: every stretch of a second holds at most its count."""

    async def scenario() -> list[tuple[float, float]]:
        moments: list[tuple[float, float]] = []
        async with gateways(server.url, 3) as nodes:
            await until_up(nodes)

            async def press(node: Gateway) -> None:
                deadline = time.monotonic() + 3.5
                while time.monotonic() < deadline:
                    before = time.monotonic()
                    if await node.spend(requests(20, 1)):
                        moments.append((before, time.monotonic()))
                    await asyncio.sleep(0.003)

            await asyncio.gather(*(press(node) for node in nodes for _ in range(2)))
        return sorted(moments)

    moments = asyncio.run(scenario())
    assert len(moments) >= 60  # three windows and a bit, each lasts up to 61 slices
    for place in range(20, len(moments)):
        assert moments[place][1] - moments[place - 20][0] >= 1, pairwise(moments)
