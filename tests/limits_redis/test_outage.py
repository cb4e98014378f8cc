"""Redis paused, stopped, restarted, emptied, and connections cut: bounded waits, the policy, and books that balance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.errors import RateLimited, StoreUnavailable
from gateway.limits_redis import courier
from gateway.limits_redis.terms import Call, Condition, Script
from gateway.types import Limits
from tests.limits_redis.gateways import (
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

BOUND = 1.0  # seconds that no cover may take, whatever the machine does; it is meant to be 0.05
WAYS = ["pause", "stop"]
SMALL = requests(20)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests must not look like a Redis that is away."""
    monkeypatch.setattr(courier, "_LOOKS", 20)
    monkeypatch.setattr(courier, "_QUICK", 0.3)


def break_it(server: Redis, way: str) -> None:
    server.pause() if way == "pause" else server.stop()


def mend_it(server: Redis, way: str) -> None:
    server.resume() if way == "pause" else server.start()


async def without(server: Redis, way: str, nodes: Sequence[Gateway]) -> None:
    """Breaks it, and lets the nodes find out."""
    break_it(server, way)
    for number, node in enumerate(nodes):
        await node.spend(requests(1, 60, f"key:probe/{number}"))
    assert await eventually(lambda: not any(node.counters.up for node in nodes))


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.parametrize("way", WAYS)
def test_local_lets_each_gateway_use_its_share(fragile: Redis, way: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 2, "local", acquainted=True) as nodes:
            await without(fragile, way, nodes)
            assert [await node.spend_until_refused(SMALL) for node in nodes] == [10, 10]
            for node in nodes:
                error = node.refusals[-1]
                assert isinstance(error, RateLimited)
                assert error.retry_after is not None and 0 < error.retry_after <= 61
                assert node.longest < BOUND
                assert node.counters.failures > 0
            mend_it(fragile, way)
            await until_up(nodes)
            assert await eventually(lambda: used(fragile, SMALL) == 20)  # what was spent meanwhile
            assert [await node.spend_until_refused(SMALL) for node in nodes] == [0, 0]

    asyncio.run(scenario())
    assert used(fragile, SMALL) == 20  # and once only
    assert lines(caplog, "out of reach") == lines(caplog, "Redis answers again") == 2  # one of each per gateway
    assert "redis://" not in caplog.text and "127.0.0.1" not in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_allow_lets_everything_pass_and_books_it_later(fragile: Redis, way: str) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 2, "allow") as nodes:
            await without(fragile, way, nodes)
            for node in nodes:
                assert sum([await node.spend(SMALL) for _ in range(50)]) == 50
                assert node.longest < BOUND
            mend_it(fragile, way)
            await until_up(nodes)
            assert await eventually(lambda: used(fragile, SMALL) == 100)
            assert [await node.spend_until_refused(SMALL) for node in nodes] == [0, 0]

    asyncio.run(scenario())
    assert used(fragile, SMALL) == 100


@pytest.mark.parametrize("way", WAYS)
def test_refuse_refuses_what_redis_has_not_granted(fragile: Redis, way: str) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 2, "refuse") as nodes:
            await without(fragile, way, nodes)
            for node in nodes:
                assert not await node.spend(SMALL)
                error = node.refusals[-1]
                assert isinstance(error, StoreUnavailable)
                assert (error.status, error.retry_after) == (503, 1)
                assert node.longest < BOUND
            mend_it(fragile, way)
            await until_up(nodes)
            assert sum([await node.spend_until_refused(SMALL) for node in nodes]) == 20

    asyncio.run(scenario())
    assert used(fragile, SMALL) == 20


def test_the_policy_can_be_changed_while_redis_is_away(fragile: Redis) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 1, "refuse") as (node,):
            await without(fragile, "stop", [node])
            assert not await node.spend(SMALL)
            node.counters.set_policy("allow")
            assert await node.spend(SMALL)

    asyncio.run(scenario())


