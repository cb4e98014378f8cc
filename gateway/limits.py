"""How much a caller may: requests and tokens per window, token budgets, and requests at the same time.

All decisions are made here, in this process and at once. Counters that several processes share are kept by a
`SharedCounters` (limits_redis): it draws room from the store beforehand, and this module spends what was drawn.
No clock, no network. See docs/adr/0004-limit-algorithm.md and docs/adr/0008-shared-limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from gateway.errors import QuotaExceeded, RateLimited
from gateway.types import Limit, Limits
from gateway.windows import Budget, Counter, WallClock, Window

SWEEP_FROM = 1000  # counters and places that may be left over from tenants and keys that are gone

Value = TypeVar("Value", Limit, int)


class Place(Protocol):
    """Requests that run at the same time under one name."""

    scope: str
    most: int

    @property
    def running(self) -> int: ...
    def has_room(self) -> bool: ...
    def take(self) -> None: ...
    def leave(self) -> None: ...


class LocalPlace:
    """A `Place` that only this process fills."""

    __slots__ = ("__weakref__", "most", "running", "scope")

    def __init__(self, scope: str, most: int) -> None:
        self.scope, self.most = scope, most
        self.running = 0

    def has_room(self) -> bool:
        return self.running < self.most

    def take(self) -> None:
        self.running += 1

    def leave(self) -> None:
        self.running -= 1


class Account:
    """The counters one set of limits draws from, looked up once."""

    __slots__ = ("places", "requests", "tokens")

    def __init__(self, places: list[Place], requests: list[Counter], tokens: list[Counter]) -> None:
        self.places, self.requests, self.tokens = places, requests, tokens

    def enter(self, now: float) -> None:
        """Takes one request and one place among those that run.

        Raises: RateLimited. Nothing is spent then.
        """
        for place in self.places:
            if not place.has_room():
                raise _crowded(place)
        for counter in self.requests:
            if not counter.has_room(1, now):
                raise refusal(_hardest(self.requests, 1, now), 1, now)
        for counter in self.requests:
            counter.add(1)
        for place in self.places:
            place.take()


class Lease:
    """What one request holds. `settle` books its true tokens; `close` gives the rest back, however it ended."""

    __slots__ = ("_account", "_booked_at", "_joined", "_reserved", "_settled")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._booked_at = -1.0  # when tokens were reserved; negative = never
        self._reserved = 0
        self._settled = False
        self._joined: list[Lease] | None = None

    def reserve(self, tokens: int, now: float) -> None:
        """Sets tokens aside before they are used.

        Raises: RateLimited naming the limit, with the time until there is room. Nothing is spent then.
        """
        counters = self._account.tokens
        for counter in counters:
            if not counter.has_room(tokens, now):
                raise refusal(_hardest(counters, tokens, now), tokens, now)
        for counter in counters:
            counter.add(tokens)
        self._reserved, self._booked_at = tokens, now

    def join(self, other: Lease) -> None:
        """Settles and closes another lease together with this one."""
        if self._joined is None:
            self._joined = []
        self._joined.append(other)

    def part(self, now: float) -> None:
        """Gives back what the joined leases hold: another model serves the request."""
        if self._joined is not None:
            for other in self._joined:
                other.close(now)
            self._joined = None

    def settle(self, tokens: int, now: float) -> None:
        """Replaces what was reserved by what was used. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        if self._booked_at >= 0:
            for counter in self._account.tokens:
                counter.correct(self._booked_at, tokens - self._reserved, now)
        if self._joined is not None:
            for other in self._joined:
                other.settle(tokens, now)

    def close(self, now: float) -> None:
        self.settle(0, now)
        for place in self._account.places:
            place.leave()
        if self._joined is not None:
            for other in self._joined:
                other.close(now)

    def headers(self, now: float) -> bytes:
        """`x-ratelimit-*` lines as OpenAI writes them, for the tightest limit of each unit.

        Limits of joined leases are not among them: what others use of a model is nobody's business.
        """
        account = self._account
        return _lines(account.requests, account.tokens if self._booked_at >= 0 else [], now)


