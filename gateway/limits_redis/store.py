"""`RedisCounters`: limits that several gateways share. The one part of the package that others talk to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import cast
from weakref import WeakValueDictionary

from gateway.errors import StoreUnavailable
from gateway.limits import Place
from gateway.limits_redis.counter import SharedCounter
from gateway.limits_redis.courier import Courier
from gateway.limits_redis.link import Link
from gateway.limits_redis.notices import Listener, Notices
from gateway.limits_redis.place import SharedPlace
from gateway.limits_redis.terms import MARGIN, Condition, Ticket
from gateway.types import Limit
from gateway.windows import Counter, WallClock

_TRIES = 5  # for what was drawn but not spent in time
_SWEEP = 30.0  # seconds


class RedisCounters:
    """A `limits.SharedCounters`. Between `start` and `close` it belongs to one event loop."""

    def __init__(self, url: str, on_failure: str, clock: WallClock) -> None:
        """
        Args:   url: redis://, rediss:// (parameters such as ?ssl_ca_certs=FILE are the client's) or unix://.
                on_failure: `local`, `allow` or `refuse`.
        Raises: StartupError when the client is not installed, or does not understand the URL.
        """
        self._condition = Condition(on_failure)
        self._courier = Courier(Link(url), self._condition)
        self._notices = Notices(url)
        self._clock = clock
        # A name stays the same object for as long as anybody uses it, and is kept for as long as it knows something.
        self._counters: WeakValueDictionary[str, SharedCounter] = WeakValueDictionary()
        self._places: WeakValueDictionary[str, SharedPlace] = WeakValueDictionary()
        self._kept: set[SharedCounter | SharedPlace] = set()
        self._swept = 0.0

    # --- life
    async def start(self) -> None:
        """Connects. When Redis is away it starts without, and goes on looking for it."""
        await self._courier.start()

    async def close(self) -> None:
        """Gives everything back and ends the connections, within a few seconds."""
        await self._notices.close()
        await self._courier.close(self._kept)

    def set_policy(self, on_failure: str) -> None:
        self._condition.on_failure = on_failure

    @property
    def up(self) -> bool:
        """Whether limits are shared at the moment."""
        return self._condition.up

    @property
    def live(self) -> int:
        """Gateways that share the limits, this one among them, when they were last counted."""
        return self._condition.live

    @property
    def failures(self) -> int:
        """How often Redis did not answer, or not in time."""
        return self._condition.failures

    @property
    def draws(self) -> int:
        """How often room was drawn from Redis."""
        return self._condition.draws

    # --- limits.SharedCounters
    def counter(self, key: str, limit: Limit) -> SharedCounter:
        counter = self._counters.get(key)
        if counter is None or (counter.limit.seconds, counter.limit.period) != (limit.seconds, limit.period):
            counter = SharedCounter(key, limit, self._courier, self._condition, self._clock)
            self._counters[key] = counter
        elif counter.limit != limit:
            counter.limit = limit
        self._keep(counter)
        return counter

    def place(self, key: str, scope: str, most: int) -> SharedPlace:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = SharedPlace(key, scope, most, self._courier, self._condition)
        place.most = most
        self._keep(place)
        return place

    async def cover(self, counters: Sequence[Counter], places: Sequence[Place], cost: int, now: float) -> None:
        """See `limits.SharedCounters`. Does not wait when there is room, and waits for Redis while it answers in 50 ms.

        `now` is not used: a request may have begun long ago, and an allowance ends at a moment of the real clock.
        """
        moment = time.monotonic()
        shared, slots = cast("Sequence[SharedCounter]", counters), cast("Sequence[SharedPlace]", places)
        for counter in shared:
            if counter.allowance < cost or moment >= counter.expires:
                break
        else:
            for place in slots:
                if place.free <= 0 or moment >= place.expires:
                    break
            else:
                return
        await self._fetch((*slots, *shared), cost)

    async def _fetch(self, members: Sequence[SharedCounter | SharedPlace], cost: int) -> None:
        """What one member has is held while others are asked: else requests that need several would never get all."""
        self._keep(*members)
        held: dict[SharedCounter | SharedPlace, Ticket] = {}
        is_covered, moment = False, time.monotonic()
        try:
            for number in range(_TRIES):
                moment = time.monotonic()
                for member in members:
                    if member not in held:
                        held[member] = member.ask(cost, moment)
                if number == _TRIES - 1:
                    for ticket in held.values():
                        ticket.may_be_late = True
                if not await _granted(held.values()):
                    break
                moment = time.monotonic()
                lost = [member for member, ticket in held.items() if not member.holds(ticket, moment)]
                for member in lost:
                    member.claim(held.pop(member), moment)
                if not lost:
                    is_covered = True
                    break
                await asyncio.sleep(2 * MARGIN)  # a slice has ended before its grant was here: soon the next begins
        finally:
            if not is_covered:
                moment = time.monotonic()
            for member, ticket in held.items():
                member.claim(ticket, moment)
                self._courier.kick(member)  # after this request has spent, the rest may be more than to be kept
        if not is_covered and not self._condition.up and self._condition.on_failure == "refuse":
            raise StoreUnavailable("The store of the rate limits cannot be reached. Try again soon.", retry_after=1)

    def _keep(self, *members: SharedCounter | SharedPlace) -> None:
        """Remembers them, and from time to time forgets those that know nothing any more."""
        moment = time.monotonic()
        if moment - self._swept > _SWEEP:
            self._swept = moment
            self._kept = {member for member in self._kept if not member.is_idle(moment)}
        self._kept.update(members)

    # --- notices
    async def publish(self, channel: str, message: str) -> None:
        """Tells all gateways something, if Redis is there: `sekisho:CHANNEL` carries the message."""
        await self._notices.publish(channel, message)

    def subscribe(self, channel: str, callback: Listener) -> None:
        """Calls back with each message. An empty one means: a connection is new, messages may have been missed."""
        self._notices.subscribe(channel, callback)


async def _granted(tickets: Collection[Ticket]) -> bool:
    """Waits for all of them. False as soon as it is known that one cannot be had, or that nothing can be learned."""
    for ticket in tickets:
        if not any(one.is_refused for one in tickets):
            await ticket.done
    return not any(ticket.is_refused for ticket in tickets)