def test_a_gateway_starts_without_redis_and_finds_it_later(fragile: Redis, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        fragile.stop()
        async with gateways(fragile.url, 1, "local") as (node,):
            assert not node.counters.up
            assert await node.spend_until_refused(SMALL) == 20
            fragile.start()
            await until_up([node])
            assert await eventually(lambda: used(fragile, SMALL) == 20)

    asyncio.run(scenario())
    assert lines(caplog, "out of reach") == lines(caplog, "Redis answers again") == 1


def test_requests_that_run_while_redis_is_away_count_when_it_is_back(fragile: Redis) -> None:
    """Slots, and tokens that are settled during the outage or after it."""

    async def scenario() -> None:
        limits = parallel(6) + tokens(1000)
        async with gateways(fragile.url, 2, "local", acquainted=True) as nodes:
            early = [await nodes[0].admit(limits, 100) for _ in range(2)]
            await without(fragile, "stop", nodes)
            late = [await nodes[1].admit(limits, 100) for _ in range(4)]
            assert [lease is not None for lease in late] == [True, True, True, False]  # half of six
            assert early[0] is not None and late[0] is not None
            finish(early[0], 10)
            finish(late[0], 20)
            fragile.start()
            await until_up(nodes)
            assert await eventually(lambda: slots(fragile, parallel(6)) == 3)
            for lease, spent in ((early[1], 30), (late[1], 40), (late[2], 250)):
                assert lease is not None
                finish(lease, spent)
            assert await eventually(lambda: slots(fragile, parallel(6)) == 0)

    asyncio.run(scenario())
    assert used(fragile, tokens(1000)) == 350


def test_a_redis_that_has_lost_its_memory_is_told_what_was_spent(fragile: Redis) -> None:
    """Windows and budgets, with a reservation that is settled afterwards."""

    async def scenario() -> None:
        day = budget(1000)
        async with gateways(fragile.url, 2, "refuse") as nodes:
            for node in nodes:
                assert await node.spend(SMALL + day, 100)
            lease = await nodes[0].admit(day, 300)
            assert lease is not None
            fragile.ask("FLUSHALL")
            for node in nodes:
                assert await node.spend(SMALL + day, 50)
            assert await eventually(lambda: used(fragile, SMALL) == 4)
            finish(lease, 30)
        assert used(fragile, day) == 330

    asyncio.run(scenario())


def test_what_redis_grants_after_a_pause_is_not_lost(fragile: Redis) -> None:
    """Commands that it had received before the pause are carried out after it, when nobody waits any more: once the
    answer still comes, once the connection has been given up and the same step is asked for again."""

    async def scenario() -> int:
        spent = 0
        async with gateways(fragile.url, 2, "local") as nodes:
            for patience in (0, 0, 2.5):
                fragile.pause()
                outcomes = await asyncio.gather(*(node.spend(tokens(10**6), 7) for node in nodes for _ in range(20)))
                spent += sum(outcomes)
                await asyncio.sleep(patience)
                fragile.resume()
                await until_up(nodes)
                outcomes = await asyncio.gather(*(node.spend(tokens(10**6), 7) for node in nodes for _ in range(20)))
                spent += sum(outcomes)
        return spent * 7

    spent = asyncio.run(scenario())
    assert spent >= 7 * 120
    assert used(fragile, tokens(10**6)) == spent


def test_connections_that_are_cut_lose_and_double_nothing(fragile: Redis) -> None:
    """Whether a step was taken whose answer got lost, is found out."""

    async def scenario() -> int:
        limits = tokens(10**6) + parallel(1000)
        spent = 0
        async with gateways(fragile.url, 3, "refuse") as nodes:

            async def press(node: Gateway, until: float) -> None:
                nonlocal spent
                while time.monotonic() < until:
                    lease = await node.admit(limits, 9)
                    if lease is not None:
                        await asyncio.sleep(0.001)
                        finish(lease, 4)
                        spent += 4
                    else:
                        await asyncio.sleep(0.005)

            until = time.monotonic() + 3
            pressing = [asyncio.create_task(press(node, until)) for node in nodes for _ in range(4)]
            while time.monotonic() < until:
                await asyncio.to_thread(fragile.ask, "CLIENT", "KILL", "TYPE", "normal")
                await asyncio.sleep(0.03)
            await asyncio.gather(*pressing)
            await until_up(nodes)
        return spent

    spent = asyncio.run(scenario())
    assert spent > 0
    assert used(fragile, tokens(10**6)) == spent
    assert slots(fragile, parallel(1000)) == 0


def test_a_restart_with_its_memory_kept_balances(tmp_path: Path) -> None:
    async def scenario(server: Redis) -> int:
        limits, spent = tokens(10**6), 0
        async with gateways(server.url, 2, "local") as nodes:
            for _ in range(3):
                for node in nodes:
                    spent += sum([await node.spend(limits, 11) for _ in range(30)])
                await asyncio.to_thread(server.restart)
                for node in nodes:
                    spent += sum([await node.spend(limits, 11) for _ in range(30)])
                await until_up(nodes)
        return spent * 11

    with Redis(tmp_path / "redis", keeps=True) as server:
        spent = asyncio.run(scenario(server))
        assert used(server, tokens(10**6)) == spent


def test_closing_without_redis_ends(fragile: Redis) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 1, "local") as (node,):
            assert await node.spend(SMALL)
            fragile.pause()
            async with asyncio.timeout(20):
                await node.counters.close()

    asyncio.run(scenario())


