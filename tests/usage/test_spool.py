"""The way of usage rows from the event loop to the database, with a disk and a database that work or do not."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import StoreUnavailable
from gateway.spool import Pace, UsageSink
from gateway.spool.base import reached
from gateway.spool.buffer import Batch, Buffer
from gateway.spool.folder import claim_dead, claim_new
from gateway.spool.mover import Mover
from gateway.usage import encode, usage_rows
from tests.usage.doubles import QUICK, Database, eventually, names, outcome, outcomes, run


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "usage.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@asynccontextmanager
async def sink(
    folder: Path | None, database: Database | None, pace: Pace = QUICK, retention: float | None = None
) -> AsyncIterator[UsageSink]:
    made = UsageSink(folder, lambda: database, retention, pace)
    made.start()
    try:
        yield made
    finally:
        await made.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def segments(folder: Path) -> list[Path]:
    return [path for path in files(folder) if path.suffix != ".lock"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def clear(folder: Path) -> None:
    shutil.rmtree(folder)


def leave_behind(folder: Path, name: str, count: int, *, tail: bytes = b"") -> Path:
    """What a process leaves that was killed while it wrote: its segment, and a lock that nobody holds."""
    claim = claim_new(folder)
    path = folder / f"{claim.name}-00000001.open"
    path.write_bytes(encode(usage_rows(outcomes(name, 0, count), claim.name, 0, 0.0)) + tail)
    claim.release()
    return path


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


# --- disk and database work
def test_rows_reach_the_database_as_they_are_and_leave_nothing_on_the_disk(folder: Path, database: Database) -> None:
    async def test() -> None:
        async with sink(folder, database) as usage:
            for number in range(10):
                usage.add(outcomes("a", number * 10, number * 10 + 10))
                await asyncio.sleep(0.005)
            await eventually(lambda: usage.waiting == 0)
            assert sorted(database.request_ids()) == sorted(names("a", 0, 100))
            assert segments(folder) == []
            assert (usage.safe, usage.dropped, usage.failing) == (100, 0, False)
        assert files(folder) == []  # its lock went with it

    run(test)
    stored = database.rows()[0]
    assert (stored.tenant, stored.key, stored.model, stored.asked, stored.operation) == (
        "research", "key_1", "m", "chat", "chat",
    )  # fmt: skip
    assert (stored.prompt, stored.completion, stored.source, stored.duration_ms) == (10, 11, "engine", 500.0)


def test_many_rows_at_once_are_stored_in_transactions_of_bounded_size(folder: Path, database: Database) -> None:
    sizes = []
    insert = database._insert

    def measured(rows: list[object]) -> None:
        sizes.append(len(rows))
        insert(rows)  # type: ignore[arg-type]

    database._insert = measured  # type: ignore[method-assign,assignment]

    async def test() -> None:
        async with sink(folder, database) as usage:
            usage.add(outcomes("a", 0, 7001))
            await eventually(lambda: usage.waiting == 0)

    run(test)
    assert len(set(database.request_ids())) == sum(sizes) == 7001
    assert max(sizes) <= 500


def test_nothing_to_do_costs_the_database_nothing(folder: Path, database: Database) -> None:
    async def test() -> None:
        async with sink(folder, database) as usage:
            usage.add([])
            await asyncio.sleep(0.2)
            assert files(folder) == []
        assert database.calls == []

    run(test)


def test_only_this_user_may_read_the_spool(folder: Path, database: Database) -> None:
    database.down = True
    old = os.umask(0)
    try:

        async def test() -> None:
            async with sink(folder, database) as usage:
                usage.add(outcomes("a", 0, 3))
                await eventually(lambda: usage.safe == 3)
                assert {path.suffix for path in files(folder)} >= {".lock"}
                assert {mode(path) for path in files(folder)} == {0o600}
                assert mode(folder) == 0o700

        run(test)
    finally:
        os.umask(old)


def test_handing_over_does_no_io_and_starts_no_task(folder: Path, database: Database) -> None:
    """The event loop's part ends with the rows in memory: `add` works before there is a thread or a folder."""

    async def test() -> None:
        usage = UsageSink(folder, lambda: database, None, QUICK)
        before = len(asyncio.all_tasks()), threading.active_count()
        usage.add(outcomes("a", 0, 5))
        assert (len(asyncio.all_tasks()), threading.active_count()) == before
        assert files(folder) == []
        assert (usage.waiting, usage.safe) == (5, 0)
        usage.start()
        await eventually(lambda: usage.waiting == 0)
        await usage.close()
        await usage.close()  # once more does no harm

    run(test)
    assert len(database.request_ids()) == 5


