"""A gateway that follows its database knows what the database holds, also when a backup is put back in between."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.directory import Directory
from gateway.errors import Conflict, StoreUnavailable
from gateway.people import People
from gateway.records import Changes, Mark, TenantRecord
from gateway.store import Store
from tests.store.harness import ADMIN, Bench, key
from tests.store.test_changes import ACTIONS, TENANTS, act


class Reader:
    """What a gateway makes of what its directory tells it."""

    def __init__(self, url: str) -> None:
        self.people = People()
        self.told: list[bool] = []  # for each time whether it was everything
        self.directory = Directory(url, self.change)

    def change(self, changes: Changes, whole: bool) -> None:
        self.told.append(whole)
        self.people = (People() if whole else self.people).with_changes(changes)

    def knows(self, held: Changes) -> bool:
        known = self.people.stored_tenants.values(), self.people.stored_keys.values()
        return [sorted(map(repr, records)) for records in known] == [
            sorted(map(repr, records)) for records in (held.tenants, held.keys)
        ]


def copy(source: Path, target: Path) -> None:
    """As SQLite's own backup does it, into a file that others have open."""
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)


ACTS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(TENANTS), st.integers(0, 5)), max_size=4)
ROUNDS = st.lists(st.tuples(ACTS, st.booleans(), ACTS, st.booleans(), ACTS, st.booleans()), min_size=1, max_size=3)


