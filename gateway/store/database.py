"""The connection to SQLite or PostgreSQL: transactions that are short, bounded and fail with StoreUnavailable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet

from sqlalchemy import URL, AsyncAdaptedQueuePool, Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.config import StartupError
from gateway.store.failures import DRIVER_ERRORS, unavailable

CONNECT_LIMIT = 5.0  # seconds
TRANSACTION_LIMIT = 30.0  # seconds, waiting for a connection and for locks included
_BUSY_LIMIT = 5.0  # seconds that SQLite waits for another writer
_CLOSE_LIMIT = 5.0  # seconds
_MOST_REPORTS = 2  # at a time, of the connections below
_REPORT_WAIT = 10.0  # seconds that a report waits for its turn
_FILE_PREFIX = "sqlite:///"
_COMMON: dict[str, Any] = {"hide_parameters": True, "pool_size": 5, "max_overflow": 5, "pool_timeout": 5.0}

# The pool reports each connection that breaks with a traceback. Callers learn of it as StoreUnavailable.
logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)


class Database:
    """Gives out transactions. They are rolled back by whatever leaves them: an error, a cancellation, the limit."""

    def __init__(self, engine: AsyncEngine, anchor: sqlite3.Connection | None = None) -> None:
        self._engine = engine
        self._anchor = anchor  # an in-memory database lives as long as one connection to it
        self._reports = asyncio.Semaphore(_MOST_REPORTS)
        if engine.dialect.name == "sqlite":
            self._writer = engine.execution_options(writes=True)
            self._reader = engine
        else:
            self._writer = engine
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    @asynccontextmanager
    async def raw(self, *, writes: bool) -> AsyncIterator[AsyncConnection]:
        """A transaction that lets the errors of the driver through."""
        engine = self._writer if writes else self._reader
        async with asyncio.timeout(TRANSACTION_LIMIT), engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database throughout. Raises: StoreUnavailable."""
        try:
            async with self.raw(writes=False) as connection:
                yield connection
        except DRIVER_ERRORS as error:
            raise unavailable(error) from None

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[AsyncConnection]:
        """Like `reading`, for what every caller may ask for and may take long. A few at a time, so that a connection is
        left for revoking keys and hearing of it. Raises: StoreUnavailable."""
        try:
            async with asyncio.timeout(_REPORT_WAIT):
                await self._reports.acquire()
        except TimeoutError as error:
            raise unavailable(error) from None
        try:
            async with self.reading() as connection:
                yield connection
        finally:
            self._reports.release()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that may write; on SQLite there is one at a time. Raises: StoreUnavailable."""
        try:
            async with self.raw(writes=True) as connection:
                yield connection
        except DRIVER_ERRORS as error:
            raise unavailable(error) from None

    async def close(self) -> None:
        """A server that does not answer delays the end by a few seconds at most."""
        with contextlib.suppress(*DRIVER_ERRORS):
            await asyncio.wait_for(self._engine.dispose(), _CLOSE_LIMIT)
        if self._anchor is not None:
            self._anchor.close()


async def connect(url: str) -> Database:
    """The database of a URL, reached or not. Raises: StartupError; SQLite's and the system's errors for its file."""
    if not url.startswith(_FILE_PREFIX):
        return _postgres(url)
    path = url.removeprefix(_FILE_PREFIX)
    if path == ":memory:":
        return _memory()
    await asyncio.to_thread(_prepare_file, path)
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=path), connect_args=_sqlite_options(), **_COMMON
    )
    return Database(_in_own_hands(engine))


def _postgres(url: str) -> Database:
    """asyncpg reads the URL itself: it knows libpq's options, and SQLAlchemy has no password to print."""
    try:
        import asyncpg
    except ImportError:
        raise StartupError(
            "`state.database` names a PostgreSQL server, whose driver is not installed: install sekisho[postgres]"
        ) from None
    dsn = "postgresql://" + url.partition("://")[2]

    async def open_connection() -> Any:
        return await asyncpg.connect(dsn, timeout=CONNECT_LIMIT, server_settings={"application_name": "sekisho"})

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=open_connection,
        pool_pre_ping=True,  # a restart of the server goes unnoticed between two transactions
        pool_recycle=1800,
        **_COMMON,
    )
    return Database(engine)


def _memory() -> Database:
    """One connection that all take turns with. The anchor keeps the data when a cancelled call drops it."""
    name = f"file:/sekisho-{uuid.uuid4().hex}"
    anchor = sqlite3.connect(f"{name}?vfs=memdb", uri=True)
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=name, query={"vfs": "memdb", "uri": "true"}),
        poolclass=AsyncAdaptedQueuePool,
        connect_args=_sqlite_options(),
        **_COMMON | {"pool_size": 1, "max_overflow": 0},
    )
    return Database(_in_own_hands(engine), anchor=anchor)


def _prepare_file(path: str) -> None:
    """Makes the file if there is none, readable by its owner alone, and lets readers work beside a writer (WAL)."""
    with contextlib.suppress(OSError):  # SQLite says better what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    deadline = time.monotonic() + _BUSY_LIMIT
    with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_LIMIT)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL").close()
                return
            except sqlite3.OperationalError as error:
                # SQLite does not wait by itself here, while another gateway opens the file.
                if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


class _Connection(sqlite3.Connection):
    """Lets go of its locks when it is closed, even between two rows of an answer. SQLite's own connection would hold
    them until Python collects the last cursor, and hold up all other writers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, *args: Any) -> Any:
        made = super().cursor(*args)
        self._cursors.add(made)
        return made

    def close(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        super().close()


def _sqlite_options() -> dict[str, Any]:
    return {"timeout": _BUSY_LIMIT, "factory": _Connection}


def _in_own_hands(engine: AsyncEngine) -> AsyncEngine:
    """Begins transactions explicitly: Python's module would begin late, and run DDL outside of them."""

    @event.listens_for(engine.sync_engine, "connect")
    def leave_transactions_alone(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # Who will write says so at once. Upgrading later fails when another has written in between.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    @event.listens_for(engine.sync_engine, "invalidate")
    def interrupt(connection: Any, *_: Any) -> None:
        # The call was cancelled or has reached its limit. Its thread would go on with the statement to the end.
        with contextlib.suppress(ValueError):  # it is closed already
            connection.run_async(lambda driver: driver.interrupt())

    return engine
