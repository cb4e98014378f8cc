"""A queue that takes turns between tenants and is first in, first out within one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # first key = whose turn it is; no line is ever empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def push(self, tenant: str, item: T) -> None:
        """Append to the tenant's own line; a new tenant's turn comes after those already waiting."""
        self._lines.setdefault(tenant, deque()).append(item)

    def peek(self) -> T | None:
        """Whose turn it is, without taking it."""
        return next((line[0] for line in self._lines.values()), None)

    def turn(self, *, done: bool) -> None:
        """End the turn of what `peek` returned. `done` takes it out, otherwise it stays first in its tenant's line."""
        tenant = next(iter(self._lines))
        line = self._lines.pop(tenant)
        if done:
            line.popleft()
        if line:
            self._lines[tenant] = line

    def remove(self, tenant: str, item: T) -> None:
        """Take an item out wherever it stands; nothing happens when it already left."""
        line = self._lines.get(tenant)
        if line is None or item not in line:
            return
        line.remove(item)
        if not line:
            del self._lines[tenant]