@given(rounds=ROUNDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_looks_now_and_then_knows_what_is_there_whatever_was_put_back(
    tmp_path: Path, rounds: list[tuple[Any, ...]]
) -> None:
    """A backup is taken, what follows is undone by it, and things go on from there."""
    for file in tmp_path.iterdir():
        file.unlink()
    database, backup = tmp_path / "s.db", tmp_path / "backup"

    async def run() -> None:
        store, reader = await Store.open(f"sqlite:///{database}"), Reader(f"sqlite:///{database}")

        async def go_on(acts: list[tuple[str, str, int]], looks: bool) -> None:
            for one in acts:
                await act(store, *one)
            if looks:
                await reader.directory.refresh()

        try:
            for before, looks_before, undone, looks_undone, since, looks_since in rounds:
                await go_on(before, looks_before)
                copy(database, backup)
                await go_on(undone, looks_undone)
                copy(backup, database)
                await go_on(since, looks_since)
            await reader.directory.refresh()
            news = await store.news(None)
            assert news is not None and reader.knows(news.changes)
        finally:
            await reader.directory.close()
            await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("more", [0, 1], ids=["as many changes", "more changes"])
def test_a_key_from_before_a_backup_ends_although_the_versions_went_on(tmp_path: Path, more: int) -> None:
    """What was made in the time that the backup has undone is gone, and what was done since is known."""
    database, backup = tmp_path / "s.db", tmp_path / "backup"

    async def run() -> None:
        store, reader = await Store.open(f"sqlite:///{database}"), Reader(f"sqlite:///{database}")
        try:
            await store.create_tenant(TenantRecord("acme"), ADMIN)
            kept = await store.create_key(key("kept"), ADMIN)
            copy(database, backup)
            await store.create_key(key("undone"), ADMIN)
            await reader.directory.refresh()
            copy(backup, database)
            await store.revoke_key(kept.id, ADMIN)
            for number in range(more):
                await store.create_key(key(f"later{number}"), ADMIN)
            await reader.directory.refresh()
            assert sorted(reader.people.stored_keys) == [f"later{number}" for number in range(more)]
        finally:
            await reader.directory.close()
            await store.close()

    asyncio.run(run())


def marks(store: Bench) -> list[Mark]:
    """Of an empty database, and after each of a few changes."""
    found = [store.mark()]
    store.create_tenant(TenantRecord("acme"), ADMIN)
    found.append(store.mark())
    store.create_key(key("k1"), ADMIN)
    found.append(store.mark())
    store.append_audit("config.reload", "configuration", ADMIN)
    found.append(store.mark())
    return found


def names(records: Sequence[Any]) -> list[str]:
    return [record.name for record in records]


def test_news_are_what_came_after_a_mark(store: Bench) -> None:
    empty, tenant, _, last = marks(store)
    for known, tenants, keys, whole in (
        (None, ["acme"], ["k1"], True), (empty, ["acme"], ["k1"], False), (tenant, [], ["k1"], False),
    ):  # fmt: skip
        news = store.news(known)
        assert (names(news.changes.tenants), names(news.changes.keys), news.whole) == (tenants, keys, whole)
        assert news.mark == last
    assert store.news(last) is None


def test_an_entry_that_changes_nobody_is_no_news_of_anybody(store: Bench) -> None:
    *_, before, last = marks(store)
    news = store.news(before)
    assert (news.mark, news.changes.tenants, news.changes.keys, news.whole) == (last, [], [], False)


def test_of_another_history_everything_is_news(store: Bench) -> None:
    _, tenant, _, last = marks(store)
    for stranger in (last._replace(head="f" * 64), last._replace(version=9), last._replace(entries=9),
                     tenant._replace(head=last.head)):  # fmt: skip
        news = store.news(stranger)
        assert news.whole and names(news.changes.keys) == ["k1"]


def test_what_could_not_be_taken_in_is_told_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"

    async def run() -> None:
        store, reader = await Store.open(url), Reader(url)
        take, reader.directory._on_change = reader.directory._on_change, refuse
        try:
            await store.create_tenant(TenantRecord("acme"), ADMIN)
            with pytest.raises(RuntimeError):
                await reader.directory.refresh()
            reader.directory._on_change = take
            await reader.directory.refresh()
            assert list(reader.people.tenants) == ["acme"]
            await store.append_audit("replica.drain", "m/vllm-1", ADMIN)
            await reader.directory.refresh()
            assert reader.told == [True]
        finally:
            await reader.directory.close()
            await store.close()

    asyncio.run(run())


def refuse(changes: Changes, whole: bool) -> None:
    raise RuntimeError("no room")


# --- the name of a tenant that has left the configuration
def test_a_new_tenant_does_not_get_the_keys_that_are_left_of_another(store: Bench) -> None:
    store.create_key(key("left", "acme"), ADMIN)  # of a tenant that only the configuration had
    with pytest.raises(Conflict, match="Revoke them"):
        store.create_tenant(TenantRecord("acme"), ADMIN)
    assert store.tenants() == [] and store.version() == 1
    store.create_tenant(TenantRecord("other"), ADMIN)
    store.revoke_key("left", ADMIN)
    assert store.create_tenant(TenantRecord("acme"), ADMIN).name == "acme"


# --- reports
def test_reports_leave_room_for_changes_and_for_hearing_of_them(store: Bench) -> None:
    """Any caller may ask for reports, as many at once as he likes."""

    async def run(store: Store) -> None:
        enough = asyncio.Event()

        async def one() -> None:
            async with store._database.reporting():
                await enough.wait()

        reports = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(0)
        try:
            await store.create_tenant(TenantRecord("acme"), ADMIN)
            heard = await asyncio.gather(*(store.news(None) for _ in range(20)))
            assert [news.mark.version for news in heard if news] == [1] * 20
        finally:
            enough.set()
            await asyncio.gather(*reports)

    store.run(run(store.store))


def test_a_report_that_gets_no_turn_is_told_to_come_back(store: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.database._REPORT_WAIT", 0.05)

    async def run(store: Store) -> None:
        enough = asyncio.Event()

        async def one() -> None:
            async with store._database.reporting():
                await enough.wait()

        reports = [asyncio.create_task(one()) for _ in range(6)]
        ends: list[object] = []
        for end in asyncio.as_completed(reports, timeout=20):
            ends += await asyncio.gather(end, return_exceptions=True)
            if len(ends) == 4:  # the others have had theirs from the beginning
                enough.set()
        refused = [end for end in ends if isinstance(end, StoreUnavailable)]
        assert len(refused) == 4 and {error.retry_after for error in refused} == {2}
        async with store._database.reporting():  # every turn was given back
            pass

    store.run(run(store.store))
