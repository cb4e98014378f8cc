"""Limits that several gateways share over Redis, through their front doors: exact together, bounded when it fails."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Gateway, base_config, chat, digest, eventually, replica
from tests.servers.redis import Redis

Start = Callable[..., Gateway]
KEY = "sk-shared-" + "s" * 40


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with Redis(tmp_path / "redis") as server:
        yield server


def configuration(engine: Engine, redis: Redis, limits: dict[str, Any], on_failure: str = "local") -> dict[str, Any]:
    tenant = {"name": "red", "limits": limits, "keys": [{"name": "ci", "sha256": digest(KEY)}]}
    return base_config(
        {"m": [replica(engine)]}, [tenant],
        state={"database": None, "redis": redis.url}, limits={"on_store_failure": on_failure},
    )  # fmt: skip


def ask(gateway: Gateway, **more: Any) -> httpx.Response:
    return gateway.http.post("/v1/chat/completions", json=chat(**more), headers={"authorization": f"Bearer {KEY}"})


def hammer(gateways: list[Gateway], requests: int, threads: int = 8, **more: Any) -> Counter[int]:
    """Statuses of `requests`, spread evenly."""
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(ask, gateways[number % len(gateways)], **more) for number in range(requests)]
        return Counter(job.result(60).status_code for job in jobs)


def test_two_gateways_admit_what_one_would(start: Start, engine: Engine, redis: Redis) -> None:
    config = configuration(engine, redis, {"requests": "60/hour"})
    gateways = [start(config), start(config)]
    assert hammer(gateways, 200) == {200: 60, 429: 140}
    refused = ask(gateways[0])
    assert refused.json()["error"]["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"]) > 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_are_shared_and_settled_to_the_token(start: Start, engine: Engine, redis: Redis) -> None:
    """Each answer takes 16 tokens of the 1,000; what was set aside beyond them comes back to everybody."""
    config = configuration(engine, redis, {"tokens": "1000/hour"})
    gateways = [start(config), start(config)]
    used = ask(gateways[0], max_tokens=20).json()["usage"]["total_tokens"]
    assert hammer(gateways, 40, threads=4, max_tokens=20) == {200: 40}

    def remaining() -> int:
        answers = [ask(gateway, max_tokens=900) for gateway in gateways]  # too many: refused, after a look at Redis
        assert {answer.status_code for answer in answers} == {429}
        return min(int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers)

    assert eventually(lambda: remaining() == 1000 - 41 * used), remaining()


def test_three_at_a_time_on_both_together_and_after_a_kill(start: Start, redis: Redis) -> None:
    release, running = threading.Event(), []

    def script(x: Exchange) -> None:
        running.append(1)
        x.wait(release)
        x.stream()

    engine = Engine("vllm", script)
    config = configuration(engine, redis, {"concurrency": 3})
    gateways = [start(config), start(config)]
    try:
        with ThreadPoolExecutor(12) as pool:
            jobs = [pool.submit(ask, gateways[number % 2], stream=True) for number in range(12)]
            assert eventually(lambda: sum(job.done() for job in jobs) == 9)
            assert len(running) == 3
            release.set()
            assert Counter(job.result(60).status_code for job in jobs) == {200: 3, 429: 9}
        release.clear()
        with ThreadPoolExecutor(3) as pool:
            held = [pool.submit(ask, gateways[0], stream=True) for _ in range(3)]
            assert eventually(lambda: len(running) == 6)
            assert ask(gateways[1], stream=True).status_code == 429
            gateways[0].process.kill()
            gateways[0].process.wait()
            for job in held:
                with pytest.raises(httpx.TransportError):
                    job.result(60)
        release.set()
        assert eventually(lambda: ask(gateways[1], stream=True).status_code == 200, timeout=30)
    finally:
        release.set()
        engine.stop()


@pytest.mark.parametrize(("on_failure", "status"), [("local", 200), ("allow", 200), ("refuse", 503)])
def test_a_frozen_redis_stalls_nobody(
    start: Start, engine: Engine, redis: Redis, on_failure: str, status: int
) -> None:
    """It takes connections and answers nothing: requests go by the policy, and sharing is back once it is."""
    config = configuration(engine, redis, {"requests": "1000/hour"}, on_failure)
    gateway = start(config)
    assert ask(gateway).status_code == 200
    redis.pause()
    try:
        assert eventually(lambda: ask(gateway).status_code == status)
        assert eventually(lambda: gateway.metric("sekisho_limit_store_up") == 0)
        began = time.monotonic()
        answers = [ask(gateway) for _ in range(20)]
        assert time.monotonic() - began < 10  # the field case: each well under a second
        assert [answer.status_code for answer in answers] == [status] * 20
        if status == 503:
            assert answers[0].json()["error"]["code"] == "store_unavailable" and "retry-after" in answers[0].headers
        assert gateway.http.get("/health").status_code == 200
    finally:
        redis.resume()
    assert eventually(lambda: gateway.metric("sekisho_limit_store_up") == 1)
    assert eventually(lambda: ask(gateway).status_code == 200)
    lines = [line for line in gateway.log().splitlines() if '"error"' in line or '"warning"' in line]
    assert 1 <= len(lines) <= 4, lines  # once when it goes, not once a request
    assert str(redis.port) not in "".join(lines)


def test_locally_a_gateway_takes_its_share(start: Start, engine: Engine, redis: Redis) -> None:
    """Of two gateways that cannot reach Redis any more each admits half."""
    config = configuration(engine, redis, {"requests": "40/hour"})
    gateways = [start(config), start(config)]
    assert [ask(gateway).status_code for gateway in gateways] == [200, 200]
    time.sleep(4)  # both have heard of the other by then: they report every few seconds
    redis.stop()
    try:
        assert eventually(lambda: all(one.metric("sekisho_limit_store_up") == 0 for one in gateways if ask(one)))
        statuses = hammer(gateways, 100)
        assert statuses.keys() == {200, 429}
        admitted = sum(one.metric("sekisho_requests_total", tenant="red", status="200") for one in gateways)
        assert admitted <= 40
    finally:
        redis.start()


def test_a_gateway_starts_without_redis_and_shares_once_it_is_there(
    start: Start, engine: Engine, redis: Redis
) -> None:
    config = configuration(engine, redis, {"requests": "1000/hour"})
    redis.stop()
    gateway = start(config)
    assert ask(gateway).status_code == 200
    redis.start()
    assert eventually(lambda: gateway.metric("sekisho_limit_store_up") == 1)
