"""The soak: a gateway of several workers under load for a long time, while everything around it fails in turn.

    python -m tests.load.soak [--minutes 30] [--streams 500] [--seed 1] [--database sqlite|postgres] [--keep FOLDER]

TLS, Redis, a database, two workers, three engines as processes of their own. Streams of 10 to 60 seconds are open at
all times, beside them requests at a steady rate; /metrics, /health and /ready are read each second. Meanwhile engines
and workers are killed, certificates and configurations replaced, and Redis frozen and restarted. Prints what clients
saw by what was done at that time, and what the processes held. Exit code 1 when anything came that we had not caused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import ssl
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from tests.load.soak import books, verdict
from tests.load.soak.chaos import Chaos
from tests.load.soak.clients import Callers, Watchers, World, metric
from tests.load.soak.stage import SMALL_LIMIT, Stage, available
from tests.load.soak.watch import Watch
from tests.servers.postgres import Postgres
from tests.servers.redis import Redis

RATE, SMALL_RATE = 20.0, 2.0  # requests a second
SHORTEST, LONGEST = 10.0, 60.0  # seconds of a stream
OUTCOMES = (verdict.COMPLETE, verdict.LEFT, verdict.ENGINE_KILLED, verdict.WORKER_KILLED, verdict.LIMITED,
            verdict.UNEXPECTED)  # fmt: skip
PHASES = ("quiet", "engine killed", "certificate", "reload", "invalid", "worker killed", "redis frozen",
          "redis restarted")  # fmt: skip


async def soak(args: argparse.Namespace, stage: Stage, redis: Redis, database: str, postgres: Postgres | None) -> bool:
    """Whether nothing unexpected came."""
    context = ssl.create_default_context(cafile=stage.authority.ca_file)
    keys = {tenant: list(found) for tenant, found in stage.wanted.keys.items()}
    world = World(stage.wanted.port, context, stage.wanted.admin_key, keys, random.Random(args.seed))
    await _wait_until_up(world, stage)
    world.began, length = time.monotonic(), args.minutes * 60
    callers, watchers, watch = Callers(world, SHORTEST, min(LONGEST, length / 3)), Watchers(world), Watch(world, stage)
    chaos = Chaos(world, stage, redis, args.minutes)
    load = [
        asyncio.create_task(work)
        for work in (
            callers.keep_open(args.streams, ramp=min(20.0, length / 10)),
            callers.ask_steadily(RATE),
            callers.ask_steadily(SMALL_RATE, small=True),
            watchers.scrape(),
            watchers.probe("/health"),
            watchers.probe("/ready"),
            watch.run(),
            _tell(args, world),
        )
    ]
    try:
        if args.calm:
            await asyncio.sleep(length)
        else:
            await chaos.run()
            await asyncio.sleep(max(0.0, world.began + length - time.monotonic()))
        world.stopping.set()
        async with asyncio.timeout(LONGEST * 2 + 60):
            await asyncio.gather(*load)
        await _at_rest(world, watchers)
        await _verify_audit(world)
    finally:
        world.stopping.set()
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    code = await asyncio.to_thread(stage.stop_gateway)
    if code != 0:
        world.complain(f"the gateway ended with {code}")
    figures = _close_books(world, stage, database, postgres)
    _report(world, chaos, watch, figures)
    return not world.amiss and all(life.is_flat for life in watch.lives.values() if life.looks)


async def _wait_until_up(world: World, stage: Stage) -> None:
    deadline = time.monotonic() + 60
    while not available([stage.wanted.port, *stage.wanted.engine_ports]):
        if stage.gateway.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the gateway did not start:\n{stage.log()}")
        await asyncio.sleep(0.1)
    while True:
        answer, _ = await world.get("/ready")
        await Watchers(world).read_metrics()
        if answer.status == 200 and world.gauges.get("sekisho_workers") == stage.workers:
            break
        if time.monotonic() > deadline:
            sys.exit(f"the gateway is not ready:\n{stage.log()}")
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)  # every worker has asked every engine
    world.unexpected.clear()
    world.amiss = 0


async def _tell(args: argparse.Namespace, world: World) -> None:
    """A line now and then, so that one sees how it goes."""
    while not world.stopping.is_set():
        await asyncio.sleep(min(30.0, args.minutes * 6))
        seconds = time.monotonic() - world.began
        print(
            f"{seconds:7.0f} s  {world.open_streams} streams open, {len(world.lines)} requests done, "
            f"{world.amiss} unexpected; {', '.join(world.phases) or 'quiet'}",
            flush=True,
        )


async def _at_rest(world: World, watchers: Watchers) -> None:
    """Nothing is open and nothing waits to be stored."""
    gauges = ("sekisho_inflight_requests", "sekisho_queue_depth", "sekisho_usage_rows_waiting")
    deadline = time.monotonic() + 90  # what a killed worker has left is taken over within a minute
    while True:
        await watchers.read_metrics()
        left = {name: metric(world.gauges, name) for name in gauges if metric(world.gauges, name)}
        if not left:
            return
        if time.monotonic() > deadline:
            return world.complain(f"after the load there is still {left}")
        await asyncio.sleep(0.5)


async def _verify_audit(world: World) -> None:
    answer, _ = await world.get("/admin/v1/audit/verify", world.admin_key)
    found = json.loads(answer.body) if answer.complete else {}
    if found.get("ok") is not True:
        world.complain(f"the audit trail is not whole: {found}")
    world.gauges["audit entries"] = found.get("entries", 0)


def _close_books(world: World, stage: Stage, database: str, postgres: Postgres | None) -> dict[str, Any]:
    wrong, figures = books.compare(books.rows_of(database, postgres), world.lines, world.deeds)
    faults, told = books.read_log(stage.folder / "stderr")
    for text in wrong + faults:
        world.complain(text)
    _check_limit(world, stage.workers)
    restarts = metric(world.totals, "sekisho_worker_restarts_total")
    if restarts != len(world.deeds.workers):
        world.complain(f"{restarts:g} workers were replaced, of which {len(world.deeds.workers)} were killed")
    dropped = metric(world.totals, "sekisho_usage_rows_dropped_total")
    if dropped:
        world.complain(f"{dropped:g} usage rows were dropped")
    return figures | {"log": told}


def _check_limit(world: World, workers: int) -> None:
    """The limited tenant asks for twice of what it may have. While Redis is away, each worker counts for itself."""
    ended = [line.ended for line in world.lines if line.tenant == "small" and line.outcome == verdict.COMPLETE]
    minutes = (max(ended, default=world.began) - world.began) / 60
    allowed = SMALL_LIMIT * minutes
    if not allowed / 2 <= len(ended) <= (allowed + SMALL_LIMIT) * workers:
        world.complain(f"the limited tenant got {len(ended)} answers in {minutes:.1f} minutes at {SMALL_LIMIT}/min")


def _report(world: World, chaos: Chaos, watch: Watch, figures: dict[str, Any]) -> None:
    print(f"\n{'s':>7}  {'took s':>7}  what was done")
    for deed in sorted(chaos.deeds):
        print(f"{deed.at:>7.1f}  {deed.took:>7.1f}  {deed.phase}: {deed.told}")
    heads = "".join(f"{name:>15}" for name in OUTCOMES)
    print(f"\n{'phase':18}{heads}{'slowest ms':>12}{'p99 ms':>9}   (until the head, complete answers)")
    for phase in PHASES:
        part = [line for line in world.lines if line.phase == phase]
        counted = Counter(line.outcome for line in part)
        firsts = sorted(line.first for line in part if line.outcome == verdict.COMPLETE) or [0.0]
        row = "".join(f"{counted[name]:>15}" for name in OUTCOMES)
        print(f"{phase:18}{row}{firsts[-1] * 1000:>12.0f}{firsts[int(len(firsts) * 0.99)] * 1000:>9.0f}")
    watch.print()
    log = figures.pop("log")
    small = Counter(line.outcome for line in world.lines if line.tenant == "small")
    minutes = (world.lines[-1].ended - world.began) / 60 if world.lines else 0.0
    lags = sorted(watch.lags) or [0.0]
    print("\n" + "\n".join(f"{name}: {value}" for name, value in figures.items()))
    print(f"limited tenant: {small[verdict.COMPLETE]} admitted in {minutes:.1f} min at {SMALL_LIMIT}/min, "
          f"{small[verdict.LIMITED]} refused")  # fmt: skip
    settled = sorted(watch.streams[len(watch.streams) // 4 :]) or [0]
    print(f"streams open: median {settled[len(settled) // 2]}, fewest {settled[0]}; /metrics read {world.pages} times")
    print(f"audit entries: {world.gauges.get('audit entries', 0):g}, in order")
    cpu = sum(life.looks[-1].cpu for life in watch.lives.values() if life.looks)
    print(f"CPU of the gateway: {cpu:.0f} s in {minutes * 60:.0f} s; load of the machine {os.getloadavg()[0]:.1f}")
    late, latest = lags[int(len(lags) * 0.99)] * 1000, lags[-1] * 1000
    print(f"this process came late by {late:.0f} ms (p99), {latest:.0f} ms at most: more says that the machine is busy")
    print("log:" if log else "log: no errors and no warnings")
    for text, count in log.most_common(20):
        print(f"{count:>6}  {text}")
    print(f"\nunexpected: {world.amiss}")
    for at, phase, text in world.unexpected:
        print(f"{at:>7.1f} s  [{phase}]  {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--calm", action="store_true", help="load only, nothing is done to the gateway")
    parser.add_argument("--keep", type=Path, help="a folder for configuration and logs, kept afterwards")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        postgres = Postgres() if args.database == "postgres" else None
        try:
            if postgres is not None:
                postgres.start()
            with Redis(folder / "redis") as redis:
                database = postgres.create() if postgres is not None else str(folder.absolute() / "sekisho.db")
                url = database if postgres is not None else f"sqlite:///{database}"
                stage = Stage(folder, args.workers, {"database": url, "redis": redis.url, "spool": "spool"})
                try:
                    fine = uvloop.run(soak(args, stage, redis, database, postgres))
                finally:
                    stage.close()
        finally:
            if postgres is not None:
                postgres.close()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