def test_a_long_outage_does_not_fill_the_memory(fragile: Redis) -> None:
    """What no longer counts is dropped: a limit per second, spent on for many windows."""

    async def scenario() -> None:
        async with gateways(fragile.url, 1, "allow") as (node,):
            await without(fragile, "stop", [node])
            limits = requests(10, 1)
            deadline = time.monotonic() + 3.2
            while time.monotonic() < deadline:
                assert await node.spend(limits)
                await asyncio.sleep(0.004)
            ((name, limit),) = limits.requests
            assert len(node.counters.counter(name, limit)._ledger._alone) <= 190

    asyncio.run(scenario())


def test_a_fault_of_ours_concerns_one_limit_only(server: Redis, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 1, "refuse") as (node,):
            desk = node.counters._courier

            class Faulty:
                def prepare(self, moment: float) -> Call | None:
                    raise ZeroDivisionError

                def accept(self, reply: object, moment: float) -> None: ...
                def fail(self) -> None: ...
                def tick(self, moment: float) -> bool:
                    return False

            desk.kick(Faulty())
            assert await node.spend(SMALL)
            assert node.counters.up

    asyncio.run(scenario())
    assert lines(caplog, "a fault in the gateway") == 1


def test_a_call_that_comes_twice_or_too_late_changes_nothing(server: Redis) -> None:
    """Straight to the scripts: a step is known by its number."""
    window, place = Script("window.lua"), Script("place.lua")

    def step(seq: int, cost: int) -> list[int]:
        answer = server.ask("EVAL", window.text, 1, "w", "p", seq, 100, 60, 0, 99999, 8, 0, 0, 0, cost)
        assert isinstance(answer, list)
        return [int(part) for part in answer]

    first = step(5, 10)
    again = step(5, 10)
    assert first[0] == again[0] == 10 and first[1] == again[1]
    assert step(4, 50)[3] == 10
    assert step(6, 10)[3] == 20

    def slots_of(seq: int, base: int, waiting: int) -> int:
        answer = server.ask("EVAL", place.text, 1, "p", "p", seq, base, waiting, 0, 8, 3, 10000)
        assert isinstance(answer, list)
        return int(answer[0])

    assert slots_of(5, 0, 2) == 2
    assert slots_of(4, 0, 0) == 2
    assert slots_of(6, 1, 5) == 3


def test_condition_shares_and_divisor() -> None:
    alone, many = Condition("local"), Condition("local", live=10)
    assert (alone.share(7), many.share(7), many.share(100)) == (7, 1, 10)
    assert (alone.divisor, many.divisor) == (8, 20)


def no_tokens() -> Limits:
    return Limits()


def test_a_caller_without_limits_needs_no_redis(fragile: Redis) -> None:
    async def scenario() -> None:
        async with gateways(fragile.url, 1, "refuse") as (node,):
            await without(fragile, "stop", [node])
            assert await node.spend(no_tokens())

    asyncio.run(scenario())
