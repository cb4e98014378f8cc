"""Takes usage rows to the database: finished segments, what dead processes have left, and, while the disk fails, rows
straight out of memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gateway.errors import StoreUnavailable
from gateway.records import UsageRow
from gateway.spool.base import Pace, Provider, reached
from gateway.spool.buffer import Buffer, joined
from gateway.spool.folder import Parcel, claim_dead
from gateway.spool.writer import Writer
from gateway.usage import decode, last_use

MOST_ROWS = 500  # in one transaction: more would be hardly faster, and hold up the event loop for longer

log = logging.getLogger("sekisho")


class Mover:
    """The work of one task. Rows leave the disk only after the database has them."""

    def __init__(
        self,
        store: Provider,
        folder: Path | None,
        buffer: Buffer,
        writer: Writer | None,
        parcels: deque[Parcel],
        pace: Pace,
    ) -> None:
        self._store, self._folder, self._buffer, self._writer, self._pace = store, folder, buffer, writer, pace
        self._parcels = parcels  # the writer appends to its end at any time
        self._marks: dict[str, float] = {}  # key -> moment, not in the database yet
        self._pause = pace.move
        self._next_adoption = self._next_marks = 0.0  # loop time
        self.failing = False
        self.caught_up = asyncio.Event()  # what earlier processes have left is in the database, as far as it can be
        self.adopted = self.done = self.lost = 0  # rows

    async def run(self, stopping: asyncio.Event) -> None:
        """Round after round; a last one when `stopping` is set."""
        last = False
        while not last:
            last = stopping.is_set()
            self._settle(await self._round(last))
            if not last:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), self._pause)

    async def _round(self, last: bool) -> str:
        """One try for everything that waits. Returns what is wrong, empty when nothing is."""
        now = asyncio.get_running_loop().time()
        try:
            if self._folder is not None and now >= self._next_adoption:
                self._next_adoption = now + self._pace.adopt
                await self._adopt(self._folder)
            if self._writer is None or self._writer.failing:
                await self._move_memory()
            problem = await self._move_parcels()
            if self._marks and (last or now >= self._next_marks):
                self._next_marks = now + self._pace.mark
                await self._mark()
        except StoreUnavailable as error:
            return error.message
        except Exception as error:
            return type(error).__name__  # no more than that: a driver's message may hold addresses and values
        self.caught_up.set()
        return problem

    def _settle(self, problem: str) -> None:
        pace = self._pace
        if problem and not self.failing:
            log.error("usage records wait on their way into the database: %s", problem)
        if self.failing and not problem:
            log.info("the database has taken all usage records that waited")
        if not problem:
            self._pause = pace.move
        else:
            self._pause = min(pace.last_retry, self._pause * 2) if self.failing else pace.first_retry
        self.failing = bool(problem)
        if self._writer is not None:
            self._writer.rotate_after = pace.rotate_failing if problem else pace.rotate

    # --- what there is to move
    async def _adopt(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # the writer says what is wrong with the folder
            parcels = await asyncio.to_thread(claim_dead, folder)
            self._parcels.extend(parcels)
            self.adopted += sum(parcel.rows for parcel in parcels)
            if parcels:
                log.info("took over %d spool segment(s) of processes that have ended", len(parcels))

    async def _move_memory(self) -> None:
        while taken := self._buffer.take(MOST_ROWS):
            batch = joined(taken)
            try:
                await self._add([row for line in batch.lines.splitlines() for row in decode(line)])
            except BaseException:
                self._buffer.put_back(taken)
                raise
            self._buffer.ease()
            self.done += batch.rows

    async def _move_parcels(self) -> str:
        """Returns what is wrong with a parcel, empty when all went through. Raises: StoreUnavailable."""
        problem = ""
        for _ in range(len(self._parcels)):
            try:
                await self._deliver(self._parcels[0])
            except Exception as error:
                self._parcels.rotate(-1)  # one that can never be stored must not hold up the others
                if isinstance(error, StoreUnavailable):
                    raise
                problem = type(error).__name__
            else:
                self._parcels.popleft()
        return problem

    async def _deliver(self, parcel: Parcel) -> None:
        try:
            await self._add(await asyncio.to_thread(parcel.read))
        except FileNotFoundError:
            log.error("a spool segment was removed by somebody: %d usage records are lost", parcel.rows)
            self.lost += parcel.rows
        else:
            self.done += parcel.rows
        await asyncio.to_thread(parcel.remove)

    # --- the store
    async def _add(self, rows: Sequence[UsageRow]) -> None:
        for start in range(0, len(rows), MOST_ROWS):
            async with reached(self._store) as store:
                await store.add_usage(rows[start : start + MOST_ROWS])
        for key, moment in last_use(rows).items():
            self._marks[key] = max(moment, self._marks.get(key, 0.0))

    async def _mark(self) -> None:
        async with reached(self._store) as store:
            await store.mark_used(self._marks.copy())
        self._marks.clear()
