"""How much a caller may: sliding windows of requests and tokens, and requests at the same time. No clock, no network.

A window is cut into slices. What was spent in a slice counts until the whole slice has left the window, so in no
stretch of `seconds` is more than `count` admitted, at the price of holding spent room up to one slice (1/60 of the
window) too long. See docs/adr/0004-limit-algorithm.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

from gateway.errors import RateLimited
from gateway.types import Limit, Limits

SLICES = 60


class Window:
    """What was spent of one limit in the last `limit.seconds`."""

    __slots__ = ("_head", "_limit", "_newest", "_slices", "_width", "last", "used")

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
        unit = limit.unit.encode()
        self._head = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n" % (
            unit, limit.count, unit, unit,
        )  # fmt: skip

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


class Place:
    """Requests that run at the same time under one name."""

    __slots__ = ("most", "running", "scope")

    def __init__(self, scope: str, most: int) -> None:
        self.scope, self.most = scope, most
        self.running = 0


class Account:
    """The counters one set of limits draws from, looked up once."""

    __slots__ = ("places", "requests", "tokens")

    def __init__(self, places: list[Place], requests: list[Window], tokens: list[Window]) -> None:
        self.places, self.requests, self.tokens = places, requests, tokens


class Lease:
    """What one request holds. `settle` books its true tokens; `close` gives the rest back, however it ended."""

    __slots__ = ("_account", "_booked_at", "_reserved", "_settled")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._booked_at = -1.0  # when tokens were reserved; negative = never
        self._reserved = 0
        self._settled = False

    def reserve(self, tokens: int, now: float) -> None:
        """Sets tokens aside before they are used.

        Raises: RateLimited naming the limit, with the time until there is room. Nothing is spent then.
        """
        windows = self._account.tokens
        for window in windows:
            if not window.has_room(tokens, now):
                raise _refusal(window, tokens, now)
        for window in windows:
            window.add(tokens)
        self._reserved, self._booked_at = tokens, now

    def settle(self, tokens: int, now: float) -> None:
        """Replaces what was reserved by what was used. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        if self._booked_at >= 0:
            for window in self._account.tokens:
                window.correct(self._booked_at, tokens - self._reserved, now)

    def close(self, now: float) -> None:
        self.settle(0, now)
        for place in self._account.places:
            place.running -= 1

    def headers(self, now: float) -> bytes:
        """`x-ratelimit-*` lines as OpenAI writes them, for the tightest limit of each unit."""
        account = self._account
        return _lines(account.requests, account.tokens if self._booked_at >= 0 else [], now)


class Limiter:
    """All counters of this process. They belong to names, not to configurations, so a reload forgets nothing."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}
        self._places: dict[str, Place] = {}
        self._accounts: dict[Limits, Account] = {}

    def admit(self, limits: Limits, now: float) -> Lease:
        """Takes one request and one place among those that run.

        Raises: RateLimited. Nothing is spent then.
        """
        account = self._accounts.get(limits) or self._open(limits)
        for place in account.places:
            if place.running >= place.most:
                raise RateLimited(
                    f"Concurrency limit of your {place.scope} reached: {place.most} requests at a time."
                    " Wait for one to end.",
                    retry_after=1,
                )
        for window in account.requests:
            if not window.has_room(1, now):
                raise _refusal(window, 1, now)
        for window in account.requests:
            window.add(1)
        for place in account.places:
            place.running += 1
        return Lease(account)

    def headers(self, limits: Limits, now: float) -> bytes:
        """The lines of `Lease.headers` for a request that was refused and holds no lease."""
        account = self._accounts.get(limits)
        if account is None:  # admitted before a reload: to look these up again would bring the old limits back
            return b""
        for window in (*account.requests, *account.tokens):
            window.advance(now)
        return _lines(account.requests, account.tokens, now)

    def forget_accounts(self) -> None:
        """After a reload: limits are looked up again by name, with what was spent under it."""
        self._accounts.clear()

    def running(self, key: str) -> int:
        place = self._places.get(key)
        return place.running if place else 0

    def _open(self, limits: Limits) -> Account:
        account = self._accounts[limits] = Account(
            [self._place(key, most) for key, most in limits.concurrency],
            [self._window(key, limit) for key, limit in limits.requests],
            [self._window(key, limit) for key, limit in limits.tokens],
        )
        return account

    def _place(self, key: str, most: int) -> Place:
        place = self._places.setdefault(key, Place(key.partition(":")[0], most))
        place.most = most
        return place

    def _window(self, key: str, limit: Limit) -> Window:
        """The window for a limit that is new or was changed; what was spent stays spent if the length is the same.

        It stays the same object then: requests that run over a reload settle what they have reserved in it.
        """
        old = self._windows.get(key)
        if old is not None and old.limit.seconds == limit.seconds:
            old.limit = limit
            return old
        window = self._windows[key] = Window(limit)
        return window


def _lines(requests: list[Window], tokens: list[Window], now: float) -> bytes:
    lines = b""
    for windows in (requests, tokens):
        if windows:
            tightest = windows[0] if len(windows) == 1 else min(windows, key=Window.remaining)
            lines += tightest.headers(now)
    return lines


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


_PERIODS = {1: "second", 60: "minute", 3600: "hour", 86400: "day"}


def _refusal(window: Window, cost: int, now: float) -> RateLimited:
    limit = window.limit
    period = _PERIODS.get(limit.seconds, f"{limit.seconds} s")
    if cost > limit.count:
        return RateLimited(
            f"This request needs {cost} {limit.unit}; your {limit.scope} may use {limit.count} per {period}."
            " Make it smaller or lower max_tokens.",
            code="request_too_large_for_limit",
        )
    wait = window.wait(cost, now)
    return RateLimited(
        f"Rate limit of your {limit.scope} reached: {limit.count} {limit.unit} per {period}, {window.used} used,"
        f" {cost} requested. Try again in {max(1, math.ceil(wait))} s.",
        retry_after=wait,
    )
