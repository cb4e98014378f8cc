"""Versions: whoever asks for changes now and then knows what a newcomer is told, whatever happens at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.errors import Conflict, NotFound
from gateway.records import TenantRecord
from gateway.store import Store
from tests.store.harness import ADMIN, Bench, Contender, Follower, Place, key

TENANTS = ("acme", "other")
_fresh = itertools.count(1)


async def act(store: Store, action: str, tenant: str, choice: int) -> None:
    """Tries one change. Refusals are as good as any: they must not confuse those who watch."""
    alive = [one.id for one in await store.keys(tenant)] or ["nobody"]
    identity = alive[choice % len(alive)]
    with contextlib.suppress(Conflict, NotFound):
        if action == "create_tenant":
            await store.create_tenant(TenantRecord(tenant, weight=1.0 + choice), ADMIN)
        elif action == "update_tenant":
            await store.update_tenant(tenant, {"priority": choice}, ADMIN)
        elif action == "delete_tenant":
            await store.delete_tenant(tenant, ADMIN)
        elif action == "create_key":
            await store.create_key(key(f"key{next(_fresh)}", tenant), ADMIN)
        elif action == "update_key":
            await store.update_key(identity, {"models": (f"m{choice}",)}, ADMIN)
        elif action == "rotate_key":
            await store.rotate_key(identity, key(f"key{next(_fresh)}"), time.time() + 60 + choice, ADMIN)
        else:
            await store.revoke_key(identity, ADMIN)


ACTIONS = (
    "create_tenant", "update_tenant", "delete_tenant",
    "create_key", "create_key", "update_key", "rotate_key", "revoke_key",
)  # fmt: skip
steps = st.lists(
    st.one_of(
        st.just(None),  # the follower asks
        st.tuples(st.sampled_from(ACTIONS), st.sampled_from(TENANTS), st.integers(0, 5)),
    ),
    max_size=25,
)


@given(plan=steps)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_follower_knows_what_a_newcomer_is_told(store: Bench, plan: list[Any]) -> None:
    follower = Follower()
    follower.take(store.news(None))
    for step in plan:
        if step is None:
            follower.take(store.news(follower.mark))
        else:
            store.run(act(store.store, *step))
    follower.take(store.news(follower.mark))
    assert follower.knows(store.living())
    assert follower.mark == store.mark()
    assert store.verify_audit().ok


def test_each_change_has_the_next_version(store: Bench) -> None:
    seen = [store.version()]
    store.create_tenant(TenantRecord("acme"), ADMIN)
    seen.append(store.version())
    store.create_key(key("k1"), ADMIN)
    seen.append(store.version())
    store.rotate_key("k1", key("k2"), time.time() + 60, ADMIN)
    seen.append(store.version())
    store.delete_tenant("acme", ADMIN)
    seen.append(store.version())
    store.append_audit("replica.drain", "r1", ADMIN)  # no change to tenants or keys
    seen.append(store.version())
    assert seen == [0, 1, 2, 3, 4, 4]


def test_changes_name_the_deleted_and_revoked_and_a_newcomer_does_not_hear_of_them(store: Bench) -> None:
    store.create_tenant(TenantRecord("acme"), ADMIN)
    store.create_key(key("k1"), ADMIN)
    known = store.mark()
    store.delete_tenant("acme", ADMIN)
    news = store.news(known)
    version, tenants, keys = news.changes
    assert version == known.version + 1 and not news.whole
    assert [(tenant.name, tenant.deleted_at is None) for tenant in tenants] == [("acme", False)]
    assert [(one.id, one.revoked_at is None) for one in keys] == [("k1", False)]
    assert store.news(news.mark) is None
    assert store.living() == (version, [], [])


def test_changes_are_complete_while_several_gateways_write(place: Place, open_bench: Callable[[str], Bench]) -> None:
    bench = open_bench(place.url)
    chance = random.Random(7)
    plans = [
        [(chance.choice(ACTIONS), chance.choice(TENANTS), chance.randrange(6)) for _ in range(25)] for _ in range(4)
    ]

    async def write(store: Store, plan: list[tuple[str, str, int]]) -> None:
        for step in plan:
            await act(store, *step)

    async def follow(store: Store, done: asyncio.Event) -> Follower:
        follower = Follower()
        while not done.is_set():
            follower.take(await store.news(follower.mark))
            await asyncio.sleep(0.001)
        follower.take(await store.news(follower.mark))
        return follower

    async def scene() -> Follower:
        stores = [await Store.open(place.url) for _ in range(2)]
        done = asyncio.Event()
        following = asyncio.create_task(follow(bench.store, done))
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(write(stores[i % 2], plan) for i, plan in enumerate(plans)))
        finally:
            done.set()
            follower = await following
            for store in stores:
                await store.close()
        return follower

    assert bench.run(scene()).knows(bench.living())
    entries = bench.audit(limit=1000)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert bench.version() == len(entries) > 30
    assert bench.verify_audit().ok


def test_two_processes_write_and_a_third_misses_nothing(place: Place, open_bench: Callable[[str], Bench]) -> None:
    bench = open_bench(place.url)
    contenders = [Contender(place.url, name, 30) for name in ("left", "right")]
    for contender in contenders:
        contender.go()
    follower = Follower()
    while any(contender.running for contender in contenders):
        follower.take(bench.news(follower.mark))
    for contender in contenders:
        contender.finish()
    follower.take(bench.news(follower.mark))
    assert follower.knows(bench.living())
    assert len(follower.tenants) == bench.version() == 60
    assert bench.verify_audit().ok


def test_only_one_of_many_gets_a_name(store: Bench) -> None:
    async def race() -> list[object]:
        attempts = [store.store.create_key(key(f"k{i}", name="ci"), ADMIN) for i in range(4)]
        return await asyncio.gather(*attempts, return_exceptions=True)

    results = store.run(race())
    assert sum(isinstance(result, Conflict) for result in results) == 3
    assert len(store.keys()) == 1
