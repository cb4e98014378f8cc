"""Requests that several workers have open at the same replicas, counted in memory that all of them see.

A bounded replica's places belong to the gateway and not to each of its processes. Every worker writes only its own row,
so no lock is needed: two that choose within the same few microseconds may both take the last place, and so there may be
one request too many for each further worker, and no more. Rows of dead workers are cleared by the supervisor.

While others wait for a replica, a worker takes no more than its share of the places, or its own queue, which gets every
place that its own requests free, would keep theirs waiting for ever. What does not divide goes round once a second.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from struct import calcsize

MOST_REPLICAS = 4096  # further ones are bounded by each worker for itself
CELL = calcsize("q")
TURN = 1.0  # seconds


def make(file: Path, workers: int) -> None:
    """An empty table. `file`: in a folder that only this user can open."""
    with file.open("xb") as made:
        made.truncate(workers * 2 * MOST_REPLICAS * CELL)


class Places:
    """One worker's view of the table: a row of open requests and one of waiting ones for each worker."""

    def __init__(
        self, file: Path, worker: int, workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: worker: number of this one's rows, from 0. clock: seconds, the same for all processes."""
        self._clock = clock
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
        rows = [cells[start : start + MOST_REPLICAS] for start in range(0, len(cells), MOST_REPLICAS)]
        self._open, self._waiting = rows[:workers], rows[workers:]
        self._worker = worker
        self._others = [number for number in range(workers) if number != worker]
        self._columns: Mapping[str, int] = {}
        self.freed: Callable[[str], None] = _nobody  # called with the id of a replica that others wait for

    def adopt(self, columns: Mapping[str, int]) -> None:
        """`columns`: replica id -> column, the same for all workers."""
        self._columns = columns

    def column(self, replica: str) -> int | None:
        return self._columns.get(replica)

    def set_open(self, column: int, count: int) -> None:
        self._open[self._worker][column] = count

    def set_waiting(self, column: int, count: int) -> None:
        self._waiting[self._worker][column] = count

    def open_elsewhere(self, column: int) -> int:
        return sum([self._open[other][column] for other in self._others])

    def wanted_elsewhere(self, column: int) -> bool:
        return any(self._waiting[other][column] for other in self._others)

    def share(self, column: int, bound: int) -> int:
        """How many requests this worker may have open, of `bound` for all."""
        waiting = [other for other in self._others if self._waiting[other][column]]
        left = bound - self.open_elsewhere(column)
        if not waiting:
            return left
        taken = sum([self._open[other][column] for other in self._others if other not in waiting])
        contenders = sorted([*waiting, self._worker])
        turn = (contenders.index(self._worker) + int(self._clock() / TURN)) % len(contenders)
        each, rest = divmod(max(0, bound - taken), len(contenders))
        return min(left, each + (turn < rest))

    def clear(self, worker: int) -> None:
        """A worker has died, and what it had open has ended with it."""
        for row in (self._open[worker], self._waiting[worker]):
            row[:] = memoryview(bytes(len(row) * CELL)).cast("q")


def _nobody(_: str) -> None:
    pass


class Columns:
    """Hands out columns. A replica keeps its own while it is there, so a reload moves no counts; those given up are
    used again as late as possible, since requests to a replica that is gone may still be running."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._next = 0

    def adopt(self, replicas: Iterable[str]) -> dict[str, int]:
        wanted = dict.fromkeys(replicas)
        self._columns = {replica: column for replica, column in self._columns.items() if replica in wanted}
        used = set(self._columns.values())
        for replica in wanted:
            if replica not in self._columns and len(used) < MOST_REPLICAS:
                while self._next in used:
                    self._next = (self._next + 1) % MOST_REPLICAS
                self._columns[replica] = self._next
                used.add(self._next)
                self._next = (self._next + 1) % MOST_REPLICAS
        return dict(self._columns)
