"""The stretch of time a shared counter counts over, as this process sees it: a window in slices, or a calendar period.

A span keeps the mirror, which is what this process itself has spent: the basis when Redis is away or has forgotten.
Pieces of a span have local numbers, which say nothing in Redis; `age` translates.
"""

from __future__ import annotations

import math
from typing import Protocol

from gateway.types import Limit
from gateway.windows import SLICES, Budget, WallClock, Window, period_of


class Span(Protocol):
    key: str  # of the hash in Redis
    seconds: int  # length of the window, 0 for a budget
    period: int  # number of the budget's period, 0 for a window
    ends: float  # of the steady clock: nothing drawn may be spent later

    @property
    def mirror(self) -> Mirror | Budget: ...
    def turn(self, now: float) -> bool:
        """True when another period has begun, which forgets all that was before."""

    def life(self, now: float) -> int:
        """Milliseconds for which Redis has to keep the hash."""

    def number(self, now: float) -> int:
        """Local number of the piece that holds `now`, at least 0."""

    def age(self, number: int, difference: int, now: float) -> int | None:
        """How many of Redis's slices ago a piece was; None when it no longer counts. The two clocks cut differently:
        what was spent is taken for later, what comes back for earlier than it may have been."""

    def own(self) -> dict[int, int]:
        """What this process has spent and still counts, by piece."""


class Mirror(Window):
    """A window that can be read out."""

    __slots__ = ()

    def pieces(self) -> dict[int, int]:
        size = len(self._slices)
        numbers = range(max(0, self.last - size + 1), self.last + 1)
        return {number: self._slices[number % size] for number in numbers if self._slices[number % size]}


class WindowSpan:
    __slots__ = ("_width", "ends", "key", "mirror", "period", "seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        self.mirror = Mirror(limit)
        self.seconds, self.period, self.ends = limit.seconds, 0, math.inf
        self._width = limit.seconds / SLICES
        self.key = f"sekisho:window:{name}"

    def turn(self, now: float) -> bool:
        return False

    def life(self, now: float) -> int:
        return math.ceil((self.seconds + 2 * self._width + 10) * 1000)

    def number(self, now: float) -> int:
        return int(now / self._width)

    def age(self, number: int, difference: int, now: float) -> int | None:
        age = max(0, self.number(now) - number)
        if age > SLICES:
            return None
        return max(0, age - 1) if difference > 0 else age + 1

    def own(self) -> dict[int, int]:
        return self.mirror.pieces()


class BudgetSpan:
    """There is one piece, the period; its number is the Unix second at which it begins."""

    __slots__ = ("_clock", "_name", "_unit", "_until", "ends", "key", "mirror", "period", "seconds")

    def __init__(self, name: str, limit: Limit, clock: WallClock) -> None:
        self.mirror = Budget(limit, clock)
        self._clock, self._name, self._unit = clock, name, limit.period
        self.seconds = self.period = 0
        self._until = 0.0  # Unix seconds
        self.key, self.ends = "", 0.0

    def turn(self, now: float) -> bool:
        offset = self._clock.offset
        if now + offset < self._until:
            self.ends = self._until - offset  # the clock may have been set
            return False
        begins, self._until = period_of(self._unit, now + offset)
        self.period, self.ends = int(begins), self._until - offset
        self.key = f"sekisho:budget:{self._name}:{self.period}"
        return True

    def life(self, now: float) -> int:
        return math.ceil((max(0.0, self.ends - now) + 86400) * 1000)

    def number(self, now: float) -> int:
        return self.period

    def age(self, number: int, difference: int, now: float) -> int | None:
        return 0 if number == self.period else None

    def own(self) -> dict[int, int]:
        return {self.period: self.mirror.used} if self.mirror.used else {}


def span_of(name: str, limit: Limit, clock: WallClock) -> Span:
    return BudgetSpan(name, limit, clock) if limit.period else WindowSpan(name, limit)