class SharedCounters(Protocol):
    """Counters whose truth is in a store that several gateways use; limits_redis has the one there is."""

    def counter(self, key: str, limit: Limit) -> Counter:
        """The counter of that name, from now on with this limit."""

    def place(self, key: str, scope: str, most: int) -> Place: ...

    async def cover(self, counters: Sequence[Counter], places: Sequence[Place], cost: int, now: float) -> None:
        """Draws room from the store until `cost` fits into every counter and one request into every place, as far as
        the store has it. What does not fit afterwards is refused by `has_room`.

        Raises: StoreUnavailable when the store is out of reach and limits.on_store_failure says to refuse.
        """


class Limiter:
    """All counters of this process. They belong to names, not to configurations, so a reload forgets nothing."""

    def __init__(self, shared: SharedCounters | None = None) -> None:
        self.clock = WallClock()
        self.shared = shared
        # By name, for as long as an account or a request uses them; and in `_kept` over reloads.
        self._counters: WeakValueDictionary[str, Counter] = WeakValueDictionary()
        self._places: WeakValueDictionary[str, Place] = WeakValueDictionary()
        self._kept: list[Counter | Place] = []
        self._sweep_at = SWEEP_FROM  # of them
        self._latest = 0.0  # of the steady clock, when a counter was looked up last
        self._limits: dict[str, tuple[int, Limit]] = {}  # by counter: in which Limits its limit was, and the limit
        self._most: dict[str, tuple[int, int]] = {}  # the same by place
        self._accounts: dict[Limits, Account] = {}

    def admit(self, limits: Limits, now: float) -> Lease:
        """Takes one request and one place among those that run.

        Raises: RateLimited. Nothing is spent then.
        """
        account = self._accounts.get(limits) or self._open(limits, now)
        account.enter(now)
        return Lease(account)

    async def cover_request(self, limits: Limits, now: float) -> None:
        """To be awaited before `admit` where counters are shared. Raises: StoreUnavailable."""
        account = self._accounts.get(limits) or self._open(limits, now)
        if self.shared is not None:
            await self.shared.cover(account.requests, account.places, 1, now)

    async def cover_tokens(self, limits: Limits, tokens: int, now: float) -> None:
        """To be awaited before `Lease.reserve` where counters are shared. Raises: StoreUnavailable."""
        account = self._accounts.get(limits) or self._open(limits, now)
        if self.shared is not None:
            await self.shared.cover(account.tokens, (), tokens, now)

    def headers(self, limits: Limits, now: float) -> bytes:
        """The lines of `Lease.headers` for a request that was refused and holds no lease."""
        account = self._accounts.get(limits)
        if account is None:  # admitted before a reload
            return b""
        for counter in (*account.requests, *account.tokens):
            counter.advance(now)
        return _lines(account.requests, account.tokens, now)

    def forget_accounts(self) -> None:
        """After a reload: limits are looked up again by name, with what was spent under it."""
        self._kept = [*self._counters.values(), *self._places.values()]
        self._accounts.clear()
        if len(self._kept) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(SWEEP_FROM, 2 * len(self._kept))

    def running(self, key: str) -> int:
        place = self._places.get(key)
        return place.running if place else 0

    def seed(self, key: str, limit: Limit, used: int, now: float) -> None:
        """Books what an earlier process has spent of a budget. Shared counters know that themselves."""
        if self.shared is None and used > 0:
            counter = self._counters.get(key) or self._counter(key, limit)  # `limit` may be older than what is in force
            counter.advance(now)
            counter.add(used)
            self._kept.append(counter)
            self._latest = max(now, self._latest)

    def _sweep(self) -> None:
        """Forgets names under which nothing is spent and nothing runs: tenants and keys come and go for as long as the
        process lives."""
        self._kept = [counter for counter in self._counters.values() if self._counts(counter)]
        self._kept += [place for place in self._places.values() if place.running]
        self._limits = {name: known for name, known in self._limits.items() if name in self._counters}
        self._most = {name: known for name, known in self._most.items() if name in self._places}

    def _counts(self, counter: Counter) -> bool:
        counter.advance(self._latest)
        return counter.used > 0

    def _open(self, limits: Limits, now: float) -> Account:
        made, self._latest = limits.made, max(now, self._latest)
        account = self._accounts[limits] = Account(
            [self._place(key, _newest(self._most, key, most, made)) for key, most in limits.concurrency],
            [self._counter(key, _newest(self._limits, key, limit, made)) for key, limit in limits.requests],
            [self._counter(key, _newest(self._limits, key, limit, made)) for key, limit in limits.tokens],
        )
        return account

    def _place(self, key: str, most: int) -> Place:
        scope = key.partition(":")[0]
        if self.shared is not None:
            return self.shared.place(key, scope, most)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = LocalPlace(scope, most)
        place.most = most
        return place

    def _counter(self, key: str, limit: Limit) -> Counter:
        """The counter for a limit that is new or was changed: names carry the length of the window, so what was spent
        stays spent, and requests that run over a reload settle what they have reserved in the same object."""
        if self.shared is not None:
            return self.shared.counter(key, limit)
        old = self._counters.get(key)
        if old is not None:
            old.limit = limit
            return old
        counter: Counter = Budget(limit, self.clock) if limit.period else Window(limit)
        self._counters[key] = counter
        return counter


