"""A database for usage in one SQLite file, which several processes may use, and outcomes to be stored in it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from backends.base import Operation
from gateway.errors import StoreUnavailable
from gateway.outcome import Outcome
from gateway.records import UsageRow
from gateway.spool import Pace
from gateway.types import Limits, Model, Principal, Tenant, Usage

PATIENCE = 20.0  # seconds until something that has to happen counts as not happening
QUICK = Pace(rotate=0.02, rotate_failing=0.05, move=0.02, first_retry=0.02, last_retry=0.1, adopt=0.1, mark=0.05)
MODEL = Model("m", ("chat",), "least_load", (), (), (), 512, 0)
_COLUMNS = ", ".join(UsageRow._fields[1:])


class Database:
    """Does what the store does for usage, and is out of reach when told so."""

    def __init__(self, path: Path, *, down: bool = False) -> None:
        self._path = path
        self.down = down
        self.hangs = False
        self.poison = ""  # rows with this request id are refused
        self.calls: list[str] = []
        with self._transaction() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"CREATE TABLE IF NOT EXISTS usage (id TEXT PRIMARY KEY, {_COLUMNS})")
            connection.execute("CREATE TABLE IF NOT EXISTS used (key TEXT PRIMARY KEY, time REAL)")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=10)) as connection, connection:
            yield connection

    async def add_usage(self, rows: Sequence[UsageRow]) -> None:
        await self._begin("add_usage")
        if self.poison and any(row.request_id == self.poison for row in rows):
            raise OverflowError("a value is too large")
        await asyncio.to_thread(self._insert, rows)

    async def mark_used(self, last: Mapping[str, float]) -> None:
        await self._begin("mark_used")
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO used VALUES (?, ?)", list(last.items()))

    async def forget_usage(self, before: float, at_most: int) -> int:
        await self._begin("forget_usage")
        with self._transaction() as connection:
            old = "SELECT id FROM usage WHERE time < ? LIMIT ?"
            return connection.execute(f"DELETE FROM usage WHERE id IN ({old})", (before, at_most)).rowcount

    async def _begin(self, call: str) -> None:
        self.calls.append(call)
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise StoreUnavailable("The database is out of reach.")

    def _insert(self, rows: Sequence[UsageRow]) -> None:
        with self._transaction() as connection:
            connection.executemany(f"INSERT OR IGNORE INTO usage VALUES ({', '.join('?' * 20)})", rows)

    def request_ids(self) -> list[str]:
        """Of every row, so one that was stored twice is there twice."""
        with self._transaction() as connection:
            return [name for (name,) in connection.execute("SELECT request_id FROM usage")]

    def rows(self) -> list[UsageRow]:
        with self._transaction() as connection:
            return [UsageRow(*values) for values in connection.execute("SELECT * FROM usage ORDER BY time, id")]

    def used(self) -> dict[str, float]:
        with self._transaction() as connection:
            return dict(connection.execute("SELECT * FROM used"))


def outcome(request_id: str, key: str = "key_1", *, age: float = 0.0) -> Outcome:
    """A request that has just ended, or ended `age` seconds ago."""
    now = time.monotonic() - age
    made = Outcome(Operation.CHAT, request_id, now - 0.5)
    made.principal = Principal(Tenant("research"), key, "user", ("*",), None, Limits(), None, b"\x01" * 32)
    made.model, made.asked, made.status, made.attempts = MODEL, "chat", 200, 1
    made.first_token, made.ended, made.usage = now - 0.25, now, Usage(10, 11)
    return made


def outcomes(name: str, first: int, last: int) -> list[Outcome]:
    """`name-first` to `name-last`, the latter not included."""
    return [outcome(f"{name}-{number}") for number in range(first, last)]


def names(name: str, first: int, last: int) -> list[str]:
    return [f"{name}-{number}" for number in range(first, last)]


async def eventually(check: Callable[[], object]) -> None:
    """Returns when `check` is true. Raises: AssertionError when it never becomes so."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(whole())
