"""What the spool needs from outside: a database, and how often it shall do what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import StoreUnavailable
from gateway.records import UsageRow

PATIENCE = 40.0  # seconds for one call of the store, which has a limit of its own


class Store(Protocol):
    """The database. Every call raises StoreUnavailable while it is out of reach."""

    async def add_usage(self, rows: Sequence[UsageRow]) -> object:
        """All or none of the rows. Those whose ids are there already change nothing."""

    async def mark_used(self, last: Mapping[str, float]) -> object:
        """When keys were used last: id -> Unix seconds. Never moves such a moment back."""

    async def forget_usage(self, before: float, at_most: int) -> int:
        """Deletes rows older than `before` (Unix seconds), `at_most` of them. Returns how many."""


Provider = Callable[[], Store | None]  # None until the database has been reached


@asynccontextmanager
async def reached(provider: Provider) -> AsyncIterator[Store]:
    """The store, for one call. Raises: StoreUnavailable when there is none, or when the call takes too long."""
    store = provider()
    if store is None:
        raise StoreUnavailable("The database is out of reach.")
    try:
        async with asyncio.timeout(PATIENCE):
            yield store
    except TimeoutError:
        raise StoreUnavailable("The database does not answer.") from None


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how much. Times in seconds."""

    rotate: float = 1.0  # length of a segment
    rotate_failing: float = 60.0  # the same while the database takes none: a long outage makes fewer files
    move: float = 1.0  # between two looks for finished segments
    first_retry: float = 1.0  # doubled after each failure
    last_retry: float = 30.0
    adopt: float = 60.0  # between two looks for dead processes
    mark: float = 10.0  # between two updates of when keys were used
    first_forget: float = 60.0
    forget: float = 3600.0  # between two deletions of what is too old
    leave: float = 5.0  # how long the end of the process waits for the database
    most_in_memory: int = 100_000  # rows
