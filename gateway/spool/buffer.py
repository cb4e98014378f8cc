"""Lines of usage rows in memory, between the event loop and whoever takes them on. Bounded: the oldest give way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Condition
from typing import NamedTuple

log = logging.getLogger("sekisho")


class Batch(NamedTuple):
    """Some rows, encoded."""

    rows: int
    lines: bytes


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(sum(batch.rows for batch in batches), b"".join([batch.lines for batch in batches]))


class Buffer:
    """A queue for several threads. No lock is held during I/O, so `put` never waits for a disk."""

    def __init__(self, most: int) -> None:
        """Args: most: rows kept."""
        self._most = most
        self._batches: deque[Batch] = deque()
        self._changed = Condition()
        self._overflowing = False
        self.rows = self.dropped = 0
        self.closed = False

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._fit(batch.rows)
            self._changed.notify()

    def put_back(self, batches: Sequence[Batch]) -> None:
        """What was taken and found no place. It is the oldest again, so the first to give way."""
        with self._changed:
            self._batches.extendleft(reversed(batches))
            self._fit(sum(batch.rows for batch in batches))

    def take(self, most: int) -> list[Batch]:
        """The oldest rows, up to `most` unless one batch alone holds more. To be put back when they find no place."""
        with self._changed:
            taken: list[Batch] = []
            rows = 0
            while self._batches and (not taken or rows + self._batches[0].rows <= most):
                taken.append(self._batches.popleft())
                rows += taken[-1].rows
            self.rows -= rows
        return taken

    def ease(self) -> None:
        """What was taken has found a place: the next overflow is another one."""
        self._overflowing = False

    def wait(self, timeout: float | None, *, only_closed: bool = False) -> None:
        """Until there are rows, the buffer is closed, or `timeout` seconds are over."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or (self._batches and not only_closed), timeout)

    def close(self) -> None:
        """Nobody needs to wait any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _fit(self, added: int) -> None:
        self.rows += added
        while self.rows > self._most:
            oldest = self._batches.popleft()
            self.rows -= oldest.rows
            self.dropped += oldest.rows
            if not self._overflowing:
                self._overflowing = True
                log.error("more than %d usage records wait in memory: the oldest are dropped", self._most)
