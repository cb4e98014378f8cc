"""Outages: a database that is away, slow or locked is a StoreUnavailable, and is used again once it is back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from gateway.errors import StoreUnavailable
from gateway.records import News, TenantRecord, UsageQuery
from gateway.store import Store
from gateway.store.database import _Connection
from tests.e2e.harness import eventually
from tests.servers.postgres import Postgres
from tests.store.harness import ADMIN, Bench, Place, assert_discreet, key
from tests.store.test_usage import row

ALWAYS = UsageQuery(0.0, 1e11)


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server that a test may stop."""
    if not Postgres.available():
        pytest.skip("no PostgreSQL server is installed")
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


def every_kind_of_call(store: Bench) -> list[Callable[[], object]]:
    return [
        lambda: store.news(None),
        lambda: store.tenants(),
        lambda: store.keys(),
        lambda: store.create_tenant(TenantRecord("other"), ADMIN),
        lambda: store.mark_used({"k1": 1.0}),
        lambda: store.add_usage([row("a")]),
        lambda: store.usage(ALWAYS),
        lambda: store.forget_usage(1e11),
        lambda: store.append_audit("a", "b", ADMIN),
        lambda: store.verify_audit(),
    ]


async def ask_at_once(store: Store, times: int) -> list[News | None]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*(store.news(None) for _ in range(times)))