# --- the database is away
def test_an_outage_keeps_rows_on_the_disk_and_is_told_once_at_each_end(
    folder: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    database.down = True

    async def test() -> None:
        async with sink(folder, database) as usage:
            for number in range(20):
                usage.add(outcomes("a", number * 10, number * 10 + 10))
                await asyncio.sleep(0.02)
            await eventually(lambda: database.calls.count("add_usage") >= 3)
            assert usage.failing
            assert usage.waiting == 200
            assert usage.safe == 200
            assert segments(folder)
            assert len(lines(caplog, "wait on their way into the database")) == 1
            database.down = False
            await eventually(lambda: usage.waiting == 0 and not usage.failing)
            assert segments(folder) == []
        assert len(lines(caplog, "has taken all usage records")) == 1

    run(test)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 200))


def test_tries_at_a_database_that_is_away_become_rare_and_are_frequent_again_afterwards() -> None:
    mover = Mover(lambda: None, None, Buffer(10), None, deque(), Pace())
    pauses = []
    for problem in ["away"] * 7 + ["", "away"]:
        mover._settle(problem)
        pauses.append(mover._pause)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 1, 1]


def test_no_store_yet_is_an_outage(folder: Path, database: Database) -> None:
    async def test() -> None:
        known: list[Database] = []
        usage = UsageSink(folder, lambda: known[0] if known else None, None, QUICK)
        usage.start()
        usage.add(outcomes("a", 0, 3))
        await eventually(lambda: usage.failing)
        known.append(database)
        await eventually(lambda: usage.waiting == 0)
        await usage.close()

    run(test)
    assert len(database.request_ids()) == 3


def test_closing_with_the_database_down_keeps_rows_and_the_next_start_stores_them(
    folder: Path, database: Database
) -> None:
    database.down = True

    async def first() -> None:
        async with sink(folder, database) as usage:
            usage.add(outcomes("a", 0, 30))
            await eventually(lambda: usage.safe == 30)
            usage.add(outcomes("a", 30, 33))  # not written yet when the end comes

    async def second() -> None:
        async with sink(folder, database) as usage:
            await eventually(lambda: sorted(database.request_ids()) == sorted(names("a", 0, 33)))
            await eventually(lambda: usage.waiting == 0)
        assert files(folder) == []

    run(first)
    assert segments(folder)
    assert database.request_ids() == []
    database.down = False
    run(second)


def test_closing_does_not_wait_for_a_database_that_hangs(folder: Path, database: Database) -> None:
    database.hangs = True

    async def test() -> None:
        async with sink(folder, database, replace(QUICK, leave=0.2)) as usage:
            usage.add(outcomes("a", 0, 3))
            await eventually(lambda: "add_usage" in database.calls)

    run(test)
    assert segments(folder)
    database.hangs = False

    async def again() -> None:
        async with sink(folder, database):
            await eventually(lambda: len(database.request_ids()) == 3)

    run(again)


def test_a_call_that_hangs_counts_as_an_outage(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    monkeypatch.setattr("gateway.spool.base.PATIENCE", 0.05)
    database.hangs = True

    async def test() -> None:
        with pytest.raises(StoreUnavailable):
            async with reached(lambda: database) as store:
                await store.add_usage([])

    run(test)


def test_rows_that_can_never_be_stored_hold_up_no_others(folder: Path, database: Database) -> None:
    leave_behind(folder, "poison", 1)
    database.poison = "poison-0"

    async def test() -> None:
        async with sink(folder, database) as usage:
            await eventually(lambda: usage.failing)
            usage.add(outcomes("a", 0, 50))
            await eventually(lambda: len(database.request_ids()) == 50)
            assert usage.failing
        assert len(segments(folder)) == 1  # kept for whoever mends the cause

    run(test)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 50))


