"""Where finished requests go for accounting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gateway.errors import StoreUnavailable
from gateway.outcome import Outcome
from gateway.spool.base import Pace, Provider, reached
from gateway.spool.buffer import Batch, Buffer
from gateway.spool.folder import Parcel
from gateway.spool.mover import Mover
from gateway.spool.writer import Writer
from gateway.usage import encode, usage_rows

LINE_ROWS = 500  # rows in a line of the spool: reading one holds the interpreter for half a millisecond
FORGET_ROWS = 1000  # deleted in one transaction
MOST_FORGOTTEN = 10_000  # transactions in one go

log = logging.getLogger("sekisho")


class UsageSink:
    """One process's usage rows, from the event loop to the database by way of the disk.

    A row is safe once it is in a segment: about as long after its request as `Gateway.book` takes to come round, plus
    one write. Until then a crash loses it.
    """

    def __init__(self, folder: Path | None, store: Provider, retention: float | None, pace: Pace | None = None) -> None:
        """Args: folder: the spool, None = rows wait in memory only. store: the database, None while it has not been
        reached. retention: seconds for which rows are kept there, None = for ever; may be changed at any time."""
        self.retention = retention
        self._store = store
        self._pace = pace or Pace()
        self._prefix = secrets.token_hex(8)
        self._made = 0
        self._buffer = Buffer(self._pace.most_in_memory)
        self._parcels: deque[Parcel] = deque()
        self._writer = Writer(folder, self._buffer, self._parcels, self._pace.rotate) if folder is not None else None
        self._mover = Mover(store, folder, self._buffer, self._writer, self._parcels, self._pace)
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """To be called on the event loop. Takes over what dead processes have left in the folder."""
        if self._writer is not None:
            self._writer.start()
        self._tasks = [asyncio.create_task(self._mover.run(self._stopping)), asyncio.create_task(self._forget())]

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Takes finished requests. Neither waits nor fails, whatever the disk and the database do."""
        rows = usage_rows(outcomes, self._prefix, self._made, time.time() - time.monotonic())
        self._made += len(rows)
        for start in range(0, len(rows), LINE_ROWS):
            part = rows[start : start + LINE_ROWS]
            self._buffer.put(Batch(len(part), encode(part)))

    async def close(self) -> None:
        """Writes what is left, gives the database `Pace.leave` seconds to take it, and leaves the rest on the disk."""
        if not self._tasks:
            return
        mover, forgetting = self._tasks
        forgetting.cancel()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close, self._pace.leave)
        self._stopping.set()
        await asyncio.wait([mover], timeout=self._pace.leave)
        mover.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._let_go()

    def _let_go(self) -> None:
        if lost := self._buffer.rows:
            log.error("%d usage records are lost: neither the spool nor the database took them", lost)
        elif self.waiting:
            log.info("%d usage records stay in the spool until the next start", self.waiting)
        for claim in {parcel.claim for parcel in self._parcels if parcel.claim.left is not None}:
            claim.release()
        if self._writer is not None:
            self._writer.release()

    async def caught_up(self, patience: float) -> None:
        """Returns once the database has what earlier processes have left in the folder, or after `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._mover.caught_up.wait()

    # --- for metrics
    @property
    def waiting(self) -> int:
        """Rows that the database has not taken yet, those of dead processes included as far as they were counted."""
        return self._made + self._mover.adopted - self._mover.done - self.dropped

    @property
    def safe(self) -> int:
        """Rows of this process that outlive it; they are the first it was given."""
        return self._writer.written if self._writer is not None else 0

    @property
    def dropped(self) -> int:
        """Rows that no place was left for."""
        return self._buffer.dropped + self._mover.lost

    @property
    def failing(self) -> bool:
        """The disk or the database does not take rows."""
        return self._mover.failing or (self._writer is not None and self._writer.failing)

    # --- retention
    async def _forget(self) -> None:
        await asyncio.sleep(self._pace.first_forget)
        while True:
            try:
                await self._forget_once()
            except StoreUnavailable:
                pass  # what has stayed too long goes the next time
            except Exception as error:
                log.error("old usage records could not be deleted: %s", type(error).__name__)
            await asyncio.sleep(self._pace.forget)

    async def _forget_once(self) -> None:
        if self.retention is None:
            return
        before = time.time() - self.retention
        for _ in range(MOST_FORGOTTEN):
            async with reached(self._store) as store:
                forgotten = await store.forget_usage(before, FORGET_ROWS)
            if not forgotten:
                return
            await asyncio.sleep(0.01)  # others want the database too
