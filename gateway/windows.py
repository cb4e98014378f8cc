"""Counters of what was spent: sliding windows, and calendar budgets with a reset. No network; time is an argument.

A window is cut into slices. What was spent in a slice counts until the whole slice has left the window, so in no
stretch of `seconds` is more than `count` admitted, at the price of holding spent room up to one slice (1/60 of the
window) too long. A budget belongs to a UTC day or month and starts again with the next. See
docs/adr/0004-limit-algorithm.md.

`now` is always seconds of one steady clock; `WallClock` says what the calendar shows then.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol

from gateway.types import Limit

SLICES = 60
_DAY = 86400.0


class Counter(Protocol):
    """What admission needs of a counter, whether it lives in this process or is shared."""

    limit: Limit

    @property
    def used(self) -> int: ...
    def advance(self, now: float) -> None: ...
    def has_room(self, cost: int, now: float) -> bool: ...
    def add(self, cost: int) -> None: ...
    def correct(self, booked_at: float, difference: int, now: float) -> None: ...
    def remaining(self) -> int: ...
    def wait(self, cost: int, now: float) -> float: ...
    def reset(self, now: float) -> float: ...
    def headers(self, now: float) -> bytes: ...


class WallClock:
    """What a steady clock shows, as a date. `offset` is Unix time minus steady time, in seconds; its owner keeps it
    right when the machine's clock is set."""

    __slots__ = ("offset",)

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset


class Window:
    """What was spent of one limit in the last `limit.seconds`."""

    __slots__ = ("__weakref__", "_head", "_limit", "_newest", "_slices", "_width", "last", "used")

    def __init__(self, limit: Limit) -> None:
        self._width = limit.seconds / SLICES
        self._slices = [0] * (SLICES + 1)
        self.last = 0  # number of the current slice
        self._newest = 0  # number of the last slice in which something was spent
        self.used = 0
        self.limit = limit

    @property
    def limit(self) -> Limit:
        return self._limit

    @limit.setter
    def limit(self, limit: Limit) -> None:
        self._limit = limit
        self._head = header_template(limit)

    def advance(self, now: float) -> None:
        """Forgets slices that have left the window at `now` (seconds of any steady clock)."""
        current = int(now / self._width)
        passed = current - self.last
        if passed <= 0:
            return
        slices = self._slices
        for step in range(1, min(passed, len(slices)) + 1):
            place = (self.last + step) % len(slices)
            self.used -= slices[place]
            slices[place] = 0
        self.last = current

    def has_room(self, cost: int, now: float) -> bool:
        if int(now / self._width) > self.last:
            self.advance(now)
        return self.used + cost <= self._limit.count

    def add(self, cost: int) -> None:
        """Spends `cost` at the time of the last `has_room` or `advance`."""
        self._slices[self.last % (SLICES + 1)] += cost
        self.used += cost
        self._newest = self.last

    def correct(self, booked_at: float, difference: int, now: float) -> None:
        """Adds a difference to what was spent at `booked_at`, unless that has left the window since."""
        if int(now / self._width) > self.last:
            self.advance(now)
        booked_in = int(booked_at / self._width)
        if self.last - booked_in <= SLICES:
            self._slices[booked_in % (SLICES + 1)] += difference
            self.used += difference

    def remaining(self) -> int:
        return max(0, self._limit.count - self.used)

    def wait(self, cost: int, now: float) -> float:
        """Seconds until `cost` fits. The whole window when it never will."""
        missing = self.used + min(cost, self._limit.count) - self._limit.count
        if missing <= 0:
            return 0.0
        size = len(self._slices)
        for number in range(self.last - size + 1, self.last + 1):
            missing -= self._slices[number % size]
            if missing <= 0:
                return max(0.0, (number + size) * self._width - now)
        return float(self._limit.seconds)

    def reset(self, now: float) -> float:
        """Seconds until nothing of what was spent counts any more."""
        return max(0.0, (self._newest + SLICES + 1) * self._width - now) if self.used else 0.0

    def headers(self, now: float) -> bytes:
        """Its `x-ratelimit-*` lines."""
        return self._head % (self.remaining(), duration(self.reset(now)))


class Budget:
    """What was spent of one limit since the UTC day or month began."""

    __slots__ = ("__weakref__", "_begins", "_clock", "_ends", "_head", "_latest", "_limit", "_since", "used")

    def __init__(self, limit: Limit, clock: WallClock) -> None:
        self._clock = clock
        self._begins = self._ends = 0.0  # of the period, in Unix seconds
        self._latest = self._since = -math.inf  # of the steady clock: latest time seen, and seen before the period
        self.used = 0
        self.limit = limit

    @property
    def limit(self) -> Limit:
        return self._limit

    @limit.setter
    def limit(self, limit: Limit) -> None:
        self._limit = limit
        self._head = header_template(limit)

    def advance(self, now: float) -> None:
        today = now + self._clock.offset
        if today >= self._ends:
            self._begins, self._ends = period_of(self._limit.period, today)
            self._since = self._latest
            self.used = 0
        elif today < self._begins - _DAY and now >= self._latest:
            # The clock was far ahead and has been set right. What was spent stays spent, but not until that far day.
            # A step back over midnight changes nothing: the new day would otherwise begin twice.
            self._begins, self._ends = period_of(self._limit.period, today)
        if now > self._latest:
            self._latest = now

    def has_room(self, cost: int, now: float) -> bool:
        self.advance(now)
        return self.used + cost <= self._limit.count

    def add(self, cost: int) -> None:
        """Spends `cost` at the time of the last `has_room` or `advance`."""
        self.used += cost

    def correct(self, booked_at: float, difference: int, now: float) -> None:
        """Adds a difference to what was spent at `booked_at`, unless another period has begun since."""
        self.advance(now)
        if booked_at > self._since:  # not compared with the calendar: the clock may have been set in between
            self.used += difference

    def remaining(self) -> int:
        return max(0, self._limit.count - self.used)

    def wait(self, cost: int, now: float) -> float:
        """Seconds until `cost` fits: the next period, since nothing comes back before."""
        return 0.0 if self.used + cost <= self._limit.count else self.reset(now)

    def reset(self, now: float) -> float:
        return max(0.0, self._ends - now - self._clock.offset)

    def headers(self, now: float) -> bytes:
        return self._head % (self.remaining(), duration(self.reset(now)))


def period_of(period: str, moment: float) -> tuple[float, float]:
    """Begin and end of the UTC day or month that holds `moment`, all in Unix seconds."""
    day = datetime.fromtimestamp(math.floor(moment), UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "month":
        first = day.replace(day=1)
        return first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()
    return day.timestamp(), (day + timedelta(days=1)).timestamp()


def header_template(limit: Limit) -> bytes:
    """The `x-ratelimit-*` lines of a limit, with room for what remains and the time until the reset."""
    unit = limit.unit.encode()
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n" % (
        unit, limit.count, unit, unit,
    )  # fmt: skip


def duration(seconds: float) -> bytes:
    """`6m0s`, `2s`, `120ms`: how OpenAI writes the time until a reset."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    return _whole(math.ceil(seconds))


@lru_cache(4096)
def _whole(seconds: int) -> bytes:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, rest)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
