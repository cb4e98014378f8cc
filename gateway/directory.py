"""The database's tenants and keys, followed: what changes there, through whichever gateway, is known here in seconds.

The mark of the last change is asked for every `POLL` seconds, which needs nothing but the database. A notice over
Redis, where there is one, only makes it sooner. With the database down everything known stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from gateway.config import StartupError
from gateway.errors import StoreUnavailable
from gateway.records import Changes, Mark
from gateway.store import Store

POLL = 2.0  # seconds: the longest a revoked key works elsewhere is this and one query; also the pause while it is down

log = logging.getLogger("sekisho")


class Directory:
    """Owns the connection to the database."""

    def __init__(self, url: str | None, on_change: Callable[[Changes, bool], None]) -> None:
        """`on_change` gets what has changed, and whether that is everything there is."""
        self._url, self._on_change = url, on_change
        self.store: Store | None = None  # None: no database is configured, or it was not reached yet
        self.up = False
        self._known: Mark | None = None  # None: nothing was read yet
        self._said = False  # that the database is down
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Reads everything, if the database can be reached. Raises: StartupError for what the user has to change."""
        if self._url is not None:
            await self._look()

    async def run(self) -> None:
        """Follows until cancelled."""
        if self._url is None:
            return
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL)
            self._wake.clear()
            try:
                await self._look()
            except StartupError as error:
                log.error("the database cannot be used: %s", error)
            except Exception:
                log.exception("the database's tenants and keys could not be read, the known ones stay")

    def wake(self) -> None:
        """Something has changed: look at once."""
        self._wake.set()

    async def refresh(self) -> None:
        """Looks now. Raises: StoreUnavailable."""
        async with self._looking:
            await self._read()

    async def close(self) -> None:
        if self.store is not None:
            await self.store.close()

    async def _look(self) -> None:
        try:
            await self.refresh()
        except StoreUnavailable as error:
            self.up = False
            if not self._said:
                log.error("the database is out of reach, known keys stay valid: %s", error.message)
            self._said = True
            return
        if self._said:
            log.info("the database is back")
        self.up, self._said = True, False

    async def _read(self) -> None:
        if self.store is None:
            assert self._url is not None
            self.store = await Store.open(self._url)
        news = await self.store.news(self._known)
        if news is None:
            return
        if news.whole or news.changes.tenants or news.changes.keys:  # else it was a drain or a reload
            self._on_change(news.changes, news.whole)
        self._known = news.mark
