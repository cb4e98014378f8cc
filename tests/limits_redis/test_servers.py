"""Where Redis may be: a socket, a cluster, behind TLS with a user of few rights. And what start-up says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gateway.config import StartupError
from gateway.limits_redis import RedisCounters
from gateway.types import Limits
from gateway.windows import WallClock
from tests.limits_redis.gateways import budget, eventually, gateways, parallel, requests, slots, tokens, used
from tests.servers.redis import ACL_USER, Cluster, Redis


async def share_everything(url: str) -> None:
    """Every kind of limit, over two gateways, exactly."""
    async with gateways(url, 2) as nodes:
        limits = parallel(3) + requests(40) + tokens(10_000) + budget(4000)
        held = [await node.admit(limits, 10) for node in (*nodes, *nodes)]
        assert [lease is not None for lease in held] == [True, True, True, False]
        for lease in held:
            if lease is not None:
                lease.settle(7, 0)
                lease.close(0)
        done = 3
        for _ in range(200):
            done += sum([await node.spend(limits, 10, used=5) for node in nodes])
            if done == 40:
                break
            await asyncio.sleep(0.02)
        assert done == 40
        await asyncio.sleep(0.2)
        assert not any([await node.spend(requests(40)) for node in nodes])


def check_everything(server: Redis | Cluster) -> None:
    assert used(server, requests(40)) == 40
    assert used(server, tokens(10_000)) == used(server, budget(4000)) == 3 * 7 + 37 * 5
    assert slots(server, parallel(3)) == 0


def test_a_unix_socket(server: Redis) -> None:
    asyncio.run(share_everything(f"unix://{server.socket}"))
    check_everything(server)


def test_tls_and_a_user_with_few_rights(tmp_path: Path) -> None:
    with Redis(tmp_path / "redis", tls=True) as server:
        server.ask(*ACL_USER)
        asyncio.run(share_everything(server.url))
        check_everything(server)
        heard = asyncio.run(exchange(server.url))
        assert heard == ["", "tenants"]


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(url: str) -> None:
        async with gateways(url, 1) as (node,):
            assert not node.counters.up
            assert not await node.spend(requests(5))

    with Redis(tmp_path / "redis", tls=True) as server:
        server.ask(*ACL_USER)
        asyncio.run(scenario(server.url.partition("?")[0]))
    assert "out of reach" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_wrong_password_is_told_without_showing_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(url: str) -> None:
        async with gateways(url, 1) as (node,):
            assert not node.counters.up

    with Redis(tmp_path / "redis") as server:
        server.ask("CONFIG", "SET", "requirepass", "right")
        asyncio.run(scenario(server.url.replace("redis://", "redis://:wr0ng@")))
    assert "out of reach (AuthenticationError" in caplog.text
    assert "wr0ng" not in caplog.text


def test_a_cluster(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        asyncio.run(share_everything(cluster.url))
        check_everything(cluster)
        assert sum(node.commands() > 0 for node in cluster.nodes) > 1
        assert asyncio.run(exchange(cluster.url, cluster.nodes[1].url)) == ["", "tenants"]


def test_slots_of_a_cluster_that_move_are_followed(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        limits = requests(50)
        async with gateways(cluster.url, 2) as nodes:
            assert all([await node.spend(limits) for node in nodes])
            await asyncio.to_thread(cluster.move, "sekisho:window:key:t/k:requests/60")
            done = 2
            for _ in range(400):
                done += sum([await node.spend(limits) for node in nodes])
                if done == 50:
                    break
                await asyncio.sleep(0.02)
            assert done == 50
            await asyncio.sleep(0.2)
            assert not any([await node.spend(limits) for node in nodes])

    with Cluster(tmp_path / "cluster") as cluster:
        asyncio.run(scenario(cluster))


async def exchange(url: str, other: str | None = None) -> list[str]:
    """What a gateway hears when another one publishes."""
    heard: list[str] = []
    async with gateways(url, 1) as (listener,), gateways(other or url, 1) as (speaker,):
        listener.counters.subscribe("people", heard.append)
        assert await eventually(lambda: heard == [""])
        await speaker.counters.publish("people", "tenants")
        assert await eventually(lambda: len(heard) == 2)
    return heard


def test_notices_reach_all_and_go_on_after_a_restart(fragile: Redis) -> None:
    async def scenario() -> None:
        heard: list[list[str]] = [[], []]
        async with gateways(fragile.url, 2) as nodes:
            for node, list_ in zip(nodes, heard, strict=True):
                node.counters.subscribe("people", list_.append)
            assert await eventually(lambda: heard == [[""], [""]])
            await nodes[0].counters.publish("people", "é")
            assert await eventually(lambda: heard == [["", "é"]] * 2)
            await asyncio.to_thread(fragile.stop)
            await nodes[0].counters.publish("people", "lost")
            await asyncio.to_thread(fragile.start)
            assert await eventually(lambda: heard == [["", "é", ""]] * 2)
            await nodes[1].counters.publish("people", "again")
            assert await eventually(lambda: heard == [["", "é", "", "again"]] * 2)

    asyncio.run(scenario())


def test_a_callback_that_fails_ends_nothing(server: Redis, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        heard: list[str] = []

        def callback(message: str) -> None:
            heard.append(message)
            raise ZeroDivisionError

        async with gateways(server.url, 1) as (node,):
            node.counters.subscribe("people", callback)
            assert await eventually(lambda: len(heard) == 1)
            await node.counters.publish("people", "x")
            assert await eventually(lambda: len(heard) == 2)

    asyncio.run(scenario())
    assert "a notice could not be handled" in caplog.text


def test_start_up_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(StartupError, match=r"install sekisho\[redis\]"):
        RedisCounters("redis://localhost:6379/0", "local", WallClock())


@pytest.mark.parametrize("url", ["redis://:s3cret@localhost/0?sockettimeout=3", "redis://:s3cret@localhost/0?db=x"])
def test_start_up_refuses_parameters_it_does_not_know(url: str) -> None:
    with pytest.raises(StartupError) as caught:
        RedisCounters(url, "local", WallClock())
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_limits_is_nothing_to_share(server: Redis) -> None:
    async def scenario() -> None:
        async with gateways(server.url, 1) as (node,):
            assert await node.spend(Limits())
            assert node.counters.draws == 0

    asyncio.run(scenario())