# --- others in the folder
def test_leftovers_of_the_dead_are_taken_over_and_a_torn_tail_is_left_out(
    folder: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(folder, "a", 5, tail=b'[["unfinished-1",1.0,"req')
    leave_behind(folder, "b", 5, tail=b"\x00" * 512 + b"\n")
    leave_behind(folder, "c", 0, tail=b"")

    async def test() -> None:
        async with sink(folder, database):
            await eventually(lambda: not segments(folder))
        assert files(folder) == []

    run(test)
    assert sorted(database.request_ids()) == names("a", 0, 5) + names("b", 0, 5)
    assert len(lines(caplog, "torn line(s) left out")) == 2


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_a_segment_cut_anywhere_gives_all_whole_lines(folder: Path, cut: int) -> None:
    path = leave_behind(folder, "a", 1)
    data = path.read_bytes()
    path.write_bytes(data + data[: min(cut, len(data) - 1)])
    (parcel,) = claim_dead(folder)
    assert [row.request_id for row in parcel.read()] == ["a-0"]
    parcel.claim.release()


def test_foreign_files_in_the_folder_are_left_alone(folder: Path, database: Database) -> None:
    folder.mkdir()
    foreign = ["notes.txt", "0123456789abcdef-1.rows", "0123456789abcdef.lock.old", "x" * 16 + "-00000001.open"]
    for name in foreign:
        (folder / name).write_text("keep me")

    async def test() -> None:
        async with sink(folder, database) as usage:
            usage.add(outcomes("a", 0, 3))
            await eventually(lambda: usage.waiting == 0)

    run(test)
    assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)


def test_two_sinks_share_a_folder_and_take_nothing_from_each_other(folder: Path, database: Database) -> None:
    other = Database(folder.parent / "other.db", down=True)

    async def test() -> None:
        async with sink(folder, database) as busy, sink(folder, other) as waiting:
            waiting.add(outcomes("w", 0, 20))
            await eventually(lambda: waiting.safe == 20 and waiting.failing)
            busy.add(outcomes("b", 0, 20))
            await eventually(lambda: busy.waiting == 0)
            assert claim_dead(folder) == []
            assert sorted(database.request_ids()) == sorted(names("b", 0, 20))
            other.down = False
            await eventually(lambda: waiting.waiting == 0)
        assert sorted(other.request_ids()) == sorted(names("w", 0, 20))

    run(test)


def test_a_running_process_takes_over_from_one_that_ends(folder: Path, database: Database) -> None:
    async def test() -> None:
        async with sink(folder, database) as lasting:
            lasting.add(outcomes("a", 0, 1))
            await eventually(lambda: lasting.waiting == 0)
            async with sink(folder, Database(folder.parent / "other.db", down=True)) as leaving:
                leaving.add(outcomes("b", 0, 20))
            await eventually(lambda: len(database.request_ids()) == 21)

    run(test)


# --- the disk does not work
def test_without_a_usable_folder_rows_go_from_memory_to_the_database(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")

    async def test() -> None:
        async with sink(tmp_path / "file" / "spool", database) as usage:
            usage.add(outcomes("a", 0, 10))
            await eventually(lambda: usage.waiting == 0)
            assert usage.failing
            assert usage.safe == 0
            usage.add(outcomes("a", 10, 13))  # left to the end

    run(test)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 13))
    assert len(lines(caplog, "cannot be spooled")) == 1


def test_no_folder_at_all_is_no_failure(database: Database) -> None:
    async def test() -> None:
        async with sink(None, database) as usage:
            usage.add(outcomes("a", 0, 10))
            await eventually(lambda: usage.waiting == 0)
            assert not usage.failing

    run(test)
    assert len(database.request_ids()) == 10


def test_memory_is_bounded_and_the_oldest_rows_give_way_and_are_counted(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    database.down = True

    async def test() -> None:
        async with sink(tmp_path / "file" / "spool", database, replace(QUICK, most_in_memory=1000)) as usage:
            for number in range(30):
                usage.add(outcomes("a", number * 100, number * 100 + 100))
            await eventually(lambda: usage.dropped == 2000)
            assert usage.waiting == 1000
            database.down = False
            await eventually(lambda: usage.waiting == 0)
        assert usage.dropped == 2000

    run(test)
    assert sorted(database.request_ids()) == sorted(names("a", 2000, 3000))
    assert len(lines(caplog, "the oldest are dropped")) == 1


def test_a_folder_that_becomes_usable_is_used(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    obstacle = tmp_path / "spool"
    obstacle.write_text("in the way")
    database.down = True

    async def test() -> None:
        async with sink(obstacle, database) as usage:
            usage.add(outcomes("a", 0, 10))
            await eventually(lambda: lines(caplog, "cannot be spooled"))
            obstacle.unlink()
            await eventually(lambda: usage.safe == 10)
            assert len(lines(caplog, "can be written again")) == 1
            database.down = False
            await eventually(lambda: usage.waiting == 0 and not usage.failing)

    run(test)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 10))


