"""The spool and the store there is, on SQLite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gateway.records import UsageQuery
from gateway.spool import UsageSink
from gateway.store import Store
from tests.usage.doubles import QUICK, eventually, names, outcomes, run

EVER = UsageQuery(0.0, 1e12)


def test_what_was_used_is_in_the_report_once_also_when_a_segment_is_stored_twice(tmp_path: Path) -> None:
    async def test() -> None:
        store = await Store.open(f"sqlite:///{tmp_path / 'sekisho.db'}")
        known: list[Store] = []
        sink = UsageSink(tmp_path / "spool", lambda: known[0] if known else None, None, QUICK)
        sink.start()
        sink.add(outcomes("a", 0, 2500))
        await eventually(lambda: sink.safe == 2500 and sink._parcels)
        await store.add_usage(sink._parcels[0].read())  # as by a process that dies before it deletes the segment
        known.append(store)
        await eventually(lambda: sink.waiting == 0)
        await sink.close()
        (total,) = await store.usage(EVER)
        rows = await store.usage_rows(EVER, limit=5000)
        await store.close()
        assert (total["requests"], total["prompt"], total["completion"]) == (2500, 25_000, 27_500)
        assert {row.request_id for row in rows} == set(names("a", 0, 2500))
        assert {(row.model, row.asked, row.operation) for row in rows} == {("m", "chat", "chat")}

    run(test)


def test_old_usage_is_forgotten_and_new_usage_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        store = await Store.open(f"sqlite:///{tmp_path / 'sekisho.db'}")
        pace = replace(QUICK, first_forget=0.05, forget=0.05)
        sink = UsageSink(tmp_path / "spool", lambda: store, 3600.0, pace)
        sink.start()
        old = outcomes("old", 0, 1500)
        for outcome in old:
            outcome.ended -= 4000
        sink.add(old + outcomes("new", 0, 10))
        await eventually(lambda: sink.waiting == 0)
        for _ in range(1000):
            (total,) = await store.usage(EVER)
            if total["requests"] == 10:
                break
        await sink.close()
        left = await store.usage_rows(EVER, limit=100)
        await store.close()
        assert {row.request_id for row in left} == set(names("new", 0, 10))

    run(test)