async def until(check: Callable[[], bool]) -> None:
    for _ in range(2000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


def is_unavailable(call: Callable[[], object]) -> bool:
    with pytest.raises(StoreUnavailable) as raised:
        call()
    assert_discreet(raised)
    return raised.value.retry_after is not None


# --- a server that goes and comes back
def test_a_restart_of_the_server_heals_by_itself(own_postgres: Postgres, open_bench: Callable[[str], Bench]) -> None:
    store = open_bench(own_postgres.create())
    store.create_tenant(TenantRecord("acme"), ADMIN)
    store.run(ask_at_once(store.store, 5))  # fills the pool
    own_postgres.restart()
    assert store.create_tenant(TenantRecord("other"), ADMIN).name == "other"  # the very next call
    own_postgres.stop()
    assert all(is_unavailable(call) for call in every_kind_of_call(store))
    own_postgres.start()
    assert [tenant.name for tenant in store.tenants()] == ["acme", "other"]
    assert store.version() == 2
    assert store.verify_audit().ok


def test_a_restart_in_the_middle_of_work_loses_nothing_that_was_confirmed(
    own_postgres: Postgres, open_bench: Callable[[str], Bench]
) -> None:
    store = open_bench(own_postgres.create())
    confirmed: list[str] = []
    refused: list[StoreUnavailable] = []

    async def write(writer: int, done: asyncio.Event) -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                await store.store.create_tenant(TenantRecord(f"t{writer}-{number}"), ADMIN)
                confirmed.append(f"t{writer}-{number}")
            except StoreUnavailable as error:
                refused.append(error)
                await asyncio.sleep(0.01)

    async def scene() -> None:
        done = asyncio.Event()
        writers = [asyncio.create_task(write(writer, done)) for writer in range(3)]
        try:
            await until(lambda: len(confirmed) >= 10)
            await asyncio.to_thread(own_postgres.stop)
            await until(lambda: bool(refused))
            await asyncio.to_thread(own_postgres.start)
            before = len(confirmed)
            await until(lambda: len(confirmed) >= before + 10)
        finally:
            done.set()
            await asyncio.gather(*writers)

    store.run(scene())
    assert set(confirmed) <= {tenant.name for tenant in store.tenants()}
    assert store.verify_audit().ok
    assert store.version() == len(store.tenants())


def test_a_server_that_stops_answering_costs_a_bounded_time(
    own_postgres: Postgres, open_bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bench(own_postgres.create())
    store.create_tenant(TenantRecord("acme"), ADMIN)
    with own_postgres.paused(), monkeypatch.context() as patch:
        patch.setattr("gateway.store.database.TRANSACTION_LIMIT", 0.5)
        assert is_unavailable(store.tenants)
        assert is_unavailable(store.version)
    assert eventually(lambda: works(store.tenants))


def test_closing_does_not_wait_for_a_server_that_does_not_answer(
    own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database._CLOSE_LIMIT", 0.2)
    store = Bench(own_postgres.create())
    store.version()
    with own_postgres.paused():
        store.close()


def test_a_server_that_accepts_and_says_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.database.CONNECT_LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://sekisho:secret-word@127.0.0.1:{silent.getsockname()[1]}/name"
        with pytest.raises(StoreUnavailable) as raised:
            Bench(url).close()
    assert_discreet(raised)
    assert "secret-word" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid:5432"])
def test_a_server_that_is_not_there_is_unavailable(host: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached") as raised:
        Bench(f"postgresql://sekisho:secret-word@{host}/name").close()
    assert_discreet(raised)


# --- locks
@asynccontextmanager
async def held(place: Place) -> AsyncIterator[None]:
    """Somebody else holds what every change needs."""
    if place.kind == "sqlite":
        with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")
        return
    connection = await asyncpg.connect(place.url)
    try:
        async with connection.transaction():
            await connection.execute("SELECT * FROM state FOR UPDATE")
            yield
    finally:
        await connection.close()


def test_a_change_that_waits_too_long_for_another_is_given_up(
    place: Place, open_bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database._BUSY_LIMIT", 0.2)
    store = open_bench(place.url)

    async def scene() -> None:
        async with held(place):
            with monkeypatch.context() as patch, pytest.raises(StoreUnavailable, match="busy") as raised:
                if place.kind == "postgresql":
                    patch.setattr("gateway.store.database.TRANSACTION_LIMIT", 0.5)
                await store.store.create_tenant(TenantRecord("acme"), ADMIN)
            assert_discreet(raised)
            assert await store.store.tenants() == []  # reading goes on
        await store.store.create_tenant(TenantRecord("acme"), ADMIN)

    store.run(scene())
    assert store.version() == 1


def test_a_database_that_was_damaged_is_unavailable_and_used_again_once_mended(store: Bench, place: Place) -> None:
    place.sql("ALTER TABLE usage RENAME TO elsewhere")
    assert is_unavailable(lambda: store.add_usage([row("a")]))
    assert is_unavailable(lambda: store.usage(ALWAYS))
    place.sql("ALTER TABLE elsewhere RENAME TO usage")
    store.add_usage([row("a")])
    assert store.usage(ALWAYS)[0]["requests"] == 1


def test_a_statement_that_takes_too_long_is_stopped(
    place: Place, open_bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bench(place.url)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    async def count() -> None:
        async with store.store._database.reading() as connection:
            await connection.exec_driver_sql(endless)

    with monkeypatch.context() as patch:
        patch.setattr("gateway.store.database.TRANSACTION_LIMIT", 0.5)
        assert is_unavailable(lambda: store.run(count()))
    assert store.version() == 0


# --- cancellation
def works(call: Callable[[], object]) -> bool:
    with contextlib.suppress(StoreUnavailable):
        call()
        return True
    return False


def test_a_connection_that_is_dropped_between_two_rows_lets_go_of_its_locks(tmp_path: Path) -> None:
    dropped = sqlite3.connect(tmp_path / "db", isolation_level=None, factory=_Connection)
    dropped.execute("BEGIN IMMEDIATE")
    unfinished = dropped.cursor()
    unfinished.execute("SELECT 1 UNION SELECT 2")
    dropped.close()
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE").close()
    assert unfinished.connection is dropped  # it was alive until here


@pytest.mark.parametrize("memory", [False, True], ids=["stored", "memory"])
def test_a_cancelled_call_happens_as_a_whole_or_not_at_all(
    place: Place, memory: bool, open_bench: Callable[[str], Bench]
) -> None:
    if memory and place.kind != "sqlite":
        pytest.skip("only SQLite has databases in memory")
    store = open_bench("sqlite:///:memory:" if memory else place.url)
    store.create_tenant(TenantRecord("acme"), ADMIN)

    async def cancel(work: Coroutine[Any, Any, object], steps: int) -> bool:
        task = asyncio.create_task(work)
        for _ in range(steps):
            await asyncio.sleep(0 if steps % 2 else 0.0002)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    async def scene() -> int:
        cancelled = 0
        for steps in range(40):
            cancelled += await cancel(change(store.store, steps), steps)
        return cancelled

    async def change(open_store: Store, number: int) -> None:
        await open_store.create_key(key(f"k{number}"), ADMIN)

    assert store.run(scene()) > 5
    # Every key that is there has its version and its entry, and the other way round.
    assert store.version() == len(store.audit(limit=1000)) == len(store.keys()) + 1
    assert store.verify_audit().ok
    assert len(store.run(ask_at_once(store.store, 12))) == 12  # no place in the pool was lost
