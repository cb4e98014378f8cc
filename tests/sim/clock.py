"""Virtual time: what is to happen, in order. Nothing here waits, and equal times keep the order in which they came."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Seconds since the start of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def every(self, seconds: Callable[[], float], action: Action) -> None:
        """Again and again, `seconds()` apart."""

        def again() -> None:
            action()
            self.after(seconds(), again)

        self.after(seconds(), again)

    def run(self, until: float) -> None:
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action = heapq.heappop(due)
            action()
        self.now = until
