"""Processes of their own on one Redis, as gateways are."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.limits_redis.terms import LEASE
from tests.e2e.harness import ROOT
from tests.limits_redis.gateways import finish, gateways, slots, used
from tests.limits_redis.worker import PARALLEL, REQUESTS, SMALLEST, TOKENS
from tests.servers.redis import Redis

Process = subprocess.Popen[str]


@contextmanager
def worker(url: str, kind: str, seconds: float = 0) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.limits_redis.worker", url, kind, str(seconds)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def four(url: str, kind: str, seconds: float) -> list[dict[str, Any]]:
    with worker(url, kind, seconds) as a, worker(url, kind, seconds) as b:
        with worker(url, kind, seconds) as c, worker(url, kind, seconds) as d:
            results = [line(process) for process in (a, b, c, d)]
            assert [process.wait(20) for process in (a, b, c, d)] == [0, 0, 0, 0]
    return results


def within(seconds: float, check: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


async def take_three(url: str) -> int:
    """How many slots another process gets, which gives them back at once."""
    async with gateways(url, 1) as (node,):
        leases = [lease for _ in range(3) if (lease := await node.admit(PARALLEL)) is not None]
        for lease in leases:
            finish(lease)
        return len(leases)


def test_four_processes_admit_as_many_requests_as_one(server: Redis) -> None:
    results = four(server.url, "requests", 3)
    assert sum(result["admitted"] for result in results) == 60
    assert used(server, REQUESTS) == 60


def test_four_processes_spend_as_many_tokens_as_one(server: Redis) -> None:
    results = four(server.url, "tokens", 4)
    spent = sum(result["spent"] for result in results)
    assert used(server, TOKENS) == spent
    assert 10_000 - SMALLEST < spent <= 10_000


def test_four_processes_run_as_many_at_a_time_as_one(server: Redis) -> None:
    results = four(server.url, "parallel", 3)
    events = sorted(
        event for result in results for begun, ended in result["spans"] for event in ((begun, 1), (ended, -1))
    )
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    assert most == 3
    assert min(result["admitted"] for result in results) > 0
    assert slots(server, PARALLEL) == 0


@pytest.mark.slow
def test_slots_of_a_killed_process_come_back_within_the_lease(server: Redis) -> None:
    with worker(server.url, "holds") as process:
        assert line(process) == {"held": 3}
        assert asyncio.run(take_three(server.url)) == 0
        process.kill()
        process.wait()
        assert asyncio.run(take_three(server.url)) == 0  # nobody knows yet
        assert within(LEASE + 5, lambda: asyncio.run(take_three(server.url)) == 3)


def test_slots_of_a_process_that_ends_come_back_at_once(server: Redis) -> None:
    with worker(server.url, "holds") as process:
        assert line(process) == {"held": 3}
        process.communicate("go\n", timeout=20)
        assert process.returncode == 0
        assert asyncio.run(take_three(server.url)) == 3


@pytest.mark.slow
def test_a_process_that_stood_still_takes_what_it_runs_again(server: Redis) -> None:
    """Longer than the lease: others were given its slots, and it must not give back what are theirs now."""
    with worker(server.url, "holds") as process:
        assert line(process) == {"held": 3}
        process.send_signal(signal.SIGSTOP)
        assert within(LEASE + 5, lambda: asyncio.run(take_three(server.url)) == 3)
        assert asyncio.run(take_three(server.url)) == 3
        process.send_signal(signal.SIGCONT)
        assert within(10, lambda: slots(server, PARALLEL) == 3)
        assert asyncio.run(take_three(server.url)) == 0
        process.communicate("go\n", timeout=20)
        assert process.returncode == 0
    assert slots(server, PARALLEL) == 0
