"""Everything that outlives the process: the database, the spool of usage records, and the limits shared over Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client.core import Metric

from gateway.config import Config
from gateway.directory import Directory
from gateway.errors import StoreUnavailable
from gateway.limits import Limiter
from gateway.metrics import counter, gauge
from gateway.records import JSON, Actor, Changes
from gateway.snapshot import Snapshot
from gateway.spool import UsageSink
from gateway.store import Store
from gateway.types import Limit, Limits
from gateway.windows import period_of
from gateway.workers.peers import Alone, Peers

CHANGED = "people"  # the channel that says tenants or keys have changed
PATIENCE = 5.0  # seconds that an audit entry may take after what it is about has happened
SPOOL_PATIENCE = 40.0  # seconds that budgets wait for what a killed process has left: longer than its retries pause

if TYPE_CHECKING:
    from gateway.limits_redis import RedisCounters

log = logging.getLogger("sekisho")
audit_log = structlog.get_logger("sekisho.audit")


class Stores:
    """Opened before the first request and closed after the last. What they are changes with a restart only."""

    def __init__(self, config: Config, folder: Path, on_change: Callable[[Changes, bool], None]) -> None:
        """`folder`: of the configuration, where the spool is kept if nothing else is said."""
        state = config.state
        url = state.database.get_secret_value() if state.database is not None else None
        self.directory = Directory(url, on_change)
        self.usage = UsageSink(state.spool_in(folder), self._store, state.usage_retention) if url else None
        self.shared: RedisCounters | None = None
        self.limiter = Limiter()
        if state.redis is not None:
            from gateway.limits_redis import RedisCounters  # the package it needs is an optional one

            self.shared = RedisCounters(
                state.redis.get_secret_value(), config.limits.on_store_failure, self.limiter.clock
            )
            self.limiter.shared = self.shared
        self.peers: Peers = Alone()  # other workers of this gateway
        self._seeded: set[str] = set()  # names of budgets
        self._counting_since: dict[str, float] = {}  # the same -> Unix time from which this process counts them itself
        self.set_clock()

    async def start(self) -> None:
        """Raises: StartupError for what the user has to change. A store that is down is waited for later."""
        if self.shared is not None:
            await self.shared.start()
            self.shared.subscribe(CHANGED, lambda _: self.directory.wake())
        else:
            log.info("limits are counted by this process alone; state.redis would share them with others")
        await self.directory.start()
        if self.usage is not None:
            self.usage.start()

    async def run(self) -> None:
        await self.directory.run()

    async def close(self) -> None:
        if self.usage is not None:
            await self.usage.close()
        if self.shared is not None:
            await self.shared.close()
        await self.directory.close()

    def adopt(self, config: Config) -> None:
        """Takes over what a reload may change."""
        if self.shared is not None:
            self.shared.set_policy(config.limits.on_store_failure)

    def set_clock(self) -> None:
        """Called now and then: the machine's clock may be set while budgets run."""
        self.limiter.clock.offset = time.time() - time.monotonic()

    async def refresh(self) -> None:
        """After a change made here: it is in force when this returns, and the other gateways are told."""
        await self.directory.refresh()
        await self.peers.refresh()
        if self.shared is not None:
            await self.shared.publish(CHANGED, "changed")

    async def note(
        self,
        action: str,
        actor: Actor,
        target: str = "configuration",
        before: JSON | None = None,
        after: JSON | None = None,
    ) -> None:
        """An audit entry for what has happened and is no change of the database. Without one the log keeps it."""
        store = self.directory.store
        try:
            if store is None:
                raise StoreUnavailable("There is no database.")
            async with asyncio.timeout(PATIENCE):
                await store.append_audit(action, target, actor, before, after)
        except (StoreUnavailable, TimeoutError):
            entry = {"action": action, "target": target, "actor": actor.name, "address": actor.address}
            audit_log.warning("audit", **entry, before=before, after=after)

    async def seed_budgets(self, snapshot: Snapshot) -> None:
        """Books what was spent of a calendar budget before this process began to count: a restart gives nothing back.

        Budgets in Redis have their own memory.
        """
        now, store = time.time(), self.directory.store
        new = [pair for pair in _budgets(snapshot) if pair[0] not in self._seeded]
        for key, _ in new:
            self._counting_since.setdefault(key, now)
        if store is None or self.shared is not None or not new:
            return
        self._seeded.update(key for key, _ in new)  # before anything is awaited: a budget is seeded once
        if self.usage is not None:
            await self.usage.caught_up(SPOOL_PATIENCE)
        try:
            wanted = {(limit.period, self._counting_since[key]) for key, limit in new}
            spent = {one: _by_owner(await store.spent(period_of(one[0], now)[0], one[1])) for one in wanted}
        except StoreUnavailable:
            self._seeded.difference_update(key for key, _ in new)
            log.warning("what was spent of token budgets before the start is not known yet")
            return
        for key, limit in new:
            owner = key.rpartition(":budget/")[0]
            self.limiter.seed(key, limit, spent[limit.period, self._counting_since[key]][owner], time.monotonic())

    def gauges(self) -> Iterator[Metric]:
        if self.usage is not None:
            up = float(self.directory.up)
            yield gauge("database_up", "Whether the database answered last", (), {(): up})
            waiting = float(self.usage.waiting)
            yield gauge("usage_rows_waiting", "Usage records that the database has not taken", (), {(): waiting})
            failing = float(self.usage.failing)
            yield gauge("usage_failing", "Whether disk or database do not take usage records", (), {(): failing})
            dropped = {(): self.usage.dropped}
            yield counter("usage_rows_dropped", "Usage records that neither disk nor database took", (), dropped)
        if self.shared is not None:
            up = float(self.shared.up)
            yield gauge("limit_store_up", "Whether Redis answers; else limits.on_store_failure applies", (), {(): up})
            failures = {(): self.shared.failures}
            yield counter("limit_store_failures", "Times that Redis did not answer in time", (), failures)

    def _store(self) -> Store | None:
        return self.directory.store


def _budgets(snapshot: Snapshot) -> Iterator[tuple[str, Limit]]:
    people = snapshot.people
    everybody: list[Limits] = [policy.limits for policy in people.tenants.values()]
    everybody += [caller.limits for caller in people.keys.values()]
    everybody += [model.limits for model in snapshot.models.values() if model.limits is not None]
    return (pair for limits in dict.fromkeys(everybody) for pair in limits.tokens if pair[1].period)


def _by_owner(spent: Iterable[tuple[str, str, str, int]]) -> Counter[str]:
    """Tokens by the owner of counters that they are booked under, of rows (tenant, key, model, tokens)."""
    found: Counter[str] = Counter()
    for tenant, caller, model, tokens in spent:
        for owner in (f"tenant:{tenant}", f"key:{tenant}/{caller}", f"model:{model}"):
            found[owner] += tokens
    return found