def _newest(known: dict[str, tuple[int, Value]], key: str, value: Value, made: int) -> Value:
    """What is in force under a name: a request that began before a reload must not bring the old limit back."""
    if key not in known or known[key][0] <= made:
        known[key] = made, value
    return known[key][1]


def _lines(requests: list[Counter], tokens: list[Counter], now: float) -> bytes:
    lines = b""
    for counters in (requests, tokens):
        if counters:
            tightest = counters[0] if len(counters) == 1 else _tightest(counters, now)
            lines += tightest.headers(now)
    return lines


def _tightest(counters: list[Counter], now: float) -> Counter:
    """The one with the least left; of several that are used up the one that stays so for longest."""
    tightest = min(counters, key=_remaining)
    if tightest.remaining():
        return tightest
    return max((counter for counter in counters if not counter.remaining()), key=lambda one: one.reset(now))


def _remaining(counter: Counter) -> int:
    return counter.remaining()


def _hardest(counters: list[Counter], cost: int, now: float) -> Counter:
    """Of the limits that are in the way the one to name: whoever waits as it says is not refused by another then."""
    full = [counter for counter in counters if not counter.has_room(cost, now)]
    return max(full, key=lambda one: (cost > one.limit.count, one.wait(cost, now)))


_PERIODS = {1: "second", 60: "minute", 3600: "hour", 86400: "day"}
_OWNERS = {"tenant": "your tenant", "key": "your key", "model": "this model"}


def _crowded(place: Place) -> RateLimited:
    return RateLimited(
        f"Concurrency limit of {_OWNERS[place.scope]} reached: {place.most} requests at a time. Wait for one to end.",
        retry_after=1,
    )


def refusal(counter: Counter, cost: int, now: float) -> RateLimited:
    """What a caller is told for whom `cost` does not fit."""
    limit = counter.limit
    owner = _OWNERS[limit.scope]
    period = limit.period or _PERIODS.get(limit.seconds, f"{limit.seconds} s")
    if cost > limit.count:
        return RateLimited(
            f"This request needs {cost} {limit.unit}; {owner} may use {limit.count} per {period}."
            " Make it smaller or lower max_tokens.",
            code="request_too_large_for_limit",
        )
    wait = counter.wait(cost, now)
    # What others have used of a model is not for this caller.
    spent = "" if limit.scope == "model" else f", {counter.used} used, {cost} requested"
    again = f"Try again in {max(1, math.ceil(wait))} s."
    if limit.period:
        return QuotaExceeded(
            f"Token budget of {owner} is spent: {limit.count} {limit.unit} per {period}{spent}. {again}",
            retry_after=wait,
        )
    return RateLimited(
        f"Rate limit of {owner} reached: {limit.count} {limit.unit} per {period}{spent}. {again}", retry_after=wait
    )