def test_a_folder_removed_while_it_is_used_is_made_again_and_what_went_with_it_is_counted(
    folder: Path, database: Database
) -> None:
    database.down = True

    async def test() -> None:
        async with sink(folder, database) as usage:
            usage.add(outcomes("a", 0, 10))
            await eventually(lambda: usage.safe == 10 and any(path.suffix == ".rows" for path in segments(folder)))
            clear(folder)
            usage.add(outcomes("b", 0, 10))
            await eventually(lambda: usage.safe == 20)
            database.down = False
            await eventually(lambda: usage.waiting == 0 and not usage.failing)
            assert usage.dropped == 10

    run(test)
    assert sorted(database.request_ids()) == sorted(names("b", 0, 10))


def test_what_found_no_place_is_the_oldest_again(caplog: pytest.LogCaptureFixture) -> None:
    buffer = Buffer(6)
    a, b, c, d, e = batches = [Batch(2, name) for name in (b"a", b"b", b"c", b"d", b"e")]
    for batch in batches[:3]:
        buffer.put(batch)
    assert buffer.take(5) == [a, b]
    buffer.put_back([a, b])
    assert buffer.take(1) == [a]  # a whole batch, however small the appetite
    buffer.put(d)
    buffer.put_back([a])
    assert (buffer.rows, buffer.dropped) == (6, 2)
    buffer.put(e)
    assert (buffer.rows, buffer.dropped) == (6, 4)
    assert buffer.take(100) == [c, d, e]
    assert (buffer.rows, buffer.take(1)) == (0, [])
    assert len(lines(caplog, "the oldest are dropped")) == 1
    buffer.ease()
    for batch in batches[:4]:
        buffer.put(batch)
    assert len(lines(caplog, "the oldest are dropped")) == 2  # another overflow, another line


# --- keys and retention
def test_keys_of_the_database_are_marked_as_used_now_and_then(folder: Path, database: Database) -> None:
    async def test() -> None:
        async with sink(folder, database, replace(QUICK, mark=30.0)) as usage:
            usage.add([outcome("a-0", "key_1", age=5.0), outcome("a-1", "ci"), outcome("a-2", "key_2")])
            await eventually(lambda: database.used())
            first = database.used()
            assert first.keys() == {"key_1", "key_2"}
            for _ in range(5):
                usage.add([outcome("a-3", "key_1")])
                await asyncio.sleep(0.05)
            await eventually(lambda: usage.waiting == 0)
            assert database.calls.count("mark_used") == 1
        assert database.calls.count("mark_used") == 2  # the rest at the end
        assert database.used()["key_1"] > first["key_1"] + 4

    run(test)


def test_rows_older_than_the_retention_are_deleted_in_steps_and_younger_ones_stay(
    folder: Path, database: Database
) -> None:
    old = [outcome(f"old-{number}", age=100.0) for number in range(2500)]

    async def test() -> None:
        async with sink(folder, database, replace(QUICK, first_forget=0.1, forget=0.1), retention=50.0) as usage:
            usage.add(old + outcomes("new", 0, 5))
            await eventually(lambda: usage.waiting == 0)
            await eventually(lambda: len(database.request_ids()) == 5)

    run(test)
    assert sorted(database.request_ids()) == names("new", 0, 5)
    assert database.calls.count("forget_usage") >= 3


def test_without_a_retention_rows_stay_for_ever(folder: Path, database: Database) -> None:
    async def test() -> None:
        async with sink(folder, database, replace(QUICK, first_forget=0.01, forget=0.01)) as usage:
            usage.add([outcome("old", age=1e6)])
            await eventually(lambda: usage.waiting == 0)
            await asyncio.sleep(0.1)
            assert "forget_usage" not in database.calls
            usage.retention = 10.0  # as by a reload
            await eventually(lambda: database.request_ids() == [])

    run(test)
